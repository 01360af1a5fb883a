//! PTX text -> functions that `ptx_run` can run: the subset that the library's own kernels use. Whatever else stands in
//! a text is refused, so that a change of the kernels that this does not know is seen when they are loaded.

use std::collections::HashMap;
use std::sync::Arc;

use crate::ptx_decode::decode;
use crate::ptx_op::{Access, Address, Guard, Kind, Op, Operand, Special, Width};
use crate::ptx_shared::Layout;
use crate::ptx_table::Table;

/// One `.entry` of a module.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) params: Vec<Width>,
    pub(crate) registers: usize,
    pub(crate) code: Vec<Op>,
    /// The most threads of a block.
    pub(crate) most_threads: u64,
    /// The parameters that are addresses which the function reads from, and writes to, one bit each.
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    /// The tables of its module.
    pub(crate) tables: Vec<Arc<Table>>,
    /// What its blocks have of shared memory.
    pub(crate) shared: Layout,
}

/// Why a text is refused.
pub(crate) type Refusal = String;

/// A parsed text.
#[derive(Debug)]
pub(crate) struct Module {
    /// Its PTX version, major and minor.
    pub(crate) version: (u32, u32),
    /// The oldest compute capability it is for, times ten.
    pub(crate) target: u32,
    pub(crate) functions: Vec<Arc<Function>>,
}

impl Module {
    pub(crate) fn parse(text: &str) -> Result<Module, Refusal> {
        let text: String = text.lines().map(|line| line.split("//").next().unwrap_or_default()).fold(
            String::with_capacity(text.len()),
            |mut all, line| {
                all.push_str(line);
                all.push('\n');
                all
            },
        );
        let mut module = Module { version: (0, 0), target: 0, functions: Vec::new() };
        let mut tables = Vec::new();
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            if rest.starts_with(".visible") {
                let (function, after) = entry(rest, &tables)?;
                module.functions.push(Arc::new(function));
                rest = after.trim_start();
                continue;
            }
            if rest.starts_with(".global") {
                let (table, after) = Table::parse(rest, tables.len())?;
                if tables.iter().any(|other: &Arc<Table>| other.name == table.name) {
                    return Err(format!("two tables {}", table.name));
                }
                tables.push(Arc::new(table));
                rest = after.trim_start();
                continue;
            }
            let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
            module.directive(line.trim())?;
            rest = after.trim_start();
        }
        if module.version == (0, 0) || module.target == 0 {
            return Err("no .version, or no .target".to_owned());
        }
        Ok(module)
    }

    fn directive(&mut self, line: &str) -> Result<(), Refusal> {
        let unknown = || format!("`{line}`");
        let (name, value) = line.split_once(' ').ok_or_else(unknown)?;
        match name {
            ".version" => {
                let (major, minor) = value.split_once('.').ok_or_else(unknown)?;
                self.version = (major.parse().map_err(|_| unknown())?, minor.parse().map_err(|_| unknown())?);
            }
            ".target" => {
                let target = value.strip_prefix("sm_").and_then(|number| number.parse().ok());
                self.target = target.ok_or_else(unknown)?;
            }
            ".address_size" if value == "64" => {}
            _ => return Err(unknown()),
        }
        Ok(())
    }
}

/// Parses the `.entry` that a text begins with, behind tables; gives it and what comes after it.
fn entry<'t>(text: &'t str, tables: &[Arc<Table>]) -> Result<(Function, &'t str), Refusal> {
    let cut = |text: &'_ str| text.lines().next().unwrap_or_default().to_owned();
    let head = text.strip_prefix(".visible .entry ").ok_or_else(|| format!("`{}`", cut(text)))?;
    let (name, rest) = head.split_once('(').ok_or("an entry without parameters")?;
    let (params, rest) = rest.split_once(')').ok_or("parameters without an end")?;
    let (directives, rest) = rest.split_once('{').ok_or("an entry without a body")?;
    let end = body_end(rest).ok_or("a body without an end")?;
    let mut most_threads = 1024;
    for line in directives.lines().map(str::trim).filter(|line| !line.is_empty()) {
        match line.split_once(' ') {
            Some((".maxntid", sides)) => {
                let sides = sides.split(',').map(|side| side.trim().parse::<u64>());
                most_threads = sides.product::<Result<u64, _>>().map_err(|_| format!("`{line}`"))?;
            }
            Some((".minnctapersm", _)) => {}
            _ => return Err(format!("`{line}`")),
        }
    }
    let mut names = HashMap::new();
    let mut widths = Vec::new();
    for param in params.split(',').map(str::trim).filter(|param| !param.is_empty()) {
        let mut words = param.split_whitespace();
        let width = match (words.next(), words.next()) {
            (Some(".param"), Some(".u64")) => Width::Eight,
            (Some(".param"), Some(".u32")) => Width::Four,
            _ => return Err(format!("`{param}`")),
        };
        names.insert(words.next().unwrap_or_default().to_owned(), widths.len());
        widths.push(width);
    }
    let mut body = Body {
        params: names,
        tables,
        shared: Layout::default(),
        bases: HashMap::new(),
        registers: 0,
        code: Vec::new(),
        labels: HashMap::new(),
    };
    let mut jumps = Vec::new();
    for statement in rest[..end].split(';').map(str::trim).filter(|statement| !statement.is_empty()) {
        body.statement(statement, &mut jumps)?;
    }
    for (op, label) in jumps {
        let target = *body.labels.get(&label).ok_or_else(|| format!("no label {label}"))?;
        body.code[op].kind = Kind::Branch(target);
    }
    let (reads, writes) = addresses(&body.code, body.registers, &widths)?;
    let function = Function {
        name: name.trim().to_owned(),
        params: widths,
        registers: body.registers,
        code: body.code,
        most_threads,
        reads,
        writes,
        tables: tables.to_vec(),
        shared: body.shared,
    };
    Ok((function, &rest[end + 1..]))
}

/// Where the brace is that closes a body; vectors of registers have braces of their own.
fn body_end(text: &str) -> Option<usize> {
    let mut open = 0usize;
    text.char_indices().find_map(|(at, letter)| match letter {
        '{' => {
            open += 1;
            None
        }
        '}' if open == 0 => Some(at),
        '}' => {
            open -= 1;
            None
        }
        _ => None,
    })
}

struct Body<'t> {
    params: HashMap<String, usize>,
    tables: &'t [Arc<Table>],
    shared: Layout,
    /// For each prefix of registers the first one and their number.
    bases: HashMap<String, (usize, usize)>,
    registers: usize,
    code: Vec<Op>,
    labels: HashMap<String, usize>,
}

impl Body<'_> {
    fn statement(&mut self, statement: &str, jumps: &mut Vec<(usize, String)>) -> Result<(), Refusal> {
        let mut rest = statement;
        while let Some((label, after)) = rest.split_once(':').filter(|(label, _)| label.starts_with('$')) {
            self.labels.insert(label.to_owned(), self.code.len());
            rest = after.trim_start();
        }
        if rest.is_empty() || rest.starts_with(".pragma") {
            return Ok(());
        }
        if rest.starts_with(".shared") {
            return self.shared.declare(rest);
        }
        if let Some(declared) = rest.strip_prefix(".reg ") {
            return self.declare(declared).ok_or_else(|| format!("`{rest}`"));
        }
        let (guard, rest) = match rest.strip_prefix('@') {
            None => (None, rest),
            Some(guarded) => {
                let (name, rest) = guarded.split_once(char::is_whitespace).ok_or_else(|| format!("`{statement}`"))?;
                let (negated, name) = name.strip_prefix('!').map_or((false, name), |name| (true, name));
                (Some(Guard { register: self.register(name)?, negated }), rest.trim_start())
            }
        };
        let (name, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        if matches!(name, "bra" | "bra.uni") {
            jumps.push((self.code.len(), operands.trim().to_owned()));
            self.code.push(Op { guard, kind: Kind::Branch(0) });
            return Ok(());
        }
        let operands = self.operands(operands)?;
        let kind = decode(name, &operands).ok_or_else(|| format!("`{rest}`"))?;
        self.code.push(Op { guard, kind });
        Ok(())
    }

    /// `.b32 %r<546>`, without its `.reg`.
    fn declare(&mut self, declared: &str) -> Option<()> {
        let (class, names) = declared.split_once(char::is_whitespace)?;
        if ![".pred", ".b16", ".b32", ".b64", ".f32"].contains(&class) {
            return None;
        }
        let (prefix, count) = names.trim().strip_suffix('>')?.split_once('<')?;
        let count: usize = count.parse().ok()?;
        self.bases.insert(prefix.to_owned(), (self.registers, count));
        self.registers = self.registers.checked_add(count).filter(|all| u16::try_from(*all).is_ok())?;
        Some(())
    }

    fn register(&self, name: &str) -> Result<u16, Refusal> {
        let prefix = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
        let found = self.bases.get(prefix).and_then(|(base, count)| {
            let index: usize = name[prefix.len()..].parse().ok()?;
            (index < *count).then_some((base + index) as u16)
        });
        found.ok_or_else(|| format!("no register {name}"))
    }

    fn operands(&self, text: &str) -> Result<Vec<Operand>, Refusal> {
        let mut operands = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            // A vector is its registers one after the other: the instruction says how many.
            rest = rest.trim_start_matches(['{', '}', ',', ' ']);
            let end = rest.find([',', '}']).unwrap_or(rest.len());
            let (one, after) = rest.split_at(end);
            operands.push(self.operand(one.trim())?);
            rest = after.trim_start_matches(['{', '}', ',', ' ']);
        }
        Ok(operands)
    }

    fn operand(&self, text: &str) -> Result<Operand, Refusal> {
        let unknown = || format!("operand `{text}`");
        if let Some(inside) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
            if let Some(param) = self.params.get(inside) {
                return Ok(Operand::Param(*param));
            }
            let (base, offset) = inside.split_once('+').unwrap_or((inside, "0"));
            let offset = offset.parse().map_err(|_| unknown())?;
            return Ok(Operand::Memory(Address { base: self.register(base)?, offset }));
        }
        let special = match text {
            "%tid.x" => Some(Special::ThreadX),
            "%tid.y" => Some(Special::ThreadY),
            "%ctaid.x" => Some(Special::BlockX),
            _ => None,
        };
        if let Some(special) = special {
            return Ok(Operand::Special(special));
        }
        if let Some((result, found)) = text.split_once('|') {
            return Ok(Operand::Pair(self.register(result)?, self.register(found)?));
        }
        if text.starts_with('%') {
            return self.register(text).map(Operand::Register);
        }
        if let Some(table) = self.tables.iter().position(|table| table.name == text) {
            return Ok(Operand::Table(table));
        }
        if let Some(address) = self.shared.address(text) {
            return Ok(Operand::Shared(address));
        }
        if let Some(bits) = text.strip_prefix("0f") {
            return u32::from_str_radix(bits, 16).map(|bits| Operand::Number(bits.into())).map_err(|_| unknown());
        }
        text.parse::<i64>().map(|number| Operand::Number(number as u64)).map_err(|_| unknown())
    }
}

/// In the place of a parameter: a table.
const TABLE: u128 = 1 << 64;

/// The parameters whose addresses are read from and written to: for each register the parameters and tables that went into
/// it, until nothing new is found.
fn addresses(code: &[Op], registers: usize, params: &[Width]) -> Result<(u64, u64), Refusal> {
    if params.len() > 64 {
        return Err("more than 64 parameters".to_owned());
    }
    let mut origins = vec![0u128; registers];
    loop {
        let mut grew = false;
        for op in code {
            let (from, to) = match &op.kind {
                Kind::LoadParam { dst, param, .. } if params[*param] == Width::Eight => (1 << param, *dst),
                Kind::Table { dst, .. } => (TABLE, *dst),
                kind => match kind.computes() {
                    Some((dst, sources)) => (sources.into_iter().fold(0, |all, s| all | origins[usize::from(s)]), dst),
                    None => continue,
                },
            };
            let origin = &mut origins[usize::from(to)];
            grew |= from & !*origin != 0;
            *origin |= from;
        }
        if !grew {
            break;
        }
    }
    let (mut reads, mut constant, mut writes) = (0, 0, 0);
    for op in code {
        let Some((address, access)) = op.kind.touches() else { continue };
        let origin = origins[usize::from(address.base)];
        if origin == 0 {
            return Err("an address that no parameter gives".to_owned());
        }
        match access {
            Access::Load => reads |= origin,
            Access::LoadConstant => constant |= origin,
            Access::Store => writes |= origin,
        }
    }
    if writes & TABLE != 0 {
        return Err("a table that is written to".to_owned());
    }
    if writes & constant != 0 {
        return Err("a constant that is written to".to_owned());
    }
    Ok(((reads | constant) as u64, writes as u64))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const SHIPPED: &str = include_str!("../../../src/backend/drivers/kernels/patch.ptx");

    #[test]
    fn the_shipped_text_is_understood() {
        let module = Module::parse(SHIPPED).unwrap();
        assert_eq!((module.version, module.target, module.functions.len()), ((6, 0), 70, 8));
        for function in &module.functions {
            assert_eq!((function.params.len(), function.most_threads), (9, 128), "{}", function.name);
            assert_eq!(function.shared.bytes(), 12_800, "{}", function.name);
            // The matrix is read and written; the work memory is read, and written where values can saturate.
            let counted = function.name.ends_with("e4m3") || function.name.ends_with("e5m2");
            assert_eq!((function.reads, function.writes), (3, if counted { 3 } else { 1 }), "{}", function.name);
        }
    }

    #[test]
    fn the_shipped_text_of_blocks_is_understood() {
        let text = include_str!("../../../src/backend/drivers/kernels/dequantise.ptx");
        let module = Module::parse(text).unwrap();
        assert_eq!((module.version, module.target, module.functions.len()), ((6, 0), 70, 27));
        for function in &module.functions {
            assert_eq!((function.params.len(), function.most_threads), (4, 256), "{}", function.name);
            // The blocks are read, and the values written.
            assert_eq!((function.reads, function.writes), (1, 2), "{}", function.name);
            assert_eq!(function.tables.len(), 6, "{}", function.name);
        }
    }

    #[test]
    fn the_shipped_text_of_codes_is_understood() {
        let text = include_str!("../../../src/backend/drivers/kernels/lossless.ptx");
        let module = Module::parse(text).unwrap();
        assert_eq!((module.version, module.target, module.functions.len()), ((6, 0), 70, 5));
        for function in &module.functions {
            assert_eq!((function.params.len(), function.most_threads), (12, 128), "{}", function.name);
            // The code is read, the weights are written and, for escapes, read; the verdict is written.
            assert_eq!((function.reads, function.writes), (7, 12), "{}", function.name);
            assert!(function.code.iter().any(|op| op.kind.is_of_warps()), "{}", function.name);
        }
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let refused = |from: &str, to: &str| {
            assert!(SHIPPED.contains(from), "{from}");
            Module::parse(&SHIPPED.replacen(from, to, 1)).unwrap_err()
        };
        assert!(refused("fma.rn.f32", "fma.rn.ftz.f32").contains("ftz"));
        assert!(refused("bar.sync", "bar.arrive").contains("bar.arrive"));
        assert!(refused("bar.sync \t0", "bar.sync 1").contains("bar.sync 1"));
        assert!(refused(".shared .align 16", ".shared .align 3").contains(".align 3"));
        assert!(refused("ld.shared", "ld.local").contains("ld.local"));
        assert!(refused("add.s32 \t%r", "add.s32 \t%r9").contains("%r9"));
        assert!(refused(".maxntid", ".reqntid").contains(".reqntid"));
        assert!(refused(".version 6.0", ".global .u32 x;").contains(".global"));
        assert!(refused("%ctaid.x", "%ctaid.y").contains("%ctaid.y"));
        assert!(refused("[patch_f32_param_2]", "[%r1]").contains("ld.param"));
        assert!(Module::parse("").is_err());
        let cut = &SHIPPED[..SHIPPED.len() / 2];
        assert!(Module::parse(cut).unwrap_err().contains("end"));
    }
}

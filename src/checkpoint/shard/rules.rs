//! Rules of how the tensors of a model are divided among ranks.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::Rank;
use super::cut::Cut;
use super::network::Network;
use crate::error::{Error, Result, ShardFault};

/// How the tensors of a model are divided among ranks: for each the dimension that is divided, by patterns of names. What no rule
/// names, each rank has whole.
///
/// [`megatron`](ShardRules::megatron) has the rules for known networks. Rules are also read from text, a line each, or several
/// between `;`; `#` begins a comment:
///
/// ```text
/// q_proj | gate_proj: rows        # dimension 0: the outputs of a linear layer
/// o_proj: columns                 # dimension 1: its inputs. What has one dimension, a bias, stays whole
/// experts.down_proj: dimension 2
/// norm: whole
/// q_proj: rows in heads           # whole heads; `in kv_heads`: where there are more ranks than key-value heads, these repeat
/// x.to_q: rows in units of 128    # whole units of 128 rows
/// embed_tokens: rows uneven       # shares that differ by one row at most
/// gate_up_proj: rows of 1 + 1     # a fused weight: each of its parts, here two equal ones, is divided by itself
/// qkv_proj: rows of heads + kv_heads + kv_heads
/// [gpt2, openai-gpt]              # what follows is for networks that their configurations call so
/// c_attn.weight: columns of heads + heads + heads
/// [*]                             # for all again
/// ```
///
/// Patterns are those of [`Weights::cast`](crate::Weights::cast), for names of modules and of tensors; of several rules that name a tensor
/// the last decides. All tensors of a module are divided as its largest is: scales of blocks in proportion. A configuration's name is
/// `model_type` or `_class_name` in its `config.json`, or `general.architecture` of a GGUF file; letter case does not matter.
///
/// ```
/// use tensor_offload::checkpoint::{Rank, ShardRules};
/// let rules: ShardRules = "*.up_proj | *.gate_proj: rows; *.down_proj: columns".parse()?;
/// let model = tensor_offload::Checkpoint::open("examples/data/tiny-llama")?;
/// let part = model.shard(&rules, Rank { rank: 1, of: 2 })?;
/// let shape = |of: &tensor_offload::Checkpoint, name| of.layout().tensor(of.find(name).unwrap()).unwrap().shape.clone();
/// let name = "model.layers.0.mlp.up_proj.weight";
/// assert_eq!(shape(&part, name), [shape(&model, name)[0] / 2, shape(&model, name)[1]]);
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardRules {
    rules: Vec<Rule>,
    heads: Option<(u64, u64)>,
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Rule {
    /// The networks that it is for, in lower case; none for all.
    networks: Vec<String>,
    pub(super) patterns: Vec<String>,
    pub(super) how: How,
}

/// What is done to a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum How {
    Whole,
    Divided { dimension: usize, division: Division },
}

/// How a dimension is divided.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Division {
    Equal,
    Uneven,
    /// Into whole units of so many indices.
    Units(u64),
    /// Into whole units, of which there are as many as heads.
    Heads(Heads),
    /// Each part by itself.
    Parts(Vec<Part>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Heads {
    Query,
    /// With more ranks than these, each is that of several ranks.
    KeyValue,
}

/// A part of a fused weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Part {
    Share(u64),
    Heads(Heads),
}

impl ShardRules {
    /// Rules that divide nothing.
    pub fn new() -> ShardRules {
        ShardRules::default()
    }

    /// Tensor parallelism as Megatron-LM does it, for the networks whose tensors are known: the layers that widen are divided by their
    /// outputs, by whole heads, and those that narrow by their inputs, so that a block needs one sum over the ranks after its attention
    /// and one after its feed-forward part; embeddings and heads by rows of the vocabulary. Biases of layers that are divided by their
    /// inputs are whole on each rank: one of them adds it. What no rule names stays whole, which is right for any network, if
    /// not small. The table is `src/checkpoint/shard/megatron.txt`.
    ///
    /// Source of the scheme: Shoeybi et al., "Megatron-LM", 2019, section 3 (arXiv 1909.08053).
    pub fn megatron() -> ShardRules {
        ShardRules::parse(include_str!("megatron.txt")).unwrap_or_else(|error| unreachable!("{error}"))
    }

    /// Divides the tensors that `pattern` names along dimension 0: the outputs of a linear layer or a convolution.
    #[must_use]
    pub fn rows(self, pattern: impl Into<String>) -> ShardRules {
        self.with(pattern.into(), How::Divided { dimension: 0, division: Division::Equal })
    }

    /// Divides the tensors that `pattern` names along dimension 1: the inputs of a linear layer or a convolution. Those of one
    /// dimension, biases, stay whole.
    #[must_use]
    pub fn columns(self, pattern: impl Into<String>) -> ShardRules {
        self.with(pattern.into(), How::Divided { dimension: 1, division: Division::Equal })
    }

    /// Leaves the tensors that `pattern` names whole.
    #[must_use]
    pub fn whole(self, pattern: impl Into<String>) -> ShardRules {
        self.with(pattern.into(), How::Whole)
    }

    /// These rules, with others after them, which decide where both name a tensor. The numbers of heads of `others` are taken if it has any.
    #[must_use]
    pub fn and(mut self, others: ShardRules) -> ShardRules {
        self.rules.extend(others.rules);
        self.heads = others.heads.or(self.heads);
        self
    }

    /// Sets the numbers of attention heads and of key-value heads, in place of those that a `config.json` or a GGUF file says.
    #[must_use]
    pub fn heads(mut self, heads: u64, kv_heads: u64) -> ShardRules {
        self.heads = Some((heads, kv_heads));
        self
    }

    fn with(mut self, pattern: String, how: How) -> ShardRules {
        self.rules.push(Rule { networks: Vec::new(), patterns: vec![pattern], how });
        self
    }

    /// The rules for a network.
    pub(super) fn of<'r>(&'r self, network: &'r Network) -> impl Iterator<Item = &'r Rule> {
        let is_for = |rule: &&Rule| {
            let named = |name: &String| network.names.iter().any(|other| other.eq_ignore_ascii_case(name));
            rule.networks.is_empty() || rule.networks.iter().any(named)
        };
        self.rules.iter().filter(is_for)
    }

    /// A network with the numbers of heads that these rules set.
    pub(super) fn known(&self, network: Network) -> Network {
        match self.heads {
            Some((heads, kv_heads)) => Network { heads: Some(heads), kv_heads: Some(kv_heads), ..network },
            None => network,
        }
    }

    fn parse(text: &str) -> Result<ShardRules> {
        let (mut rules, mut networks) = (Vec::new(), Vec::new());
        let uncommented = text.lines().map(|line| line.split_once('#').map_or(line, |(line, _)| line));
        for line in uncommented.flat_map(|line| line.split(';')).map(str::trim).filter(|line| !line.is_empty()) {
            let wrong = |reason: &str| {
                Error::shard(None, ShardFault::Rule { line: line.to_owned(), reason: reason.to_owned() })
            };
            if let Some(names) = line.strip_prefix('[') {
                let names = names.strip_suffix(']').ok_or_else(|| wrong("`]` is missing"))?;
                let names: Vec<String> = names.split(',').map(|name| name.trim().to_ascii_lowercase()).collect();
                if names.iter().any(String::is_empty) {
                    return Err(wrong("the name of a network is missing"));
                }
                networks = if names == ["*"] { Vec::new() } else { names };
                continue;
            }
            let (patterns, how) =
                line.split_once(':').ok_or_else(|| wrong("`:` is missing between pattern and rule"))?;
            let patterns: Vec<String> = patterns.split('|').map(|pattern| pattern.trim().to_owned()).collect();
            if patterns.iter().any(String::is_empty) {
                return Err(wrong("a pattern is missing"));
            }
            let how = How::parse(how).map_err(|reason| wrong(&reason))?;
            rules.push(Rule { networks: networks.clone(), patterns, how });
        }
        Ok(ShardRules { rules, heads: None })
    }
}

impl FromStr for ShardRules {
    type Err = Error;

    /// # Errors
    /// [`Error::Shard`] with the line that is not understood, and why.
    fn from_str(text: &str) -> Result<ShardRules> {
        ShardRules::parse(text)
    }
}

impl How {
    fn parse(text: &str) -> Result<How, String> {
        let mut words = text.split_whitespace();
        let dimension = match words.next() {
            Some("whole") => return words.next().map_or(Ok(How::Whole), |word| Err(format!("`{word}` after `whole`"))),
            Some("rows") => 0,
            Some("columns") => 1,
            Some("dimension") => {
                let number = words.next().and_then(|word| word.parse().ok());
                number.ok_or("`dimension` takes a number from 0")?
            }
            _ => return Err("it is none of `whole`, `rows`, `columns` and `dimension N`".to_owned()),
        };
        let rest: Vec<&str> = words.collect();
        let division = match rest.as_slice() {
            [] => Division::Equal,
            ["uneven"] => Division::Uneven,
            ["in", "units", "of", number] => {
                let number = number.parse().ok().filter(|number| *number > 0);
                Division::Units(number.ok_or("`in units of` takes a number from 1")?)
            }
            ["in", heads] => {
                Division::Heads(Heads::parse(heads).ok_or("`in` takes `heads`, `kv_heads` or `units of N`")?)
            }
            ["of", parts @ ..] => {
                let parts = parts.concat();
                let part = |part: &str| match Heads::parse(part) {
                    Some(heads) => Ok(Part::Heads(heads)),
                    None => part.parse().ok().filter(|share| *share > 0).map(Part::Share).ok_or_else(|| {
                        format!(
                            "`{part}` is no part: these are numbers from 1, `heads` and `kv_heads`, with `+` between"
                        )
                    }),
                };
                Division::Parts(parts.split('+').map(part).collect::<Result<_, _>>()?)
            }
            _ => return Err(format!("`{}` is none of `uneven`, `in …` and `of …`", rest.join(" "))),
        };
        Ok(How::Divided { dimension, division })
    }
}

impl Heads {
    fn parse(text: &str) -> Option<Heads> {
        match text {
            "heads" => Some(Heads::Query),
            "kv_heads" => Some(Heads::KeyValue),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Heads::Query => "heads",
            Heads::KeyValue => "key-value heads",
        }
    }

    fn count(self, network: &Network) -> Result<u64, ShardFault> {
        let count = match self {
            Heads::Query => network.heads,
            Heads::KeyValue => network.kv_heads,
        };
        count.filter(|count| *count > 0).ok_or(ShardFault::Heads { what: self.name() })
    }

    /// The units of a rank among so many.
    fn share(self, count: u64, Rank { rank, of }: Rank) -> Result<Range<u64>, ShardFault> {
        let (rank, ranks) = (u64::from(rank), u64::from(of));
        if count.is_multiple_of(ranks) {
            let each = count / ranks;
            return Ok(rank * each..(rank + 1) * each);
        }
        if self == Heads::KeyValue && ranks.is_multiple_of(count) {
            let head = rank / (ranks / count);
            return Ok(head..head + 1);
        }
        Err(ShardFault::Unequal { what: format!("{count} {}", self.name()), of })
    }
}

impl Division {
    /// What a rank has of dimension number `dimension` of a tensor.
    pub(super) fn cut(
        &self,
        dimension: usize,
        shape: &[u64],
        rank: Rank,
        network: &Network,
    ) -> Result<Cut, ShardFault> {
        let (len, ranks, number) = (shape[dimension], u64::from(rank.of), u64::from(rank.rank));
        let unequal = || {
            let what = format!("dimension {dimension} of {shape:?}");
            ShardFault::Unequal { what, of: rank.of }
        };
        let units = |what: String| ShardFault::Units { dimension, shape: shape.to_vec(), what };
        let equal = |range: Range<u64>, unit: u64| {
            let count = (range.end - range.start) / unit;
            if !count.is_multiple_of(ranks) || count == 0 {
                return Err(unequal());
            }
            let each = count / ranks * unit;
            Ok(range.start + number * each..range.start + (number + 1) * each)
        };
        let ranges = match self {
            Division::Equal => vec![equal(0..len, 1)?],
            Division::Uneven if len >= ranks => {
                // No more than the dimension has.
                let end = |rank: u64| (u128::from(len) * u128::from(rank) / u128::from(ranks)) as u64;
                vec![end(number)..end(number + 1)]
            }
            Division::Uneven => return Err(unequal()),
            Division::Units(unit) => {
                if !len.is_multiple_of(*unit) {
                    return Err(units(format!("units of {unit}")));
                }
                vec![equal(0..len, *unit)?]
            }
            Division::Heads(heads) => {
                let count = heads.count(network)?;
                if !len.is_multiple_of(count) || len == 0 {
                    return Err(units(format!("{count} {}", heads.name())));
                }
                let (unit, share) = (len / count, heads.share(count, rank)?);
                vec![share.start * unit..share.end * unit]
            }
            Division::Parts(parts) => {
                let size = |part: &Part| match part {
                    Part::Share(share) => Ok(*share),
                    Part::Heads(heads) => heads.count(network),
                };
                let sizes = parts.iter().map(size).collect::<Result<Vec<u64>, _>>()?;
                let sum = sizes.iter().fold(0u64, |sum, size| sum.saturating_add(*size));
                if len == 0 || !len.is_multiple_of(sum) {
                    let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
                    return Err(units(format!("parts of {}", sizes.join(" + "))));
                }
                let (unit, mut begin, mut ranges) = (len / sum, 0, Vec::new());
                for (part, size) in parts.iter().zip(&sizes) {
                    let end = begin + size * unit;
                    ranges.push(match part {
                        Part::Share(_) => equal(begin..end, 1)?,
                        Part::Heads(heads) => {
                            let share = heads.share(*size, rank)?;
                            begin + share.start * unit..begin + share.end * unit
                        }
                    });
                    begin = end;
                }
                ranges
            }
        };
        Ok(Cut { dimension, ranges })
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.rank, self.of)
    }
}

impl FromStr for Rank {
    type Err = Error;

    /// Reads `1/4`, the second of four.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another text; [`Error::Shard`] for a rank that there is not.
    fn from_str(text: &str) -> Result<Rank> {
        let numbers =
            text.split_once('/').and_then(|(rank, of)| Some((rank.trim().parse().ok()?, of.trim().parse().ok()?)));
        let (rank, of) =
            numbers.ok_or_else(|| Error::invalid(format!("`{text}` is no rank: that is `1/4`, the second of four")))?;
        Rank { rank, of }.checked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(heads: u64, kv_heads: u64) -> Network {
        Network { names: vec!["Llama".to_owned()], heads: Some(heads), kv_heads: Some(kv_heads) }
    }

    fn ranges(how: &str, shape: &[u64], rank: u32, of: u32) -> Result<Vec<Range<u64>>, ShardFault> {
        let How::Divided { dimension, division } = How::parse(how).unwrap() else { return Ok(Vec::new()) };
        division.cut(dimension, shape, Rank { rank, of }, &network(6, 2)).map(|cut| cut.ranges)
    }

    #[test]
    fn dimensions_are_divided_as_rules_say() {
        assert_eq!(ranges("rows", &[12, 5], 1, 3), Ok(vec![4..8]));
        assert_eq!(ranges("columns", &[5, 12], 2, 3), Ok(vec![8..12]));
        assert_eq!(ranges("dimension 2", &[5, 1, 4], 0, 4), Ok(vec![0..1]));
        assert_eq!(ranges("rows uneven", &[7], 1, 3), Ok(vec![2..4]));
        assert_eq!(ranges("rows in heads", &[12, 5], 1, 3), Ok(vec![4..8]));
        assert_eq!(ranges("rows in units of 4", &[12, 5], 2, 3), Ok(vec![8..12]));
        assert_eq!(ranges("rows of 1 + 2", &[12, 5], 1, 2), Ok(vec![2..4, 8..12]));
        assert_eq!(ranges("rows of heads+kv_heads + kv_heads", &[20, 5], 1, 2), Ok(vec![6..12, 14..16, 18..20]));
        // Two key-value heads of two rows each for four ranks.
        assert_eq!(ranges("rows in kv_heads", &[4], 2, 4), Ok(vec![2..4]));
    }

    #[test]
    fn what_is_not_equal_is_an_error_with_its_numbers() {
        let fault = |how, shape: &[u64], of| ranges(how, shape, 0, of).unwrap_err().to_string();
        assert!(fault("rows", &[10, 4], 4).contains("dimension 0 of [10, 4]"));
        assert!(fault("rows in heads", &[12], 4).contains("6 heads"));
        assert!(fault("rows in heads", &[12], 12).contains("6 heads"));
        assert!(fault("rows in kv_heads", &[4], 3).contains("2 key-value heads"));
        assert!(fault("rows in heads", &[13], 2).contains("6 heads"));
        assert!(fault("rows in units of 5", &[12], 2).contains("units of 5"));
        assert!(fault("rows of 1 + 1", &[13], 2).contains("parts of 1 + 1"));
        assert!(fault("rows uneven", &[2], 3).contains("3 ranks"));
        assert!(fault("rows", &[0, 4], 2).contains("[0, 4]"));
        let unknown = Division::Heads(Heads::Query).cut(0, &[4], Rank { rank: 0, of: 2 }, &Network::default());
        assert_eq!(unknown, Err(ShardFault::Heads { what: "heads" }));
    }

    #[test]
    fn texts_are_read_or_refused_with_the_line() {
        let rules: ShardRules =
            "a | b.c: rows # comment\n[Llama, x]\nd: whole; e: columns\n[*]\nf: dimension 3".parse().unwrap();
        let of = |network: &Network| rules.of(network).map(|rule| rule.patterns.join(" ")).collect::<Vec<_>>();
        assert_eq!(of(&network(1, 1)), ["a b.c", "d", "e", "f"]);
        assert_eq!(of(&Network::default()), ["a b.c", "f"]);
        for wrong in [
            "a",
            "a:",
            "a: row",
            ": rows",
            "a |: rows",
            "a: rows in",
            "a: rows in 3",
            "a: rows of",
            "a: rows of 1 + 0",
            "a: dimension",
            "a: dimension x",
            "[a",
            "[]",
            "a: whole rows",
            "a: rows in units of 0",
            "a: rows even",
        ] {
            let error = wrong.parse::<ShardRules>().unwrap_err();
            let Error::Shard { tensor: None, fault } = &error else { panic!("{error}") };
            assert!(matches!(&**fault, ShardFault::Rule { line, .. } if line == wrong), "{wrong}: {error}");
        }
        assert!(ShardRules::megatron().rules.len() > 20);
    }

    #[test]
    fn ranks_are_read_as_they_print() {
        let rank: Rank = "1/4".parse().unwrap();
        assert_eq!((rank, rank.to_string().as_str()), (Rank { rank: 1, of: 4 }, "1/4"));
        for wrong in ["", "1", "4/4", "0/0", "-1/4", "1/4/2"] {
            assert!(wrong.parse::<Rank>().is_err(), "{wrong}");
        }
    }
}

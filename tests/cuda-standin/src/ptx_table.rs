//! Tables of a text: arrays of constants in global memory, which its functions read from.

use crate::ptx::Refusal;

/// Where the addresses of tables start, below those of device memory. Not canonical either.
const BASE: u64 = 0x00C0_0000_0000_0000;
/// From one table to the next: more than an index of 31 bits reaches, so that running past an end never hits a neighbour.
const SPAN: u64 = 1 << 36;

/// `.global .align 2 .b8 NAME[512] = {0, 0, …};`
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) name: String,
    /// A multiple of its alignment, and of nothing more.
    pub(crate) address: u64,
    bytes: Vec<u8>,
}

impl Table {
    /// Parses the table that a text begins with, number `index` of its module; gives it and what comes after it.
    pub(crate) fn parse(text: &str, index: usize) -> Result<(Table, &str), Refusal> {
        let (declaration, rest) = text.split_once(';').ok_or("a table without an end")?;
        let refused = || format!("`{}`", declaration.chars().take(60).collect::<String>());
        let (head, values) = declaration.split_once('=').ok_or_else(refused)?;
        let [".global", ".align", align, ".b8", name] = head.split_whitespace().collect::<Vec<_>>()[..] else {
            return Err(refused());
        };
        let align: u64 = align.parse().ok().filter(|align| [1, 2, 4, 8, 16].contains(align)).ok_or_else(refused)?;
        let (name, count) = name.strip_suffix(']').and_then(|name| name.split_once('[')).ok_or_else(refused)?;
        let values = values.trim().strip_prefix('{').and_then(|values| values.strip_suffix('}')).ok_or_else(refused)?;
        let bytes: Result<Vec<u8>, _> = values.split(',').map(|value| value.trim().parse::<u8>()).collect();
        let bytes = bytes.map_err(|_| refused())?;
        if count.parse() != Ok(bytes.len()) {
            return Err(format!("{} values in {}", bytes.len(), refused()));
        }
        Ok((Table { name: name.to_owned(), address: BASE + index as u64 * SPAN + align, bytes }, rest))
    }

    /// The `count` bytes at an address, if the table of those has them.
    pub(crate) fn bytes_at(&self, address: u64, count: u64) -> Option<&[u8]> {
        let from = address.checked_sub(self.address)?;
        self.bytes.get(usize::try_from(from).ok()?..)?.get(..count as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_its_bytes_at_an_address_of_its_alignment() {
        let (table, rest) = Table::parse(".global .align 2 .b8 POINTS[4] = {0, 1,\n 255, 7};\n.visible", 3).unwrap();
        assert_eq!((table.name.as_str(), rest), ("POINTS", "\n.visible"));
        assert_eq!(table.address % 4, 2);
        assert_eq!(table.bytes_at(table.address + 1, 2), Some(&[1, 255][..]));
        assert_eq!(table.bytes_at(table.address + 2, 2), Some(&[255, 7][..]));
        for (from, count) in [(3, 2), (4, 1), (u64::MAX, 1), (u64::MAX, 2), (1 << 32, 1)] {
            assert_eq!(table.bytes_at(table.address.wrapping_add(from), count), None, "{count} at {from}");
        }
    }

    #[test]
    fn what_is_no_table_of_bytes_is_refused() {
        for refused in [
            ".global .align 2 .b8 POINTS[4] = {0, 1, 2};",
            ".global .align 2 .b8 POINTS[4] = {0, 1, 2, 3, 4};",
            ".global .align 2 .b8 POINTS[4] = {0, 1, 2, 256};",
            ".global .align 2 .b8 POINTS[4] = {0, 1, 2, other};",
            ".global .align 2 .b8 POINTS[4] = 0, 1, 2, 3;",
            ".global .align 2 .b8 POINTS[4];",
            ".global .align 2 .b8 POINTS[4] = {0, 1, 2, 3}",
            ".global .align 2 .b8 POINTS = {0};",
            ".global .align 3 .b8 POINTS[1] = {0};",
            ".global .align 2 .u16 POINTS[1] = {0};",
            ".global .b8 POINTS[1] = {0};",
            ".const .align 2 .b8 POINTS[1] = {0};",
        ] {
            assert!(Table::parse(refused, 0).is_err(), "{refused}");
        }
    }
}

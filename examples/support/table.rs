//! Tables of published step times: comma-separated, one row for each model and amount that is kept off the card.

use std::path::Path;

use tensor_offload::device::Bandwidth;
use tensor_offload::{Error, Result};

/// The columns before those of the links.
const COLUMNS: [&str; 5] = ["model", "model_gb", "offloaded_gb", "compute_s", "passes"];

/// The most gigabytes, seconds and passes that a cell may hold.
const MOST: f64 = 1e6;

/// A table of published times.
pub(crate) struct Table {
    /// Where weights are kept, and the bandwidth to it.
    pub(crate) links: Vec<Link>,
    pub(crate) rows: Vec<Row>,
}

/// A column `NAME@GB/s`.
pub(crate) struct Link {
    /// The whole heading.
    pub(crate) name: String,
    pub(crate) bandwidth: Bandwidth,
    /// Whether it leads to the host's memory, as its name says; to another card otherwise.
    pub(crate) to_host: bool,
}

/// One model with one amount kept off the card.
pub(crate) struct Row {
    pub(crate) model: String,
    pub(crate) model_bytes: u64,
    /// Gigabytes as the table has them.
    pub(crate) offloaded_gb: f64,
    pub(crate) offloaded_bytes: u64,
    /// Seconds per step with nothing offloaded.
    pub(crate) compute: f64,
    /// How often the network is gone through in a step.
    pub(crate) passes: u32,
    /// Published seconds per step, link by link.
    pub(crate) published: Vec<Option<f64>>,
}

impl Table {
    /// Reads a table.
    ///
    /// # Errors
    /// When the file cannot be read; for what is not of the form, the line and the column.
    pub(crate) fn read(path: &Path) -> Result<Table> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
            path: path.to_owned(),
            action: "read",
            source,
        })?;
        Table::parse(&text).map_err(|fault| Error::Invalid { reason: format!("{}: {fault}", path.display()) })
    }

    fn parse(text: &str) -> Result<Table, String> {
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        let mut lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let (number, header) = lines.next().ok_or("there is no line with the columns' names")?;
        let header: Vec<&str> = header.split(',').map(str::trim).collect();
        for (column, name) in COLUMNS.iter().enumerate() {
            let found = header.get(column).unwrap_or(&"");
            if found != name {
                return Err(format!("line {number}, column {}: `{found}` in place of `{name}`", column + 1));
            }
        }
        let links = header.iter().enumerate().skip(COLUMNS.len()).map(|(column, heading)| {
            let form = || format!("line {number}, column {}: `{heading}` is not LINK@GB/s", column + 1);
            let (name, bandwidth) = heading.split_once('@').ok_or_else(form)?;
            let bandwidth = bandwidth.parse().map_err(|_| form())?;
            Ok(Link { name: (*heading).to_owned(), bandwidth, to_host: name.ends_with("cpu") })
        });
        let links = links.collect::<Result<Vec<Link>, String>>()?;
        let rows = lines.map(|(number, line)| Row::parse(number, line, &header)).collect::<Result<_, _>>()?;
        Ok(Table { links, rows })
    }
}

impl Row {
    fn parse(number: usize, line: &str, header: &[&str]) -> Result<Row, String> {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        if cells.len() != header.len() {
            let (found, name) = (cells.len(), header.get(cells.len()).unwrap_or(&"after the last"));
            return Err(format!("line {number}, column {name}: the line has {found} cells, not {}", header.len()));
        }
        let wrong = |column: usize, what: &str| {
            format!("line {number}, column {}: `{}` is not {what}", header[column], cells[column])
        };
        let number_in = |column: usize, what: &str| {
            let number = cells[column].parse::<f64>().ok().filter(|n| (0.0..=MOST).contains(n));
            number.ok_or_else(|| wrong(column, what))
        };
        let gigabytes = "a number of gigabytes from 0 to 1000000";
        let (model_gb, offloaded_gb) = (number_in(1, gigabytes)?, number_in(2, gigabytes)?);
        let compute = number_in(3, "a number of seconds from 0 to 1000000")?;
        let how_often = "a whole number from 1 to 1000";
        let passes = number_in(4, how_often)?;
        if passes.fract() != 0.0 || !(1.0..=1000.0).contains(&passes) {
            return Err(wrong(4, how_often));
        }
        let published = (COLUMNS.len()..cells.len()).map(|column| match cells[column] {
            "" => Ok(None),
            _ => number_in(column, "a number of seconds from 0 to 1000000").map(Some),
        });
        let bytes = |gb: f64| (gb * 1e9).round() as u64;
        Ok(Row {
            model: cells[0].to_owned(),
            // What is kept elsewhere is part of the model, even where the table rounds the model's size down.
            model_bytes: bytes(model_gb).max(bytes(offloaded_gb)),
            offloaded_gb,
            offloaded_bytes: bytes(offloaded_gb),
            compute,
            passes: passes as u32,
            published: published.collect::<Result<_, String>>()?,
        })
    }
}

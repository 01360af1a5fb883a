//! The table that a plan prints as.

use std::fmt;

use super::outlier::Outlier;
use super::value::{DevicePlan, Order, Plan, Unit, Use};
use crate::bytes::ByteSize;

const HEADS: [&str; 8] = ["device", "quota", "weights", "modules", "slots", "reserve", "total", "free"];

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match (self.order(), self.unit()) {
            (Order::Interleaved, Unit::Uniform) => " by roles and whole layers",
            (Order::Interleaved, Unit::Module) => " by module",
            _ => "",
        };
        let (mode, order, compute, depth) = (self.mode(), self.order(), self.compute(), self.depth());
        writeln!(f, "mode {mode}, {order}{unit}, compute on {compute}, depth {depth}")?;
        let rows: Vec<[String; 8]> = self.devices().iter().map(|device| self.row(device)).collect();
        let width =
            |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0).max(HEADS[column].len());
        let widths: [usize; 8] = std::array::from_fn(width);
        write_row(f, &HEADS, &widths)?;
        for row in &rows {
            write_row(f, &row.each_ref().map(String::as_str), &widths)?;
        }
        self.write_streaming(f)?;
        let streams = self.streamed_layers() > 0;
        let explained = |outlier: &Outlier| self.explanation().is_some_and(|e| e.keeps(&outlier.module));
        let shown = |outlier: &&Outlier| (streams || outlier.usage != Use::Resident) && !explained(outlier);
        for outlier in self.outliers().iter().filter(shown) {
            write!(f, "\n{outlier}")?;
        }
        for device in self.devices().iter().filter(|device| device.beside.opening > 0) {
            write!(
                f,
                "\n{} is not open yet: opening it takes about {}",
                device.id,
                ByteSize(device.beside.opening).human()
            )?;
        }
        if let Some(explanation) = self.explanation() {
            write!(f, "\n{explanation}")?;
        }
        for warning in self.warnings() {
            write!(f, "\nwarning: {warning}")?;
        }
        Ok(())
    }
}

impl Plan {
    fn row(&self, device: &DevicePlan) -> [String; 8] {
        let human = |bytes: u64| ByteSize(bytes).human().to_string();
        let or_dash = |bytes: Option<u64>| bytes.map_or("-".to_owned(), human);
        let (slots, here) = (self.slots(), device.id == self.compute());
        let slots = match device.beside.scratch > device.beside.slots {
            true => format!("{} for patching", human(device.beside.scratch)),
            false if here && slots.count > 0 => slots.to_string(),
            false => "-".to_owned(),
        };
        [
            device.id.to_string(),
            or_dash(device.quota),
            human(device.weights.bytes),
            device.weights.modules.to_string(),
            slots,
            if here { human(device.beside.reserve) } else { "-".to_owned() },
            human(device.memory.total),
            or_dash(device.memory.free),
        ]
    }

    fn write_streaming(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let human = |bytes: u64| ByteSize(bytes).human();
        let (layers, bytes) = (self.streamed_layers(), self.streamed_bytes());
        if layers == 0 {
            write!(f, "nothing is streamed")?;
        } else {
            let pinned = self.devices().iter().map(|d| d.weights.pinned).sum();
            let staged = self.devices().iter().fold(0u64, |sum, d| sum.saturating_add(d.weights.staged));
            let layers = format!("{layers} layer{}", if layers == 1 { "" } else { "s" });
            write!(f, "{layers} streamed, {} per pass: ", human(bytes))?;
            write!(f, "{} pinned, {} staged", human(pinned), human(staged))?;
        }
        if let Some(dtype) = self.unpacked() {
            write!(f, "; slots hold the values of blocks as {dtype}")?;
        }
        let compressed = self.assignments().iter().filter(|a| a.is_compressed());
        let (bytes, taken) = compressed.fold((0u64, 0u64), |(bytes, taken), a| (bytes + a.bytes, taken + a.taken()));
        if bytes > 0 {
            write!(f, "; {} kept compressed in {}", human(bytes), human(taken))?;
        }
        let in_place = self.assignments().iter().filter(|a| a.usage == Use::InPlace);
        let (modules, bytes) = in_place.fold((0usize, 0u64), |(n, sum), a| (n + 1, sum + a.bytes));
        if modules > 0 {
            let s = if modules == 1 { "" } else { "s" };
            write!(f, "; {modules} module{s} used in place, {}", human(bytes))?;
        }
        let in_files = self.devices().iter().map(|device| device.weights.in_files).sum();
        if in_files > 0 {
            write!(f, "; {} stay in the model's own files", human(in_files))?;
        }
        Ok(())
    }
}

/// Writes one row, the first column left-aligned and the others right-aligned.
fn write_row(f: &mut fmt::Formatter<'_>, cells: &[&str; 8], widths: &[usize; 8]) -> fmt::Result {
    write!(f, "{:<width$}", cells[0], width = widths[0])?;
    for (cell, width) in cells.iter().zip(widths).skip(1) {
        write!(f, "  {cell:>width$}")?;
    }
    writeln!(f)
}

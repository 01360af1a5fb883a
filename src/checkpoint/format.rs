//! Files that are neither safetensors nor GGUF files, recognised by their first bytes.

use crate::error::FileFault;
use crate::transfer::Source;

/// The bytes that are looked at. The mark of a tar archive begins at byte 257.
const START: u64 = 512;

const CONVERT: &str = "convert it to safetensors";
const UNPACK: &str = "unpack it, and open the safetensors file in it";
const AGAIN: &str = "download it again";

/// First bytes, the format that has them, and what to do.
const FORMATS: [(&[u8], &str, &str); 27] = [
    (b"\x80\x02", "a Python pickle", CONVERT),
    (b"\x80\x03", "a Python pickle", CONVERT),
    (b"\x80\x04", "a Python pickle", CONVERT),
    (b"\x80\x05", "a Python pickle", CONVERT),
    // The first protocol is text.
    (b"(dp0\n", "a Python pickle", CONVERT),
    (b"(lp0\n", "a Python pickle", CONVERT),
    // GGML wrote its marks as numbers, so they stand backwards in a file.
    (b"lmgg", "a GGML file", CONVERT),
    (b"fmgg", "a GGML file", CONVERT),
    (b"tjgg", "a GGML file", CONVERT),
    (b"algg", "a GGML adapter", CONVERT),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", CONVERT),
    (b"\x93NUMPY", "a NumPy file", CONVERT),
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the file that it stands for with `git lfs pull`"),
    (b"\x1f\x8b\x08", "a gzip archive", UNPACK),
    (b"BZh", "a bzip2 archive", UNPACK),
    (b"\xfd7zXZ\0", "an xz archive", UNPACK),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive", UNPACK),
    (b"\x04\x22\x4d\x18", "an LZ4 archive", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", UNPACK),
    (b"PAR1", "a Parquet file", AGAIN),
    (b"%PDF-", "a PDF document", AGAIN),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", AGAIN),
    (b"\xff\xd8\xff", "a JPEG picture", AGAIN),
    (b"RIFF", "a picture or sound (RIFF)", AGAIN),
    (b"\x7fELF", "a program (ELF)", AGAIN),
    (b"MZ", "a program of Windows", AGAIN),
];

/// The mark of a tar archive, and where it stands.
const TAR: (usize, &[u8]) = (257, b"ustar");

/// The fault of a file of a format that is not read; `None` for one that is not recognised.
pub(super) fn other_format(source: &dyn Source) -> Option<FileFault> {
    let len = source.stamp().len();
    let mut start = vec![0; len.min(START) as usize];
    source.read_at(0, &mut start).ok()?;
    // A header of under 4 GiB that begins as one does, whatever its length spells.
    if start.get(4..9) == Some(b"\0\0\0\0{") {
        return None;
    }
    let known = FORMATS.into_iter().find(|(magic, ..)| start.starts_with(magic));
    let known = known.map(|(_, format, advice)| (format, advice));
    let tar = start.get(TAR.0..).is_some_and(|rest| rest.starts_with(TAR.1)).then_some(("a tar archive", UNPACK));
    if let Some((format, advice)) = zip(&start).or(known).or(tar) {
        return Some(FileFault::OtherFormat { format, advice });
    }
    if start.len() >= 16 && start.iter().all(|&byte| byte == 0) {
        let format = "a file that begins with zeros, as an interrupted download leaves it";
        return Some(FileFault::OtherFormat { format, advice: AGAIN });
    }
    text(&start)
}

/// What a zip archive is, by the name of its first file, and what to do.
fn zip(start: &[u8]) -> Option<(&'static str, &'static str)> {
    // PKWARE's APPNOTE.TXT, 4.3.7: the name's length is at byte 26, the name at byte 30.
    let rest = start.strip_prefix(b"PK\x03\x04")?;
    let name = rest.get(22..24).and_then(|len| rest.get(26..)?.get(..u16::from_le_bytes([len[0], len[1]]).into()));
    Some(match name {
        Some(name) if name.ends_with(b".npy") => ("a NumPy archive (npz, a zip archive)", CONVERT),
        Some(name) if name.ends_with(b".safetensors") => ("a zip archive of a safetensors file", UNPACK),
        _ => ("a zip archive, as torch.save writes", CONVERT),
    })
}

/// The fault of a file of text, by its first bytes. Eight bytes that begin a safetensors file hold zeros.
fn text(start: &[u8]) -> Option<FileFault> {
    let wide = |unit: fn([u8; 2]) -> u16| {
        let units: Vec<u16> = start[2..].as_chunks().0.iter().map(|&bytes| unit(bytes)).collect();
        text(String::from_utf16_lossy(&units).as_bytes())
    };
    match start {
        [0xff, 0xfe, _, 0, ..] => return wide(u16::from_le_bytes),
        [0xfe, 0xff, 0, ..] => return wide(u16::from_be_bytes),
        _ => {}
    }
    let start = start.strip_prefix(super::text::MARK).unwrap_or(start);
    let control = |byte: &u8| matches!(byte, 0..=8 | 0x0b | 0x0e..=0x1f | 0x7f);
    if start.is_empty() || start.iter().any(control) {
        return None;
    }
    let trimmed = start.trim_ascii_start();
    let lower = trimmed.to_ascii_lowercase();
    let has = |word: &[u8]| lower.windows(word.len()).any(|part| part == word);
    let kind = match trimmed.first() {
        Some(b'<') if lower.starts_with(b"<!doctype html") || has(b"<html") => "an HTML page",
        Some(b'<') => "XML text",
        Some(b'{' | b'[') => "JSON text",
        _ => match std::str::from_utf8(start) {
            // A character may be cut at the end of the piece that was read.
            Err(error) if error.error_len().is_some() => return None,
            _ => "text",
        },
    };
    let words = String::from_utf8_lossy(trimmed);
    let line = words.split_whitespace().collect::<Vec<_>>().join(" ");
    Some(FileFault::Text { kind, start: line.chars().take(80).collect() })
}

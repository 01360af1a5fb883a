//! Headers, sound and broken, against the format's own reader: this crate takes no file that it refuses, and refuses
//! of those that it takes only two kinds: names that stand twice, and an element type spelled as an object, which
//! its derived parser happens to understand (`{"F32":null}`).

use std::collections::HashSet;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use safetensors::SafeTensors;
use tensor_offload::DType;
use tensor_offload::checkpoint::Checkpoint;

/// A tensor's name, type, shape.
type Tensor = (String, DType, Vec<u64>);

fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let dtype = select(DType::all().filter(|dtype| !dtype.is_ggml_block()).collect::<Vec<_>>());
    let shape = prop::collection::vec(0u64..5, 0..4);
    let name = prop_oneof!["[a-c.]{1,3}", "\\PC{0,6}"];
    let whole = |(_, dtype, shape): &Tensor| dtype.bytes_of(shape).is_some();
    prop::collection::vec((name, dtype, shape).prop_filter("whole bytes", whole), 0..6)
}

/// The header of these tensors, entries in another order than the bytes, and the number of bytes.
fn header(tensors: &[Tensor], reverse: bool, metadata: Option<&str>) -> (String, usize) {
    let mut end = 0;
    let mut entries: Vec<String> = Vec::new();
    for (name, dtype, shape) in tensors {
        let begin = end;
        end += dtype.bytes_of(shape).unwrap();
        let name = serde_json::to_string(name).unwrap();
        entries.push(format!(r#"{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#));
    }
    entries.extend(metadata.map(|text| format!(r#""__metadata__":{text}"#)));
    if reverse {
        entries.reverse();
    }
    (format!("{{{}}}", entries.join(",")), end as usize)
}

fn file(header: &[u8], bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend((0..bytes).map(|i| i as u8));
    file
}

fn compare(file: Vec<u8>) -> Result<(), TestCaseError> {
    let ours = Checkpoint::from_bytes("m", file.clone());
    match (SafeTensors::deserialize(&file), ours) {
        (Ok(theirs), Ok(ours)) => {
            prop_assert_eq!(theirs.len(), ours.layout().tensors().len());
            for (index, info) in ours.layout().tensor_ids().zip(ours.layout().tensors()) {
                let view = theirs.tensor(&info.name).unwrap();
                prop_assert_eq!(view.dtype().to_string(), info.dtype.name());
                prop_assert!(view.shape().iter().map(|&d| d as u64).eq(info.shape.iter().copied()));
                let mut bytes = vec![0; info.bytes as usize];
                ours.read(index, &mut bytes).unwrap();
                prop_assert_eq!(view.data(), &bytes);
            }
        }
        (Ok(_), Err(error)) => {
            let known = ["occurs twice", "invalid type: map, expected a string"];
            prop_assert!(known.iter().any(|kind| error.to_string().contains(kind)), "{error}");
        }
        (Err(error), Ok(_)) => return Err(TestCaseError::fail(format!("accepted what is refused: {error}"))),
        (Err(_), Err(_)) => {}
    }
    Ok(())
}

/// What a number, a text or a whole value of the header may turn into.
const HOSTILE: [&str; 24] = [
    "0",
    "1",
    "4",
    "-1",
    "-0",
    "1.0",
    "1e2",
    "1e400",
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775808",
    "null",
    "true",
    "[]",
    "{}",
    "[0,0]",
    "[[0]]",
    "\"\"",
    "\"F32\"",
    "\"F4\"",
    "\"dtype\"",
    "\"__metadata__\"",
    "\"\\ud800\"",
    "{\"F32\":null}",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sound_headers(
        tensors in tensors(), reverse: bool, metadata in select(vec![None, Some("{}"), Some("null"), Some(r#"{"a":"b"}"#)]),
        blanks in 0usize..9,
    ) {
        let (header, bytes) = header(&tensors, reverse, metadata);
        let file = file((header + &" ".repeat(blanks)).as_bytes(), bytes);
        let names: HashSet<&str> = tensors.iter().map(|(name, ..)| name.as_str()).collect();
        prop_assert_eq!(Checkpoint::from_bytes("m", file.clone()).is_ok(), names.len() == tensors.len());
        compare(file)?;
    }

    #[test]
    fn headers_with_another_value(
        tensors in tensors(), reverse: bool, at: Index, hostile in select(HOSTILE.to_vec()), deep in 0usize..140,
    ) {
        let (header, bytes) = header(&tensors, reverse, Some("{}"));
        let places = values(&header);
        let place = places[at.index(places.len())].clone();
        // Deep nesting in some: both readers have a limit, and it must be the same.
        let value = if deep > 120 { format!("{}{hostile}{}", "[".repeat(deep), "]".repeat(deep)) } else { hostile.into() };
        compare(file([&header[..place.start], &value, &header[place.end..]].concat().as_bytes(), bytes))?;
    }

    #[test]
    fn headers_with_another_field(
        tensors in tensors(), at: Index, key in select(vec!["x", "dtype", "shape", "data_offsets"]), hostile in select(HOSTILE.to_vec()),
        deep in 0usize..140,
    ) {
        let (header, bytes) = header(&tensors, false, None);
        let places: Vec<usize> = header.match_indices('{').map(|(at, _)| at + 1).collect();
        let at = places[at.index(places.len())];
        let value = if deep > 120 { format!("{}{hostile}{}", "[".repeat(deep), "]".repeat(deep)) } else { hostile.into() };
        let comma = if header[at..].starts_with('}') { "" } else { "," };
        compare(file(format!("{}\"{key}\":{value}{comma}{}", &header[..at], &header[at..]).as_bytes(), bytes))?;
    }

    #[test]
    fn files_with_other_bytes(
        tensors in tensors(), edits in prop::collection::vec((any::<Index>(), any::<u8>(), 0..3), 1..4), extra in -3isize..3,
    ) {
        let (header, bytes) = header(&tensors, true, Some(r#"{"k":"v"}"#));
        let mut file = file(header.as_bytes(), bytes);
        for (at, byte, kind) in edits {
            let at = at.index(file.len());
            match kind {
                0 => file[at] = byte,
                1 => file[at] ^= 1 << (byte % 8),
                _ => { file.remove(at); }
            }
        }
        file.resize(file.len().saturating_add_signed(extra), 0);
        compare(file)?;
    }

    #[test]
    fn any_bytes(length in 0u64..40, bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        compare([&length.to_le_bytes()[..], &bytes].concat())?;
        compare(bytes)?;
    }
}

/// The places of the header's numbers and texts.
fn values(header: &str) -> Vec<std::ops::Range<usize>> {
    let (bytes, mut places, mut at) = (header.as_bytes(), Vec::new(), 0);
    while at < bytes.len() {
        let start = at;
        at += 1;
        if bytes[start] == b'"' {
            while bytes[at] != b'"' {
                at += if bytes[at] == b'\\' { 2 } else { 1 };
            }
            at += 1;
            places.push(start..at);
        } else if bytes[start].is_ascii_digit() {
            while bytes[at].is_ascii_digit() {
                at += 1;
            }
            places.push(start..at);
        }
    }
    places
}

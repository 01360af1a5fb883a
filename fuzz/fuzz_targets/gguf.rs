//! Any bytes as a GGUF file: refused, or every tensor of it can be read and lies inside the file, and every array of its
//! metadata has as many elements as it says.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tensor_offload::Checkpoint;
use tensor_offload::checkpoint::GgufValue;

fuzz_target!(|data: &[u8]| {
    let data = [b"GGUF", data].concat();
    let Ok(checkpoint) = Checkpoint::from_bytes("input", data.clone()) else { return };
    let layout = checkpoint.layout();
    let mut sum = 0u64;
    for (index, tensor) in layout.tensor_ids().zip(layout.tensors()) {
        assert_eq!(tensor.dtype.bytes_of(&tensor.shape), Some(tensor.bytes));
        assert!(tensor.offset + tensor.bytes <= data.len() as u64);
        let mut bytes = vec![0; tensor.bytes as usize];
        checkpoint.read(index, &mut bytes).expect("a tensor of an opened file");
        assert_eq!(bytes, data[tensor.offset as usize..][..bytes.len()]);
        assert_eq!(checkpoint.find(&tensor.name), Some(index), "two tensors of one name");
        sum += tensor.bytes;
    }
    assert!(sum < data.len() as u64);
    let gguf = checkpoint.gguf().expect("a GGUF file");
    for (key, value) in gguf.entries() {
        let GgufValue::Array { len, .. } = value else {
            assert_eq!(checkpoint.metadata()[key], value.to_string());
            continue;
        };
        let array = gguf.array(key).expect("an array").expect("an array of an opened file");
        let counts = [
            array.texts().map(Iterator::count),
            array.integers().map(Iterator::count),
            array.floats().map(Iterator::count),
            array.bools().map(Iterator::count),
        ];
        assert!(counts.into_iter().flatten().all(|count| count as u64 == *len));
    }
});

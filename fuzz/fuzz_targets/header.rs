//! Any bytes as a safetensors file: refused, or every tensor of it can be read and lies inside the file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tensor_offload::Checkpoint;

fuzz_target!(|data: &[u8]| {
    let Ok(checkpoint) = Checkpoint::from_bytes("input", data.to_vec()) else { return };
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
    assert_eq!(layout.modules().iter().map(|module| module.tensors.len()).sum::<usize>(), layout.tensors().len());
    assert_eq!(layout.layers().iter().map(|layer| layer.modules.len()).sum::<usize>(), layout.modules().len());
});

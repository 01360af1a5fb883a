//! Any bytes as weights: their code gives them back, whole and in part. Any damage to it: an error, or the same weights. Any
//! bytes as a code, and in the place of a block: no more than an error.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tensor_offload::DType;
use tensor_offload::lossless::{Code, Info, compress, compressed_bound, decompress, estimate};

const TYPES: [DType; 5] = [DType::BF16, DType::F16, DType::F32, DType::F8E4M3, DType::F8E5M2];

fuzz_target!(|data: &[u8]| {
    let Some((&[dtype, repeat, split, place], data)) = data.split_first_chunk() else { return };
    let dtype = TYPES[usize::from(dtype) % TYPES.len()];
    let (weights, damage) = data.split_at(data.len() * usize::from(split) / 255);
    let mut weights = weights.repeat(1 + usize::from(repeat));
    weights.truncate(weights.len().min(48 << 10) / 4 * 4);
    let size = dtype.element_bytes().expect("a type of whole bytes");
    let code = compress(dtype, &weights).expect("whole weights");
    assert!(code.len() <= compressed_bound(dtype, weights.len() / size).expect("few weights"));
    assert!(estimate(dtype, &weights).expect("whole weights") <= 1.0);
    let mut back = vec![0; weights.len()];
    decompress(&code, &mut back).expect("its own code");
    assert!(back == weights);

    let opened = Code::open(&code).expect("its own code");
    let count = opened.info().count;
    let (begin, end) = (count * u64::from(place) / 255, count * u64::from(split) / 255);
    let (begin, end) = (begin.min(end), begin.max(end));
    let mut part = vec![0; (end - begin) as usize * size];
    opened.decode_range(begin..end, &mut part).expect("weights of the tensor");
    assert!(part == weights[begin as usize * size..end as usize * size]);

    let mut damaged = code.clone();
    if place & 1 == 0 {
        // Header, planes or tails of blocks as a whole.
        let at = 64 + (damaged.len() - 64) * usize::from(place) / 255;
        damaged.iter_mut().skip(at).zip(damage).for_each(|(to, from)| *to = *from);
    } else {
        for change in damage.chunks_exact(3) {
            let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % damaged.len();
            damaged[at] ^= change[2];
        }
    }
    if decompress(&damaged, &mut back).is_ok() && Info::read(&damaged) == Info::read(&code) {
        assert!(back == weights, "other weights of the same sum");
    }
    for code in [damage, &[&code[..10], damage].concat()] {
        assert!(decompress(code, &mut back).is_err() || code.len() >= 64);
    }
});

//! Weights from their lossless code by the kernels of CUDA devices: the text that ships, interpreted by the stand-in driver or run by a
//! card, gives the bits of the host, and tells damage as the host does.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod codes;
mod support;

use std::sync::Arc;

use card::{driver, registry};
use codes::{normal, random_bytes, read, sent, stored, verdict};
use cuda_standin::{Config, MemoryMode};
use tensor_offload::backend::{Decompress, Device, MemoryKind, Role, Stream};
use tensor_offload::lossless::{BLOCK_WEIGHTS as BLOCK, Code, CodePart, compress};
use tensor_offload::{DType, DeviceId};

const TYPES: [DType; 7] =
    [DType::BF16, DType::F16, DType::F32, DType::F8E4M3, DType::F8E5M2, DType::F8E4M3Fnuz, DType::F8E5M2Fnuz];

fn one_card() -> Config {
    Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).late_micros(2000).seed(3)
}

/// Weights of every kind that a code has a form for, and what it is.
fn contents(dtype: DType, seed: u64, count: usize) -> Vec<(&'static str, Vec<u8>)> {
    let size = dtype.element_bytes().unwrap();
    let usual = |deviation| stored(dtype, normal(seed, deviation).take(count));
    let random = random_bytes(seed, count * size);
    let rare = |every: usize| {
        let mut bytes = usual(0.02);
        let others = random_bytes(seed + 1, count * size);
        bytes
            .chunks_mut(size)
            .zip(others.chunks(size))
            .step_by(every)
            .for_each(|(one, other)| one.copy_from_slice(other));
        bytes
    };
    // Blocks that stay as they were between others, as far as there are several.
    let mut mixed = usual(0.02);
    mixed.chunks_mut(BLOCK * size).zip(random.chunks(BLOCK * size)).skip(1).step_by(2).for_each(|(to, from)| {
        to.copy_from_slice(from);
    });
    let mut zeroed = usual(1.0);
    zeroed.chunks_mut(size).for_each(|one| one[..size / 2].fill(0));
    vec![
        ("usual", usual(0.02)),
        ("wide", stored(dtype, normal(seed, 1.0).map(|value| value.powi(7)).take(count))),
        ("some rare", rare(611)),
        ("many rare", rare(7)),
        ("mixed with what is not coded", mixed),
        ("not coded", random),
        ("zeros", vec![0; count * size]),
        ("constant", stored(dtype, std::iter::repeat_n(-1.5, count))),
        ("one exponent", stored(dtype, normal(seed, 0.05).map(|value| 1.5 + value.clamp(-0.4, 0.4)).take(count))),
        ("low planes of zeros", zeroed),
        ("two exponents", stored(dtype, (0..count).map(|at| if at % 97 == 5 { -0.25 } else { 1.0 }))),
    ]
}

/// What `given` decodes to, of the code `sound` or a damaged one of the same info: the weights, and whether the verdict is sound. The
/// weights begin at byte `at`, and nothing before and behind them may change.
fn decoded(device: &Arc<dyn Device>, stream: &dyn Stream, sound: &[u8], given: &[u8], at: usize) -> (Vec<u8>, bool) {
    let info = *Code::open(sound).unwrap().info();
    let bytes = info.decoded_bytes as usize;
    let before = random_bytes(9, at + bytes + 48);
    let (src, dst) = (sent(device, given).freeze(), sent(device, &before));
    let work = Decompress::new((src, 0), info, (dst, at), (sent(device, &[0; 16]), 0)).unwrap();
    let flight = device.kernels().unwrap().decompress(stream, work).unwrap();
    let after = read(device, flight.weights.chain()).unwrap();
    assert!(
        after[..at] == before[..at] && after[at + bytes..] == before[at + bytes..],
        "written outside of the weights"
    );
    (after[at..at + bytes].to_vec(), verdict(device, flight.verdict.chain()))
}

/// Whether the driver has the kernels; says so if not.
fn has_kernels(device: &Arc<dyn Device>, stream: &dyn Stream) -> bool {
    let Err(why) = device.kernels().unwrap().decompresses(stream, DType::BF16) else { return true };
    assert!(card::named(), "{why}");
    eprintln!("skipped: the driver has no kernels for its device: {why}");
    false
}

/// Runs a test on a card that decodes; afterwards nothing is left, and no rule was broken.
fn on_a_card(test: impl FnOnce(&Arc<dyn Device>, &dyn Stream)) {
    let driver = driver(&one_card());
    let devices = registry();
    let device = devices.device(DeviceId::cuda(0)).unwrap();
    let stream = device.stream(Role::Compute).unwrap();
    if !has_kernels(&device, &*stream) {
        return;
    }
    test(&device, &*stream);
    drop((stream, device, devices));
    driver.assert_clean();
}

/// Numbers of weights that end in the midst of a run, of a tile, and at a block's end.
#[test]
fn cuda_codes_give_the_weights_that_were_coded() {
    on_a_card(|device, stream| {
        for (seed, dtype) in TYPES.into_iter().enumerate() {
            for count in [0, 1, 1021, BLOCK, 2 * BLOCK + 2 * 1024 + 13] {
                for (what, weights) in contents(dtype, seed as u64, count) {
                    let code = compress(dtype, &weights).unwrap();
                    let (got, sound) = decoded(device, stream, &code, &code, 0);
                    let wrong = got.iter().zip(&weights).position(|(got, wanted)| got != wanted);
                    assert_eq!((wrong, sound), (None, true), "{count} {what} of {dtype}: byte of the weights, verdict");
                }
            }
        }
    });
}

/// Weights that begin at a multiple of their own size and of nothing more, in the midst of a buffer; one tensor of many blocks.
#[test]
fn cuda_weights_need_no_more_alignment_than_their_own() {
    on_a_card(|device, stream| {
        for dtype in TYPES {
            let at = 5 * dtype.element_bytes().unwrap();
            for (what, weights) in contents(dtype, 40, BLOCK + 100) {
                let code = compress(dtype, &weights).unwrap();
                assert!(decoded(device, stream, &code, &code, at) == (weights, true), "{what} of {dtype}");
            }
        }
        let weights = stored(DType::BF16, normal(5, 0.02).take((1 << 19) + 9));
        let code = compress(DType::BF16, &weights).unwrap();
        assert!(decoded(device, stream, &code, &code, 16) == (weights, true), "a mebibyte");
    });
}

/// Codes of several blocks in all their forms, and where the blocks begin.
fn codes() -> Vec<(Vec<u8>, Vec<usize>)> {
    let coded = |(dtype, weights): (DType, Vec<u8>)| {
        let code = compress(dtype, &weights).unwrap();
        let opened = Code::open(&code).unwrap();
        let blocks = (0..opened.info().blocks()).map(|block| opened.block(block).unwrap());
        let begins = blocks.map(|block| block.as_ptr().addr() - code.as_ptr().addr()).collect();
        (code, begins)
    };
    let of = |dtype: DType, wanted: &[&str]| {
        let all = contents(dtype, 70, BLOCK + 1500).into_iter().filter(|(what, _)| wanted.contains(what));
        all.map(|(_, weights)| (dtype, weights)).collect::<Vec<_>>()
    };
    let all = [
        of(DType::BF16, &["usual", "some rare", "mixed with what is not coded", "not coded", "zeros", "one exponent"]),
        of(DType::F16, &["some rare"]),
        of(DType::F32, &["low planes of zeros"]),
        of(DType::F8E4M3, &["usual"]),
        of(DType::F8E5M2, &["some rare"]),
    ];
    all.into_iter().flatten().map(coded).collect()
}

/// Decodes damaged codes on the device and on the host, which agree on whether there is damage; undamaged weights are right.
fn agree(device: &Arc<dyn Device>, stream: &dyn Stream, sound: &[u8], damaged: &[u8], what: &str) -> bool {
    let (got, is_sound) = decoded(device, stream, sound, damaged, 0);
    let mut weights = vec![0; got.len()];
    let wanted = Code::open(damaged).and_then(|code| code.decode(&mut weights));
    assert_eq!(is_sound, wanted.is_ok(), "{what}: {wanted:?}");
    assert!(!is_sound || got == weights, "{what}: other weights");
    is_sound
}

/// Bits of all fields of the blocks' headers, and one in some of what follows.
#[test]
fn cuda_flipped_bits_of_blocks_are_told() {
    on_a_card(|device, stream| {
        let mut random = support::Random::new(4);
        for (number, (code, begins)) in codes().into_iter().enumerate() {
            let coded = code[11] == 1;
            let fields = begins.iter().filter(|_| coded).flat_map(|begin| begin * 8..(begin + 32) * 8).step_by(3);
            let first = begins[0] * 8;
            let bits = (0..60).map(|_| first + random.next() as usize % (code.len() * 8 - first));
            let last = (code.len() - 18) * 8..code.len() * 8;
            let bits: Vec<usize> = fields.chain(bits).chain(last.step_by(5)).collect();
            for bit in bits {
                let mut damaged = code.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                let what = format!("bit {bit} of {} of code {number}", code.len() * 8);
                assert!(!agree(device, stream, &code, &damaged, &what), "{what}");
            }
            assert!(agree(device, stream, &code, &code, "sound"));
        }
    });
}

/// Gives the header of a block the sum that its bytes 8..32 need if the weights are as before.
fn reseal(before: &[u8], block: &mut [u8]) {
    let words = |header: &[u8]| {
        let words = header[8..32].chunks(4).enumerate();
        words.fold(0u64, |sum, (word, bytes)| {
            let factor = (2 * (BLOCK as u32 + word as u32) + 1).wrapping_mul(0x9e37_79b1);
            let word = u32::from_le_bytes(bytes.try_into().unwrap());
            sum.wrapping_add(u64::from(word) * u64::from(factor))
        })
    };
    let sum = u64::from_le_bytes(block[..8].try_into().unwrap());
    let sum = sum.wrapping_sub(words(before)).wrapping_add(words(block));
    block[..8].copy_from_slice(&sum.to_le_bytes());
}

/// Headers that lie about their block, and have the sum of the lie: nothing is read or written outside, and nothing passes that the
/// host refuses.
#[test]
fn cuda_blocks_that_lie_are_told() {
    on_a_card(|device, stream| {
        let values: [u8; 8] = [0, 1, 2, 0x40, 0x7f, 0x80, 0x81, 0xff];
        for (number, (code, begins)) in codes().into_iter().enumerate().filter(|(_, (code, _))| code[11] == 1) {
            for (field, value, begin) in (8..32)
                .flat_map(|field| values.iter().map(move |value| (field, *value)))
                .zip(begins.iter().cycle())
                .map(|((f, v), b)| (f, v, *b))
            {
                let mut damaged = code.clone();
                damaged[begin + field] = value;
                let before = code[begin..begin + 32].to_vec();
                reseal(&before, &mut damaged[begin..]);
                agree(
                    device,
                    stream,
                    &code,
                    &damaged,
                    &format!("{value:#x} at {field} of the block at {begin} of code {number}"),
                );
            }
            // Codes and tails of noise, behind a header that is right.
            for (seed, begin) in begins.iter().enumerate() {
                let mut damaged = code.clone();
                let end = begins.get(seed + 1).copied().unwrap_or(code.len());
                let body = begin + 32 + (end - begin - 32) * 2 / 3;
                let noise = random_bytes(seed as u64, end - body);
                damaged[body..end].copy_from_slice(&noise);
                assert!(body == end || !agree(device, stream, &code, &damaged, "noise"));
                // All codes say that they continue.
                damaged[begin + 32..end].fill(0xff);
                agree(device, stream, &code, &damaged, "ones");
            }
        }
    });
}

/// The host has checked the index; what became of it on the way is told, and leads nowhere else.
#[test]
fn cuda_damaged_indexes_lead_nowhere_else() {
    on_a_card(|device, stream| {
        for (code, begins) in codes().into_iter().filter(|(code, _)| code[11] == 1) {
            for place in 0..=begins.len() {
                let at = 64 + 4 * place;
                let now = u32::from_le_bytes(code[at..at + 4].try_into().unwrap());
                let units = (code.len() / 16) as u32;
                for value in [0, now - 1, now + 1, now + 2, units, units + 1, 1 << 28, u32::MAX] {
                    if value == now {
                        continue;
                    }
                    let mut damaged = code.clone();
                    damaged[at..at + 4].copy_from_slice(&value.to_le_bytes());
                    let (_, sound) = decoded(device, stream, &code, &damaged, 0);
                    assert!(!sound, "{value} in place of {now} for block {place}");
                }
            }
        }
    });
}

/// Parts of a code, each with header and index and what a block may have of the bytes before, decode all of it together; and what is
/// damaged, left out or of another code is told.
#[test]
fn cuda_parts_of_a_code_are_decoded_one_after_the_other() {
    on_a_card(|device, stream| {
        for (seed, dtype) in TYPES.into_iter().enumerate() {
            let count = 4 * BLOCK + 1023;
            for (what, weights) in contents(dtype, seed as u64, count) {
                if !["usual", "mixed with what is not coded", "not coded"].contains(&what) {
                    continue;
                }
                let code = compress(dtype, &weights).unwrap();
                let end =
                    Code::open(&code).unwrap().block(1).unwrap().as_ptr_range().end as usize - code.as_ptr() as usize;
                // At the end of a block, within one, and a part in which none ends.
                for cuts in [vec![end, end + 16], vec![end / 16 * 16 + 4096, code.len() / 32 * 16 + 4096]] {
                    let (got, sound) = decoded_in_parts(device, stream, &code, &cuts, |_| true, &code);
                    assert!(sound && got == weights, "{what} of {dtype}, cut at {cuts:?}");
                    for left_out in [0, 2] {
                        let (_, sound) = decoded_in_parts(device, stream, &code, &cuts, |part| part != left_out, &code);
                        assert!(!sound, "{what} of {dtype} without part {left_out}");
                    }
                    let mut damaged = code.clone();
                    damaged[code.len() - 40] ^= 1;
                    let (_, sound) = decoded_in_parts(device, stream, &code, &cuts, |_| true, &damaged);
                    assert!(!sound, "{what} of {dtype}, damaged");
                    let nothing = vec![0; code.len()];
                    let (_, sound) = decoded_in_parts(device, stream, &code, &cuts, |_| true, &nothing);
                    assert!(!sound, "nothing of {what} of {dtype} arrived");
                }
            }
        }
    });
}

/// What the parts of `given` that are `wanted` decode to, with the info of the code `sound`, which is cut at these bytes: the weights,
/// and whether the verdict is sound.
fn decoded_in_parts(
    device: &Arc<dyn Device>,
    stream: &dyn Stream,
    sound: &[u8],
    cuts: &[usize],
    wanted: impl Fn(usize) -> bool,
    given: &[u8],
) -> (Vec<u8>, bool) {
    let info = *Code::open(sound).unwrap().info();
    let (head, size) = (info.head_bytes() as usize, info.dtype.element_bytes().unwrap());
    let longest = 32 + BLOCK * size;
    let mut told = sent(device, &[0; 16]);
    let mut dst = device.alloc(info.decoded_bytes as usize, MemoryKind::Whole).unwrap();
    let ends = cuts.iter().copied().chain([given.len()]);
    let mut after = 0;
    for (number, end) in ends.enumerate() {
        let begin = after.max(longest) - longest;
        let part = CodePart { begin: begin as u64, after: after as u64, end: end as u64 };
        if wanted(number) {
            let src = sent(device, &[&given[..head], &given[begin..end]].concat()).freeze();
            let work = Decompress::part((src, 0), info, (part, head), (dst, 0), (told, 0)).unwrap();
            let flight = device.kernels().unwrap().decompress(stream, work).unwrap();
            (dst, told) = (flight.weights.chain(), flight.verdict.chain());
        }
        after = end;
    }
    (read(device, dst).unwrap(), verdict(device, told))
}

/// Several codes share a verdict; a block of another tensor, which is sound in itself, shows too.
#[test]
fn cuda_one_verdict_is_of_all_codes() {
    on_a_card(|device, stream| {
        let kernels = device.kernels().unwrap();
        let tensor = |deviation| stored(DType::BF16, normal(6, deviation).take(BLOCK));
        let [one, other] = [tensor(0.3), tensor(0.6)].map(|weights| compress(DType::BF16, &weights).unwrap());
        let block = Code::open(&one).unwrap().block(0).unwrap().len();
        let exchanged = [&one[..one.len() - block], Code::open(&other).unwrap().block(0).unwrap()].concat();
        assert_eq!(exchanged.len(), one.len(), "twice as large weights have the next exponents");
        let mut damaged = one.clone();
        damaged[one.len() / 2] ^= 1;
        let of = |codes: [(&[u8], &[u8]); 3]| {
            let mut told = sent(device, &[0; 16]);
            for (info, code) in codes {
                let info = *Code::open(info).unwrap().info();
                let dst = device.alloc(info.decoded_bytes as usize, MemoryKind::Whole).unwrap();
                let work = Decompress::new((sent(device, code).freeze(), 0), info, (dst, 0), (told, 0)).unwrap();
                told = kernels.decompress(stream, work).unwrap().verdict.chain();
            }
            verdict(device, told)
        };
        assert!(of([(&one, &one), (&other, &other), (&one, &one)]));
        assert!(!of([(&one, &one), (&one, &damaged), (&one, &one)]));
        assert!(!of([(&one, &exchanged), (&other, &other), (&one, &one)]));
    });
}

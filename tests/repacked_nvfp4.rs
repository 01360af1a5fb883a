//! Adapters on NVFP4 weights, whose new values are packed again in either order of codes and scales.

mod reference;

use reference::{Tensor, f32s, file, tensor, tensors};
use tensor_offload::adapter::{Adapter, Matching, Weights};
use tensor_offload::error::{AdapterFault, PackingFault};
use tensor_offload::{Checkpoint, DType, Error};

const ROWS: usize = 32;
const COLS: usize = 64;
const NUMBERS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The value of an F8_E4M3 scale without a sign.
fn e4m3(raw: u8) -> f32 {
    let (exponent, fraction) = (i32::from(raw >> 3), f32::from(raw & 7));
    if exponent == 0 { fraction / 512.0 } else { (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7) }
}

/// Where the scale of a block is stored.
fn place(row: usize, block: usize, tiles: bool) -> usize {
    if tiles { row % 32 * 16 + row / 32 * 4 + block } else { row * (COLS / 16) + block }
}

/// A weight with every code, and scales of all sizes.
fn model(tiles: bool, note: bool, all: f32) -> Vec<Tensor> {
    let codes = (0..ROWS * COLS / 2).map(|at| (at * 37 + 11 + at / 7) as u8).collect();
    let (shape, stored) = if tiles { ([128, 4], 512) } else { ([ROWS as u64, 4], ROWS * 4) };
    let scales = (0..stored).map(|at| 40 + (at * 29 % 60) as u8).collect();
    let mut tensors = vec![
        tensor("a.q.weight", DType::U8, &[ROWS as u64, COLS as u64 / 2], codes),
        tensor("a.q.weight_scale", DType::F8E4M3, &shape, scales),
        f32s("a.q.weight_scale_2", &[], &[all]),
    ];
    if note {
        let text = br#"{"format": "nvfp4"}"#.to_vec();
        tensors.push(tensor("a.q.comfy_quant", DType::U8, &[text.len() as u64], text));
    }
    tensors
}

fn values(tensors: &[Tensor], tiles: bool) -> Vec<f32> {
    let all = f32::from_le_bytes(tensors[2].3[..4].try_into().unwrap());
    let value = |at: usize| {
        let (row, col) = (at / COLS, at % COLS);
        let upper = (col % 2 == 0) == tiles;
        let byte = tensors[0].3[at / 2];
        let code = if upper { byte >> 4 } else { byte & 15 };
        let number = NUMBERS[usize::from(code & 7)];
        let scale = all * e4m3(tensors[1].3[place(row, col / 16, tiles)]);
        if code < 8 { number * scale } else { -number * scale }
    };
    (0..ROWS * COLS).map(value).collect()
}

fn change(rows: std::ops::Range<usize>, by: f32) -> Vec<Adapter> {
    let up: Vec<f32> = (0..ROWS).map(|row| if rows.contains(&row) { by } else { 0.0 }).collect();
    let down: Vec<f32> = (0..COLS).map(|col| (col as f32 - 20.0) / 64.0).collect();
    let tensors =
        [f32s("a.q.lora_B.weight", &[ROWS as u64, 1], &up), f32s("a.q.lora_A.weight", &[1, COLS as u64], &down)];
    vec![Adapter::from_checkpoint(file("adapter", &tensors), 1.0).unwrap()]
}

fn merged(base: &Checkpoint, adapters: Vec<Adapter>) -> Vec<Tensor> {
    let weights = Weights::repacked(base.clone(), adapters, Matching::Strict).unwrap();
    let mut all = tensors(base);
    for (id, tensor) in base.layout().tensor_ids().zip(&mut all) {
        weights.read(id, &mut tensor.3).unwrap();
    }
    all
}

#[test]
fn changed_values_are_within_half_a_step_and_the_rest_stays() {
    for tiles in [false, true] {
        let base = model(tiles, tiles, 0.01);
        for (rows, by) in [(0..ROWS, 0.3), (3..9, -0.7), (0..0, 0.0), (0..ROWS, 900.0)] {
            let got = merged(&file("model", &base), change(rows.clone(), by));
            let (was, now) = (values(&base, tiles), values(&got, tiles));
            let all = f32::from_le_bytes(got[2].3[..4].try_into().unwrap());
            assert_eq!(all != 0.01, by == 900.0);
            for (block, (was, now)) in was.chunks(16).zip(now.chunks(16)).enumerate() {
                let (row, first) = (block / 4, block % 4 * 16);
                let delta = |col: usize| if rows.contains(&row) { by * ((col as f32 - 20.0) / 64.0) } else { 0.0 };
                let wanted: Vec<f32> = was.iter().enumerate().map(|(at, was)| was + delta(first + at)).collect();
                let most = wanted.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                for (wanted, now) in wanted.iter().zip(now) {
                    // Half of the step from 4 to 6, of a scale that is rounded itself by a sixteenth at most.
                    assert!((wanted - now).abs() <= most / 6.0 * 1.07 + all / 512.0, "{wanted} {now} of {most}");
                }
                assert!(rows.contains(&row) || by == 900.0 || was == now);
            }
            let untouched = |row: usize| !rows.contains(&row);
            for row in (0..ROWS).filter(|&row| untouched(row)) {
                assert_eq!(got[0].3[row * 32..][..32], base[0].3[row * 32..][..32]);
            }
            // What fills tiles stays.
            let used: Vec<usize> = (0..ROWS * 4).map(|block| place(block / 4, block % 4, tiles)).collect();
            for at in (0..base[1].3.len()).filter(|at| !used.contains(at)) {
                assert_eq!(got[1].3[at], base[1].3[at]);
            }
        }
    }
}

#[test]
fn orders_that_cannot_be_told_are_refused() {
    let refused = |tensors: &[Tensor]| {
        let error = Weights::repacked(file("model", tensors), change(0..1, 1.0), Matching::Strict).unwrap_err();
        let message = error.to_string();
        let Error::Adapter { fault, .. } = error else { panic!("{message}") };
        let AdapterFault::Codes { fault, .. } = *fault else { panic!("{message}") };
        fault
    };
    // Tiles without a note, and rows with one.
    for (tiles, note) in [(true, false), (false, true)] {
        let PackingFault::Shape { tensor, .. } = refused(&model(tiles, note, 0.01)) else { panic!("{tiles}") };
        assert_eq!(tensor, "a.q.weight_scale");
    }
    let mut missing = model(false, false, 0.01);
    missing.remove(2);
    assert_eq!(refused(&missing), PackingFault::Missing { tensor: "a.q.weight_scale_2".to_owned() });
    let mut smooth = model(false, false, 0.01);
    smooth.push(f32s("a.q.pre_quant_scale", &[COLS as u64], &[1.0; COLS]));
    assert_eq!(refused(&smooth), PackingFault::Unknown { tensor: "a.q.pre_quant_scale".to_owned() });
}

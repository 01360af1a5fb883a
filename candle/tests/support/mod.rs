//! The networks that tests run over streamed weights, and over candle's own loading.

#![allow(dead_code, reason = "each test uses its part")]

#[path = "../../examples/support/flux.rs"]
mod flux;
#[path = "../../examples/support/llama.rs"]
mod llama;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use tensor_offload::{Adapter, Checkpoint, Matching, Model, TensorId, Weights};
use tensor_offload_candle::Streamed;

pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

pub(crate) fn tiny_llama() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/tiny-llama")
}

pub(crate) fn tiny_lora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/tiny-llama-lora")
}

/// The small Llama with its adapter.
pub(crate) fn at_strength(checkpoint: &Checkpoint, strength: f32) -> Weights {
    let adapter = Adapter::open(tiny_lora(), strength).unwrap();
    Weights::patched(checkpoint.clone(), vec![adapter], Matching::Strict).unwrap()
}

/// All merged weights, written by the library and loaded by candle.
pub(crate) fn candles_own(weights: &Weights, device: &Device) -> VarBuilder<'static> {
    let layout = weights.layout();
    let tensor = |id: TensorId| {
        let info = layout.tensor(id).unwrap();
        let mut bytes = vec![0; info.bytes as usize];
        weights.read(id, &mut bytes).unwrap();
        let shape: Vec<usize> = info.shape.iter().map(|&dim| dim as usize).collect();
        let dtype = match info.dtype {
            tensor_offload::DType::F32 => DType::F32,
            tensor_offload::DType::BF16 => DType::BF16,
            other => panic!("{other}"),
        };
        (info.name.clone(), Tensor::from_raw_buffer(&bytes, dtype, &shape, device).unwrap())
    };
    let tensors: HashMap<_, _> = layout.tensor_ids().map(tensor).collect();
    let dtype = tensors.values().next().unwrap().dtype();
    VarBuilder::from_tensors(tensors, dtype, device)
}

/// A network to run over some weights, one way or the other, and the device that it runs on.
#[derive(Clone)]
pub(crate) struct Network {
    kind: Kind,
    device: Device,
}

#[derive(Clone)]
enum Kind {
    Llama(Box<llama::Config>),
    Flux(flux::Config, flux::Inputs, Tensor),
}

pub(crate) enum Part {
    Llama(llama::Part),
    Flux(flux::Part),
}

impl Network {
    pub(crate) fn llama(folder: &Path, device: &Device) -> Network {
        let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let kind = Kind::Llama(Box::new(llama::Config::parse(&config).unwrap()));
        Network { kind, device: device.clone() }
    }

    pub(crate) fn flux(folder: &Path, device: &Device) -> Network {
        let config: flux::Config =
            serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
        let given = candle_core::safetensors::load(folder.join("expected.safetensors"), device).unwrap();
        // The weights are of bf16.
        let of = |name: &str| given[name].to_dtype(DType::BF16).unwrap();
        let inputs = flux::Inputs {
            txt: of("txt"),
            txt_ids: given["txt_ids"].clone(),
            img_ids: given["img_ids"].clone(),
            timesteps: given["timesteps"].clone(),
            y: of("y"),
            guidance: given.get("guidance").cloned(),
        };
        Network { kind: Kind::Flux(config, inputs, of("img")), device: device.clone() }
    }

    pub(crate) fn part(&self, name: &str, vb: VarBuilder<'_>) -> Result<Part> {
        Ok(match &self.kind {
            Kind::Llama(config) => Part::Llama(llama::Part::new(config, name, vb)?),
            Kind::Flux(config, ..) => Part::Flux(flux::Part::new(config, name, vb)?),
        })
    }

    /// A few passes; their outputs as bits.
    pub(crate) fn run(
        &self,
        mut turn: impl FnMut(&str, &mut dyn FnMut(&Part) -> Result<Tensor>) -> Result<Tensor>,
    ) -> Vec<u32> {
        let mut outputs = Vec::new();
        match &self.kind {
            Kind::Llama(config) => {
                let mut state = llama::State::new(config, &self.device).unwrap();
                for ids in [&[1_u32, 7, 3, 12][..], &[5], &[9]] {
                    let mut x = Tensor::new(ids, &self.device).unwrap().unsqueeze(0).unwrap();
                    for step in config.steps() {
                        x = turn(&step.layer, &mut |part| match part {
                            Part::Llama(part) => part.forward(&x, &mut state),
                            Part::Flux(_) => unreachable!(),
                        })
                        .unwrap();
                    }
                    outputs.push(x);
                }
            }
            Kind::Flux(config, inputs, img) => {
                for _ in 0..2 {
                    let mut state = flux::State::new(config, inputs).unwrap();
                    let mut x = img.clone();
                    for step in config.steps() {
                        x = turn(&step.layer, &mut |part| match part {
                            Part::Flux(part) => part.forward(&x, &mut state),
                            Part::Llama(_) => unreachable!(),
                        })
                        .unwrap();
                    }
                    outputs.push(x);
                }
            }
        }
        let bits = |output: &Tensor| {
            let values = output.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        outputs.iter().flat_map(bits).collect()
    }

    pub(crate) fn resident(&self, vb: &VarBuilder<'_>) -> Vec<u32> {
        self.run(|layer, forward| forward(&self.part(layer, vb.clone())?))
    }

    pub(crate) fn streamed(&self, model: &Arc<Model>) -> Vec<u32> {
        let mut blocks = Streamed::on(model, &self.device, |layer, vb| self.part(&layer.name, vb)).unwrap();
        self.run(|layer, forward| Ok(blocks.layer_named(layer)?.run(|part| forward(part))?))
    }
}

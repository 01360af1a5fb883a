//! The networks of the examples compute what other implementations of them do. `tests/data` has tiny checkpoints with what
//! transformers and diffusers computed over them; `tests/data/reference.py` wrote it.

#[path = "../examples/support/flux.rs"]
mod flux;
#[path = "../examples/support/llama.rs"]
mod llama;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use tensor_offload::checkpoint::Checkpoint;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn tiny_llama() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/tiny-llama")
}

fn weights(folder: &Path) -> VarBuilder<'static> {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    VarBuilder::from_buffered_safetensors(bytes, DType::F32, &Device::Cpu).unwrap()
}

fn expected(file: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(file, &Device::Cpu).unwrap()
}

/// The names of a checkpoint's layers in order of execution.
fn layers(file: PathBuf) -> Vec<String> {
    let checkpoint = Checkpoint::open(file).unwrap();
    checkpoint.layout().layers().iter().map(|layer| layer.name.clone()).collect()
}

#[track_caller]
fn assert_close(computed: &Tensor, expected: &Tensor) {
    assert_eq!(computed.dims(), expected.dims());
    let largest = |x: &Tensor| x.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
    let difference = largest(&(computed - expected).unwrap());
    let allowed = 2e-5 * largest(expected);
    assert!(difference <= allowed, "{difference} is above {allowed}");
}

fn llama_config(folder: &Path) -> llama::Config {
    llama::Config::parse(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap()
}

/// A sequence that comes in pieces, as `reference.py` gave it to transformers.
fn decode(config: &llama::Config, vb: &VarBuilder<'_>, ids: &Tensor) -> Result<Tensor> {
    let mut state = llama::State::new(config, &Device::Cpu)?;
    let mut logits = Vec::new();
    for tokens in [7, 1, 1, 1, 2] {
        let mut x = ids.narrow(1, state.position(), tokens)?;
        for step in config.steps() {
            x = llama::Part::new(config, &step.layer, vb.clone())?.forward(&x, &mut state)?;
        }
        logits.push(x);
    }
    Tensor::cat(&logits, 1)
}

#[track_caller]
fn agrees(folder: &Path, file: &Path) {
    let expected = expected(file);
    let logits = decode(&llama_config(folder), &weights(folder), &expected["ids"]).unwrap();
    assert_close(&logits, &expected["logits"]);
}

#[test]
fn grouped_queries_biases_and_llama_3s_positions_give_transformers_logits() {
    agrees(&data("llama/biases"), &data("llama/biases/expected.safetensors"));
}

#[test]
fn a_tied_head_and_linear_positions_give_transformers_logits() {
    agrees(&data("llama/tied"), &data("llama/tied/expected.safetensors"));
}

#[test]
fn qwen2s_biases_give_transformers_logits() {
    agrees(&data("llama/qwen2"), &data("llama/qwen2/expected.safetensors"));
}

#[test]
fn the_tiny_llama_gives_transformers_logits() {
    agrees(&tiny_llama(), &data("llama/tiny-llama.safetensors"));
}

#[test]
fn the_steps_of_a_llama_are_its_layers_in_the_layouts_order() {
    for name in ["biases", "tied", "qwen2"] {
        let folder = data("llama").join(name);
        let config = llama_config(&folder);
        let mut layers = layers(folder.join("model.safetensors"));
        if config.tie_word_embeddings {
            layers.push(layers[0].clone());
        }
        assert_eq!(config.steps().map(|step| step.layer).collect::<Vec<_>>(), layers, "{name}");
    }
}

fn flux_config(folder: &Path) -> flux::Config {
    serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap()
}

#[track_caller]
fn denoises(name: &str) {
    let folder = data("flux").join(name);
    let (config, vb, given) = (flux_config(&folder), weights(&folder), expected(&folder.join("expected.safetensors")));
    let of = |name: &str| given[name].clone();
    let inputs = flux::Inputs {
        txt: of("txt"),
        txt_ids: of("txt_ids"),
        img_ids: of("img_ids"),
        timesteps: of("timesteps"),
        y: of("y"),
        guidance: given.get("guidance").cloned(),
    };
    let mut state = flux::State::new(&config, &inputs).unwrap();
    let mut x = of("img");
    for step in config.steps() {
        x = flux::Part::new(&config, &step.layer, vb.clone()).unwrap().forward(&x, &mut state).unwrap();
    }
    assert_close(&x, &given["velocity"]);
}

#[test]
fn a_guided_flux_gives_diffusers_velocity() {
    denoises("guided");
}

#[test]
fn a_flux_without_guidance_and_biases_gives_diffusers_velocity() {
    denoises("plain");
}

#[test]
fn the_steps_of_a_flux_are_its_layers_in_the_layouts_order() {
    for name in ["guided", "plain"] {
        let folder = data("flux").join(name);
        let steps: Vec<_> = flux_config(&folder).steps().map(|step| step.layer).collect();
        assert_eq!(steps, layers(folder.join("model.safetensors")), "{name}");
    }
}

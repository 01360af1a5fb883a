//! The networks of the examples compute what other implementations of them do. `tests/data` has tiny checkpoints with what
//! transformers and diffusers computed over them; `tests/data/reference.py` wrote it.

#[path = "../examples/support/flux.rs"]
mod flux;
#[path = "../examples/support/generate.rs"]
mod generate;
#[path = "../examples/support/llama.rs"]
mod llama;

use std::borrow::Borrow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use tensor_offload::checkpoint::Checkpoint;
use tokenizers::Tokenizer;

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

/// Tensors that are NaN until they are written, in place.
struct Late {
    variables: VarMap,
    tensors: HashMap<String, Tensor>,
}

impl Late {
    fn new(folder: &Path) -> Late {
        let variables = VarMap::new();
        let tensors: HashMap<_, _> = expected(&folder.join("model.safetensors"))
            .into_iter()
            .map(|(name, tensor)| (name, tensor.to_dtype(DType::F32).unwrap()))
            .collect();
        for (name, tensor) in &tensors {
            let nan = Tensor::full(f32::NAN, tensor.shape(), &Device::Cpu).unwrap();
            variables.data().lock().unwrap().insert(name.clone(), Var::from_tensor(&nan).unwrap());
        }
        Late { variables, tensors }
    }

    fn builder(&self) -> VarBuilder<'_> {
        VarBuilder::from_varmap(&self.variables, DType::F32, &Device::Cpu)
    }

    fn write(&self) {
        for (name, variable) in &*self.variables.data().lock().unwrap() {
            variable.set(&self.tensors[name]).unwrap();
        }
    }
}

#[track_caller]
fn assert_close(computed: &Tensor, expected: &Tensor) {
    assert_eq!(computed.dims(), expected.dims());
    let numbers = |x: &Tensor| x.abs().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let allowed = 2e-5 * numbers(expected).into_iter().fold(0.0, f32::max);
    let differences = numbers(&(computed - expected).unwrap());
    // Not that all are above: NaN is neither.
    assert!(differences.iter().all(|&difference| difference <= allowed), "{differences:?}: at most {allowed}");
}

fn llama_config(folder: &Path) -> llama::Config {
    llama::Config::parse(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap()
}

/// A sequence that comes in pieces, as `reference.py` gave it to transformers.
fn decode<P>(config: &llama::Config, part: impl Fn(&str) -> Result<P>, ids: &Tensor) -> Result<Tensor>
where
    P: Borrow<llama::Part>,
{
    let mut state = llama::State::new(config, &Device::Cpu)?;
    let mut logits = Vec::new();
    for tokens in [7, 1, 1, 1, 2] {
        let mut x = ids.narrow(1, state.position(), tokens)?;
        for step in config.steps() {
            x = part(&step.layer)?.borrow().forward(&x, &mut state)?;
        }
        logits.push(x);
    }
    Tensor::cat(&logits, 1)
}

#[track_caller]
fn agrees(folder: &Path, file: &Path) {
    let (config, vb, expected) = (llama_config(folder), weights(folder), expected(file));
    let logits = decode(&config, |layer| llama::Part::new(&config, layer, vb.clone()), &expected["ids"]).unwrap();
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
fn the_last_token_alone_has_the_same_logits() {
    let (folder, given) = (data("llama/biases"), expected(&data("llama/biases/expected.safetensors")));
    let (config, vb) = (llama_config(&folder), weights(&folder));
    let mut state = llama::State::new(&config, &Device::Cpu).unwrap().last_only();
    let mut x = given["ids"].clone();
    for step in config.steps() {
        x = llama::Part::new(&config, &step.layer, vb.clone()).unwrap().forward(&x, &mut state).unwrap();
    }
    assert_eq!(state.position(), 12);
    assert_close(&x, &given["logits"].narrow(1, 11, 1).unwrap());
}

#[test]
fn parts_use_weights_that_are_written_after_they_were_made() {
    let (folder, given) = (data("llama/biases"), expected(&data("llama/biases/expected.safetensors")));
    let (config, late) = (llama_config(&folder), Late::new(&folder));
    let part = |layer: &str| llama::Part::new(&config, layer, late.builder()).unwrap();
    let parts: HashMap<_, _> = config.steps().map(|step| (step.layer.clone(), part(&step.layer))).collect();
    late.write();
    let logits = decode(&config, |layer| Ok(&parts[layer]), &given["ids"]).unwrap();
    assert_close(&logits, &given["logits"]);

    let (folder, given) = (data("flux/guided"), expected(&data("flux/guided/expected.safetensors")));
    let (config, late) = (flux_config(&folder), Late::new(&folder));
    let part = |layer: &str| flux::Part::new(&config, layer, late.builder()).unwrap();
    let parts: HashMap<_, _> = config.steps().map(|step| (step.layer.clone(), part(&step.layer))).collect();
    late.write();
    assert_close(&denoise(&config, |layer| Ok(&parts[layer]), &given).unwrap(), &given["velocity"]);
}

#[test]
fn bf16_is_near_f32() {
    let near = |computed: Tensor, expected: &Tensor| {
        assert_eq!(computed.dtype(), DType::BF16);
        let difference =
            (computed.to_dtype(DType::F32).unwrap() - expected).unwrap().sqr().unwrap().mean_all().unwrap();
        let size = expected.sqr().unwrap().mean_all().unwrap();
        let ratio = (difference / size).unwrap().sqrt().unwrap().to_scalar::<f32>().unwrap();
        assert!(ratio < 0.03, "{ratio}");
    };
    let (folder, given) = (data("llama/biases"), expected(&data("llama/biases/expected.safetensors")));
    let (config, vb) = (llama_config(&folder), weights(&folder).to_dtype(DType::BF16));
    near(
        decode(&config, |layer| llama::Part::new(&config, layer, vb.clone()), &given["ids"]).unwrap(),
        &given["logits"],
    );

    let (folder, mut given) = (data("flux/guided"), expected(&data("flux/guided/expected.safetensors")));
    for name in ["img", "txt", "y"] {
        given.insert(name.to_owned(), given[name].to_dtype(DType::BF16).unwrap());
    }
    let (config, vb) = (flux_config(&folder), weights(&folder).to_dtype(DType::BF16));
    near(denoise(&config, |layer| flux::Part::new(&config, layer, vb.clone()), &given).unwrap(), &given["velocity"]);
}

#[test]
fn a_llama_that_is_not_here_is_refused() {
    let given = std::fs::read_to_string(data("llama/biases/config.json")).unwrap();
    let refused = |old: &str, new: &str| {
        let text = given.replace(old, new);
        assert_ne!(text, given);
        llama::Config::parse(&text).unwrap_err().to_string()
    };
    assert!(refused("\"model_type\": \"llama\"", "\"model_type\": \"gemma\"").contains("`gemma`"));
    assert!(refused("\"silu\"", "\"gelu\"").contains("`gelu`"));
    assert!(refused("\"llama3\"", "\"longrope\"").contains("`longrope`"));
    assert!(refused("\"factor\": 8.0", "\"factor\": -8.0").contains("`factor` -8"));
    assert!(refused("\"low_freq_factor\": 1.0,", "").contains("`low_freq_factor`"));
    assert!(
        refused("\"rope_theta\"", "\"partial_rotary_factor\": 0.5, \"rope_theta\"").contains("`partial_rotary_factor`")
    );
    assert!(refused("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3").contains("4 heads"));
    assert!(refused("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 0").contains("share 0"));
    assert!(refused("\"num_attention_heads\": 4", "\"num_attention_heads\": 0").contains("0 heads"));
    assert!(refused("\"use_cache\": true", "\"sliding_window\": 8").contains("`sliding_window`"));
    assert!(refused("\"hidden_size\": 16,", "").contains("hidden_size"));
}

#[test]
fn the_older_spelling_of_rotary_positions_is_read() {
    let (folder, given) = (data("llama/biases"), expected(&data("llama/biases/expected.safetensors")));
    let mut json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let mut scaling = json["rope_parameters"].take();
    json["rope_theta"] = scaling["rope_theta"].take();
    json["rope_scaling"] = scaling;
    let (config, vb) = (llama::Config::parse(&json.to_string()).unwrap(), weights(&folder));
    let logits = decode(&config, |layer| llama::Part::new(&config, layer, vb.clone()), &given["ids"]).unwrap();
    assert_close(&logits, &given["logits"]);
}

#[test]
fn layers_that_a_network_does_not_have_are_refused() {
    let (folder, vb) = (data("llama/biases"), weights(&data("llama/biases")));
    let config = llama_config(&folder);
    for name in ["model.layers.2", "model.layers", "visual.blocks.0"] {
        assert!(llama::Part::new(&config, name, vb.clone()).unwrap_err().to_string().contains(name));
    }
    let (folder, vb) = (data("flux/plain"), weights(&data("flux/plain")));
    let config = flux_config(&folder);
    for name in ["double_blocks.1", "single_blocks.1", "transformer_blocks.0"] {
        assert!(flux::Part::new(&config, name, vb.clone()).unwrap_err().to_string().contains(name));
    }
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

/// What a Llama says, at most `most` tokens of it.
fn greedy(config: &llama::Config, vb: &VarBuilder<'_>, prompt: &[u32], end: u32, most: usize) -> Result<Vec<u32>> {
    let mut state = llama::State::new(config, &Device::Cpu)?.last_only();
    let parts: Vec<_> =
        config.steps().map(|step| llama::Part::new(config, &step.layer, vb.clone())).collect::<Result<_>>()?;
    let pass = |ids| parts.iter().try_fold(ids, |x, part| part.forward(&x, &mut state));
    generate::greedy(prompt, &[end], &Device::Cpu, pass).take(most).collect()
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    let given = expected(&data("llama/tiny-llama.safetensors"));
    let tokens =
        |name: &str| given[name].flatten_all().unwrap().to_dtype(DType::U32).unwrap().to_vec1::<u32>().unwrap();
    let (config, vb, expected) = (llama_config(&tiny_llama()), weights(&tiny_llama()), tokens("greedy"));
    let none = u32::MAX;
    assert_eq!(greedy(&config, &vb, &tokens("ids"), none, 20).unwrap(), expected);
    let end = expected[7];
    let before: Vec<u32> = expected.iter().copied().take_while(|&token| token != end).collect();
    assert_eq!(greedy(&config, &vb, &tokens("ids"), end, 20).unwrap(), before);
}

#[test]
fn a_pass_that_fails_ends_the_text_with_its_error() {
    let mut passes = 0;
    let pass = |_| {
        passes += 1;
        candle_core::bail!("the device is gone")
    };
    let tokens: Vec<Result<u32>> = generate::greedy(&[1, 2], &[0], &Device::Cpu, pass).collect();
    assert!(tokens.len() == 1 && tokens[0].as_ref().unwrap_err().to_string().contains("gone"));
    assert_eq!(passes, 1);
}

#[test]
fn a_conversation_has_smollm2s_form() {
    let chat = generate::Chat::open(&data("llama/tokenizer.json")).unwrap();
    let plain = Tokenizer::from_file(data("llama/tokenizer.json")).unwrap();
    let prompt = chat.prompt("What is 12 + 30?").unwrap();
    let text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
                <|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(plain.decode(&prompt, false).unwrap(), text);
    let (start, end) = (plain.token_to_id("<|im_start|>").unwrap(), chat.end().unwrap());
    assert_eq!(prompt.iter().filter(|&&token| token == start).count(), 3);
    assert_eq!(prompt.iter().filter(|&&token| token == end).count(), 2);

    let tokens = plain.encode("Größe, 漢字 🙂", false).unwrap().get_ids().to_vec();
    let mut piece = chat.pieces();
    let pieces: Vec<String> = tokens.iter().map(|&token| piece(token).unwrap()).collect();
    assert!(pieces.iter().any(String::is_empty), "{pieces:?}");
    assert_eq!(
        (pieces.concat(), chat.text(&tokens).unwrap()),
        ("Größe, 漢字 🙂".to_owned(), "Größe, 漢字 🙂".to_owned())
    );
    assert_eq!(chat.text(&[end]).unwrap(), "");
}

#[test]
fn a_tokenizer_without_the_marks_of_a_conversation_has_the_text_gone_on_with() {
    let text = std::fs::read_to_string(data("llama/tokenizer.json")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, text.replace("<|im_end|>", "<|end|>")).unwrap();
    let chat = generate::Chat::open(&file).unwrap();
    assert_eq!(
        (chat.end(), chat.text(&chat.prompt("What is 12?").unwrap()).unwrap()),
        (None, "What is 12?".to_owned())
    );
    let missing = generate::Chat::open(&folder.path().join("none.json")).err().unwrap().to_string();
    assert!(missing.contains("none.json"), "{missing}");
}

#[test]
fn a_configuration_names_no_end_one_or_several() {
    let ends = |text: &str| generate::ends(text).unwrap();
    assert_eq!(ends("{}"), [0; 0]);
    assert_eq!(ends(r#"{"eos_token_id": 2}"#), [2]);
    assert_eq!(ends(r#"{"eos_token_id": [128001, 128009]}"#), [128001, 128009]);
    assert!(generate::ends("eos").is_err());
}

/// `SMOLLM2` names a folder that `scripts/fetch-model FOLDER --dtype f32` wrote.
#[test]
#[ignore = "needs the weights that scripts/fetch-model fetches"]
fn smollm2_says_what_it_says_in_transformers() {
    let folder = PathBuf::from(std::env::var_os("SMOLLM2").expect("SMOLLM2 names the model's folder"));
    let (config, vb) = (llama_config(&folder), weights(&folder));
    let chat = generate::Chat::open(&folder.join("tokenizer.json")).unwrap();
    for (question, answer) in [
        ("What is the capital of France?", "The capital of France is Paris."),
        (
            "Write a Rust function that adds two numbers.",
            "```rust\nfn add_two_numbers(a: uint, b: uint) -> uint {\n    return a + b;\n}\n```\n\nThis function takes two arguments, `a` and `b",
        ),
        (
            "List three colours of the rainbow.",
            "The rainbow is often associated with three colours: the first is the colour of the rainbow itself, which is a celestial event that occurs when the Earth orbits the Sun. The second colour is the colour of the rainbow's upper atmosphere, which is",
        ),
        (
            "Who are you?",
            "I'm here to help with any kind of creative writing project. Whether it's a story idea, a character concept, or just a need for inspiration, I'm always happy to assist. Whether you're looking for a quick idea or need",
        ),
    ] {
        let tokens = greedy(&config, &vb, &chat.prompt(question).unwrap(), chat.end().unwrap(), 48).unwrap();
        assert_eq!(chat.text(&tokens).unwrap(), answer);
    }
}

fn flux_config(folder: &Path) -> flux::Config {
    serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap()
}

fn flux_inputs(given: &HashMap<String, Tensor>) -> flux::Inputs {
    let of = |name: &str| given[name].clone();
    flux::Inputs {
        txt: of("txt"),
        txt_ids: of("txt_ids"),
        img_ids: of("img_ids"),
        timesteps: of("timesteps"),
        y: of("y"),
        guidance: given.get("guidance").cloned(),
    }
}

fn denoise<P>(
    config: &flux::Config,
    part: impl Fn(&str) -> Result<P>,
    given: &HashMap<String, Tensor>,
) -> Result<Tensor>
where
    P: Borrow<flux::Part>,
{
    let mut state = flux::State::new(config, &flux_inputs(given))?;
    let mut x = given["img"].clone();
    for step in config.steps() {
        x = part(&step.layer)?.borrow().forward(&x, &mut state)?;
    }
    Ok(x)
}

#[track_caller]
fn denoises(name: &str) {
    let folder = data("flux").join(name);
    let (config, vb, given) = (flux_config(&folder), weights(&folder), expected(&folder.join("expected.safetensors")));
    let velocity = denoise(&config, |layer| flux::Part::new(&config, layer, vb.clone()), &given).unwrap();
    assert_close(&velocity, &given["velocity"]);
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
fn inputs_that_do_not_fit_a_flux_are_refused() {
    let (folder, given) = (data("flux/guided"), expected(&data("flux/guided/expected.safetensors")));
    let (config, vb) = (flux_config(&folder), weights(&folder));
    let refused = |config: &flux::Config, given: &HashMap<String, Tensor>| {
        denoise(config, |layer| flux::Part::new(config, layer, vb.clone()), given).unwrap_err().to_string()
    };
    let mut without = given.clone();
    without.remove("guidance");
    assert!(refused(&config, &without).contains("takes a guidance strength"));
    let plain = flux::Config { guidance_embed: false, ..config.clone() };
    assert!(refused(&plain, &given).contains("takes no guidance strength"));
    for other in [
        flux::Config { num_heads: 4, ..config.clone() },
        flux::Config { num_heads: 0, ..config.clone() },
        flux::Config { axes_dim: vec![4, 4], ..config.clone() },
    ] {
        assert!(refused(&other, &given).contains("do not fit positions"));
    }
}

#[test]
fn parts_of_a_flux_out_of_turn_say_what_is_missing() {
    let (folder, given) = (data("flux/guided"), expected(&data("flux/guided/expected.safetensors")));
    let (config, vb) = (flux_config(&folder), weights(&folder));
    for (layer, missing) in [
        ("double_blocks.0", "the text's embedder"),
        ("single_blocks.1", "the text's embedder"),
        ("final_layer.adaLN_modulation.1", "the embedders"),
        ("time_in.out_layer", "an embedder's first half"),
        ("final_layer.linear", "the last layer's modulation"),
    ] {
        let mut state = flux::State::new(&config, &flux_inputs(&given)).unwrap();
        let part = flux::Part::new(&config, layer, vb.clone()).unwrap();
        let error = part.forward(&given["img"], &mut state).unwrap_err().to_string();
        assert!(error.contains(missing), "{error}");
    }
}

#[test]
fn the_steps_of_a_flux_are_its_layers_in_the_layouts_order() {
    for name in ["guided", "plain"] {
        let folder = data("flux").join(name);
        let steps: Vec<_> = flux_config(&folder).steps().map(|step| step.layer).collect();
        assert_eq!(steps, layers(folder.join("model.safetensors")), "{name}");
    }
}

//! A program that names nothing but the prelude.

use tensor_offload::prelude::*;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
const LORA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama-lora");

/// A card that holds a third of the model.
fn devices() -> Registry {
    Registry::simulated(["cuda:0=256kb,link=10", "cpu=64mb"]).unwrap()
}

#[test]
fn six_lines_from_a_file_to_streamed_layers() -> Result<()> {
    let devices = devices();
    let model = Model::open(MODEL)?.adapter(LORA, 0.8)?.allocation("cuda:0,25%;cpu,*")?.depth(1).load(&devices)?;
    let mut names = Vec::new();
    for layer in model.stream()?.pass() {
        let layer = layer?;
        names.push(layer.name().to_owned());
        assert!(layer.tensors().all(|tensor| tensor.device() == DeviceId::cuda(0)));
    }
    let wanted = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm"];
    assert_eq!(names, wanted);
    Ok(())
}

#[test]
fn a_builder_and_the_stages_beneath_it_make_the_same_model() -> Result<()> {
    let devices = devices();
    let builder = Model::open(MODEL)?.adapter(LORA, 0.8)?.allocation("cuda:0,25%;cpu,*")?.depth(1);
    let built = builder.load(&devices)?;

    let weights = Weights::patched(Checkpoint::open(MODEL)?, vec![Adapter::open(LORA, 0.8)?], Matching::Strict)?;
    let planner = Planner::new(weights.layout(), devices.machine()).allocation("cuda:0,25%;cpu,*".parse()?).depth(1);
    // The card has room for one of them.
    let beside = self::devices();
    let staged = Loader::new(&beside).load(&weights, &planner.plan()?)?;
    assert_eq!(built.plan(), staged.plan());
    for tensor in weights.layout().tensors().iter().filter(|tensor| tensor.dtype == DType::BF16) {
        let name = tensor.name.as_str();
        assert_eq!(built.to_vec::<half::bf16>(name)?, staged.to_vec::<half::bf16>(name)?, "{name}");
    }
    Ok(())
}

#[test]
fn the_builder_takes_back_what_an_adapter_was_resolved_to() -> Result<()> {
    let devices = devices();
    let builder = Model::open(MODEL)?.allocation(Allocation::all_on(DeviceId::CPU))?.compute(DeviceId::CPU);
    let plain = builder.load(&devices)?;
    let merged = builder.adapter(LORA, 1.0)?.load(&devices)?;
    let name = "model.layers.0.mlp.down_proj.weight";
    assert_ne!(plain.to_vec::<half::bf16>(name)?, merged.to_vec::<half::bf16>(name)?);
    assert_eq!((plain.report().patched, merged.report().patched), (0, 9));
    Ok(())
}

#[test]
fn a_text_that_is_no_allocation_is_an_error_with_its_place() {
    let error = Model::open(MODEL).unwrap().allocation("cuda:0,fast").unwrap_err();
    assert!(matches!(error, Error::Allocation(_)), "{error}");
    assert!(error.to_string().contains("`fast`"), "{error}");
}

#[test]
fn layers_are_found_by_name_and_tensors_by_the_name_in_their_layer() -> Result<()> {
    let model = Model::open(MODEL)?.allocation("cuda:0,0%;cpu,100%")?.depth(0).load(&devices())?;
    let mut stream = model.stream()?;
    let layer = stream.layer_named("model.layers.1")?;
    let short = layer.tensor("mlp.up_proj.weight").expect("a Llama's layer has it");
    let long = layer.tensor("model.layers.1.mlp.up_proj.weight").expect("by its whole name, too");
    assert_eq!((short.name(), short.byte_range()), (long.name(), long.byte_range()));
    assert_eq!((short.dtype(), short.shape(), short.size()), (DType::BF16, &[160, 64][..], 160 * 64 * 2));
    assert!(layer.tensor("model.layers.0.mlp.up_proj.weight").is_none(), "of another layer");

    let stored = Checkpoint::open(MODEL)?;
    let mut bytes = vec![0; short.size()];
    stored.read(stored.find(short.name()).expect("it is in the file"), &mut bytes)?;
    let elements = layer.to_vec::<half::bf16>("mlp.up_proj.weight")?;
    let written: Vec<u8> = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
    assert_eq!(written, bytes);

    let wrong = layer.to_vec::<f32>("mlp.up_proj.weight").unwrap_err().to_string();
    assert_eq!(wrong, "tensor `model.layers.1.mlp.up_proj.weight` holds BF16, not F32");
    drop(layer);
    let missing = stream.layer_named("model.layers.9").unwrap_err().to_string();
    assert_eq!(missing, "there is no layer `model.layers.9`");
    Ok(())
}

#[test]
fn tensors_in_host_memory_are_slices() -> Result<()> {
    let model = Model::open(MODEL)?.allocation("cuda:0,40kb;cpu,*")?.depth(1).load(&devices())?;
    let placed = |device: DeviceId| {
        let of = model.plan().assignments().iter().find(|assignment| assignment.device == device);
        let module = model.layout().module(of.expect("something is on each").index);
        format!("{}.weight", module.expect("it is in the plan").name)
    };
    let (near, far) = (placed(DeviceId::CPU), placed(DeviceId::cuda(0)));
    let view = model.tensor(&near).expect("it is in the plan");
    assert_eq!(view.as_slice::<half::bf16>()?, model.to_vec::<half::bf16>(&near)?);
    assert_eq!(view.bytes()?.map(<[u8]>::len), Some(view.size()));
    assert_eq!(view.as_slice::<u8>().unwrap_err().to_string(), format!("tensor `{near}` holds BF16, not U8"));
    assert_eq!(model.tensor(&far).expect("it is in the plan").device(), DeviceId::cuda(0));
    Ok(())
}

#[test]
fn a_pass_ends_after_the_first_error() -> Result<()> {
    let model = Model::open(MODEL)?.allocation("cuda:0,0%;cpu,100%")?.depth(0).load(&devices())?;
    let mut stream = model.stream()?;
    let mut pass = stream.pass();
    assert_eq!(pass.len(), 5);
    let held = pass.next().expect("there are layers")?;
    assert!(pass.next().expect("the one slot is held").is_err());
    assert_eq!((pass.len(), pass.next().is_none()), (0, true));
    drop(held);
    assert_eq!(stream.pass().filter(Result::is_ok).count(), 5);
    Ok(())
}

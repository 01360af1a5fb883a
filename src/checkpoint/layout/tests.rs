use super::*;

fn layout(names: &[&str]) -> Layout {
    let mut offset = 0;
    let tensor = |name: &&str| {
        let tensor = TensorInfo::new(*name, DType::F32, &[4], 0, offset).unwrap();
        offset += tensor.bytes;
        tensor
    };
    Layout::new(names.iter().map(tensor).collect())
}

fn layers(layout: &Layout) -> Vec<&str> {
    layout.layers.iter().map(|l| l.name.as_str()).collect()
}

#[test]
fn layers_stand_in_order_of_execution() {
    let llama = layout(&[
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.10.mlp.up_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.2.mlp.up_proj.bias",
        "model.norm.weight",
    ]);
    assert_eq!(layers(&llama), ["model.embed_tokens", "model.layers.2", "model.layers.10", "model.norm", "lm_head"]);
    assert_eq!(llama.modules[1].tensors.len(), 2);
    assert_eq!(llama.modules[1].role, "mlp.up_proj");
    let flux = layout(&[
        "double_blocks.0.img_attn.qkv.weight",
        "final_layer.linear.weight",
        "img_in.weight",
        "single_blocks.0.linear1.weight",
        "txt_in.weight",
    ]);
    assert_eq!(layers(&flux), ["img_in", "txt_in", "double_blocks.0", "single_blocks.0", "final_layer.linear"]);
    let ordered = flux.in_order(&["txt_in", "single_blocks.0"]).unwrap();
    assert_eq!(layers(&ordered), ["txt_in", "single_blocks.0", "img_in", "double_blocks.0", "final_layer.linear"]);
    assert!(ordered.clone().in_order(&["nothing"]).is_err());
    assert!(ordered.in_order(&["img_in", "img_in"]).is_err());
}

/// Of two stacks only the files tell which is first, though no number is in both.
#[test]
fn several_stacks_stand_in_the_order_of_the_files() {
    let order = |names: &[&str]| layout(names).order().clone();
    assert_eq!(order(&["stack.1.up.weight", "stack.0.up.weight"]), OrderSource::NamesRule);
    assert_eq!(order(&["far.0.up.weight", "near.1.up.weight"]), OrderSource::FileOrder);
}

#[test]
fn the_outermost_number_counts() {
    let moe = layout(&[
        "model.layers.3.experts.12.up.weight",
        "model.layers.3.experts.2.up.weight",
        "blocks.0.modulation",
        "blocks.0.ffn.0.weight",
        "blocks.0.ffn.0.weight_scale",
    ]);
    assert_eq!(layers(&moe), ["model.layers.3", "blocks.0"]);
    let roles: Vec<&str> = moe.modules.iter().map(|m| m.role.as_str()).collect();
    assert_eq!(roles, ["experts.2.up", "experts.12.up", "ffn.0", "modulation"]);
}

#[test]
fn classes_agree_in_roles_types_and_sizes() {
    // Layers of one module each, that differ in one thing from the first.
    let layers: [(&str, DType, &[u64]); 8] = [
        ("mlp.up.weight", DType::F16, &[2, 6]),
        ("mlp.down.weight", DType::F16, &[2, 6]),
        ("mlp.up.weight", DType::BF16, &[2, 6]),
        ("mlp.up.weight", DType::F16, &[2, 7]),
        ("mlp.up.weight", DType::F16, &[2, 6]),
        // Another shape and another name inside the module make no other slot.
        ("mlp.up.weight", DType::F16, &[12]),
        ("mlp.up.kernel", DType::F16, &[2, 6]),
        // As many bytes, of elements twice the size.
        ("mlp.up.weight", DType::F32, &[2, 3]),
    ];
    let mut offset = 0;
    let tensor = |(layer, (role, dtype, shape)): (usize, &(&str, DType, &[u64]))| {
        let info = TensorInfo::new(format!("layers.{layer}.{role}"), *dtype, shape, 0, offset).unwrap();
        offset += info.bytes;
        info
    };
    let mut tensors: Vec<_> = layers.iter().enumerate().map(tensor).collect();
    // A module more, and a tensor more in the one module.
    let more = ["layers.8.mlp.up.weight", "layers.8.mlp.down.weight", "layers.9.mlp.up.weight", "layers.9.mlp.up.bias"];
    tensors.extend(more.map(|name| {
        offset += 24;
        TensorInfo::new(name, DType::F16, &[2, 6], 0, offset - 24).unwrap()
    }));
    let layout = Layout::new(tensors);
    let classes: Vec<usize> = layout.layers.iter().map(|layer| layer.class).collect();
    assert_eq!((classes, layout.classes), (vec![0, 1, 2, 3, 0, 0, 0, 4, 5, 6], 7));
}

#[test]
fn a_patched_tensor_has_bytes_of_its_own() {
    let at = |name: &str, offset| TensorInfo::new(name, DType::F32, &[4], 0, offset).unwrap();
    let tied = [at("model.embed_tokens.weight", 0), at("model.layers.0.w.weight", 16), at("lm_head.weight", 0)];
    let tied = Layout::new(tied.to_vec());
    assert_eq!(tied.patched(&[]).unwrap(), tied);
    let grown = tied.patched(&[(TensorId::new(0), vec![6])]).unwrap();
    let own: Vec<TensorId> = tied.tensor_ids().collect();
    assert_eq!((grown.bytes(), grown.tensors[0].bytes, &grown.storage), (56, 24, &own));
    assert!(!grown.modules[0].tied && grown.modules.iter().all(|m| m.alias_of.is_none()));
    let at = |index, size| tied.patched(&[(TensorId::new(index), vec![size])]);
    assert!(at(3, 6).is_err() && at(0, u64::MAX).is_err());
}

#[test]
fn cast_tensors_still_share_their_bytes() {
    let at = |name: &str, offset| TensorInfo::new(name, DType::F32, &[4], 0, offset).unwrap();
    let tied = [at("model.embed_tokens.weight", 0), at("model.layers.0.w.weight", 16), at("lm_head.weight", 0)];
    let tied = Layout::new(tied.to_vec());
    assert_eq!(tied.cast(&[]).unwrap(), tied);
    let types = [0, 2].map(|index| (TensorId::new(index), DType::BF16));
    let cast = tied.cast(&types).unwrap();
    assert_eq!((cast.bytes(), cast.tensors[2].bytes, &cast.storage), (24, 8, &tied.storage));
    assert!(cast.modules[0].tied && cast.modules[2].alias_of == Some(ModuleId::new(0)));
    assert!(tied.cast(&[(TensorId::new(3), DType::F16)]).is_err());
}

#[test]
fn shared_storage_counts_once() {
    let at = |name: &str, offset| TensorInfo::new(name, DType::F32, &[4], 0, offset).unwrap();
    let tied = Layout::new(vec![
        at("model.embed_tokens.weight", 0),
        at("model.layers.0.w.weight", 16),
        at("lm_head.weight", 0),
    ]);
    assert_eq!(tied.bytes(), 32);
    let head = tied.modules.last().unwrap();
    assert_eq!((head.name.as_str(), head.bytes, head.alias_of), ("lm_head", 0, Some(ModuleId::new(0))));
    assert!(tied.modules[0].tied);
}

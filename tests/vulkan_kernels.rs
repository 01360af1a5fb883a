//! Kernels of Vulkan devices: the values of blocks and the weights of codes are the bits that the host gives, also where a driver's
//! bindings are smaller than a tensor.
#![cfg(feature = "vulkan")]

mod support;
mod vulkan_devices;

use std::sync::Arc;

use support::blocks::{edged, random_bytes, wanted};
use support::coded::{self, Codes};
use support::compressed::Compressed;
use support::{spec, unpacked};
use tensor_offload::backend::{
    Backend, Buf, BufMut, Decompress, Dequantise, Device, Host, Kernels, MemoryKind, Role, Transfer,
};
use tensor_offload::error::{Mismatch, Missing};
use tensor_offload::lossless::{Code, compress};
use tensor_offload::{DType, DeviceId, Error};
use vulkan_devices::{DEADLINE, assert_given_back, drivers, open};
use vulkan_probe::Failure;

const COMPUTE: DeviceId = DeviceId::vulkan(0);
const VALUES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn kernels(device: &Arc<dyn Device>) -> &dyn Kernels {
    device.kernels().expect("kernels")
}

fn on_device(device: &Arc<dyn Device>, bytes: &[u8]) -> BufMut {
    let host = Host::new().open(DeviceId::CPU).unwrap();
    let mut staged = host.alloc(bytes.len(), MemoryKind::Whole).unwrap();
    staged.host_mut().unwrap().copy_from_slice(bytes);
    let memory = device.alloc(bytes.len(), MemoryKind::Whole).unwrap();
    let stream = device.stream(Role::Upload).unwrap();
    stream.copy(Transfer::whole(&staged.freeze(), memory).unwrap()).unwrap().wait(DEADLINE).unwrap()
}

fn back(device: &Arc<dyn Device>, memory: &Buf) -> Vec<u8> {
    let host = Host::new().open(DeviceId::CPU).unwrap();
    let stream = device.stream(Role::Download).unwrap();
    let there = host.alloc(memory.bytes(), MemoryKind::Whole).unwrap();
    let mut there = stream.copy(Transfer::whole(memory, there).unwrap()).unwrap().wait(DEADLINE).unwrap();
    there.host_mut().unwrap().to_vec()
}

/// All types, with subnormal, infinite and other scales at the edges, to memory that begins in the middle of a word.
#[test]
fn vulkan_values_of_all_blocks_are_those_of_the_host() {
    let drivers = drivers();
    for device in open(&drivers.vulkan()) {
        let stream = device.stream(Role::Compute).unwrap();
        for (number, dtype) in DType::all().filter(|dtype| dtype.is_ggml_block()).enumerate() {
            for to in VALUES {
                kernels(&device).dequantises(&*stream, dtype, to).unwrap();
                let (block, size) = (dtype.block(), to.element_bytes().unwrap());
                let (count, offset, at) = (256, number % 5, size * (1 + number % 4));
                let (blocks, values) = (edged(number as u64, dtype, count), count * block.elements as usize);
                let source = [&vec![0x5a; offset][..], &blocks].concat();
                let before = random_bytes(9, at + values * size + 6);
                let (source, dst) = (on_device(&device, &source).freeze(), on_device(&device, &before));
                let work = Dequantise::new((source, offset, dtype), values, (dst, at, to)).unwrap();
                let got = back(&device, &kernels(&device).dequantise(&*stream, work).unwrap().chain().freeze());
                let wanted = wanted(dtype, &blocks, to);
                let wrong = got[at..].chunks(size).zip(wanted.chunks(size)).position(|(got, wanted)| got != wanted);
                assert_eq!(wrong, None, "{to} of {dtype}: the first value that is wrong");
                assert!(got[..at] == before[..at], "before the values: {to} of {dtype}");
                assert!(got[at + wanted.len()..] == before[at + wanted.len()..], "after the values: {to} of {dtype}");
            }
        }
    }
}

/// Where drivers allow only small bindings, the kernels take their parts one after the other.
#[test]
fn vulkan_what_is_larger_than_a_binding_is_done_in_parts() {
    for most in [40_000, 100_000] {
        let drivers = drivers();
        drivers.limit_bindings(most);
        for device in open(&drivers.vulkan()) {
            let stream = device.stream(Role::Compute).unwrap();
            for (dtype, to, at) in [(DType::Q4_0, DType::BF16, 2), (DType::Q6_K, DType::F32, 4)] {
                let blocks = edged(1, dtype, (300_000 / dtype.block().elements) as usize);
                let wanted = wanted(dtype, &blocks, to);
                let values = wanted.len() / to.element_bytes().unwrap();
                let (source, dst) = (on_device(&device, &blocks), on_device(&device, &vec![0; at + wanted.len()]));
                let work = Dequantise::new((source.freeze(), 0, dtype), values, (dst, at, to)).unwrap();
                let got = back(&device, &kernels(&device).dequantise(&*stream, work).unwrap().chain().freeze());
                assert!(got[at..] == wanted && got[..at].iter().all(|byte| *byte == 0), "{to} of {dtype}");
            }
            let weights: Vec<u8> = random_bytes(2, 500_000).iter().map(|byte| byte & 0x87 | 0x38).collect();
            for (dtype, at) in [(DType::BF16, 2), (DType::F8E4M3, 1), (DType::F32, 0)] {
                let code = compress(dtype, &weights).unwrap();
                let info = *Code::open(&code).unwrap().info();
                let (source, verdict) = (on_device(&device, &code).freeze(), on_device(&device, &[0; 16]));
                let dst = on_device(&device, &vec![0; at + weights.len()]);
                let work = Decompress::new((source, 0), info, (dst, at), (verdict, 0)).unwrap();
                let flight = kernels(&device).decompress(&*stream, work).unwrap();
                let (got, verdict) = (flight.weights.chain().freeze(), flight.verdict.chain().freeze());
                assert!(back(&device, &got)[at..] == weights, "{dtype}");
                assert!(Decompress::is_sound(back(&device, &verdict).first_chunk().unwrap()), "{dtype}");
            }
        }
    }
}

/// No driver may report as little, and none makes the library panic by it.
#[test]
fn vulkan_bindings_that_hold_nothing_are_an_error() {
    for most in [0, 100, 5000] {
        let drivers = drivers();
        drivers.limit_bindings(most);
        for device in open(&drivers.vulkan()) {
            let stream = device.stream(Role::Compute).unwrap();
            let weights = vec![0x3f; 100_000];
            let code = compress(DType::BF16, &weights).unwrap();
            let info = *Code::open(&code).unwrap().info();
            let (source, verdict) = (on_device(&device, &code).freeze(), on_device(&device, &[0; 16]));
            let work = Decompress::new((source, 0), info, (on_device(&device, &weights), 0), (verdict, 0)).unwrap();
            assert!(kernels(&device).decompress(&*stream, work).is_err());
            if most < 500 {
                let (source, dst) = (on_device(&device, &[0; 3400]).freeze(), on_device(&device, &[0; 6400]));
                let work = Dequantise::new((source, 0, DType::Q8_0), 3200, (dst, 0, DType::F16)).unwrap();
                let rejected = kernels(&device).dequantise(&*stream, work).unwrap_err();
                assert!(rejected.error.to_string().contains("bindings of"), "{}", rejected.error);
            }
        }
    }
}

/// Kernels write whole words. A part of an allocation that ends within one may have a neighbour that others write.
#[test]
fn vulkan_kernels_do_not_write_into_words_of_another_part() {
    let drivers = drivers();
    for device in open(&drivers.vulkan()) {
        let stream = device.stream(Role::Compute).unwrap();
        let source = on_device(&device, &edged(3, DType::Q8_0, 32)).freeze();
        let part = |from: usize, bytes: usize| {
            let mut memory = device.alloc(4096, MemoryKind::Arena).unwrap();
            let mut part = memory.split_off(from).unwrap();
            let rest = part.split_off(bytes).unwrap();
            (part, [memory, rest])
        };
        for (from, bytes, fits) in
            [(2, 2048, false), (4, 2050, true), (4, 2048, true), (0, 2048, true), (2, 4094, true)]
        {
            let (memory, _others) = part(from, bytes);
            let at = if (from, bytes) == (2, 4094) { 2 } else { 0 };
            let work = Dequantise::new((source.clone(), 0, DType::Q8_0), 1024, (memory, at, DType::F16)).unwrap();
            match kernels(&device).dequantise(&*stream, work) {
                Ok(flight) => assert!(fits && flight.chain().wait_unused(DEADLINE).is_ok(), "{from} {bytes}"),
                Err(rejected) => {
                    assert!(!fits && rejected.error.to_string().contains("shares"), "{from}: {}", rejected.error);
                    assert_eq!(rejected.dst.bytes(), bytes);
                }
            }
        }
    }
}

/// What a driver refuses stays refused, unless it only had no memory.
#[test]
fn vulkan_a_kernel_that_is_refused_is_told() {
    let drivers = drivers();
    for call in
        ["vkCreateDescriptorSetLayout", "vkCreatePipelineLayout", "vkCreateShaderModule", "vkCreateComputePipelines"]
    {
        for (how, stays) in [(Failure::DeviceMemory, false), (Failure::HostMemory, false), (Failure::Other, true)] {
            for device in open(&drivers.vulkan()) {
                let stream = device.stream(Role::Compute).unwrap();
                drivers.fail_next(call, how);
                let why = kernels(&device).dequantises(&*stream, DType::Q4_K, DType::F16).unwrap_err();
                assert!(why.contains(call), "{why}");
                let again = kernels(&device).dequantises(&*stream, DType::Q4_K, DType::F16);
                assert_eq!(again.is_err(), stays, "{call}: {again:?}");
                // Another kernel is not concerned.
                kernels(&device).dequantises(&*stream, DType::Q8_0, DType::F16).unwrap();
            }
        }
    }
    drivers.fail_next("vkCreateComputePipelines", Failure::Other);
    let devices = drivers.registry();
    let refused = unpacked::passes(&devices, COMPUTE, "vulkan:0,30%;cpu,*", DType::F16, 1).unwrap_err();
    let Error::Missing(Missing::Unpacking { tensor, .. }) = &refused else { panic!("{refused}") };
    assert!(tensor.ends_with(".weight") && refused.to_string().contains("vkCreateComputePipelines"), "{refused}");
    assert_given_back(&devices, "a refused kernel");
}

/// A device of another backend, and one that is lost.
#[test]
fn vulkan_kernels_take_their_own_streams_and_memory() {
    let drivers = drivers();
    let host = Host::new().open(DeviceId::CPU).unwrap();
    for device in open(&drivers.vulkan()) {
        let (own, other) = (device.stream(Role::Compute).unwrap(), host.stream(Role::Compute).unwrap());
        let why = kernels(&device).dequantises(&*other, DType::Q4_K, DType::F16).unwrap_err();
        assert!(why.contains("not one of vulkan"), "{why}");
        let blocks = host.alloc(34 * 32, MemoryKind::Whole).unwrap().freeze();
        let memory = device.alloc(2048, MemoryKind::Arena).unwrap();
        let work = Dequantise::new((blocks, 0, DType::Q8_0), 1024, (memory, 0, DType::F16)).unwrap();
        let rejected = kernels(&device).dequantise(&*own, work).unwrap_err();
        let Error::Mismatch(mismatch) = &rejected.error else { panic!("{}", rejected.error) };
        assert!(matches!(**mismatch, Mismatch::Memory { .. }), "{mismatch}");
        assert!(!kernels(&device).patches() && kernels(&device).ready().is_err());
    }
}

#[test]
fn vulkan_slots_hold_the_values_of_what_crosses_in_blocks() {
    let drivers = drivers();
    for (what, backend) in drivers.hosts() {
        let devices = vulkan_devices::registry(backend);
        for (to, allocation) in VALUES.into_iter().zip(["cpu,*", "vulkan:0,40%;disk,20%;cpu,*", "vulkan:0,*"]) {
            unpacked::passes(&devices, COMPUTE, allocation, to, 2).unwrap();
            assert_given_back(&devices, &format!("{allocation} with {what}"));
        }
    }
}

#[test]
fn vulkan_slots_hold_the_weights_of_codes_that_cross() {
    // The large one arrives in parts.
    let large = spec("model.layers.1.large.weight", DType::BF16, &[160, 192]);
    let file = Compressed::new(&[coded::tensors(), vec![large]].concat(), 1);
    let drivers = drivers();
    let devices = drivers.registry();
    for (allocation, pinned, codes) in [
        ("cpu,*", None, Codes::OfTheFile),
        ("vulkan:0,30%;cpu,70%", Some(0), Codes::OfTheLoad),
        ("cpu,50%;disk,50%", Some(20_000), Codes::OfTheFile),
        ("vulkan:0,*", None, Codes::OfTheFile),
        ("vulkan:0,60%;cpu,40%", None, Codes::OfTheLoad),
    ] {
        coded::passes((&devices, COMPUTE), (&file, codes), allocation, pinned, 2).unwrap();
        assert_given_back(&devices, allocation);
    }
}

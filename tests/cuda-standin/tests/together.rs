//! Threads that work together: through shared memory, and as the lanes of a warp.

mod common;

use common::kernel::{assert_only, refused, stored};
use common::{Cuda, MIB};
use cuda_standin::{Config, Rule, session};
use cudarc::driver::sys::CUresult;

/// Stores, for each thread, the numbers of four threads of its block from shared memory: of the four that are as far from the end
/// as its own four are from the beginning.
const TURN_ROUND: &str = "
.version 6.0
.target sm_70
.address_size 64
.visible .entry store(
    .param .u64 to,
    .param .u64 sum,
    .param .u32 value
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<10>;
    .shared .align 16 .b8 numbers[128];
    ld.param.u64 %rd1, [to];
    mov.u32 %r1, %tid.x;
    mov.u32 %r6, %ctaid.x;
    add.s32 %r7, %r1, %r6;
    mov.u64 %rd2, numbers;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;
    setp.eq.s32 %p1, %r1, 7;
    st.shared.u32 [%rd4], %r7;
    bar.sync 0;
    shl.b64 %rd5, %rd3, 2;
    and.b64 %rd5, %rd5, 112;
    sub.s64 %rd6, %rd2, %rd5;
    ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%rd6+112];
    mul.wide.u32 %rd7, %r6, 512;
    mul.wide.u32 %rd8, %r1, 16;
    add.s64 %rd7, %rd7, %rd8;
    add.s64 %rd9, %rd1, %rd7;
    st.global.v4.u32 [%rd9], {%r2, %r3, %r4, %r5};
    ret;
}
";

/// Stores, for each thread, what it takes from other lanes: their numbers, each read from where its partner has stored it.
const TAKE: &str = "
.version 6.0
.target sm_70
.address_size 64
.visible .entry store(
    .param .u64 to,
    .param .u64 sum,
    .param .u32 value
)
{
    .reg .pred %p<3>;
    .reg .b32 %r<13>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [to];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    setp.eq.s32 %p1, %r1, 7;
    mul.lo.s32 %r3, %r2, 32;
    add.s32 %r4, %r3, %r1;
    xor.b32 %r5, %r4, 1;
    mul.wide.u32 %rd2, %r4, 16;
    add.s64 %rd3, %rd1, %rd2;
    mul.wide.u32 %rd4, %r5, 16;
    add.s64 %rd5, %rd1, %rd4;
    st.global.u32 [%rd3], %r1;
    bar.warp.sync -1;
    ld.global.u32 %r6, [%rd5];
    shfl.sync.up.b32 %r7|%p2, %r6, 1, 0, -1;
    shfl.sync.idx.b32 %r8, %r6, 31, 31, -1;
    mov.u32 %r12, -1;
    shfl.sync.bfly.b32 %r9, %r6, 16, 31, %r12;
    selp.u32 %r10, 1, 0, %p2;
    bar.warp.sync %r12;
    st.global.v4.u32 [%rd3], {%r7, %r8, %r9, %r10};
    ret;
}
";

#[test]
fn threads_of_a_block_share_memory_from_one_barrier_to_the_next() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let got = stored(&cuda, TURN_ROUND).unwrap();
    for (at, number) in got.into_iter().enumerate() {
        let (block, thread, place) = (at / 128, at % 128 / 4, at % 4);
        assert_eq!(number as usize, (28 - thread % 8 * 4) + place + block, "thread {thread} of block {block}");
    }
    cuda.close();
    standin.report().assert_clean();
}

#[test]
fn shared_memory_that_is_misused_breaks_the_device() {
    let order = (Rule::Unordered, CUresult::CUDA_ERROR_LAUNCH_FAILED);
    for (from, to, (rule, code)) in [
        // No barrier between the writers and the readers; and none before what is read is written again.
        ("bar.sync 0;", "", order),
        ("shl.b64 %rd5", "st.shared.u32 [%rd4+0], %r1; shl.b64 %rd5", order),
        // Two threads write the same bytes.
        ("add.s64 %rd4, %rd2, %rd3;", "and.b64 %rd4, %rd3, 64; add.s64 %rd4, %rd2, %rd4;", order),
        // Nobody wrote what thread 7 has.
        ("st.shared.u32", "@!%p1 st.shared.u32", order),
        // Thread 7 ends, or waits elsewhere, while the others wait.
        ("bar.sync 0;", "@%p1 ret; bar.sync 0;", (Rule::Unordered, CUresult::CUDA_ERROR_LAUNCH_TIMEOUT)),
        ("bar.sync 0;", "@%p1 bar.sync 0; bar.sync 0;", (Rule::Unordered, CUresult::CUDA_ERROR_LAUNCH_TIMEOUT)),
        ("[%rd6+112]", "[%rd6+128]", (Rule::OutOfBounds, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)),
        ("[%rd6+112]", "[%rd6+108]", (Rule::OutOfBounds, CUresult::CUDA_ERROR_MISALIGNED_ADDRESS)),
        ("[%rd9]", "[%rd9+4]", (Rule::OutOfBounds, CUresult::CUDA_ERROR_MISALIGNED_ADDRESS)),
        (
            "add.s64 %rd9, %rd1, %rd7",
            "add.s64 %rd9, %rd1, 1020",
            (Rule::OutOfBounds, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
        ),
    ] {
        assert!(TURN_ROUND.contains(from), "{from}");
        let standin = session(&Config::with_devices(&[64 * MIB]));
        let text = TURN_ROUND.replacen(from, to, 1);
        assert_eq!(stored(&Cuda::open(0), &text).unwrap_err(), code, "{to}");
        assert_only(&standin, rule, "cuLaunchKernel");
    }
}

#[test]
fn lanes_of_a_warp_take_numbers_from_each_other() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let got = stored(&cuda, TAKE).unwrap();
    for (lane, got) in (0..64).map(|thread| thread % 32).zip(got.chunks(4)) {
        let below = if lane == 0 { 1 } else { (lane - 1) ^ 1 };
        assert_eq!(got, [below, 30, lane ^ 17, u32::from(lane > 0)], "lane {lane}");
    }
    cuda.close();
    standin.report().assert_clean();
}

#[test]
fn lanes_that_do_not_keep_together_break_the_device() {
    let (failed, apart) = (CUresult::CUDA_ERROR_LAUNCH_FAILED, CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
    for (from, to, code) in [
        // What another lane stored is read with no barrier between; and written over. To take numbers is no barrier.
        ("bar.warp.sync -1;", "", failed),
        ("bar.warp.sync %r12;", "", failed),
        // Two warps store to the same places.
        ("mul.lo.s32 %r3, %r2, 32;", "mul.lo.s32 %r3, %r2, 0;", failed),
        // Some lanes alone.
        ("bar.warp.sync -1;", "bar.warp.sync 65535;", failed),
        ("mov.u32 %r12, -1;", "mov.u32 %r12, 255;", failed),
        ("1, 0, -1;", "1, 0, 1;", failed),
        // Lane 7 ends, or does something else, while the others wait.
        ("bar.warp.sync -1;", "@%p1 ret; bar.warp.sync -1;", apart),
        ("bar.warp.sync -1;", "@%p1 bar.warp.sync -1; bar.warp.sync -1;", apart),
        ("shfl.sync.idx.b32", "@!%p1 shfl.sync.idx.b32", apart),
    ] {
        assert!(TAKE.contains(from), "{from}");
        let standin = session(&Config::with_devices(&[64 * MIB]));
        let text = TAKE.replacen(from, to, 1);
        assert_eq!(stored(&Cuda::open(0), &text).unwrap_err(), code, "{to}");
        assert_only(&standin, Rule::Unordered, "cuLaunchKernel");
    }
}

#[test]
fn texts_with_other_memory_barriers_or_shuffles_are_refused() {
    for (from, to) in [
        // Shared memory of other types, twice, or used like global memory; other barriers; addresses of nothing.
        (".align 16 .b8", ".align 16 .b32"),
        (".shared .align", ".shared .align 16 .b8 numbers[4]; .shared .align"),
        ("ld.shared", "ld.global"),
        ("bar.sync 0", "bar.sync 1"),
        ("bar.sync 0", "bar.red.popc.u32 %r2, 0, %p1"),
        ("%rd2, numbers", "%rd2, others"),
    ] {
        assert!(TURN_ROUND.contains(from), "{from}");
        assert_eq!(
            refused(&Config::with_devices(&[64 * MIB]), &TURN_ROUND.replacen(from, to, 1)),
            CUresult::CUDA_ERROR_INVALID_PTX,
            "{to}"
        );
    }
    for (from, to) in [
        ("shfl.sync.up.b32", "shfl.sync.down.b32"),
        ("shfl.sync.up.b32", "shfl.up.b32"),
        ("%r7|%p2, %r6, 1, 0, -1", "%r7|%p2, %r6, 1, 0"),
        ("%r7|%p2", "%r7|%p9"),
        ("bar.warp.sync -1", "bar.warp.sync"),
    ] {
        assert!(TAKE.contains(from), "{from}");
        let text = TAKE.replacen(from, to, 1);
        assert_eq!(refused(&Config::with_devices(&[64 * MIB]), &text), CUresult::CUDA_ERROR_INVALID_PTX, "{to}");
    }
}

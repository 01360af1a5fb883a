// The names of CUDA that the kernels use, for AMD's devices, by the compiler's own means: no header of HIP is read, and no library of
// its device functions. Each result is rounded to nearest even and subnormals are kept, as the names say; the sources are compiled
// without contraction, so a multiplication and an addition stay two operations. scripts/kernels/hip puts this before a source, and
// checks in the compiled code that it is so.
//
// A wave has 32 or 64 lanes, whatever a kernel calls a warp. So there are only names here that do not depend on it.

#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
// The number after that of threads is one of blocks at once in CUDA; here it would be one of waves.
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))

struct Index {
    unsigned x;
};
#define threadIdx (Index{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (Index{__builtin_amdgcn_workgroup_id_x()})

// The compiler's vectors stay in registers where structures of numbers go to memory.
typedef unsigned uint2 __attribute__((ext_vector_type(2)));
typedef unsigned uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));
__device__ __forceinline__ uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
__device__ __forceinline__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// C++'s usual conversions make one type of two, as CUDA's overloads do.
template <class A, class B>
__device__ __forceinline__ auto min(A a, B b) -> decltype(a + b) {
    decltype(a + b) x = a, y = b;
    return y < x ? y : x;
}
template <class A, class B>
__device__ __forceinline__ auto max(A a, B b) -> decltype(a + b) {
    decltype(a + b) x = a, y = b;
    return x < y ? y : x;
}

__device__ __forceinline__ float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
__device__ __forceinline__ unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
__device__ __forceinline__ float __int2float_rn(int value) { return (float)value; }
__device__ __forceinline__ float __fadd_rn(float a, float b) { return a + b; }
__device__ __forceinline__ float __fmul_rn(float a, float b) { return a * b; }
__device__ __forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
__device__ __forceinline__ float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// The barrier alone orders no accesses to memory.
__device__ __forceinline__ void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

__device__ __forceinline__ unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
    return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Not every device has an instruction for it, and the results do not depend on it.
__device__ __forceinline__ void prefetch(const void *) {}

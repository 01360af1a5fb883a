// What kernels ask of a CUDA device that C++ and CUDA's own names do not say. hip.cuh is the same for AMD's devices. Whoever
// compiles a source puts the one for its target before it.

// Asks for the line of memory at an address, so that it is on its way before it is read.
__device__ __forceinline__ void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

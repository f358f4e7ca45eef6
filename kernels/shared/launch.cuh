// Launching kernels so that each may start while the one before it still runs (programmatic dependent launch).
//
// With the launch parameter EARLY = 1, that is. A kernel calls `let_next_start` at once, reads what no kernel writes (weights), calls `wait_for_inputs`, and only then touches
// what others produced or writes anything. Since every kernel here waits before it ends, waiting for the one before is waiting
// for all before it. Behind a kernel that knows nothing of this, the launch is an ordinary one.
#include "../shared/rows.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ inline void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ inline void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <class... P, class... A> static int launch(void (*kernel)(P...), int64_t blocks, int threads, void* stream, A... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = EARLY;
  return int(cudaLaunchKernelEx(&config, kernel, P(arguments)...));
}

// Behind EARLY = 0 an input is final when the kernel starts, and its loads may take the read-only path.
#if EARLY
#define SOLE
#else
#define SOLE __restrict__
#endif

// 16 bytes that another kernel may have written while this one was starting: an ordinary load, which stays behind the wait.
__device__ inline uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }
// 16 bytes of a weight: read once, by nobody else, and never written.
__device__ inline uint4 load_weight16(const void* p) { return __ldcs(static_cast<const uint4*>(p)); }

// N elements of T in 16-byte words.
template <class T, int N> struct Vector {
  static constexpr int WORDS = N * sizeof(T) / 16;
  uint4 words[WORDS];
  __device__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = load16(reinterpret_cast<const uint4*>(p) + i);
  }
  __device__ void store(T* p) const {
#pragma unroll
    for (int i = 0; i < WORDS; i++) reinterpret_cast<uint4*>(p)[i] = words[i];
  }
  __device__ float get(int i) const {
    T v;
    memcpy(&v, reinterpret_cast<const char*>(words) + i * sizeof(T), sizeof(T));
    return float(v);
  }
  __device__ void set(int i, float f) {
    const T v = T(f);
    memcpy(reinterpret_cast<char*>(words) + i * sizeof(T), &v, sizeof(T));
  }
};

__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}
__device__ inline float silu(float v) { return v / (1.0f + __expf(-v)); }

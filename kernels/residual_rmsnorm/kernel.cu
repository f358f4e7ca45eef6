// CUDA C++: residual add and RMSNorm, one block a row. The row stays in registers between its two passes, 16 bytes a load; the norm
// reads the sum before it is rounded to the model's type, which is nearer to the exact result than the model itself.
#include "../shared/rows.cuh"

using T = jk::residual_t;
using W = jk::weight_t;
constexpr int STEP = 16 / sizeof(T);  // elements a load
constexpr int MOST = 8192 / THREADS / STEP > 0 ? 8192 / THREADS / STEP : 1;  // loads a thread holds: rows of up to 8192 elements

__global__ void __launch_bounds__(THREADS)
    residual_rmsnorm(const T* __restrict__ residual, int64_t r_stride, const T* __restrict__ delta, int64_t d_stride, const W* __restrict__ weight,
                     T* __restrict__ total, T* __restrict__ normed, int N, float eps, float offset) {
  const int64_t row = blockIdx.x;
  union Vector {
    uint4 all;
    T each[STEP];
    __device__ Vector() {}
  };
  float sum[MOST][STEP];
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < MOST; j++) {
    const int k = (j * THREADS + threadIdx.x) * STEP;
    if (k < N) {
      Vector r, d, rounded;
      r.all = *reinterpret_cast<const uint4*>(residual + row * r_stride + k);
      d.all = *reinterpret_cast<const uint4*>(delta + row * d_stride + k);
#pragma unroll
      for (int i = 0; i < STEP; i++) {
        const float v = float(r.each[i]) + float(d.each[i]);
        sum[j][i] = v;
        rounded.each[i] = T(v);
        squares = fmaf(v, v, squares);
      }
      *reinterpret_cast<uint4*>(total + row * N + k) = rounded.all;
    }
  }
#pragma unroll
  for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
  __shared__ float part[THREADS / 32];
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int j = 0; j < THREADS / 32; j++) squares += part[j];
  const float scale = rsqrtf(squares / N + eps);
#pragma unroll
  for (int j = 0; j < MOST; j++) {
    const int k = (j * THREADS + threadIdx.x) * STEP;
    if (k < N) {
      Vector out;
#pragma unroll
      for (int i = 0; i < STEP; i++) out.each[i] = T(sum[j][i] * scale * (float(weight[k + i]) + offset));
      *reinterpret_cast<uint4*>(normed + row * N + k) = out.all;
    }
  }
}

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t N = JK_SIZE(residual, jk::residual_rank - 1), rows = row_count(meta, jk::residual, jk::residual_rank);
  const int64_t r = row_stride(meta, jk::residual, jk::residual_rank), d = row_stride(meta, jk::delta, jk::delta_rank);
  if (N > MOST * THREADS * STEP || N % STEP || r < 0 || d < 0 || r % STEP || d % STEP) return -1;
  residual_rmsnorm<<<dim3(rows), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
      JK_DATA(residual), r, JK_DATA(delta), d, JK_DATA(weight), JK_DATA(sum), JK_DATA(normed), int(N), float(JK_PARAM_eps), float(JK_PARAM_offset));
  return int(cudaGetLastError());
}

// CUDA C++: residual add and RMSNorm, one block a row, 16 bytes a load. The row stays in registers between its two passes; the norm
// reads the sum before it is rounded to the model's type, which is nearer to the exact result than the model itself.
#include "../shared/launch.cuh"

using T = jk::residual_t;
using W = jk::weight_t;
constexpr int STEP = 16 / sizeof(T);  // elements a thread takes at a time

template <int TIMES>  // that a thread must load to cover a row
__global__ void __launch_bounds__(THREADS)
    residual_rmsnorm(const T* residual, int64_t r_stride, const T* earlier, int64_t e_stride, const T* delta, int64_t d_stride, const W* weight,
                     T* total, T* normed, int N, float eps, float offset) {
  let_next_start();
  const int64_t row = blockIdx.x;
  Vector<W, STEP> w[TIMES];
#pragma unroll
  for (int j = 0; j < TIMES; j++)
    if (const int k = (j * THREADS + threadIdx.x) * STEP; k < N) w[j].load(weight + k);
  wait_for_inputs();
  Vector<T, STEP> r[TIMES], d[TIMES];
#if JK_HAVE_earlier
  Vector<T, STEP> e[TIMES];
#endif
#pragma unroll
  for (int j = 0; j < TIMES; j++)
    if (const int k = (j * THREADS + threadIdx.x) * STEP; k < N) {
      r[j].load(residual + row * r_stride + k);
      d[j].load(delta + row * d_stride + k);
#if JK_HAVE_earlier
      e[j].load(earlier + row * e_stride + k);
#endif
    }
  float sum[TIMES][STEP], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < TIMES; j++)
    if (const int k = (j * THREADS + threadIdx.x) * STEP; k < N) {
#pragma unroll
      for (int i = 0; i < STEP; i++) {
#if JK_HAVE_earlier
        sum[j][i] = r[j].get(i) + e[j].get(i) + d[j].get(i);
#else
        sum[j][i] = r[j].get(i) + d[j].get(i);
#endif
        squares = fmaf(sum[j][i], sum[j][i], squares);
        r[j].set(i, sum[j][i]);
      }
      if (total) r[j].store(total + row * N + k);
    }
  __shared__ float part[THREADS / 32];
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = warp_sum(threadIdx.x % 32 < THREADS / 32 ? part[threadIdx.x % 32] : 0.0f);
  const float scale = rsqrtf(squares / N + eps);
#pragma unroll
  for (int j = 0; j < TIMES; j++)
    if (const int k = (j * THREADS + threadIdx.x) * STEP; k < N) {
#pragma unroll
      for (int i = 0; i < STEP; i++) d[j].set(i, sum[j][i] * scale * (w[j].get(i) + offset));
      d[j].store(normed + row * N + k);
    }
}

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t N = JK_SIZE(residual, jk::residual_rank - 1), rows = row_count(meta, jk::residual, jk::residual_rank);
  const int64_t r = row_stride(meta, jk::residual, jk::residual_rank), d = row_stride(meta, jk::delta, jk::delta_rank);
#if JK_HAVE_earlier
  const T* earlier = JK_DATA(earlier);
  const int64_t e = row_stride(meta, jk::earlier, jk::earlier_rank);
#else
  const T* earlier = nullptr;
  const int64_t e = 0;
#endif
#if JK_HAVE_sum
  T* total = JK_DATA(sum);
#else
  T* total = nullptr;
#endif
  if (N % STEP || r < 0 || e < 0 || d < 0 || r % STEP || e % STEP || d % STEP) return -1;
  const int times = int((N + THREADS * STEP - 1) / (THREADS * STEP));
  auto run = [&](auto kernel) {
    return launch(kernel, rows, THREADS, stream, JK_DATA(residual), r, earlier, e, JK_DATA(delta), d, JK_DATA(weight), total, JK_DATA(normed), int(N),
                  float(JK_PARAM_eps), float(JK_PARAM_offset));
  };
  switch (times) {
    case 1: return run(residual_rmsnorm<1>);
    case 2: return run(residual_rmsnorm<2>);
    case 3: return run(residual_rmsnorm<3>);
    case 4: return run(residual_rmsnorm<4>);
    default: return -2;  // a longer row than this kernel is for
  }
}

// CUDA C++: silu(gate) * up, 16 bytes a thread.
#include "../shared/launch.cuh"

using T = jk::gate_t;
constexpr int STEP = 16 / sizeof(T);

__global__ void __launch_bounds__(THREADS) silu_mul(const T* gate, int64_t g_stride, const T* up, int64_t u_stride, T* out, int N, int64_t count) {
  let_next_start();
  wait_for_inputs();
  const int64_t i = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * STEP;
  if (i >= count) return;
  const int64_t row = i / N, k = i % N;
  Vector<T, STEP> g, u;
  g.load(gate + row * g_stride + k);
  u.load(up + row * u_stride + k);
#pragma unroll
  for (int j = 0; j < STEP; j++) g.set(j, silu(g.get(j)) * u.get(j));
  g.store(out + i);
}

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t N = JK_SIZE(gate, jk::gate_rank - 1), rows = row_count(meta, jk::gate, jk::gate_rank);
  const int64_t g = row_stride(meta, jk::gate, jk::gate_rank), u = row_stride(meta, jk::up, jk::up_rank);
  if (N % STEP || g < 0 || u < 0 || g % STEP || u % STEP) return -1;
  const int64_t blocks = (rows * N / STEP + THREADS - 1) / THREADS;
  return launch(silu_mul, blocks, THREADS, stream, JK_DATA(gate), g, JK_DATA(up), u, JK_DATA(out), int(N), rows * N);
}

// CUDA C++: rms_norm(x) * silu(gate), one warp a head, a few heads a block; a lane holds EACH consecutive channels.
#include "../shared/launch.cuh"

using T = jk::x_t;
using W = jk::weight_t;

template <class V, int EACH> struct alignas(EACH * sizeof(V) > 16 ? 16 : EACH * sizeof(V)) Channels {
  V each[EACH];
};

template <int EACH>
__global__ void __launch_bounds__(32 * HEADS)
    gated_rmsnorm(const T* x, int64_t x_stride, const W* weight, const T* gate, int64_t g_stride, T* out, int64_t rows, float eps, float offset) {
  let_next_start();
  const int lane = threadIdx.x % 32, channel = lane * EACH;
  const int64_t row = int64_t(blockIdx.x) * HEADS + threadIdx.x / 32;
  if (row >= rows) return;  // it reads and writes nothing, so it need not wait
  const auto w = *reinterpret_cast<const Channels<W, EACH>*>(weight + channel);
  wait_for_inputs();
  const auto v = *reinterpret_cast<const Channels<T, EACH>*>(x + row * x_stride + channel);
  const auto g = *reinterpret_cast<const Channels<T, EACH>*>(gate + row * g_stride + channel);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; i++) squares = fmaf(float(v.each[i]), float(v.each[i]), squares);
  const float scale = rsqrtf(warp_sum(squares) / (32 * EACH) + eps);
  Channels<T, EACH> result;
#pragma unroll
  for (int i = 0; i < EACH; i++) result.each[i] = T(float(v.each[i]) * scale * (float(w.each[i]) + offset) * silu(float(g.each[i])));
  *reinterpret_cast<Channels<T, EACH>*>(out + row * (32 * EACH) + channel) = result;
}

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t N = JK_SIZE(x, jk::x_rank - 1), rows = row_count(meta, jk::x, jk::x_rank);
  const int64_t x = row_stride(meta, jk::x, jk::x_rank), g = row_stride(meta, jk::gate, jk::gate_rank);
  if (x < 0 || g < 0 || x % (N / 32) || g % (N / 32)) return -1;
  auto run = [&](auto kernel) {
    return launch(kernel, (rows + HEADS - 1) / HEADS, 32 * HEADS, stream, JK_DATA(x), x, JK_DATA(weight), JK_DATA(gate), g, JK_DATA(out), rows,
                  float(JK_PARAM_eps), float(JK_PARAM_offset));
  };
  switch (N) {
    case 32: return run(gated_rmsnorm<1>);
    case 64: return run(gated_rmsnorm<2>);
    case 128: return run(gated_rmsnorm<4>);
    case 256: return run(gated_rmsnorm<8>);
    case 512: return run(gated_rmsnorm<16>);
    default: return -2;  // a head size that this kernel is not for
  }
}

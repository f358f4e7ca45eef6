// C++: rms_norm(x) * silu(gate), head by head.
#include "../shared/rows.h"

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t N = JK_SIZE(x, jk::x_rank - 1), rows = row_count(meta, jk::x, jk::x_rank);
  const float eps = float(JK_PARAM_eps);
  const simd::V offset = simd::set(float(JK_PARAM_offset));
  const auto* weight = JK_DATA(weight);
#pragma omp parallel for schedule(static) if (rows > 1 && rows * N > GRAIN)
  for (int64_t row = 0; row < rows; row++) {
    const auto* x = JK_DATA(x) + row_offset(meta, jk::x, jk::x_rank, row);
    const auto* g = JK_DATA(gate) + row_offset(meta, jk::gate, jk::gate_rank, row);
    auto* o = JK_DATA(out) + row * N;
    const simd::V scale = simd::set(1.0f / std::sqrt(sum_of_squares(x, N) / float(N) + eps));
    sweep(N, [&](int64_t k, int n) {
      simd::V normed = simd::mul(simd::mul(get(x + k, n), scale), simd::add(get(weight + k, n), offset));
      put(o + k, simd::mul(normed, simd::silu(get(g + k, n))), n);
    });
  }
  return 0;
}

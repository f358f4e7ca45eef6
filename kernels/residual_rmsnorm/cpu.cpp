// C++: residual add and RMSNorm, a row at a time while it is in cache. The norm reads the sum before it is rounded to the model's
// type, which is nearer to the exact result than the model itself (and is what Inductor does).
#include "../shared/rows.h"

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t N = JK_SIZE(residual, jk::residual_rank - 1), rows = row_count(meta, jk::residual, jk::residual_rank);
  const float eps = float(JK_PARAM_eps);
  const simd::V offset = simd::set(float(JK_PARAM_offset));
  const auto* weight = JK_DATA(weight);
#pragma omp parallel for schedule(static) if (rows > 1 && rows * N > GRAIN)
  for (int64_t row = 0; row < rows; row++) {
    const auto* r = JK_DATA(residual) + row_offset(meta, jk::residual, jk::residual_rank, row);
    const auto* d = JK_DATA(delta) + row_offset(meta, jk::delta, jk::delta_rank, row);
#if JK_HAVE_earlier
    const auto* e = JK_DATA(earlier) + row_offset(meta, jk::earlier, jk::earlier_rank, row);
    auto added = [&](int64_t k, int n) { return simd::add(simd::add(get(r + k, n), get(e + k, n)), get(d + k, n)); };
#else
    auto added = [&](int64_t k, int n) { return simd::add(get(r + k, n), get(d + k, n)); };
#endif
    auto* normed = JK_DATA(normed) + row * N;
    simd::V squares = simd::set(0.0f);
    sweep(N, [&](int64_t k, int n) {
      const simd::V v = added(k, n);
      squares = simd::fma(v, v, squares);
#if JK_HAVE_sum
      put(JK_DATA(sum) + row * N + k, v, n);
#endif
    });
    const simd::V scale = simd::set(1.0f / std::sqrt(simd::sum(squares) / float(N) + eps));
    sweep(N, [&](int64_t k, int n) {
      const simd::V v = added(k, n);  // again, from cache: cheaper than a second buffer
      put(normed + k, simd::mul(simd::mul(v, scale), simd::add(get(weight + k, n), offset)), n);
    });
  }
  return 0;
}

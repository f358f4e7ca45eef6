// C++: RMSNorm and rotary embedding of every query and key head, written as attention reads them.
#include "../shared/rows.h"
#include <vector>

template <class X, class Y, class C>
static void head(const X* x, const Y* weight, float offset, float eps, const C* cos, const C* sin, int64_t rotary, X* out, int64_t D) {
  float v[1024];  // a head, widened; checked by the caller
  const simd::V scale = simd::set(1.0f / std::sqrt(sum_of_squares(x, D) / float(D) + eps));
  sweep(D, [&](int64_t k, int n) {
    put(v + k, simd::mul(simd::mul(get(x + k, n), scale), simd::add(get(weight + k, n), simd::set(offset))), n);
  });
  const int64_t half = rotary / 2;
  for (int64_t k = 0; k < half; k++) {
    const float a = v[k], b = v[k + half];
    simd::narrow(a * simd::widen(cos[k]) - b * simd::widen(sin[k]), out + k);
    simd::narrow(b * simd::widen(cos[k + half]) + a * simd::widen(sin[k + half]), out + k + half);
  }
  sweep(D - rotary, [&](int64_t k, int n) { put(out + rotary + k, get(v + rotary + k, n), n); });
}

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t B = JK_SIZE(q, 0), S = JK_SIZE(q, 1), HQ = JK_SIZE(q, 2), D = JK_SIZE(q, 3), HK = JK_SIZE(k, 2);
  const int64_t rotary = int64_t(JK_PARAM_rotary);
  if (D > 1024) return 1;
  const float offset = float(JK_PARAM_offset), q_eps = float(JK_PARAM_eps), k_eps = float(JK_PARAM_k_eps);
  const int s_dim = JK_PARAM_heads_first ? 2 : 1, h_dim = JK_PARAM_heads_first ? 1 : 2;
  const int64_t cos_b = JK_SIZE(cos, 0) == 1 ? 0 : JK_STRIDE(cos, 0), sin_b = JK_SIZE(sin, 0) == 1 ? 0 : JK_STRIDE(sin, 0);
  const int64_t cos_s = s_dim == 2 ? JK_STRIDE(cos, 2) : JK_STRIDE(cos, 1), sin_s = s_dim == 2 ? JK_STRIDE(sin, 2) : JK_STRIDE(sin, 1);
#pragma omp parallel for schedule(static) if (B * S * (HQ + HK) * D > GRAIN)
  for (int64_t t = 0; t < B * S * (HQ + HK); t++) {
    const int64_t h = t % (HQ + HK), s = t / (HQ + HK) % S, b = t / (HQ + HK) / S;
    const auto* cos = JK_DATA(cos) + b * cos_b + s * cos_s;
    const auto* sin = JK_DATA(sin) + b * sin_b + s * sin_s;
    if (h < HQ) {
      const auto* x = JK_DATA(q) + b * JK_STRIDE(q, 0) + s * JK_STRIDE(q, 1) + h * JK_STRIDE(q, 2);
      auto* out = JK_DATA(q_out) + b * JK_STRIDE(q_out, 0) + s * JK_STRIDE(q_out, s_dim) + h * JK_STRIDE(q_out, h_dim);
      head(x, JK_DATA(q_weight), offset, q_eps, cos, sin, rotary, out, D);
    } else {
      const auto* x = JK_DATA(k) + b * JK_STRIDE(k, 0) + s * JK_STRIDE(k, 1) + (h - HQ) * JK_STRIDE(k, 2);
      auto* out = JK_DATA(k_out) + b * JK_STRIDE(k_out, 0) + s * JK_STRIDE(k_out, s_dim) + (h - HQ) * JK_STRIDE(k_out, h_dim);
      head(x, JK_DATA(k_weight), offset, k_eps, cos, sin, rotary, out, D);
    }
  }
  return 0;
}

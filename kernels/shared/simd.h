// Vectors of floats at the machine's widest width (AVX-512, AVX2 with FMA, or one float), loads that widen bf16 and fp16, and
// exp. One interface, three widths: kernels are written once.
#include <cmath>
#include <cstring>
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

namespace simd {

static inline float widen(float v) { return v; }
static inline float widen(jk_bf16 v) {
  uint32_t bits = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
static inline float widen(jk_f16 v) { return float(v.value); }

static inline void narrow(float v, float* to) { *to = v; }
static inline void narrow(float v, jk_bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  to->bits = (v != v) ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}
static inline void narrow(float v, jk_f16* to) { to->value = _Float16(v); }

#if defined(__AVX512F__)
constexpr int W = 16;
using V = __m512;
static inline V set(float v) { return _mm512_set1_ps(v); }
static inline V load(const float* p) { return _mm512_loadu_ps(p); }
static inline V load(const jk_bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline V load(const jk_f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V div(V a, V b) { return _mm512_div_ps(a, b); }
static inline V min(V a, V b) { return _mm512_min_ps(a, b); }
static inline V max(V a, V b) { return _mm512_max_ps(a, b); }
static inline V round(V a) { return _mm512_roundscale_ps(a, 0); }
static inline V scale(V a, V n) { return _mm512_scalef_ps(a, n); }
// 1 / a for a in [1, 3e38], within two units of the last place: a division takes three times as long.
static inline V reciprocal(V a) {
  const V r = _mm512_rcp14_ps(a);
  return _mm512_mul_ps(r, _mm512_fnmadd_ps(a, r, set(2.0f)));
}
static inline float sum(V v) { return _mm512_reduce_add_ps(v); }
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8;
using V = __m256;
static inline V set(float v) { return _mm256_set1_ps(v); }
static inline V load(const float* p) { return _mm256_loadu_ps(p); }
static inline V load(const jk_bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline V load(const jk_f16* p) {
  float f[8];
  for (int i = 0; i < 8; i++) f[i] = widen(p[i]);
  return _mm256_loadu_ps(f);
}
static inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
static inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V add(V a, V b) { return _mm256_add_ps(a, b); }
static inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
static inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
static inline V div(V a, V b) { return _mm256_div_ps(a, b); }
static inline V min(V a, V b) { return _mm256_min_ps(a, b); }
static inline V max(V a, V b) { return _mm256_max_ps(a, b); }
static inline V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V pow2(V n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline V scale(V a, V n) {
  const V half = round(mul(n, set(0.5f)));  // in two steps: 2^128 alone is out of range
  return mul(mul(a, pow2(half)), pow2(sub(n, half)));
}
static inline V reciprocal(V a) { return div(set(1.0f), a); }
static inline float sum(V v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
#else
constexpr int W = 1;
using V = float;
static inline V set(float v) { return v; }
template <class T> static inline V load(const T* p) { return widen(*p); }
static inline void store(float* p, V v) { *p = v; }
static inline V fma(V a, V b, V c) { return a * b + c; }
static inline V add(V a, V b) { return a + b; }
static inline V sub(V a, V b) { return a - b; }
static inline V mul(V a, V b) { return a * b; }
static inline V div(V a, V b) { return a / b; }
static inline V min(V a, V b) { return a < b ? a : b; }
static inline V max(V a, V b) { return a > b ? a : b; }
static inline V round(V a) { return std::nearbyintf(a); }
static inline V scale(V a, V n) { return std::ldexp(a, int(n)); }
static inline V reciprocal(V a) { return 1.0f / a; }
static inline float sum(V v) { return v; }
#endif

#if defined(__AVX512F__)
static inline void store(jk_bf16* p, V v) {
  __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(bits));
}
static inline void store(jk_f16* p, V v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
#else
template <class T> static inline void store(T* p, V v) {
  float f[W];
  store(f, v);
  for (int i = 0; i < W; i++) narrow(f[i], p + i);
}
#endif

// The first n < W elements of a row's end; the others read as zero and are not written.
template <class T> static inline V load_part(const T* p, int n) {
  float f[W] = {};
  for (int i = 0; i < n; i++) f[i] = widen(p[i]);
  return load(f);
}
template <class T> static inline void store_part(T* p, V v, int n) {
  float f[W];
  store(f, v);
  for (int i = 0; i < n; i++) narrow(f[i], p + i);
}

// e^x to about one unit in the last place: 2^n * e^r, |r| <= ln(2)/2, Taylor to the seventh power. Results below the smallest
// normal number flush to zero, above the largest to infinity.
static inline V exp(V x) {
  x = min(max(x, set(-87.336544f)), set(88.722839f));
  V n = round(mul(x, set(1.44269504f)));
  V r = fma(n, set(-0.693145752f), x);
  r = fma(n, set(-1.42860677e-6f), r);
  V p = set(1.98412698e-4f);
  p = fma(p, r, set(1.38888889e-3f));
  p = fma(p, r, set(8.33333333e-3f));
  p = fma(p, r, set(4.16666667e-2f));
  p = fma(p, r, set(1.66666667e-1f));
  p = fma(p, r, set(0.5f));
  p = fma(p, r, set(1.0f));
  p = fma(p, r, set(1.0f));
  return scale(p, n);
}

static inline V silu(V x) { return mul(x, reciprocal(add(set(1.0f), exp(sub(set(0.0f), x))))); }

}  // namespace simd

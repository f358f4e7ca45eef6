// Walking the rows of a tensor whose leading sizes have any strides.
#include "../shared/simd.h"
#include <algorithm>
#include <omp.h>

// Elements from the start of tensor `i` to its row `row`, rows counted over all sizes but the last.
static inline int64_t row_offset(const int64_t* meta, int i, int rank, int64_t row) {
  int64_t offset = 0;
  for (int d = rank - 2; d >= 0; d--) {
    offset += row % meta[16 * i + d] * meta[16 * i + 8 + d];
    row /= meta[16 * i + d];
  }
  return offset;
}

static inline int64_t row_count(const int64_t* meta, int i, int rank) {
  int64_t rows = 1;
  for (int d = 0; d + 1 < rank; d++) rows *= meta[16 * i + d];
  return rows;
}

// body(k, n): n == W for a full vector at k, 1 <= n < W for the row's end.
template <class F> static inline void sweep(int64_t N, F body) {
  int64_t k = 0;
  for (; k + simd::W <= N; k += simd::W) body(k, simd::W);
  if (k < N) body(k, int(N - k));
}
template <class T> static inline simd::V get(const T* p, int n) { return n == simd::W ? simd::load(p) : simd::load_part(p, n); }
template <class T> static inline void put(T* p, simd::V v, int n) {
  if (n == simd::W) simd::store(p, v);
  else simd::store_part(p, v, n);
}

template <class T> static inline float sum_of_squares(const T* x, int64_t N) {
  simd::V a = simd::set(0.0f), b = simd::set(0.0f);
  int64_t k = 0;
  for (; k + 2 * simd::W <= N; k += 2 * simd::W) {
    simd::V u = simd::load(x + k), v = simd::load(x + k + simd::W);
    a = simd::fma(u, u, a);
    b = simd::fma(v, v, b);
  }
  sweep(N - k, [&](int64_t j, int n) {
    simd::V u = get(x + k + j, n);
    a = simd::fma(u, u, a);
  });
  return simd::sum(simd::add(a, b));
}

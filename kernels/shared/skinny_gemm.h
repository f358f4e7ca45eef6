// Skinny GEMM on a CPU: up to a few dozen rows of x times one or several weights, out_i = x @ weight_i^T (+ bias_i).
//
// A tile of TILE_N weight rows meets TILE_M rows of x at a time, all of K in registers' reach; the weights come from memory once
// and the rows of x stay in cache. Sibling weights form one list of tiles, so they share one parallel region.
#include "../shared/simd.h"
#include <algorithm>
#include <omp.h>
#if JK_HAVE_BIAS
#define BIAS_OF(i) jk::bias_list[i]
#else
#define BIAS_OF(i) (-1)
#endif

using T = jk::x_t;

template <int MR, int NR>
static inline void tile(const T* const* x, const T* w, int64_t K, float (*acc)[NR]) {
  simd::V sums[MR][NR];
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NR; n++) sums[m][n] = simd::set(0.0f);
  int64_t k = 0;
  for (; k + simd::W <= K; k += simd::W) {
    simd::V wv[NR];
#pragma GCC unroll 8
    for (int n = 0; n < NR; n++) wv[n] = simd::load(w + n * K + k);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      simd::V xv = simd::load(x[m] + k);
#pragma GCC unroll 8
      for (int n = 0; n < NR; n++) sums[m][n] = simd::fma(xv, wv[n], sums[m][n]);
    }
  }
  if (k < K) {
    const int rest = int(K - k);
    for (int n = 0; n < NR; n++) {
      simd::V wv = simd::load_part(w + n * K + k, rest);
      for (int m = 0; m < MR; m++) sums[m][n] = simd::fma(simd::load_part(x[m] + k, rest), wv, sums[m][n]);
    }
  }
  for (int m = 0; m < MR; m++)
    for (int n = 0; n < NR; n++) acc[m][n] = simd::sum(sums[m][n]);
}

template <int NR>
static void strip(const T* const* x, int64_t M, const T* w, int64_t K, const T* bias, T* out, int64_t N) {
  auto write = [&](auto& acc, int64_t m, int rows) {
    for (int i = 0; i < rows; i++)
      for (int n = 0; n < NR; n++) simd::narrow(acc[i][n] + (bias ? simd::widen(bias[n]) : 0.0f), out + (m + i) * N + n);
  };
  int64_t m = 0;
  for (; m + TILE_M <= M; m += TILE_M) {
    float acc[TILE_M][NR];
    tile<TILE_M, NR>(x + m, w, K, acc);
    write(acc, m, TILE_M);
  }
  for (; m < M; m++) {
    float acc[1][NR];
    tile<1, NR>(x + m, w, K, acc);
    write(acc, m, 1);
  }
}

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t K = JK_SIZE(x, jk::x_rank - 1);
  int64_t M = 1;
  for (int d = 0; d + 1 < jk::x_rank; d++) M *= JK_SIZE(x, d);
  const T* x0 = JK_DATA(x);
  const T* fixed[256];
  const T** rows = M <= 256 ? fixed : new const T*[M];
  for (int64_t m = 0; m < M; m++) {
    int64_t rest = m, offset = 0;
    for (int d = jk::x_rank - 2; d >= 0; d--) {
      offset += rest % JK_SIZE(x, d) * JK_STRIDE(x, d);
      rest /= JK_SIZE(x, d);
    }
    rows[m] = x0 + offset;
  }
  int64_t first[jk::siblings + 1] = {0};
  for (int i = 0; i < jk::siblings; i++) first[i + 1] = first[i] + (meta[16 * jk::weight_list[i]] + TILE_N - 1) / TILE_N;
  const int64_t tiles = first[jk::siblings];
#pragma omp parallel for schedule(static) if (tiles * TILE_N * K * M > 32768)
  for (int64_t t = 0; t < tiles; t++) {
    int i = 0;
    while (t >= first[i + 1]) i++;
    const int64_t N = meta[16 * jk::weight_list[i]], n = (t - first[i]) * TILE_N;
    const T* w = reinterpret_cast<const T*>(data[jk::weight_list[i]]) + n * K;
    const T* bias = BIAS_OF(i) < 0 ? nullptr : reinterpret_cast<const T*>(data[BIAS_OF(i)]) + n;
    T* out = reinterpret_cast<T*>(data[jk::out_list[i]]) + n;
    if (n + TILE_N <= N) {
      strip<TILE_N>(rows, M, w, K, bias, out, N);
    } else {
      for (int64_t j = 0; j < N - n; j++) strip<1>(rows, M, w + j * K, K, bias ? bias + j : nullptr, out + j, N);
    }
  }
  if (rows != fixed) delete[] rows;
  return 0;
}

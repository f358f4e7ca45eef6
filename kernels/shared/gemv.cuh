// Skinny GEMM in CUDA C++ for up to 8 rows of x: out_i = x @ weight_i^T (+ bias_i), bound by reading each weight once.
//
// A block owns ROWS rows of one weight and shares K among its threads, 16 bytes a load, all ROWS loads of a step in flight before
// the first use. Products and sums are in fp32; the block adds up its partial sums in shared memory, so there is no second
// kernel. x is small, is read through the L1, and is shared by the ROWS rows. Sibling weights form one list of blocks, so they
// share one launch.
#include "../shared/rows.cuh"
#if JK_HAVE_BIAS
#define BIAS_OF(i) jk::bias_list[i]
#else
#define BIAS_OF(i) (-1)
#endif

template <class T> struct Pack;  // 16 bytes
template <> struct Pack<float> {
  static constexpr int N = 4;
  float4 v;
  __device__ float get(int i) const { return (&v.x)[i]; }
};
template <> struct Pack<jk_bf16> {
  static constexpr int N = 8;
  uint4 v;
  __device__ float get(int i) const {
    const uint32_t word = (&v.x)[i / 2];
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }
};
template <> struct Pack<jk_f16> {
  static constexpr int N = 8;
  uint4 v;
  __device__ float get(int i) const {
    const __half2 pair = reinterpret_cast<const __half2*>(&v)[i / 2];
    return i % 2 ? __high2float(pair) : __low2float(pair);
  }
};

template <class T> __device__ inline Pack<T> load_once(const T* p) {  // a weight: read once, keep it out of the way
  Pack<T> pack;
  const uint4 v = __ldcs(reinterpret_cast<const uint4*>(p));
  memcpy(&pack, &v, 16);
  return pack;
}
template <class T> __device__ inline Pack<T> load_shared(const T* p) {
  Pack<T> pack;
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
  memcpy(&pack, &v, 16);
  return pack;
}

template <class T> struct Sibling {
  const T* weight;
  const T* bias;
  T* out;
  int rows, first;  // its rows, and its first block
};
template <class T> struct Siblings {
  Sibling<T> each[jk::siblings];
};

template <class T, int M>
__global__ void __launch_bounds__(THREADS) gemv(const T* __restrict__ x, int64_t x_stride, const __grid_constant__ Siblings<T> siblings, int K) {
  using P = Pack<T>;
  int which = 0;
#pragma unroll
  for (int i = 1; i < jk::siblings; i++) which += int(blockIdx.x) >= siblings.each[i].first;
  const Sibling<T> s = siblings.each[which];
  const int N = s.rows, n0 = (int(blockIdx.x) - s.first) * ROWS;
  const T* rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) rows[r] = s.weight + int64_t(min(n0 + r, N - 1)) * K;
  float acc[ROWS][M] = {};
#pragma unroll 2
  for (int k = threadIdx.x * P::N; k < K; k += THREADS * P::N) {
    P wv[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) wv[r] = load_once(rows[r] + k);
#pragma unroll
    for (int m = 0; m < M; m++) {
      const P xv = load_shared(x + m * x_stride + k);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < P::N; i++) acc[r][m] = fmaf(wv[r].get(i), xv.get(i), acc[r][m]);
    }
  }
  __shared__ float part[THREADS / 32][ROWS * M];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int m = 0; m < M; m++) {
      float v = acc[r][m];
#pragma unroll
      for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
      if (threadIdx.x % 32 == 0) part[threadIdx.x / 32][r * M + m] = v;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * M; i += THREADS) {
    float v = 0.0f;
#pragma unroll
    for (int j = 0; j < THREADS / 32; j++) v += part[j][i];
    const int n = n0 + i / M;
    if (n < N) s.out[int64_t(i % M) * N + n] = T(v + (s.bias ? float(s.bias[n]) : 0.0f));
  }
}

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  using T = jk::x_t;
  const int64_t M = row_count(meta, jk::x, jk::x_rank), K = JK_SIZE(x, jk::x_rank - 1), x_stride = row_stride(meta, jk::x, jk::x_rank);
  if (x_stride < 0 || K % Pack<T>::N || x_stride % Pack<T>::N) return -1;  // rows unevenly spaced, or not in steps of 16 bytes
  Siblings<T> siblings;
  int blocks = 0;
  for (int i = 0; i < jk::siblings; i++) {
    Sibling<T>& s = siblings.each[i];
    s.weight = static_cast<const T*>(data[jk::weight_list[i]]);
    s.bias = BIAS_OF(i) < 0 ? nullptr : static_cast<const T*>(data[BIAS_OF(i)]);
    s.out = static_cast<T*>(data[jk::out_list[i]]);
    s.rows = int(meta[16 * jk::weight_list[i]]);
    s.first = blocks;
    blocks += (s.rows + ROWS - 1) / ROWS;
  }
  const T* x = JK_DATA(x);
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (M) {
#define CASE(m) \
  case m: gemv<T, m><<<blocks, THREADS, 0, queue>>>(x, x_stride, siblings, int(K)); break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    default: return -2;  // more rows than this kernel is for
  }
  return int(cudaGetLastError());
}

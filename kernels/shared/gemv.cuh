// Skinny GEMM in CUDA C++ for a few rows of x: out_i = x @ weight_i^T (+ bias_i), bound by reading each weight once.
//
// A block owns ROWS rows of one weight; its threads share K, 16 bytes a load, and add up at the end, so there is no second kernel.
// Sibling weights form one list of blocks, so they share one launch. Two ways to do the sums:
//
// TENSOR = 0: plain multiply-adds in fp32, for up to 8 rows of x and any type.
// TENSOR = 1: tensor cores, in bf16 and fp16. A warp's m16n8k16 product takes 16 rows of a weight and 8 rows of x. Which k goes
// where within a product is free as long as both operands agree, so every thread just loads 16 contiguous bytes of a weight row and
// of an x row and feeds them as they are: no shuffles and no shared memory on the way.
#include "../shared/launch.cuh"
#if JK_HAVE_BIAS
#define BIAS_OF(i) jk::bias_list[i]
#else
#define BIAS_OF(i) (-1)
#endif

using T = jk::x_t;
constexpr int THREADS = 32 * WARPS;
constexpr int PACK = 16 / sizeof(T);  // elements a load

struct Sibling {
  const T* weight;
  const T* bias;
  T* out;
  int rows, first;  // its rows, and its first block
};
struct Siblings {
  Sibling each[jk::siblings];
};

__device__ inline const Sibling& mine(const Siblings& siblings) {
  int which = 0;
#pragma unroll
  for (int i = 1; i < jk::siblings; i++) which += int(blockIdx.x) >= siblings.each[i].first;
  return siblings.each[which];
}

#if TENSOR
constexpr int ROWS = 16;

template <class V> __device__ inline void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ inline void multiply<jk_bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply<jk_f16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int TILES>  // of 8 rows of x
__global__ void __launch_bounds__(THREADS) by_tensor_cores(const T* x, int64_t x_stride, const __grid_constant__ Siblings siblings, int M, int K) {
  let_next_start();
  const Sibling& s = mine(siblings);
  const int N = s.rows, n0 = (int(blockIdx.x) - s.first) * ROWS;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const T* upper = s.weight + int64_t(min(n0 + g, N - 1)) * K;
  const T* lower = s.weight + int64_t(min(n0 + g + 8, N - 1)) * K;
  constexpr int RUN = 4 * PACK;                 // elements of a row that one load of a warp takes
  constexpr int STEP = WARPS * UNROLL * RUN;    // and that the block takes at a time, without a gap
  const int first = warp * UNROLL * RUN + t * PACK;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  uint4 a[UNROLL], b[UNROLL];
  auto load_weights = [&](int base) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int k = base + first + u * RUN;
      a[u] = k < K ? load_weight16(upper + k) : zero;
      b[u] = k < K ? load_weight16(lower + k) : zero;
    }
  };
  load_weights(0);
  wait_for_inputs();
  float acc[TILES][4] = {};
  for (int base = 0; base < K; base += STEP) {
    if (base) load_weights(base);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const int k = base + first + u * RUN, m = i * 8 + g;
        const uint4 xv = k < K && m < M ? load16(x + m * x_stride + k) : zero;
        multiply<T>(acc[i], a[u].x, b[u].x, a[u].y, b[u].y, xv.x, xv.y);
        multiply<T>(acc[i], a[u].z, b[u].z, a[u].w, b[u].w, xv.z, xv.w);
      }
  }

  __shared__ float part[WARPS][TILES * 8][ROWS];
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) part[warp][i * 8 + 2 * t + j % 2][g + 8 * (j / 2)] = acc[i][j];
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * M; i += THREADS) {
    const int n = i % ROWS, m = i / ROWS;
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) v += part[w][m][n];
    if (n0 + n < N) s.out[int64_t(m) * N + n0 + n] = T(v + (s.bias ? float(s.bias[n0 + n]) : 0.0f));
  }
}

static int run(const T* x, int64_t x_stride, const Siblings& siblings, int blocks, int M, int K, void* stream) {
  if (M <= 8) return launch(by_tensor_cores<1>, blocks, THREADS, stream, x, x_stride, siblings, M, K);
  if (M <= 16) return launch(by_tensor_cores<2>, blocks, THREADS, stream, x, x_stride, siblings, M, K);
  if (M <= 32) return launch(by_tensor_cores<4>, blocks, THREADS, stream, x, x_stride, siblings, M, K);
  return -2;  // more rows than this kernel is for
}
#else
template <int M>
__global__ void __launch_bounds__(THREADS) by_multiply_adds(const T* SOLE x, int64_t x_stride, const __grid_constant__ Siblings siblings, int K) {
  using V = Vector<T, PACK>;
  let_next_start();
  const Sibling& s = mine(siblings);
  const int N = s.rows, n0 = (int(blockIdx.x) - s.first) * ROWS;
  const T* rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) rows[r] = s.weight + int64_t(min(n0 + r, N - 1)) * K;
  wait_for_inputs();
  float acc[ROWS][M] = {};
#pragma unroll 2
  for (int k = threadIdx.x * PACK; k < K; k += THREADS * PACK) {
    V w[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) w[r].words[0] = load_weight16(rows[r] + k);
#pragma unroll
    for (int m = 0; m < M; m++) {
      V xv;
      xv.load(x + m * x_stride + k);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < PACK; i++) acc[r][m] = fmaf(w[r].get(i), xv.get(i), acc[r][m]);
    }
  }
  __shared__ float part[WARPS][ROWS * M];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int m = 0; m < M; m++) {
      const float v = warp_sum(acc[r][m]);
      if (threadIdx.x % 32 == 0) part[threadIdx.x / 32][r * M + m] = v;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * M; i += THREADS) {
    float v = 0.0f;
#pragma unroll
    for (int j = 0; j < WARPS; j++) v += part[j][i];
    const int n = n0 + i / M;
    if (n < N) s.out[int64_t(i % M) * N + n] = T(v + (s.bias ? float(s.bias[n]) : 0.0f));
  }
}

static int run(const T* x, int64_t x_stride, const Siblings& siblings, int blocks, int M, int K, void* stream) {
  switch (M) {
#define CASE(m) \
  case m: return launch(by_multiply_adds<m>, blocks, THREADS, stream, x, x_stride, siblings, K);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    default: return -2;  // more rows than this kernel is for
  }
}
#endif

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t M = row_count(meta, jk::x, jk::x_rank), K = JK_SIZE(x, jk::x_rank - 1), x_stride = row_stride(meta, jk::x, jk::x_rank);
  if (x_stride < 0 || K % PACK || x_stride % PACK) return -1;  // rows unevenly spaced, or not in steps of 16 bytes
  Siblings siblings;
  int blocks = 0;
  for (int i = 0; i < jk::siblings; i++) {
    Sibling& s = siblings.each[i];
    s.weight = static_cast<const T*>(data[jk::weight_list[i]]);
    s.bias = BIAS_OF(i) < 0 ? nullptr : static_cast<const T*>(data[BIAS_OF(i)]);
    s.out = static_cast<T*>(data[jk::out_list[i]]);
    s.rows = int(meta[16 * jk::weight_list[i]]);
    s.first = blocks;
    blocks += (s.rows + ROWS - 1) / ROWS;
  }
  return run(JK_DATA(x), x_stride, siblings, blocks, int(M), int(K), stream);
}

// Skinny GEMM in CUDA C++ for a few rows of x: out_i = x @ weight_i^T (+ bias_i), bound by reading each weight once.
//
// In bf16 and fp16 the tensor cores do the sums, though they are far from busy: a warp's m16n8k16 product takes 16 rows of a
// weight and 8 rows of x. Which k goes where within a product is free as long as both operands agree, so every thread just loads
// 16 contiguous bytes of a weight row and of an x row and feeds them as they are: no shuffles, no shared memory on the way. The
// warps of a block share K and add up at the end, so there is no second kernel; sibling weights form one list of blocks, so they
// share one launch. The first weights are under way before the kernel before this one has ended.
//
// float32 (not worth tensor cores at full precision) takes the same loads with plain multiply-adds.
#include "../shared/launch.cuh"
#if JK_HAVE_BIAS
#define BIAS_OF(i) jk::bias_list[i]
#else
#define BIAS_OF(i) (-1)
#endif

constexpr int ROWS = 16;           // of a weight, to a block
constexpr int THREADS = 32 * WARPS;
using T = jk::x_t;
constexpr int PACK = 16 / sizeof(T);  // elements a load
constexpr int STEP = 4 * PACK * WARPS;  // elements of K that a block takes at a time: four loads wide, warp by warp

struct Sibling {
  const T* weight;
  const T* bias;
  T* out;
  int rows, first;  // its rows, and its first block
};
struct Siblings {
  Sibling each[jk::siblings];
};

template <class T> __device__ inline void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
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

// One thread's part of 16 rows of weight times 8 rows of x: its loads hold rows g and g + 8 of the weight, and row g of x.
__device__ inline void accumulate(float (&c)[4], const uint4& upper, const uint4& lower, const uint4& xv) {
  multiply<T>(c, upper.x, lower.x, upper.y, lower.y, xv.x, xv.y);
  multiply<T>(c, upper.z, lower.z, upper.w, lower.w, xv.z, xv.w);
}

template <int TILES>  // of 8 rows of x
__global__ void __launch_bounds__(THREADS) skinny(const T* x, int64_t x_stride, const __grid_constant__ Siblings siblings, int M, int K) {
  let_next_start();
  int which = 0;
#pragma unroll
  for (int i = 1; i < jk::siblings; i++) which += int(blockIdx.x) >= siblings.each[i].first;
  const Sibling s = siblings.each[which];
  const int N = s.rows, n0 = (int(blockIdx.x) - s.first) * ROWS;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const T* upper = s.weight + int64_t(min(n0 + g, N - 1)) * K;
  const T* lower = s.weight + int64_t(min(n0 + g + 8, N - 1)) * K;
  const int first = (warp * 4 + t) * PACK;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  uint4 a[UNROLL], b[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const int k = first + u * STEP;
    a[u] = k < K ? load_weight16(upper + k) : zero;
    b[u] = k < K ? load_weight16(lower + k) : zero;
  }
  wait_for_inputs();
  float acc[TILES][4] = {};
  for (int base = 0; base < K; base += UNROLL * STEP) {
    uint4 xv[UNROLL][TILES];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const int k = base + first + u * STEP, m = i * 8 + g;
        xv[u][i] = k < K && m < M ? load16(x + m * x_stride + k) : zero;
      }
    uint4 next_a[UNROLL], next_b[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int k = base + first + (UNROLL + u) * STEP;
      next_a[u] = k < K ? load_weight16(upper + k) : zero;
      next_b[u] = k < K ? load_weight16(lower + k) : zero;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int i = 0; i < TILES; i++) accumulate(acc[i], a[u], b[u], xv[u][i]);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) a[u] = next_a[u], b[u] = next_b[u];
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

// float32: a warp takes whole rows of the weight, one after the other, and up to 8 rows of x.
__global__ void __launch_bounds__(THREADS) skinny_float(const T* x, int64_t x_stride, const __grid_constant__ Siblings siblings, int M, int K) {
  let_next_start();
  int which = 0;
#pragma unroll
  for (int i = 1; i < jk::siblings; i++) which += int(blockIdx.x) >= siblings.each[i].first;
  const Sibling s = siblings.each[which];
  wait_for_inputs();
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < ROWS; r += WARPS) {
    const int n = (int(blockIdx.x) - s.first) * ROWS + r;
    if (n >= s.rows) break;
    for (int m0 = 0; m0 < M; m0 += 8) {
      float acc[8] = {};
      for (int k = lane * PACK; k < K; k += 32 * PACK) {
        Vector<T, PACK> wv, xv;
        wv.load(s.weight + int64_t(n) * K + k);
#pragma unroll
        for (int m = 0; m < 8; m++)
          if (m0 + m < M) {
            xv.load(x + (m0 + m) * x_stride + k);
#pragma unroll
            for (int i = 0; i < PACK; i++) acc[m] = fmaf(wv.get(i), xv.get(i), acc[m]);
          }
      }
#pragma unroll
      for (int m = 0; m < 8; m++) {
        const float v = warp_sum(acc[m]);
        if (lane == 0 && m0 + m < M) s.out[int64_t(m0 + m) * s.rows + n] = T(v + (s.bias ? float(s.bias[n]) : 0.0f));
      }
    }
  }
}

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
  const T* x = JK_DATA(x);
  if constexpr (sizeof(T) == 4) {
    return launch(skinny_float, blocks, THREADS, stream, x, x_stride, siblings, int(M), int(K));
  } else {
    if (M <= 8) return launch(skinny<1>, blocks, THREADS, stream, x, x_stride, siblings, int(M), int(K));
    if (M <= 16) return launch(skinny<2>, blocks, THREADS, stream, x, x_stride, siblings, int(M), int(K));
    if (M <= 32) return launch(skinny<4>, blocks, THREADS, stream, x, x_stride, siblings, int(M), int(K));
    return -2;  // more rows than this kernel is for
  }
}

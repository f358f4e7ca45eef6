// C++: silu(gate) * up in one pass.
#include "../shared/rows.h"

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t N = JK_SIZE(gate, jk::gate_rank - 1), rows = row_count(meta, jk::gate, jk::gate_rank);
  constexpr int64_t CHUNK = 1024;  // so that one long row is shared by all threads
  const int64_t chunks = (N + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) if (rows * N > GRAIN)
  for (int64_t t = 0; t < rows * chunks; t++) {
    const int64_t row = t / chunks, first = t % chunks * CHUNK, count = std::min(CHUNK, N - first);
    const auto* g = JK_DATA(gate) + row_offset(meta, jk::gate, jk::gate_rank, row) + first;
    const auto* u = JK_DATA(up) + row_offset(meta, jk::up, jk::up_rank, row) + first;
    auto* o = JK_DATA(out) + row * N + first;
    sweep(count, [&](int64_t k, int n) { put(o + k, simd::mul(simd::silu(get(g + k, n)), get(u + k, n)), n); });
  }
  return 0;
}

// Rows of a tensor whose leading sizes may have any strides, as long as rows are evenly spaced.
#include <cuda_runtime.h>

static inline int64_t row_count(const int64_t* meta, int tensor, int rank) {
  int64_t rows = 1;
  for (int d = 0; d + 1 < rank; d++) rows *= meta[16 * tensor + d];
  return rows;
}

// Elements from one row to the next, or -1 if they are not evenly spaced. Sizes of 1 have a stride without meaning.
static inline int64_t row_stride(const int64_t* meta, int tensor, int rank) {
  int64_t stride = -1, next = 0;
  for (int d = rank - 2; d >= 0; d--) {
    const int64_t size = meta[16 * tensor + d], step = meta[16 * tensor + 8 + d];
    if (size == 1) continue;
    if (stride >= 0 && step != next) return -1;
    if (stride < 0) stride = next = step;
    next *= size;
  }
  return stride < 0 ? 0 : stride;
}

// CUDA C++: the down projection for a few rows, bound by reading its weight.
#include "../shared/rows.cuh"
#include "../shared/gemv.cuh"

extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream) {
  const int64_t x_stride = row_stride(meta, jk::x, jk::x_rank);
  if (x_stride < 0) return -3;
#if JK_HAVE_BIAS
  const auto* bias = JK_DATA(bias0);
#else
  const jk::x_t* bias = nullptr;
#endif
  return launch_gemv(JK_DATA(x), x_stride, JK_DATA(weight0), bias, JK_DATA(out0), row_count(meta, jk::x, jk::x_rank), JK_SIZE(weight0, 0),
                     JK_SIZE(weight0, 1), static_cast<cudaStream_t>(stream));
}

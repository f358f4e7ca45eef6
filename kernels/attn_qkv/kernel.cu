// CUDA C++: q, k and v, for a few rows, bound by reading the weights.
#include "../shared/gemv.cuh"

// CUDA C++: gate and up, for a few rows, bound by reading the weights.
#include "../shared/gemv.cuh"

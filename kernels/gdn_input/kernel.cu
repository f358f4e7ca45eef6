// CUDA C++: qkv, z, b and a, for a few rows, bound by reading the weights.
#include "../shared/gemv.cuh"

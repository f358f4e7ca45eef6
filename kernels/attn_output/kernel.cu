// CUDA C++: the output projection, for a few rows, bound by reading the weights.
#include "../shared/gemv.cuh"

// C++: qkv, z, b and a, as one skinny GEMM.
#include "../shared/skinny_gemm.h"

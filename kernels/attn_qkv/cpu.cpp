// C++: q, k and v, as one skinny GEMM.
#include "../shared/skinny_gemm.h"

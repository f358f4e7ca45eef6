// C++: gate and up, as one skinny GEMM.
#include "../shared/skinny_gemm.h"

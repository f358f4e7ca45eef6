// C++: the output projection, as one skinny GEMM.
#include "../shared/skinny_gemm.h"

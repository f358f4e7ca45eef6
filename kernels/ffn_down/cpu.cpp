// C++: down, as one skinny GEMM.
#include "../shared/skinny_gemm.h"

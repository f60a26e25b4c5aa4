// Any processor: vectors of four floats, which the compiler lowers to what the architecture has.
#define LANES 4
#include "kernels.h"

static bool runs_here() { return true; }

const orca::Isa orca::portable = {"portable", runs_here, false, Type::f32, MOST_ROWS, DEEP, nothing, nothing,
                                  gemm<true>, gemm<false>, gemm_codes, gemm_fours,
      encode, norm, copy, norm_head, turn, narrow_all, attention};

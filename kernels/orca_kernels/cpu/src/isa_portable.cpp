// Any processor: vectors of four floats, which the compiler lowers to what the architecture has.
#include "kernels.h"

static bool runs_here() { return true; }

const orca::Isa orca::isa = {"portable", runs_here, false, Type::f32, MOST_ROWS, DEEP, nothing, nothing, gemm<false>, gemm<true>,
                             encode, norm, copy, norm_head, turn, narrow_all, encode_head};

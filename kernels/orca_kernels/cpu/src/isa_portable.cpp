// Any processor: vectors of four floats, which the compiler lowers to what the architecture has.
#define LANES 4
#include "kernels.h"

static bool runs_here() { return true; }

const orca::Isa orca::portable = {"portable", runs_here, false, Type::f32, MOST_ROWS, DEEP, nothing, nothing,
                                  gemm<true>, gemm<false>, gemm_opened<Type::i8>, gemm_opened<Type::i4>,
      gemm_opened<Type::blocks8>, gemm_opened<Type::blocks4>,
      {gemm_opened<Type::grouped128>, gemm_opened<Type::grouped64>, gemm_opened<Type::grouped32>},
      encode, norm, copy, norm_head, turn, narrow_all, attention};

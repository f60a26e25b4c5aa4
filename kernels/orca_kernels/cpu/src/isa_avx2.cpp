// AVX2 with FMA.
#define LANES 8
#include "kernels.h"

static bool runs_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const orca::Isa orca::avx2 = {"avx2", runs_here, false, Type::f32, MOST_ROWS, DEEP, nothing, nothing,
                              gemm<true>, gemm<false>, gemm_opened<Type::i8>, gemm_opened<Type::i4>,
      gemm_opened<Type::blocks8>, gemm_opened<Type::blocks4>,
      {gemm_opened<Type::grouped128>, gemm_opened<Type::grouped64>, gemm_opened<Type::grouped32>},
      encode, norm, copy, norm_head, turn, narrow_all, attention};

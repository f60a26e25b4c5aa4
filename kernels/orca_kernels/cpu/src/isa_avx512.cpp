// AVX-512 (F, BW, DQ, VL).
#define LANES 16
#include "kernels.h"

static bool runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const orca::Isa orca::avx512 = {"avx512", runs_here, false, Type::f32, MOST_ROWS, DEEP, nothing, nothing,
                                gemm<true>, gemm<false>, gemm_opened<Type::i8>, gemm_opened<Type::i4>,
      gemm_opened<Type::blocks8>, gemm_opened<Type::blocks4>,
      {gemm_opened<Type::grouped128>, gemm_opened<Type::grouped64>, gemm_opened<Type::grouped32>},
      encode, norm, copy, norm_head, turn, narrow_all, attention};

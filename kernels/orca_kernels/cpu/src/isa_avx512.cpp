// AVX-512 (F, BW, DQ, VL).
#include "kernels.h"

static bool runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const orca::Isa orca::isa = {"avx512", runs_here, false, Type::f32, MOST_ROWS, DEEP, nothing, nothing, gemm<false>, gemm<true>,
                             encode, norm, copy, norm_head, turn, narrow_all, encode_head};

// AVX2 with FMA.
#include "kernels.h"

static bool runs_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const orca::Isa orca::isa = {"avx2", runs_here, false, Type::f32, MOST_ROWS, DEEP, nothing, nothing, gemm<false>, gemm<true>,
                             encode, norm, copy, norm_head, turn, narrow_all, encode_head};

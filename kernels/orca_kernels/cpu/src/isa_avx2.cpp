// AVX2 with FMA.
#define LANES 8
#include "kernels.h"

static bool runs_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const orca::Isa orca::avx2 = {"avx2", runs_here, false, MOST_ROWS, DEEP, nothing, nothing,
                              gemm<true>, gemm<false>, norm, copy, norm_head, turn, narrow_all, attention};

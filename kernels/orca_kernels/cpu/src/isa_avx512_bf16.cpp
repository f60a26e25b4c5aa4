// AVX-512 with BF16: vdpbf16ps multiplies pairs of bfloat16 and adds them to a float32 sum.
#define LANES 16
#include "kernels.h"

#include <immintrin.h>

namespace {

template <int R, int P>
inline void multiply_pairs(const Gemm& g, int panel, int first) {
  const int steps = g.weights->steps;
  const bf16* a[R];
  for (int r = 0; r < R; r++) a[r] = g.operand.row<const bf16>(first + r);
  const char* w[P];
  for (int p = 0; p < P; p++) w[p] = g.weights->panel(panel + p);
  __m512 sum[R][P];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sum[r][p] = _mm512_setzero_ps();
  for (int step = 0; step < steps; step++) {
    for (int k = 0; k < STEP; k += 2) {
      for (int p = 0; p < P; p++) {
        __builtin_prefetch(w[p] + 2048);
        const __m512bh pair = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w[p]));
        for (int r = 0; r < R; r++) {
          int32_t both;
          std::memcpy(&both, a[r] + k, 4);
          sum[r][p] = _mm512_dpbf16_ps(sum[r][p], reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)), pair);
        }
        w[p] += 64;
      }
    }
    for (int r = 0; r < R; r++) a[r] += TILE * STEP;
  }
  float sums[R][PANEL];
  for (int p = 0; p < P; p++) {
    for (int r = 0; r < R; r++) _mm512_storeu_ps(sums[r], sum[r][p]);
    finish(g, panel + p, first, R, sums[0], PANEL);
  }
}

template <int R, int P>
inline void multiply_pair_rows(const Gemm& g, int panel, int first) {
  for (; first + R <= g.rows; first += R) multiply_pairs<R, P>(g, panel, first);
  if constexpr (R > 1) multiply_pair_rows<R / 2, P>(g, panel, first);
}

template <int R, int P>
inline void multiply_pair_panels(const Gemm& g, int& panel, int last) {
  for (; panel + P <= last; panel += P) multiply_pair_rows<R, P>(g, panel, 0);
}

void gemm_pairs(const Gemm& g, int panel, int last) {
  if (g.rows <= 4) multiply_pair_panels<4, 4>(g, panel, last);
  multiply_pair_panels<12, 2>(g, panel, last);
  multiply_pair_panels<12, 1>(g, panel, last);
}

bool runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16");
}

}  // namespace

const orca::Isa orca::avx512_bf16 = {
    "avx512_bf16", runs_here, true, MOST_ROWS, DEEP, nothing, nothing, gemm_pairs, gemm<false>, norm,
    copy, norm_head, turn, narrow_all, attention};

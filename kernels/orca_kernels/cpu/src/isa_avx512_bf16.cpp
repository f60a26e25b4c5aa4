// AVX-512 with BF16: vdpbf16ps multiplies pairs of bfloat16 and adds them to a float32 sum. Every processor that has it has VNNI.
#include "pair_attention.h"
#include "vnni.h"

namespace {

// R rows of one tile from `first` on, times P panels. A pair of the operand is loaded once for all panels: a core that
// multiplies twice a cycle loads twice a cycle, too.
//
// The first rows wait for the panels, so they ask for lines ahead, across the end of the panels. Other rows find the panels in a
// cache. They ask for those that come next, from `next` on, `share` bytes for each line that they read.
template <int R, int P>
void multiply_pairs(const Gemm& g, int panel, int first, const char* next, int share) {
  constexpr int AHEAD = 2, LINE = 64, OF_A_STEP = STEP / 2 * LINE;
  const int steps = g.weights->steps;
  const bf16* a = g.operand.row<const bf16>(first);
  const char* w = g.weights->panel(panel);
  const size_t apart = size_t(steps) * OF_A_STEP;
  __m512 sum[R][P];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sum[r][p] = _mm512_setzero_ps();
  for (int step = 0; step < steps; step++, a += TILE * STEP) {
    if (!first) next = w + AHEAD * OF_A_STEP + (step + AHEAD < steps ? 0 : (P - 1) * apart);
#pragma GCC unroll 2
    for (int k = 0; k < STEP; k += 2, w += LINE, next += share) {
      __m512bh pair[P];
      for (int p = 0; p < P; p++) {
        __builtin_prefetch(next + p * apart);
        pair[p] = pairs_at(w + p * apart);
      }
      for (int r = 0; r < R; r++) {
        const __m512bh of_row = pair_at(a + r * STEP + k);
        for (int p = 0; p < P; p++) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], of_row, pair[p]);
      }
    }
  }
  alignas(64) float sums[P][R][PANEL];
  for (int p = 0; p < P; p++)
    for (int r = 0; r < R; r++) _mm512_store_ps(sums[p][r], sum[r][p]);
  for (int p = 0; p + 2 <= P; p += 2) finish_two(g, panel + p, first, R, sums[p][0], sums[p + 1][0], PANEL);
  if constexpr (P % 2) finish(g, panel + P - 1, first, R, sums[P - 1][0], PANEL);
}

template <int P>
void multiply_pair_panels(const Gemm& g, int& panel, int last) {
  for (; panel + P <= last; panel += P) {
    const char* next = g.weights->panel(panel + P);
    for (int first = 0, end, behind = 0; first < g.rows; first = end) {
      const int left = std::min(TILE - first % TILE, g.rows - first);  // of the tile
      end = first + (left > TOGETHER ? (left + 1) / 2 : left);
      if (!first) behind = g.rows - end;
      const int share = first ? 64 * (end - first) / behind + 1 : 64;
      with_rows<TOGETHER>(end - first, [&](auto rows) { multiply_pairs<rows, P>(g, panel, first, next, share); });
      if (first) next += share * (g.weights->steps * STEP / 2);
    }
  }
}

void gemm_pairs(const Gemm& g, int panel, int last) {
  if (g.rows <= 4) multiply_pair_panels<4>(g, panel, last);
  multiply_pair_panels<2>(g, panel, last);
  multiply_pair_panels<1>(g, panel, last);
}

bool runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const orca::Isa orca::isa = {"avx512_bf16", runs_here, true, Type::i8, MOST_ROWS, DEEP, nothing, nothing, gemm<false>, gemm_pairs,
                             encode, norm, copy, norm_head, turn, narrow_all, encode_head};

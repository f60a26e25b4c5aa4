// Weights in codes with VNNI: vpdpbusd multiplies four codes with four unsigned ones and adds them to an integer.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace {

// Rows at once: they leave registers for the weights of two panels and a pair of the operand.
constexpr int TOGETHER = 12;

// R rows of one tile from `first` on, times P panels, in codes. The weights' codes become unsigned by 128 more; the operand's
// offsets, from which the sums begin, take it away again. A core asks for lines of the P panels a group ahead.
template <int R, int P>
void multiply_codes(const Gemm& g, int panel, int first) {
  constexpr int LINE = 64, AHEAD = BYTES_OF_CODES;
  const int groups = g.codes.groups;
  const int8_t* a = g.operand.row<const int8_t>(first);
  const char* w = g.weights->panel(panel);
  const size_t apart = g.weights->panel_bytes();
  const float* of_rows = g.codes.scales + size_t(first) * groups;
  const int32_t* offsets = g.codes.offsets + size_t(first) * groups;
  const __m512i unsigned_again = _mm512_set1_epi8(char(0x80));
  alignas(64) float sums[P][R][PANEL] = {};
  for (int group = 0; group < groups; group++, w += LINE) {
    __m512i counted[R][P];
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++) counted[r][p] = _mm512_set1_epi32(offsets[r * groups + group]);
    for (int tile = 0; tile < 2; tile++, a += TILE * LINE)
#pragma GCC unroll 2
      for (int k = 0; k < LINE; k += 4, w += LINE) {
        __m512i codes[P];
        for (int p = 0; p < P; p++) {
          if (!first) __builtin_prefetch(w + AHEAD + p * apart);
          codes[p] = _mm512_xor_si512(_mm512_loadu_si512(w + p * apart), unsigned_again);
        }
        for (int r = 0; r < R; r++) {
          int32_t four;
          std::memcpy(&four, a + r * LINE + k, 4);
          const __m512i of_row = _mm512_set1_epi32(four);
          for (int p = 0; p < P; p++) counted[r][p] = _mm512_dpbusd_epi32(counted[r][p], codes[p], of_row);
        }
      }
    for (int p = 0; p < P; p++) {
      const __m512 of_panel = _mm512_load_ps(w + p * apart);
      for (int r = 0; r < R; r++) {
        const __m512 scale = _mm512_set1_ps(of_rows[r * groups + group]) * of_panel;
        _mm512_store_ps(sums[p][r],
                        _mm512_fmadd_ps(_mm512_cvtepi32_ps(counted[r][p]), scale, _mm512_load_ps(sums[p][r])));
      }
    }
  }
  for (int p = 0; p + 2 <= P; p += 2) finish_two(g, panel + p, first, R, sums[p][0], sums[p + 1][0], PANEL);
  if constexpr (P % 2) finish(g, panel + P - 1, first, R, sums[P - 1][0], PANEL);
}

template <int P>
void multiply_code_panels(const Gemm& g, int& panel, int last) {
  for (; panel + P <= last; panel += P)
    for (int first = 0, end; first < g.rows; first = end) {
      const int left = std::min(TILE - first % TILE, g.rows - first);  // of the tile
      end = first + (left > TOGETHER ? (left + 1) / 2 : left);
      with_rows<TOGETHER>(end - first, [&](auto rows) { multiply_codes<rows, P>(g, panel, first); });
    }
}

void gemm_vnni(const Gemm& g, int panel, int last) {
  if (g.rows <= 4) multiply_code_panels<4>(g, panel, last);
  multiply_code_panels<2>(g, panel, last);
  multiply_code_panels<1>(g, panel, last);
}

}  // namespace

// Weights in codes with VNNI: vpdpbusd multiplies four codes with four unsigned ones and adds them to an integer.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace {

// Rows at once: they leave registers for the weights of two panels and a pair of the operand.
constexpr int TOGETHER = 12;

template <int R, int P>
inline void finish_panels(const Gemm& g, int panel, int first, const float (&sums)[P][R][PANEL]) {
  for (int p = 0; p + 2 <= P; p += 2) finish_two(g, panel + p, first, R, sums[p][0], sums[p + 1][0], PANEL);
  if constexpr (P % 2) finish(g, panel + P - 1, first, R, sums[P - 1][0], PANEL);
}

// Four codes of a row in each lane.
inline __m512i four_at(const int8_t* codes) {
  int32_t four;
  std::memcpy(&four, codes, 4);
  return _mm512_set1_epi32(four);
}

constexpr bool is_in_fours(Type type) { return type != Type::i8 && type != Type::blocks8; }

// products += a part of 32 inputs, of R rows `a` and P panels. FOURS: in bytes with two codes, otherwise in bytes with one, which
// becomes unsigned by 128 more.
template <bool FOURS, int R, int P>
[[gnu::always_inline]] inline void multiply_part(const int8_t* a, const char* w, size_t apart, __m512i (&products)[R][P]) {
  constexpr int LINE = 64;
  const __m512i low = _mm512_set1_epi8(15), unsigned_again = _mm512_set1_epi8(char(0x80));
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) {
    __m512i both[P];
    if constexpr (FOURS)
      for (int p = 0; p < P; p++) both[p] = _mm512_load_si512(w + v * LINE + p * apart);
    for (int half = 0; half < 2; half++) {
      __m512i codes[P];
      for (int p = 0; p < P; p++)
        if constexpr (FOURS) codes[p] = _mm512_and_si512(half ? _mm512_srli_epi16(both[p], 4) : both[p], low);
        else codes[p] = _mm512_xor_si512(_mm512_load_si512(w + (half * 4 + v) * LINE + p * apart), unsigned_again);
      for (int r = 0; r < R; r++) {
        const __m512i of_row = four_at(a + r * LINE + half * PART / 2 + v * 4);
        for (int p = 0; p < P; p++) products[r][p] = _mm512_dpbusd_epi32(products[r][p], codes[p], of_row);
      }
    }
  }
}

// A row of 16 scales of a panel.
template <Type TYPE>
inline __m512 scales_at(const char* scales, int row) {
  if constexpr (is_grouped(TYPE))
    return _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(ZERO_BITS), _mm512_load_si512(scales + row * 64)));
  else if constexpr (TYPE == Type::blocks8 || TYPE == Type::blocks4)
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(scales) + row));
  else
    return _mm512_load_ps(scales + row * 64);
}

// R rows of one tile from `first` on, times P panels. What has one scale is summed in integers. These sums begin at what unsigned
// weights multiply too often, which the operand's sums of codes tell: 128 or 8 times those, or zero points times those, which
// fit a word, so that a product of words takes both. The first rows wait for memory, and ask for lines of the P panels a group
// ahead, or two.
template <Type TYPE, int R, int P>
void multiply_codes(const Gemm& g, int panel, int first) {
  constexpr GroupOfPanel OF = group_of(TYPE);
  constexpr bool FOURS = is_in_fours(TYPE), MULTIPLIED = TYPE == Type::i4;
  constexpr int LINE = 64, AHEAD = (FOURS ? 2 : 1) * OF.bytes, MORE = FOURS ? 8 : 128;
  constexpr int OF_CODES = FOURS ? MULTIPLIERS : SCALES, OF_A_PART = OF_CODES / PARTS, DEPTH = PARTS / OF.of_output;
  const int groups = g.codes.groups;
  const int8_t* a = g.operand.row<const int8_t>(first);
  const char* w = g.weights->panel(panel);
  const size_t apart = g.weights->panel_bytes();
  const float* of_rows = g.codes.scales + size_t(first) * groups;
  const int32_t* of_codes = g.codes.sums + size_t(first) * groups * PARTS;
  auto ask = [&](int from, int to) {
    for (int p = 0; !first && p < P; p++)
      for (int at = from; at < to; at += LINE) __builtin_prefetch(w + AHEAD + p * apart + at);
  };
  alignas(64) float sums[P][R][PANEL] = {};
  for (int group = 0; group < groups; group++, w += OF.bytes) {
    ask(OF_CODES, OF.bytes);
#pragma GCC unroll 1
    for (int part = 0; part < PARTS; part += DEPTH) {
      __m512i counted[R][P];
      for (int r = 0; r < R; r++) {
        const int32_t* parts = of_codes + (r * groups + group) * PARTS + part;
        int32_t sum = 0;
        for (int i = 0; i < DEPTH; i++) sum += parts[i];
        for (int p = 0; p < P; p++) {
          if constexpr (is_grouped(TYPE)) {  // the upper word of a zero point is 0
            const __m512i words = _mm512_load_si512(w + p * apart + OF.scales + part / DEPTH * LINE);
            counted[r][p] = _mm512_madd_epi16(_mm512_and_si512(words, _mm512_set1_epi32(ZERO_BITS)), _mm512_set1_epi32(-sum));
          } else {
            counted[r][p] = _mm512_set1_epi32(MULTIPLIED ? 0 : -MORE * sum);
          }
        }
      }
#pragma GCC unroll 1
      for (int deep = part; deep < part + DEPTH; deep++) {
        const int8_t* of_part = a + (size_t(group) * 2 + deep / 2) * TILE * LINE + deep % 2 * PART;
        ask(deep * OF_A_PART, (deep + 1) * OF_A_PART);
        if constexpr (!MULTIPLIED) {
          multiply_part<FOURS>(of_part, w + deep * OF_A_PART, apart, counted);
          continue;
        }
        // The sum of a part's 32 products of four bits with eight is below 2^15, so a product of words multiplies it and adds it.
        __m512i products[R][P];
        for (int r = 0; r < R; r++)
          for (int p = 0; p < P; p++) products[r][p] = _mm512_set1_epi32(-MORE * of_codes[(r * groups + group) * PARTS + deep]);
        multiply_part<FOURS>(of_part, w + deep * OF_A_PART, apart, products);
        for (int p = 0; p < P; p++) {
          const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(w + MULTIPLIERS + p * apart) + deep);
          // Of the two words of a lane the upper one, the sign, is multiplied with nothing.
          const __m512i multiplier = _mm512_and_si512(_mm512_cvtepi8_epi32(bytes), _mm512_set1_epi32(0xffff));
          for (int r = 0; r < R; r++) counted[r][p] = _mm512_dpwssd_epi32(counted[r][p], products[r][p], multiplier);
        }
      }
      for (int p = 0; p < P; p++) {
        const __m512 of_panel = scales_at<TYPE>(w + p * apart + OF.scales, part / DEPTH);
        for (int r = 0; r < R; r++) {
          const __m512 scale = _mm512_set1_ps(of_rows[r * groups + group]) * of_panel;
          _mm512_store_ps(sums[p][r], _mm512_fmadd_ps(_mm512_cvtepi32_ps(counted[r][p]), scale, _mm512_load_ps(sums[p][r])));
        }
      }
    }
  }
  finish_panels(g, panel, first, sums);
}

// MOST: rows at once.
template <int MOST, int P, Type TYPE>
void multiply_code_panels(const Gemm& g, int& panel, int last) {
  for (; panel + P <= last; panel += P)
    for (int first = 0, end; first < g.rows; first = end) {
      const int left = std::min(TILE - first % TILE, g.rows - first), pieces = (left + MOST - 1) / MOST;  // of the tile
      end = first + (left + pieces - 1) / pieces;
      with_rows<MOST>(end - first, [&](auto rows) { multiply_codes<TYPE, rows, P>(g, panel, first); });
    }
}

// MOST: rows at once. A single panel is the last one of a task, if there is one, so few rows at once do for it.
template <Type TYPE, int MOST = TOGETHER>
void gemm_vnni(const Gemm& g, int panel, int last) {
  constexpr int OF_FOUR = TYPE == Type::i8 ? 4 : 2;
  if (g.rows <= OF_FOUR) multiply_code_panels<OF_FOUR, 4, TYPE>(g, panel, last);
  multiply_code_panels<MOST, 2, TYPE>(g, panel, last);
  multiply_code_panels<4, 1, TYPE>(g, panel, last);
}

}  // namespace

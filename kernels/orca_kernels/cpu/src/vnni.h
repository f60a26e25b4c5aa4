// Weights in codes with VNNI: vpdpbusd multiplies four codes with four unsigned ones and adds them to an integer.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace {

// Rows at once: they leave registers for the weights of two panels and a pair of the operand.
constexpr int TOGETHER = 12;

// sums [P][R][PANEL] += the integers of a group [R][P] times the scales of their rows and columns, which lie `apart` bytes from
// each other.
template <int R, int P>
inline void add_counted(const __m512i (&counted)[R][P], const float* of_rows, int groups, const char* of_columns,
                        size_t apart, float (&sums)[P][R][PANEL]) {
  for (int p = 0; p < P; p++) {
    const __m512 of_panel = _mm512_load_ps(of_columns + p * apart);
    for (int r = 0; r < R; r++) {
      const __m512 scale = _mm512_set1_ps(of_rows[r * groups]) * of_panel;
      _mm512_store_ps(sums[p][r], _mm512_fmadd_ps(_mm512_cvtepi32_ps(counted[r][p]), scale, _mm512_load_ps(sums[p][r])));
    }
  }
}

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

// Sums of a part of 32 inputs begin at -of_each times the sum of the operand's codes.
template <int R, int P>
inline void begin_part(const int32_t* of_codes, int groups, int of_each, __m512i (&products)[R][P]) {
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) products[r][p] = _mm512_set1_epi32(-of_each * of_codes[r * groups * PARTS]);
}

// products += a part, of R rows `a` and P panels. FOURS: in bytes with two codes, otherwise in bytes with one.
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

// The same of whole groups in blocks, whose parts have scales of their own.
template <Type TYPE, int R, int P>
void multiply_blocks(const Gemm& g, int panel, int first) {
  constexpr bool FOURS = TYPE == Type::blocks4;
  constexpr GroupOfPanel OF = group_of(TYPE);
  constexpr int LINE = 64, AHEAD = (FOURS ? 2 : 1) * OF.bytes, OF_A_PART = OF.scales / PARTS;
  const int groups = g.codes.groups;
  const int8_t* a = g.operand.row<const int8_t>(first);
  const char* w = g.weights->panel(panel);
  const size_t apart = g.weights->panel_bytes();
  const float* of_rows = g.codes.scales + size_t(first) * groups;
  const int32_t* of_codes = g.codes.sums + size_t(first) * groups * PARTS;
  alignas(64) float sums[P][R][PANEL] = {};
  for (int group = 0; group < groups; group++, w += OF.bytes) {
    if (!first)
      for (int p = 0; p < P; p++)
        for (int line = OF.scales; line < OF.bytes; line += LINE) __builtin_prefetch(w + AHEAD + p * apart + line);
#pragma GCC unroll 1
    for (int part = 0; part < PARTS; part++) {
      const char* of_part = w + part * OF_A_PART;
      if (!first)
        for (int p = 0; p < P; p++)
          for (int line = 0; line < OF_A_PART; line += LINE) __builtin_prefetch(of_part + AHEAD + p * apart + line);
      __m512i products[R][P];
      begin_part(of_codes + group * PARTS + part, groups, FOURS ? 8 : 128, products);
      multiply_part<FOURS>(a + (size_t(group) * 2 + part / 2) * TILE * LINE + part % 2 * PART, of_part, apart, products);
      for (int p = 0; p < P; p++) {
        const char* scales = w + p * apart + OF.scales;
        const __m512 of_panel = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(scales) + part));
        for (int r = 0; r < R; r++) {
          const __m512 scale = _mm512_set1_ps(of_rows[r * groups + group]) * of_panel;
          _mm512_store_ps(sums[p][r], _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[r][p]), scale, _mm512_load_ps(sums[p][r])));
        }
      }
    }
  }
  finish_panels(g, panel, first, sums);
}

// The same of grouped codes. Sums begin at the zero points times the sums of the operand's codes: of 128 of them these fit a word, so
// that a product of words takes both.
template <Type TYPE, int R, int P>
void multiply_grouped(const Gemm& g, int panel, int first) {
  constexpr GroupOfPanel OF = group_of(TYPE);
  constexpr int LINE = 64, AHEAD = 2 * OF.bytes, OF_A_PART = OF.scales / PARTS, DEPTH = PARTS / OF.of_output;
  const int groups = g.codes.groups;
  const int8_t* a = g.operand.row<const int8_t>(first);
  const char* w = g.weights->panel(panel);
  const size_t apart = g.weights->panel_bytes();
  const float* of_rows = g.codes.scales + size_t(first) * groups;
  const int32_t* of_codes = g.codes.sums + size_t(first) * groups * PARTS;
  const __m512i zero_bits = _mm512_set1_epi32(ZERO_BITS);
  alignas(64) float sums[P][R][PANEL] = {};
  for (int group = 0; group < groups; group++, w += OF.bytes) {
    if (!first)
      for (int p = 0; p < P; p++)
        for (int line = OF.scales; line < OF.bytes; line += LINE) __builtin_prefetch(w + AHEAD + p * apart + line);
#pragma GCC unroll 1
    for (int part = 0; part < PARTS; part += DEPTH) {
      __m512i words[P], products[R][P];
      for (int p = 0; p < P; p++) words[p] = _mm512_load_si512(w + p * apart + OF.scales + part / DEPTH * LINE);
      for (int r = 0; r < R; r++) {
        const int32_t* parts = of_codes + (r * groups + group) * PARTS + part;
        int32_t sum = 0;
        for (int i = 0; i < DEPTH; i++) sum += parts[i];
        // The upper word of a zero point is 0.
        for (int p = 0; p < P; p++) products[r][p] = _mm512_madd_epi16(_mm512_and_si512(words[p], zero_bits), _mm512_set1_epi32(-sum));
      }
#pragma GCC unroll 1
      for (int deep = part; deep < part + DEPTH; deep++) {
        const char* of_part = w + deep * OF_A_PART;
        if (!first)
          for (int p = 0; p < P; p++)
            for (int line = 0; line < OF_A_PART; line += LINE) __builtin_prefetch(of_part + AHEAD + p * apart + line);
        multiply_part<true>(a + (size_t(group) * 2 + deep / 2) * TILE * LINE + deep % 2 * PART, of_part, apart, products);
      }
      for (int p = 0; p < P; p++) {
        const __m512 of_panel = _mm512_castsi512_ps(_mm512_andnot_si512(zero_bits, words[p]));
        for (int r = 0; r < R; r++) {
          const __m512 scale = _mm512_set1_ps(of_rows[r * groups + group]) * of_panel;
          _mm512_store_ps(sums[p][r], _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[r][p]), scale, _mm512_load_ps(sums[p][r])));
        }
      }
    }
  }
  finish_panels(g, panel, first, sums);
}

// R rows of one tile from `first` on, times P panels, in codes. The weights' codes become unsigned by 128 more; the operand's
// sums, from which those of the products begin, take it away again. A core asks for lines of the P panels a group ahead.
template <int R, int P>
void multiply_codes(const Gemm& g, int panel, int first) {
  constexpr int LINE = 64, AHEAD = BYTES_OF_CODES;
  const int groups = g.codes.groups;
  const int8_t* a = g.operand.row<const int8_t>(first);
  const char* w = g.weights->panel(panel);
  const size_t apart = g.weights->panel_bytes();
  const float* of_rows = g.codes.scales + size_t(first) * groups;
  const int32_t* of_codes = g.codes.sums + size_t(first) * groups * PARTS;
  const __m512i unsigned_again = _mm512_set1_epi8(char(0x80));
  alignas(64) float sums[P][R][PANEL] = {};
  for (int group = 0; group < groups; group++, w += LINE) {
    __m512i counted[R][P];
    for (int r = 0; r < R; r++) {
      const int32_t* parts = of_codes + (r * groups + group) * PARTS;
      for (int p = 0; p < P; p++) counted[r][p] = _mm512_set1_epi32(-128 * (parts[0] + parts[1] + parts[2] + parts[3]));
    }
    for (int tile = 0; tile < 2; tile++, a += TILE * LINE)
#pragma GCC unroll 2
      for (int k = 0; k < LINE; k += 4, w += LINE) {
        __m512i codes[P];
        for (int p = 0; p < P; p++) {
          if (!first) __builtin_prefetch(w + AHEAD + p * apart);
          codes[p] = _mm512_xor_si512(_mm512_loadu_si512(w + p * apart), unsigned_again);
        }
        for (int r = 0; r < R; r++) {
          const __m512i of_row = four_at(a + r * LINE + k);
          for (int p = 0; p < P; p++) counted[r][p] = _mm512_dpbusd_epi32(counted[r][p], codes[p], of_row);
        }
      }
    add_counted(counted, of_rows + group, groups, w, apart, sums);
  }
  finish_panels(g, panel, first, sums);
}

// The same in fours. The sum of a part's 32 products of four bits with eight is below 2^15, so a product of words multiplies it
// and adds it to the sum of the group.
template <int R, int P>
void multiply_fours(const Gemm& g, int panel, int first) {
  constexpr int LINE = 64, AHEAD = 2 * BYTES_OF_FOURS;
  const int groups = g.codes.groups;
  const int8_t* a = g.operand.row<const int8_t>(first);
  const char* w = g.weights->panel(panel);
  const size_t apart = g.weights->panel_bytes();
  const float* of_rows = g.codes.scales + size_t(first) * groups;
  const int32_t* of_codes = g.codes.sums + size_t(first) * groups * PARTS;
  alignas(64) float sums[P][R][PANEL] = {};
  for (int group = 0; group < groups; group++, w += BYTES_OF_FOURS) {
    __m512i counted[R][P];
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++) counted[r][p] = _mm512_setzero_si512();
    if (!first)
      for (int p = 0; p < P; p++)
        for (int line = 16 * LINE; line < BYTES_OF_FOURS; line += LINE) __builtin_prefetch(w + AHEAD + p * apart + line);
#pragma GCC unroll 1
    for (int part = 0; part < PARTS; part++) {
      const int8_t* of_part = a + (size_t(group) * 2 + part / 2) * TILE * LINE + part % 2 * PART;
      if (!first)
        for (int p = 0; p < P; p++)
          for (int line = 0; line < 4; line++) __builtin_prefetch(w + (part * 4 + line) * LINE + AHEAD + p * apart);
      __m512i products[R][P];
      begin_part(of_codes + group * PARTS + part, groups, 8, products);
      multiply_part<true>(of_part, w + part * 4 * LINE, apart, products);
      for (int p = 0; p < P; p++) {
        const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(w + MULTIPLIERS + p * apart) + part);
        // Of the two words of a lane the upper one, the sign, is multiplied with nothing.
        const __m512i multiplier = _mm512_and_si512(_mm512_cvtepi8_epi32(bytes), _mm512_set1_epi32(0xffff));
        for (int r = 0; r < R; r++) counted[r][p] = _mm512_dpwssd_epi32(counted[r][p], products[r][p], multiplier);
      }
    }
    add_counted(counted, of_rows + group, groups, w + SCALES_OF_FOURS, apart, sums);
  }
  finish_panels(g, panel, first, sums);
}

template <int P, Type TYPE>
void multiply_code_panels(const Gemm& g, int& panel, int last) {
  for (; panel + P <= last; panel += P)
    for (int first = 0, end; first < g.rows; first = end) {
      const int left = std::min(TILE - first % TILE, g.rows - first);  // of the tile
      end = first + (left > TOGETHER ? (left + 1) / 2 : left);
      with_rows<TOGETHER>(end - first, [&](auto rows) {
        if constexpr (TYPE == Type::i8) multiply_codes<rows, P>(g, panel, first);
        else if constexpr (TYPE == Type::i4) multiply_fours<rows, P>(g, panel, first);
        else if constexpr (is_grouped(TYPE)) multiply_grouped<TYPE, rows, P>(g, panel, first);
        else multiply_blocks<TYPE, rows, P>(g, panel, first);
      });
    }
}

template <Type TYPE>
void gemm_vnni(const Gemm& g, int panel, int last) {
  if (g.rows <= (TYPE == Type::i8 ? 4 : 2)) multiply_code_panels<4, TYPE>(g, panel, last);
  multiply_code_panels<2, TYPE>(g, panel, last);
  multiply_code_panels<1, TYPE>(g, panel, last);
}

}  // namespace

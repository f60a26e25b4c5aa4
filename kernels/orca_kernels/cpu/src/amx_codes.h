// Weights in codes on AMX's tiles.
#pragma once

#include "amx_tiles.h"
#include "vnni.h"

namespace {

// Products in codes: a tile of 16 x 64 codes times one of 64 x 16, added to 16 x 16 integers.

// sums [rows][stride] += the integers of a group [rows][stride], of one panel, times the scales of their rows and columns.
inline void add_group(const Gemm& g, int first, int rows, int group, const float* of_columns, const int32_t* counted,
                      float* sums, int stride) {
  const float* of_rows = g.codes.scales + size_t(first) * g.codes.groups + group;
  const __m512 of_panel = _mm512_load_ps(of_columns);
  for (int r = 0; r < rows; r++, counted += stride, sums += stride, of_rows += g.codes.groups) {
    const __m512 integers = _mm512_cvtepi32_ps(_mm512_load_si512(counted));
    _mm512_store_ps(sums, _mm512_fmadd_ps(integers, _mm512_set1_ps(*of_rows) * of_panel, _mm512_load_ps(sums)));
  }
}

// Asks for one half of a group of a panel, of BYTES in all.
template <int BYTES>
inline void ask_half(const char* group, int half) {
  constexpr int MIDDLE = BYTES / 128 * 64;
  for (int line = half * MIDDLE; line < MIDDLE + half * (BYTES - MIDDLE); line += 64) _mm_prefetch(group + line, _MM_HINT_T1);
}

// Each byte of 16 in the four of its lane.
inline __m512i four_times(__m128i bytes) {
  const __m512i lanes = _mm512_cvtepu8_epi32(bytes), words = _mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16));
  return _mm512_or_si512(words, _mm512_slli_epi16(words, 8));
}

// A group of a panel of grouped128 as one of codes.
inline void open_grouped(const char* fours, char* codes) {
  const __m512i low = _mm512_set1_epi8(15), zero_bits = _mm512_set1_epi32(ZERO_BITS);
  const __m512i scales = _mm512_load_si512(fours + MULTIPLIERS);
  const __m512i zeros = four_times(_mm512_cvtepi32_epi8(_mm512_and_si512(scales, zero_bits)));
  for (int part = 0; part < PARTS; part++, codes += PART * PANEL)
    for (int v = 0; v < 4; v++) {
      const __m512i both = _mm512_load_si512(fours + (part * 4 + v) * 64);
      _mm512_store_si512(codes + v * 64, _mm512_sub_epi8(_mm512_and_si512(both, low), zeros));
      _mm512_store_si512(codes + (4 + v) * 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), low), zeros));
    }
  _mm512_store_si512(codes, _mm512_andnot_si512(zero_bits, scales));  // behind the last part: SCALES
}

// A group of a panel of fours as one of codes. Bytes are multiplied in words, the even ones and the odd ones: what is above a
// byte falls out.
inline void open_multiplied(const char* fours, char* codes) {
  const __m512i low = _mm512_set1_epi8(15), even = _mm512_set1_epi16(255);
  for (int part = 0; part < PARTS; part++, codes += PART * PANEL) {
    const __m512i bytes = four_times(_mm_load_si128(reinterpret_cast<const __m128i*>(fours + MULTIPLIERS) + part));
    const __m512i words = _mm512_and_si512(bytes, even);
    const __m512i eight = _mm512_and_si512(_mm512_slli_epi16(bytes, 3), _mm512_set1_epi8(char(0xf8)));  // times 8
    for (int v = 0; v < 4; v++) {
      const __m512i both = _mm512_load_si512(fours + (part * 4 + v) * 64);
      const __m512i halves[2] = {_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16(both, 4), low)};
      for (int half = 0; half < 2; half++) {
        const __m512i of_even = _mm512_mullo_epi16(_mm512_and_si512(halves[half], even), words);
        const __m512i of_odd = _mm512_mullo_epi16(_mm512_andnot_si512(even, halves[half]), words);
        const __m512i product = _mm512_or_si512(_mm512_and_si512(of_even, even), of_odd);
        _mm512_store_si512(codes + (half * 4 + v) * 64, _mm512_sub_epi8(product, eight));
      }
    }
  }
  _mm512_store_si512(codes, _mm512_load_si512(fours + SCALES_OF_FOURS));  // behind the last part: SCALES
}

template <Type TYPE>
inline void open_group(const char* fours, char* codes) {
  if constexpr (TYPE == Type::i4) open_multiplied(fours, codes);
  else open_grouped(fours, codes);
}

// Up to 16 rows from `first` on, times P panels (1 or 4): tiles 0-3 are sums of a group. While a group is multiplied, the group
// before is added and the group after is asked for, across the end of the panels.
template <int P, Type TYPE>
void few_codes(const Gemm& g, int panel, int first, bool more) {
  constexpr bool FOURS = TYPE != Type::i8;
  constexpr int BYTES = group_of(TYPE).bytes;
  alignas(64) int32_t counted[2][P][16 * 16];
  alignas(64) float sums[P][16 * 16] = {};
  alignas(64) char opened[2][FOURS ? P : 1][BYTES_OF_CODES];
  const int groups = g.codes.groups, rows = std::min(16, g.rows - first);
  const size_t apart = g.weights->panel_bytes();
  const char *a = g.operand.data + g.operand.at(first), *w = g.weights->panel(panel);
  auto codes = [&](int group, int p) {
    return FOURS ? opened[group % 2][p] : g.weights->panel(panel) + size_t(group) * BYTES_OF_CODES + p * apart;
  };
  auto add = [&](int group) {
    for (int p = 0; p < P; p++) {
      const float* scales = reinterpret_cast<const float*>(codes(group, p) + SCALES);
      add_group(g, first, rows, group, scales, counted[group % 2][p], sums[p], 16);
    }
  };
  for (int group = 0; group < groups; group++, w += BYTES) {
    if constexpr (FOURS)
      for (int p = 0; p < P; p++) open_group<TYPE>(w + p * apart, opened[group % 2][p]);
    _tile_zero(0);
    if constexpr (P > 1) {
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const char* next = group + 1 < groups ? w + BYTES : more ? g.weights->panel(panel + P) : w;
    for (int half = 0; half < 2; half++, a += TILE_BYTES) {
      auto tile = [&](int p) { return codes(group, p) + half * TILE_BYTES; };
      _tile_loadd(4, a, 64);
      _tile_loadd(5, tile(0), 64);
      _tile_dpbssd(0, 4, 5);
      ask_half<BYTES>(next, half);
      if constexpr (P > 1) {
        _tile_loadd(6, tile(1), 64);
        _tile_dpbssd(1, 4, 6);
        ask_half<BYTES>(next + apart, half);
        _tile_loadd(7, tile(2), 64);
        _tile_dpbssd(2, 4, 7);
        ask_half<BYTES>(next + 2 * apart, half);
        _tile_loadd(5, tile(3), 64);
        ask_half<BYTES>(next + 3 * apart, half);
        _tile_dpbssd(3, 4, 5);
      }
    }
    if (group) add(group - 1);
    auto& into = counted[group % 2];
    _tile_stored(0, into[0], 64);
    if constexpr (P > 1) {
      _tile_stored(1, into[1], 64);
      _tile_stored(2, into[2], 64);
      _tile_stored(3, into[3], 64);
    }
  }
  add(groups - 1);
  for (int p = 0; p < P; p++) finish(g, panel + p, first, rows, sums[p], 16);
}

// 32 rows from `first` on times groups [from, to) of 2 panels, which lie at w0 and w1, added to sums [32][32]. Asks for `lines`
// lines of both panels a tile, from `next` on.
inline void block_of_codes(const Gemm& g, int first, int from, int to, const char* w0, const char* w1, float* sums,
                           const char* next, int lines) {
  alignas(64) int32_t counted[2][32 * 32];
  const size_t across = size_t(g.operand.width) * TILE;  // bytes of 16 rows
  const char *a0 = g.operand.data + g.operand.at(first) + size_t(from) * 2 * TILE_BYTES, *a1 = a0 + across;
  auto add = [&](int group) {  // the one before w0 and w1
    const float* scales = reinterpret_cast<const float*>(w0 - BYTES_OF_CODES + SCALES);
    add_group(g, first, 32, group, scales, counted[group % 2], sums, 32);
    scales = reinterpret_cast<const float*>(w1 - BYTES_OF_CODES + SCALES);
    add_group(g, first, 32, group, scales, counted[group % 2] + 16, sums + 16, 32);
  };
  for (int group = from; group < to; group++, w0 += BYTES_OF_CODES, w1 += BYTES_OF_CODES) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int half = 0; half < 2; half++, a0 += TILE_BYTES, a1 += TILE_BYTES) {
      _tile_loadd(4, a0, 64);
      _tile_loadd(6, w0 + half * TILE_BYTES, 64);
      _tile_dpbssd(0, 4, 6);
      for (int line = 0; line < lines; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
      _tile_loadd(7, w1 + half * TILE_BYTES, 64);
      _tile_dpbssd(1, 4, 7);
      for (int line = -lines; line < 0; line++) _mm_prefetch(next + line * 64 + g.weights->panel_bytes(), _MM_HINT_T1);
      _tile_loadd(5, a1, 64);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    if (group > from) add(group - 1);
    int32_t* into = counted[group % 2];
    _tile_stored(0, into, 128);
    _tile_stored(1, into + 16, 128);
    _tile_stored(2, into + 16 * 32, 128);
    _tile_stored(3, into + 16 * 32 + 16, 128);
  }
  add(to - 1);
}

// Rows [first_row, last_row), BLOCKS * 32 at most, times panels [panel, last), in pairs: as `many_rows`, 4 groups (17 KB of
// weights) in the level-1 cache while all rows pass them, and the groups after them fetched meanwhile.
template <Type TYPE>
void many_codes(const Gemm& g, int panel, int last, int first_row, int last_row) {
  constexpr bool FOURS = TYPE != Type::i8;
  constexpr int GROUPS = 4, BYTES = group_of(TYPE).bytes;
  alignas(64) float sums[BLOCKS][32 * 32];
  alignas(64) char opened[2][FOURS ? GROUPS : 1][BYTES_OF_CODES];
  const int groups = g.codes.groups, blocks = (last_row - first_row + 31) / 32;
  const int lines = (BYTES / 64 + 2 * blocks - 1) / (2 * blocks);
  for (; panel < last; panel += 2) {
    std::memset(sums, 0, sizeof sums[0] * blocks);
    for (int from = 0; from < groups; from += GROUPS) {
      const int to = std::min(groups, from + GROUPS);
      const char *w0 = g.weights->panel(panel) + size_t(from) * BYTES, *w1 = w0 + g.weights->panel_bytes();
      if constexpr (FOURS) {
        for (int i = 0; i < to - from; i++) open_group<TYPE>(w0 + i * BYTES, opened[0][i]), open_group<TYPE>(w1 + i * BYTES, opened[1][i]);
        w0 = opened[0][0], w1 = opened[1][0];
      }
      const char* next = to < groups ? g.weights->panel(panel) + size_t(to) * BYTES
                                     : g.weights->panel(panel + 2 < last ? panel + 2 : panel);
      for (int b = 0; b < blocks; b++, next += size_t(to - from) * 2 * lines * 64)
        block_of_codes(g, first_row + b * 32, from, to, w0, w1, sums[b], next, lines);
    }
    for (int b = 0; b < blocks; b++) {
      const int row = first_row + b * 32;
      finish_two(g, panel, row, std::min(32, last_row - row), sums[b], sums[b] + 16, 32);
    }
  }
}

template <Type TYPE>
void gemm_tiles_of_codes(const Gemm& g, int panel, int last) {
  if (g.rows <= 8) return gemm_vnni<TYPE, 8>(g, panel, last);  // tiles of 8 rows or fewer would wait for their sums
  if (g.rows <= TILE) {
    for (; panel + 4 <= last; panel += 4) few_codes<4, TYPE>(g, panel, 0, panel + 8 <= last);
  } else {
    const int even = panel + (last - panel) / 2 * 2;
    for (int row = 0; row < g.rows; row += BLOCKS * 32)
      if (panel < even) many_codes<TYPE>(g, panel, even, row, std::min(g.rows, row + BLOCKS * 32));
    panel = even;
  }
  for (; panel < last; panel++)
    for (int row = 0; row < g.rows; row += TILE) few_codes<1, TYPE>(g, panel, row, panel + 1 < last);
}

}  // namespace

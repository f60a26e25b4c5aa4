// The products of attention on AMX's tiles. Keys are the left tiles of scores^T, p that of the sums.
#pragma once

#include "pair_attention.h"

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles of 16 rows x 64 bytes, but those that hold R rows: 0 and 1 are scores^T [16, R], 3 is q^T [16, R] (pairs), 4 is p
// [R, 32], 6 and 7 are sums [R, 16].
void configure(int rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = 16;
  for (int tile : {0, 1, 3}) config.bytes[tile] = uint16_t(4 * rows);
  for (int tile : {4, 6, 7}) config.rows[tile] = uint8_t(rows);
  // Not _tile_loadconfig: GCC 12's tells the compiler that 8 bytes are read, and the others were never written.
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

struct OnTiles {
  static constexpr bool ASKS_FAR_AHEAD = false;

  static void ask(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1); }

  // Asks for 16 lines, which are wanted soon. A thread that asks for more at once waits: it has room for as many misses.
  static void ask_lines(const bf16* lines) {
    for (int line = 0; line < 16; line++) ask(lines + 32 * line);
  }

  static void begin(int rows) {
    if (rows < 16) configure(rows);
  }
  static void end(int rows) {
    if (rows < 16) configure(16);
  }

  // q * scale in bfloat16, as the right tile of scores^T: [d / 2][R][2]. `q`: [rows][d] float32, whole tiles of R rows.
  static void queries(const float* q, int rows, int d, bf16* out) {
    if (rows == 1) {
      for (int i = 0; i < d; i += LANES) save(out + i, load(q + i));
      return;
    }
    if (rows < 16) {
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < d; i++) out[(i / 2 * rows + r) * 2 + i % 2] = narrow(q[r * d + i]);
      return;
    }
    pair_rows(q, d, out);
  }

  // scores^T [16][R] of R queries with 16 keys of d columns, from key j of the tile on, for each of `tiles` groups of R:
  // [d / 2][R][2] and [32][R] apart. Asks for 16 keys more.
  static void score(const bf16* q, const bf16* keys, const bf16* more, int, int tiles, int rows, int d, int j,
                    float* scores) {
    scores += j * rows;
    for (int i = 0; i < d; i += 32) ask_lines(more + 16 * i);
    if (d == 64 && rows == 16) {  // two groups together, whose sums need not wait for each other
      _tile_loadd(2, keys, 128);
      _tile_loadd(5, keys + 32, 128);
      for (; tiles >= 2; tiles -= 2, q += 2 * 16 * 64, scores += 2 * 16 * KEYS) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(3, q, 64);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(4, q + 16 * 64, 64);
        _tile_dpbf16ps(1, 2, 4);
        _tile_loadd(3, q + 16 * 32, 64);
        _tile_dpbf16ps(0, 5, 3);
        _tile_loadd(4, q + 16 * 96, 64);
        _tile_dpbf16ps(1, 5, 4);
        _tile_stored(0, scores, 64);
        _tile_stored(1, scores + 16 * KEYS, 64);
      }
    }
    for (; tiles--; q += size_t(rows) * d, scores += rows * KEYS) {
      _tile_zero(0);
      for (int i = 0; i < d; i += 32) {
        _tile_loadd(3, q + i * rows, 4 * rows);
        _tile_loadd(2, keys + i, 2 * d);
        _tile_dpbf16ps(0, 2, 3);
      }
      _tile_stored(0, scores, 4 * rows);
    }
  }

  // Row r of [32][R].
  static const float* scores_of(const float* scores, int rows, int r, float* gathered) {
    if (rows == 1) return scores;
    for (int j = 0; j < KEYS; j++) gathered[j] = scores[j * rows + r];
    return gathered;
  }

  // Scores [32][R] times each key's scale.
  static void scale(float* scores, int rows, const float* scales) {
    for (int j = 0; j < KEYS; j++)
      for (int r = 0; r < rows; r++) scores[j * rows + r] *= scales[j];
  }

  // p of 16 rows [16][32], of pairs of keys.
  static void keep(__m512i (&pairs)[16], bf16* p) {
    transpose(pairs);
    for (int r = 0; r < 16; r++) _mm512_store_si512(p + r * KEYS, pairs[r]);
  }

  // sums = sums * old + p values of `rows` rows, in tiles of R.
  static void blend(const bf16* p, const bf16* values, int rows, int together, const int*, int d, const float* old,
                    float* sums, float* part) {
    for (int r = 0; r < rows; r += together) blend_tile(p + r * KEYS, values, d, part + size_t(r) * d);
    for (int r = 0; r < rows; r++, sums += d, part += d)
      for (int i = 0; i < d; i += LANES) save(sums + i, load(sums + i) * splat(old[r]) + load(part + i));
  }

  // p values: [R][d].
  static void blend_tile(const bf16* p, const bf16* values, int d, float* out) {
    _tile_loadd(4, p, 2 * KEYS);
    for (int i = 0; i < d; i += 32) {
      _tile_zero(6);
      _tile_zero(7);
      _tile_loadd(2, values + 2 * i, 4 * d);
      _tile_dpbf16ps(6, 4, 2);
      _tile_loadd(5, values + 2 * i + 32, 4 * d);
      _tile_dpbf16ps(7, 4, 5);
      _tile_stored(6, out + i, 4 * d);
      _tile_stored(7, out + i + 16, 4 * d);
    }
  }
};

}  // namespace

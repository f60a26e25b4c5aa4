// The products of attention on pairs of bfloat16.
#pragma once

#include "pair_attention.h"

namespace {

// The products of attention. A sum takes its pairs in ascending order, from whichever side the lanes come: of 16 rows they
// are the rows, of fewer the keys.
struct InPairs {
  static constexpr bool ASKS_FAR_AHEAD = true;

  static void ask(const void* line) { __builtin_prefetch(line); }

  static void begin(int) {}
  static void end(int) {}

  // q in bfloat16: of 16 rows [d / 2][16][2], of fewer [R][d].
  static void queries(const float* q, int rows, int d, bf16* out) {
    if (rows < 16) narrow_all(q, out, rows * d);
    else pair_rows(q, d, out);
  }

  // Scores of `tiles` times R rows with 16 keys, from key j of the tile on: of 16 rows [32][16], of fewer [R][32]. n of the
  // keys are there. Asks for as much of `more`: with few rows this waits for memory, so line by line, and for no key more.
  static void score(const bf16* q, const bf16* keys, const bf16* more, int n, int tiles, int rows, int d, int j,
                    float* scores) {
    if (rows < 16) {
      for (int r = 0; r < rows;)
        with_rows<4>(std::min(4, rows - r), [&](auto together) {
          score_few<together>(q + r * d, keys, r ? keys : more, n, d, scores + r * KEYS + j);
          r += together;
        });
      return;
    }
    for (int i = 0; i < 16 * d; i += 32) ask(more + i);
    for (; tiles >= 2; tiles -= 2, q += 2 * 16 * d, scores += 2 * 16 * KEYS) score_many<2>(q, keys, d, scores + j * 16);
    if (tiles) score_many<1>(q, keys, d, scores + j * 16);
  }

  template <int T>
  static void score_many(const bf16* q, const bf16* keys, int d, float* scores) {
    constexpr int AT_ONCE = 8;
    for (int j = 0; j < 16; j += AT_ONCE, keys += AT_ONCE * d, scores += AT_ONCE * 16) {
      __m512 sum[T][AT_ONCE];
      for (int t = 0; t < T; t++)
        for (int k = 0; k < AT_ONCE; k++) sum[t][k] = _mm512_setzero_ps();
#pragma GCC unroll 2
      for (int c = 0; c < d; c += 2) {
        __m512bh rows[T];
        for (int t = 0; t < T; t++) rows[t] = pairs_at(q + t * 16 * d + c * 16);
        for (int k = 0; k < AT_ONCE; k++) {
          const __m512bh key = pair_at(keys + k * d + c);
          for (int t = 0; t < T; t++) sum[t][k] = _mm512_dpbf16_ps(sum[t][k], rows[t], key);
        }
      }
      for (int t = 0; t < T; t++)
        for (int k = 0; k < AT_ONCE; k++) _mm512_storeu_ps(scores + t * 16 * KEYS + k * 16, sum[t][k]);
    }
  }

  template <int R>
  static void score_few(const bf16* q, const bf16* keys, const bf16* more, int n, int d, float* scores) {
    __m512 sum[R];
    for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_ps();
    for (int i = 0; i < d; i += 32) {
      __m512i x[16];
      for (int key = 0; key < 16; key++) {
        const int at = std::min(key, n - 1) * d + i;
        ask(more + at), x[key] = _mm512_loadu_si512(keys + at);
      }
      transpose(x);
      for (int c = 0; c < 16; c++)
        for (int r = 0; r < R; r++)
          sum[r] = _mm512_dpbf16_ps(sum[r], pair_at(q + r * d + i + 2 * c), reinterpret_cast<__m512bh>(x[c]));
    }
    for (int r = 0; r < R; r++) _mm512_storeu_ps(scores + r * KEYS, sum[r]);
  }

  static const float* scores_of(const float* scores, int, int r, float*) { return scores + r * KEYS; }

  // Scores of R rows, as `score` makes them, times each key's scale.
  static void scale(float* scores, int rows, const float* scales) {
    for (int i = 0; i < (rows < 16 ? rows : KEYS); i++)
      for (int c = 0; c < (rows < 16 ? KEYS : 16); c += LANES) {
        float* at = scores + i * (rows < 16 ? KEYS : 16) + c;
        save(at, load(at) * (rows < 16 ? load(scales + c) : splat(scales[i])));
      }
  }

  // p of 16 rows [16][16][2], pairs of keys; of fewer [R][32].
  static void keep(const __m512i (&pairs)[16], bf16* p) {
    for (int j = 0; j < 16; j++) _mm512_store_si512(p + j * 32, pairs[j]);
  }

  // sums = sums * old + p values of `rows` rows. `values`: [16][d][2].
  static void blend(const bf16* p, const bf16* values, int rows, int together, const int* seen, int d, const float* old,
                    float* sums, float*) {
    const bool many = together == 16;
    for (int r = 0; r < rows;)
      with_rows<4>(std::min(4, rows - r), [&](auto some) {
        const bf16* of_rows = p + (many ? r / 16 * 16 * KEYS + r % 16 * 2 : r * KEYS);
        const Blend<some> b{of_rows, many ? 2 : KEYS, many ? 32 : 2, values, seen + r, old + r, sums + size_t(r) * d, d};
        if (seen[r] == KEYS) b.template run<true>();
        else b.template run<false>();
        r += some;
      });
  }

  // R rows of a tile.
  template <int R>
  struct Blend {
    const bf16* p;
    int of_row, of_pair;  // from a row, and from a pair of keys, to the next
    const bf16* values;
    const int* seen;
    const float* old;
    float* sums;
    int d;

    template <bool ALL>
    void run() const {
      int i = 0;
      for (; i + 4 * LANES <= d; i += 4 * LANES) columns<ALL, 4>(i);
      if (i < d) columns<ALL, 2>(i);
    }

    // ALL: each row sees all keys. Otherwise it adds the values of those that it sees and no others: 0 times one that is not
    // finite would not be 0. A row sees as many as the row before, or more.
    template <bool ALL, int V>
    void columns(int i) const {
      __m512 sum[R][V];
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = _mm512_setzero_ps();
      const int last = ALL ? KEYS : seen[R - 1];
      const bf16 *x = values + 2 * i, *pair = p;
#pragma GCC unroll 1
      for (int j = 0; j < last; j += 2, x += 2 * d, pair += of_pair) {
        __m512bh of_keys[V];
        for (int v = 0; v < V; v++) of_keys[v] = pairs_at(x + 2 * v * LANES);
        for (int r = 0; r < R; r++) {
          const __m512bh of_this = pair_at(pair + r * of_row);
          const __mmask32 sees = ALL || seen[r] > j + 1 ? 0xffffffff : seen[r] > j ? 0x55555555 : 0;
          for (int v = 0; v < V; v++) {
            __m512bh y = of_keys[v];
            if constexpr (!ALL) y = reinterpret_cast<__m512bh>(_mm512_maskz_mov_epi16(sees, reinterpret_cast<__m512i>(y)));
            sum[r][v] = _mm512_dpbf16_ps(sum[r][v], of_this, y);
          }
        }
      }
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
          float* to = sums + r * d + i + v * LANES;
          save(to, load(to) * splat(old[r]) + reinterpret_cast<vf>(sum[r][v]));
        }
    }
  };
};

}  // namespace

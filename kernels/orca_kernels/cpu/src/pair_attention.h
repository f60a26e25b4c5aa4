// Attention for keys and values in bfloat16, on instruction sets that multiply bfloat16. It computes the same as `attend` of
// kernels.h, but narrows q and the softmax's p to bfloat16. Sums, maxima and weights stay float32. Codes of eight bits become
// bfloat16, which holds them exactly; their scales multiply scores, and p before it is narrowed.
// `Products` multiplies, by one instruction set. Only its functions know how q, scores and p lie in memory.
//
// R rows (queries x query heads a key/value head), 16 at most, are multiplied together:
//   scores^T = keys q^T   [32 keys, R]: keys as they lie in the cache
//   sums    += p values   [R, d]
// The lines that are read next are asked for meanwhile. With ASKS_FAR_AHEAD these are a head's values while its keys are read, and
// the next tile's keys while its values are read; without it, they are the next head's.
//
// A row's result depends on that row of q and p alone, so an increment with R = 1 gets the bits that it gets among others.
#pragma once

#include "kernels.h"

#include <immintrin.h>

namespace {

// 16 rows of 16 32-bit elements become columns.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0x88);
      y[i + 4 + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88);
    x[8 + j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0xdd);
  }
}

// 16 pairs of bfloat16.
inline __m512bh pairs_at(const void* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

// 32 numbers of the cache as bfloat16.
inline __m512i numbers_at(const bf16* p) { return _mm512_loadu_si512(p); }
inline __m512i numbers_at(const int8_t* p) {
  auto half = [&](int i) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i)))); };
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(half(16), half(0)));
}

// A pair of bfloat16 in each lane.
inline __m512bh pair_at(const bf16* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
}

// 16 rows of float32 [16][d] as pairs of bfloat16, [d / 2][16][2].
inline void pair_rows(const float* rows, int d, bf16* out) {
  for (int i = 0; i < d; i += 32, out += 16 * 32) {
    __m512i x[16];
    for (int r = 0; r < 16; r++)
      x[r] = reinterpret_cast<__m512i>(
          _mm512_cvtne2ps_pbh(_mm512_loadu_ps(rows + r * d + i + 16), _mm512_loadu_ps(rows + r * d + i)));
    transpose(x);
    for (int r = 0; r < 16; r++) _mm512_storeu_si512(out + r * 32, x[r]);
  }
}

// Where the rows of 32 tokens' keys, and of their values, begin in the cache: of the first head of a call.
struct Tile {
  int64_t first;  // position
  int n;          // tokens; 0 behind the last
  size_t at[KEYS];

  Tile(const Attention& a, int64_t first, int64_t end) : first(first), n(int(std::clamp<int64_t>(end - first, 0, KEYS))) {
    runs(a, a.head, first, n, [&](int j, size_t start, int tokens, int) {
      for (int i = 0; i < tokens; i++) at[j + i] = start + size_t(i) * a.cache.head_size;
    });
  }
};

// 2^x for x <= 0, to 4e-6 of it: p is narrowed to bfloat16, whose half unit is a thousand times that. Below -126 it is not 0
// but 2^-126: a result that underflows takes the processor a hundred times as long. NaN stays NaN: the maximum is its second
// operand where one is NaN.
inline vf power_of_two(vf x) {
  const __m512 at_least = _mm512_max_ps(_mm512_set1_ps(-126.0f), reinterpret_cast<__m512>(x));
  const __m512 n = _mm512_roundscale_ps(at_least, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf r = reinterpret_cast<vf>(at_least) - reinterpret_cast<vf>(n);
  vf p = splat(9.6181291e-3f) * r + 5.5504109e-2f;  // Taylor's series of 2^r
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  return reinterpret_cast<vf>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), n));
}

inline __m256i narrowed(vf x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x))); }

// What 32 more scores (in units of log 2) do to 16 rows, a row in each lane: p = 2^(score - maximum), the rows' maxima and
// weights, and what to scale earlier sums with. ALL: each row sees all 32 keys. T: of the values; where they are codes, p is multiplied
// by their scales.
template <class Products, bool ALL, class T>
inline void soften_tile(const float* scores, const float* scales, vi seen, float* maximum, float* weight, float* old, bf16* p) {
  const vf nothing = splat(-std::numeric_limits<float>::infinity()), before = load(maximum);
  auto score = [&](int j) {
    const vf s = load(scores + j * 16);
    return ALL ? s : seen > j ? s : nothing;
  };
  vf most[4] = {before, nothing, nothing, nothing};  // four chains of comparisons, which need not wait for each other
#pragma GCC unroll 32
  for (int j = 0; j < KEYS; j++) most[j % 4] = larger(score(j), most[j % 4]);
  const vf now = larger(larger(most[0], most[1]), larger(most[2], most[3]));
  alignas(64) static constexpr uint16_t IN_TURN[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i in_turn = _mm512_load_si512(IN_TURN);
  vf e[KEYS];
  __m512i pairs[KEYS / 2];  // of each row
#pragma GCC unroll 16
  for (int j = 0; j < KEYS; j += 2) {
    for (int k = j; k < j + 2; k++) {
      e[k] = power_of_two(score(k) - now);
      if (!ALL) e[k] = seen > k ? e[k] : vf{};
    }
    auto given = [&](int k) {
      if constexpr (!IS_CODES<T>) return reinterpret_cast<__m512>(e[k]);
      const vf scaled = e[k] * splat(scales[k]);
      return reinterpret_cast<__m512>(ALL ? scaled : seen > k ? scaled : vf{});
    };
    const auto both = _mm512_cvtne2ps_pbh(given(j + 1), given(j));
    pairs[j / 2] = _mm512_permutexvar_epi16(in_turn, reinterpret_cast<__m512i>(both));
  }
  Products::keep(pairs, p);
  for (int half = KEYS / 2; half; half /= 2)  // in the order of `total`
    for (int j = 0; j < half; j++) e[j] += e[j + half];
  const vf scale = power_of_two(before - now);
  save(old, scale);
  save(weight, load(weight) * scale + e[0]);
  save(maximum, now);
}

// The same of R rows one by one.
template <class Products, class T>
inline void soften_rows(const float* scores, const float* scales, int rows, const int* seen, float* maximum, float* weight,
                        float* old, bf16* p) {
  const vf nothing = splat(-std::numeric_limits<float>::infinity());
  for (int r = 0; r < rows; r++, p += KEYS) {
    float gathered[KEYS];
    const float* row = Products::scores_of(scores, rows, r, gathered);
    const vi sees[2] = {lanes() < seen[r], lanes() < seen[r] - 16};
    const vf low = sees[0] ? load(row) : nothing, high = sees[1] ? load(row + 16) : nothing;
    const vf before = splat(maximum[r]), now = larger(before, largest(larger(low, high)));
    const vf e[2] = {sees[0] ? power_of_two(low - now) : vf{}, sees[1] ? power_of_two(high - now) : vf{}};
    const vf scale = power_of_two(before - now);
    auto given = [&](int half) {
      if constexpr (!IS_CODES<T>) return e[half];
      const vf scaled = e[half] * load(scales + 16 * half);
      return sees[half] ? scaled : vf{};
    };
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), narrowed(given(0)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(p + 16), narrowed(given(1)));
    const vf sum = splat(weight[r]) * scale + total(e[0] + e[1]);
    old[r] = scale[0], weight[r] = sum[0], maximum[r] = now[0];
  }
}

// The values of one head as [16][d][2]: pairs of keys side by side, and zeros behind the last. Asks for as many
// more, of another head or tile.
template <class Products, class T>
inline void pair_values(const T* values, const Tile& tile, const T* more, const Tile& of_more, int d, bf16* out) {
  alignas(64) static constexpr uint16_t ORDER[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(ORDER), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int j = 0; j < KEYS; j += 2)
    for (int i = 0; i < d; i += 32, out += 64) {
      for (int k = j; k < j + 2 && k < of_more.n; k++)
        Products::ask(more + of_more.at[k] + i);
      const __m512i even = j < tile.n ? numbers_at(values + tile.at[j] + i) : __m512i{};
      const __m512i odd = j + 1 < tile.n ? numbers_at(values + tile.at[j + 1] + i) : __m512i{};
      _mm512_store_si512(out, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_store_si512(out + 32, _mm512_permutex2var_epi16(even, high, odd));
    }
}

// Of head size d, a multiple of 32, over keys and values of type T.
template <class Products, class T>
void attend_pairs(const Attention& a, float* scratch) {
  const int d = a.cache.head_size, rows = a.queries * a.group;  // of a head
  const int together = std::min(16, rows), of_head = rounded(rows, together), all = a.heads * of_head;
  auto take = [&](size_t floats) { return std::exchange(scratch, scratch + (floats + 15) / 16 * 16); };
  auto take_bf16 = [&](size_t values) { return reinterpret_cast<bf16*>(take((values + 1) / 2)); };
  bf16* copies = take_bf16(size_t(16) * d);
  bf16* values[2] = {take_bf16(size_t(KEYS) * d), take_bf16(size_t(KEYS) * d)};
  bf16* q = take_bf16(size_t(all) * d);     // [tiles], as the products take it
  bf16* p = take_bf16(size_t(all) * KEYS);  // [tiles], as the products take it
  float* scores = take(size_t(all) * KEYS);  // [tiles][KEYS][16], or of fewer rows as the products make it
  float* sums = take(size_t(all) * d);       // [all][d]
  float* part = take(size_t(of_head) * d);   // [of_head][d]
  float *maximum = take(all), *weight = take(all), *old = take(all);
  alignas(64) int seen[TILED_ROWS], query[TILED_ROWS];  // of each row
  alignas(64) float of_keys[KEYS], of_values[KEYS];     // scales of a head's codes
  for (int r = 0; r < rows; r++) query[r] = r / a.group;
  const float scale = a.scale * 1.44269504f;  // scores in units of log 2
  const T *all_keys = static_cast<const T*>(a.cache.keys), *all_values = static_cast<const T*>(a.cache.values);
  const size_t of_next_head = a.cache.of_head();
  const int64_t end = a.first + a.queries;  // keys that the last query sees
  Tile next(a, 0, end);
  if (Products::ASKS_FAR_AHEAD)
    for (int head = 0; head < a.heads; head++)
      for (int i = 0; i < std::min(16, next.n) * d; i += 32) Products::ask(all_keys + next.at[0] + head * of_next_head + i);
  for (int head = 0; head < a.heads; head++)
    for (int tile = 0; tile < of_head; tile += together) {
      for (int r = tile; r < tile + together; r++) {
        float* to = part + size_t(r - tile) * d;
        if (r >= rows) {
          std::memset(to, 0, sizeof(float) * d);
          continue;
        }
        const float* from = a.q + size_t(r / a.group) * a.ld + size_t(head * a.group + r % a.group) * d;
        for (int i = 0; i < d; i += LANES) save(to + i, load(from + i) * scale);
      }
      Products::queries(part, together, d, q + size_t(head * of_head + tile) * d);
    }
  std::fill(sums, sums + size_t(all) * d, 0.0f);
  std::fill(weight, weight + all, 0.0f);
  std::fill(maximum, maximum + all, -std::numeric_limits<float>::infinity());
  Products::begin(together);
  while (next.n) {
    const Tile tile = next;
    next = Tile(a, tile.first + KEYS, end);
    int begin = 0;  // the first tile with a row that sees a key of these
    for (int r = 0; r < of_head; r++) {
      seen[r] = r < rows ? int(std::clamp<int64_t>(a.first + query[r] + 1 - tile.first, 0, tile.n)) : 0;
      if (r < rows && !seen[r]) begin = (r + 1) / together * together;
    }
    // Keys in the order in which they lie in memory: 16 tokens of all heads, one head after the other.
    for (int j = 0; j < tile.n; j += 16) {
      const size_t follows = j + 16 < tile.n ? tile.at[j + 16] : next.n ? next.at[0] : tile.at[j];
      for (int head = 0; head < a.heads; head++) {
        const T* keys = all_keys + tile.at[j] + head * of_next_head;
        const T* more = Products::ASKS_FAR_AHEAD ? all_values + tile.at[j] + head * of_next_head
                        : head + 1 < a.heads     ? keys + of_next_head
                                                 : all_keys + follows;
        const size_t first = size_t(head) * of_head + begin;
        auto score = [&](const bf16* keys, const bf16* more) {
          Products::score(q + first * d, keys, more, std::min(16, tile.n - j), (of_head - begin) / together, together, d, j,
                          scores + first * KEYS);
        };
        const bool together_in_memory = a.cache.block_size % 16 == 0;
        if constexpr (!IS_CODES<T>)
          if (together_in_memory) {
            score(keys, more);
            continue;
          }
        for (int i = 0; i < std::min(16, tile.n - j); i++)
          for (int c = 0; c < d; c += 32) {
            if (IS_CODES<T>) Products::ask(more + i * d + c);
            _mm512_storeu_si512(copies + i * d + c, numbers_at(all_keys + tile.at[j + i] + head * of_next_head + c));
          }
        score(copies, copies);
      }
    }
    auto soften = [&](int head) {
      if constexpr (IS_CODES<T>) {
        load_scales(a, all_keys, head, tile.first, tile.n, of_keys);
        load_scales(a, all_values, head, tile.first, tile.n, of_values);
      }
      for (int r = begin; r < of_head; r += together) {
        const int row = head * of_head + r;
        float *of_scores = scores + size_t(row) * KEYS, *m = maximum + row, *w = weight + row, *o = old + row;
        if constexpr (IS_CODES<T>) Products::scale(of_scores, together, of_keys), settle();
        bf16* of_p = p + size_t(row) * KEYS;
        const vi of_seen = *reinterpret_cast<const vi*>(seen + r);
        if (together == 16 && seen[r] == KEYS && seen[r + 15] == KEYS)
          soften_tile<Products, true, T>(of_scores, of_values, of_seen, m, w, o, of_p);
        else if (together == 16) soften_tile<Products, false, T>(of_scores, of_values, of_seen, m, w, o, of_p);
        else soften_rows<Products, T>(of_scores, of_values, together, seen + r, m, w, o, of_p);
      }
    };
    auto blend = [&](int head) {
      const size_t row = size_t(head) * of_head + begin;
      Products::blend(p + row * KEYS, values[head % 2], rows - begin, together, seen + begin, d, old + row, sums + row * d,
                      part);
    };
    // While one head's values come from memory, what multiplies them is computed, and the head before is done.
    for (int head = 0; head < a.heads; head++) {
      const T* of_head_values = all_values + head * of_next_head;
      const bool is_last = head + 1 == a.heads;
      bf16* pairs = values[head % 2];
      if (Products::ASKS_FAR_AHEAD)
        pair_values<Products>(of_head_values, tile, all_keys + head * of_next_head, next, d, pairs);
      else if (is_last)
        pair_values<Products>(of_head_values, tile, all_values, next, d, pairs);
      else
        pair_values<Products>(of_head_values, tile, of_head_values + of_next_head, tile, d, pairs);
      soften(head);
      if (head) blend(head - 1);
    }
    blend(a.heads - 1);
  }
  Products::end(together);
  for (int head = 0; head < a.heads; head++)
    for (int r = 0; r < rows; r++) {
      const int row = head * of_head + r;
      const int column = a.out_column + (head * a.group + r % a.group) * d;
      const float *from = sums + size_t(row) * d, share = 1.0f / weight[row];
      if (a.out.is_bf16()) put<bf16>(a.out, a.out_row + r / a.group, column, from, d, share);
      else put<float>(a.out, a.out_row + r / a.group, column, from, d, share);
    }
}

// An initiation must round as an increment does, so the cache and the model decide, never the batch.
template <class Products>
void attention_in_pairs(const Attention& a, float* scratch) {
  // One of these always, behind an encoder; `least` always, in a prefix LM.
  const bool plain = a.window == UNBOUNDED && !a.origin && !a.all && !a.least && !a.bias;
  const bool fits = a.cache.head_size % 32 == 0 && plain;
  if (fits && a.cache.type == Type::bf16) attend_pairs<Products, bf16>(a, scratch);
  else if (fits && a.cache.type == Type::i8 && a.narrows) attend_pairs<Products, int8_t>(a, scratch);
  else attention(a, scratch);
}

}  // namespace

// The kernels, over vectors of LANES floats. Each file that includes this is compiled once for each instruction set, and an
// instruction set's files make one library: so each has what it uses, and no more of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "isa.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

namespace {

using namespace orca;

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef int8_t vb __attribute__((vector_size(LANES)));
typedef float vf_u __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t vi_u __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t vh_u __attribute__((vector_size(LANES * 2), aligned(2)));

constexpr int VECTORS = PANEL / LANES;  // of a panel

inline vf load(const float* p) { return *reinterpret_cast<const vf_u*>(p); }
inline void save(float* p, vf x) { *reinterpret_cast<vf_u*>(p) = x; }
inline vf splat(float x) { return x - vf{}; }
inline vf bits(vi x) { return reinterpret_cast<vf>(x); }
inline vi bits(vf x) { return reinterpret_cast<vi>(x); }
inline vf larger(vf a, vf b) { return a > b ? a : b; }  // b where one is NaN
inline vf smaller(vf a, vf b) { return a < b ? a : b; }

// The even or the odd ones of 2 * LANES bfloat16.
inline vf load_half(const bf16* p, int odd) {
  const vi both = *reinterpret_cast<const vi_u*>(p);
  return bits(odd ? both & int32_t(0xffff0000) : both << 16);
}
#if defined(__AVX512BF16__)
inline void save(bf16* p, vf x) {
  const __m256bh narrowed = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
  std::memcpy(p, &narrowed, sizeof narrowed);
}
#else
inline void save(bf16* p, vf x) {
  vi b = bits(x);
  b = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  b = x == x ? b : (vi{} + 0x7fc0);
  *reinterpret_cast<vh_u*>(p) = __builtin_convertvector(b, vh);
}
#endif
inline void save_one(float* p, float x) { *p = x; }
inline void save_one(bf16* p, float x) { *p = narrow(x); }

inline vi lanes() {
  vi lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  return lane;
}

// The sum, or the largest, of all lanes, in each lane. Always in the same order.
inline vf total(vf x) {
  for (int half = LANES / 2; half; half /= 2) x += __builtin_shuffle(x, lanes() ^ half);
  return x;
}
inline vf largest(vf x) {
  for (int half = LANES / 2; half; half /= 2) x = larger(x, __builtin_shuffle(x, lanes() ^ half));
  return x;
}

// e^x to about an ulp: 2^n by the exponent's bits, and a polynomial for the rest (Cephes' expf). Below -87.3 it is not 0
// but 1.2e-38.
inline vf exponential(vf x) {
  const vf given = x;
  x = larger(splat(-87.3365f), x);
  x = smaller(splat(88.3762f), x);
  const vf magic = splat(12582912.0f);
  vf shifted = x * 1.44269504f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return given == given ? bits(bits(p) + ((bits(shifted) - bits(magic)) << 23)) : given;  // NaN stays NaN
}

// Calls use(rows), at most MOST, with a constant.
template <int MOST, class F>
inline void with_rows(int rows, F use) {
  if (rows == MOST) return use(std::integral_constant<int, MOST>());
  if constexpr (MOST > 1) with_rows<MOST - 1>(rows, use);
}

// Products in float32. A tile has as many rows as there are registers for their sums. An element is the sum over k in
// ascending order, in one accumulator, however rows, panels and k are cut: a float32 that is put aside and loaded again is
// the same.
//
// What is used again soon lies near: a tile's DEEP columns (6 KB) and weights for as many k (16 KB in float32) in the level-1
// cache, ROWS rows of operand (96 KB) and their sums of GROUP panels (96 KB) in the level-2 cache.
constexpr int MOST_ROWS = LANES == 16 ? 8 : LANES == 8 ? 6 : 2, PANELS = LANES == 16 ? 2 : 1, DEEP = 256 / PANELS;
constexpr int ROWS = 96, GROUP = 16;
// Rows for whose sums, and for weights while they are widened, there are registers.
constexpr int FEW = LANES == 16 ? 8 : LANES == 8 ? 4 : 2;

template <class T>
constexpr bool IS_BF16 = std::is_same_v<T, bf16>;
template <class T>
constexpr int TURN = IS_BF16<T> ? 4 : 8;  // k of a turn of the loop

// sums += R rows of a tile x P panels that are `apart` elements from each other, over `depth` k. Calls fetch(k) in each turn.
//
// A neighbour on the same core may take half of what the core decodes, so each instruction that does not multiply costs time.
// 12 multiplications need 8 loads; long turns make the loop's own instructions few. (With turns of 2 k in float32 GCC 12 keeps
// sums in memory.)
template <int R, int P, class T, class F>
[[gnu::always_inline]] inline void multiply(const float* a, const T* weights, size_t apart, int depth,
                                            vf (&sum)[R][P][VECTORS], F fetch) {
#pragma GCC unroll 1
  for (int k = 0; k < depth; k += TURN<T>, a += TURN<T>, weights += TURN<T> * PANEL) {
    fetch(k);
#pragma GCC unroll 8
    for (int i = 0; i < TURN<T>; i++)
      for (int p = 0; p < P; p++) {
        vf w[VECTORS];
        for (int v = 0; v < VECTORS; v++)
          if constexpr (IS_BF16<T>) w[v] = load_half(weights + p * apart + i / 2 * 2 * PANEL + v * LANES * 2, i % 2);
          else w[v] = load(weights + p * apart + i * PANEL + v * LANES);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < VECTORS; v++) sum[r][p][v] += a[r * DEEP + i] * w[v];
      }
  }
}

// A single tile, times panels from `panel` on, P at a time. This waits for memory, so the P streams must not pause: lines are
// asked for ahead, across the end of the panels.
template <int R, int P, class T>
void few_rows(const Gemm& g, int& panel, int last) {
  constexpr int AHEAD = 2048 / sizeof(T), LINE = 64 / sizeof(T);
  const int depth = g.weights->steps * STEP;
  const size_t of_a_panel = size_t(depth) * PANEL;
  for (; panel + P <= last; panel += P) {
    vf sum[R][P][VECTORS] = {};
    const T* weights = reinterpret_cast<const T*>(g.weights->panel(panel));
    const float* a = g.operand.row<const float>(0);
    for (int from = 0; from < depth; from += DEEP, a += MOST_ROWS * DEEP)
      multiply<R, P>(a, weights + from * PANEL, of_a_panel, std::min(DEEP, depth - from), sum, [&](int k) {
        const size_t at = size_t(from + k) * PANEL + AHEAD;
        const T* line = weights + at + (at < of_a_panel ? 0 : (P - 1) * of_a_panel);
        for (int p = 0; p < P; p++)
          for (int i = 0; i < TURN<T> * PANEL; i += LINE) __builtin_prefetch(line + p * of_a_panel + i);
      });
    float sums[R][PANEL];
    for (int p = 0; p < P; p++) {
      for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) save(sums[r] + v * LANES, sum[r][p][v]);
      finish(g, panel + p, 0, R, sums[0], PANEL);
    }
  }
}

struct Aside {
  alignas(64) float weights[PANELS][DEEP][PANEL];
  alignas(64) float sums[GROUP][ROWS][PANEL];
};

inline void widen_panel(const bf16* from, int depth, float* to) {
  for (int k = 0; k < depth; k += 2, from += 2 * PANEL)
    for (int i = 0; i < 2; i++, to += PANEL)
      for (int v = 0; v < VECTORS; v++) save(to + v * LANES, load_half(from + v * LANES * 2, i));
}

// Rows [first, last) times P panels for k in [from, to). `next` is what will be multiplied after it.
template <int P, class T>
void pass(const Gemm& g, int panel, int first, int last, int from, int to, const char* next, Aside& aside, int group) {
  const size_t of_a_panel = size_t(g.weights->steps) * STEP * PANEL;
  const T* weights = reinterpret_cast<const T*>(g.weights->panel(panel)) + size_t(from) * PANEL;
  // With two tiles it would not pay, but tiles of more than FEW rows leave no registers to widen in.
  const bool widens = IS_BF16<T> && (last - first > 2 * FEW || g.operand.tile_of(first).rows > FEW);
  if constexpr (IS_BF16<T>)
    for (int p = 0; p < P && widens; p++) widen_panel(weights + p * of_a_panel, to - from, aside.weights[p][0]);
  const int tiles = (last - first + MOST_ROWS - 1) / MOST_ROWS, of_a_k = PANEL * int(sizeof(T)) / tiles + 1;  // bytes to fetch
  for (int row = first; row < last;) {
    const Operand::Tile tile = g.operand.tile_of(row);
    with_rows<MOST_ROWS>(tile.rows, [&](auto constant) {
      constexpr int R = constant;
      vf sum[R][P][VECTORS] = {};
      auto each = [&](auto use) {
        for (int r = 0; r < R; r++)
          for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) use(aside.sums[group + p][row - first + r] + v * LANES, sum[r][p][v]);
      };
      if (from) each([](const float* put, vf& x) { x = load(put); });
      const float* a = g.operand.row<const float>(row) + g.operand.column(from);
      auto fetch = [&](auto turn) {
        for (int p = 0; p < P; p++)
          for (int i = 0; i < turn * PANEL / 2 * int(sizeof(T)); i += 64)  // two tiles at least share it
            __builtin_prefetch(next + p * of_a_panel * sizeof(T) + i);
        next += turn * of_a_k;
      };
      if (widens)
        multiply<R, P>(a, aside.weights[0][0], DEEP * PANEL, to - from, sum,
                       [&](int) { fetch(std::integral_constant<int, TURN<float>>()); });
      else if constexpr (!IS_BF16<T> || R <= FEW)
        multiply<R, P>(a, weights, of_a_panel, to - from, sum,
                       [&](int) { fetch(std::integral_constant<int, TURN<T>>()); });
      each([](float* put, vf x) { save(put, x); });
    });
    row += tile.rows;
  }
}

template <class T>
void many_rows(const Gemm& g, int panel, int last, int first_row, int last_row) {
  Aside aside;
  const int depth = g.weights->steps * STEP;
  auto weights = [&](int panel, int k) { return g.weights->panel(panel) + size_t(k) * PANEL * sizeof(T); };
  for (int end; panel < last; panel = end) {
    end = std::min(last, panel + GROUP);
    for (int from = 0; from < depth; from += DEEP) {
      const int to = std::min(depth, from + DEEP);
      for (int p = panel; p < end;) {
        const bool whole = p + PANELS <= end;
        const int after = p + (whole ? PANELS : 1);
        const char* next = after < end ? weights(after, from) : to < depth ? weights(panel, to) : weights(end, 0);
        if (whole) pass<PANELS, T>(g, p, first_row, last_row, from, to, next, aside, p - panel);
        else pass<1, T>(g, p, first_row, last_row, from, to, next, aside, p - panel);
        p = after;
      }
    }
    int p = panel;
    for (; p + 2 <= end; p += 2)
      finish_two(g, p, first_row, last_row - first_row, aside.sums[p - panel][0], aside.sums[p - panel + 1][0], PANEL);
    if (p < end) finish(g, p, first_row, last_row - first_row, aside.sums[p - panel][0], PANEL);
  }
}

template <bool WIDEN>
void gemm(const Gemm& g, int panel, int last) {
  using T = std::conditional_t<WIDEN, bf16, float>;
  if (g.rows > MOST_ROWS) {
    static_assert(ROWS % MOST_ROWS == 0);
    for (int row = 0, end; row < g.rows; row = end) {
      const int left = g.rows - row, parts = (left + ROWS - 1) / ROWS;
      end = parts == 1 ? g.rows : g.operand.tile_of(row + rounded((left + parts - 1) / parts, MOST_ROWS)).first;
      many_rows<T>(g, panel, last, row, end);
    }
    return;
  }
  with_rows<MOST_ROWS>(g.rows, [&](auto constant) {
    constexpr int R = constant, WIDEST = std::clamp(FEW * PANELS / R, 1, 4);
    few_rows<R, WIDEST, T>(g, panel, last);
    few_rows<R, 1, T>(g, panel, last);
  });
}

// The codes of a group as float32.
inline void open_codes(const char* packed, float (&weights)[GROUP_OF_CODES][PANEL]) {
  const int8_t* codes = reinterpret_cast<const int8_t*>(packed);
  for (int k = 0; k < GROUP_OF_CODES; k += 4)
    for (int i = 0; i < 4; i++)
      for (int c = 0; c < PANEL; c++) weights[k + i][c] = codes[k * PANEL + 4 * c + i];
}

// The same of four bits: less a zero point, which is 8 if it is not in the scales, and times a multiplier in fours.
template <Type TYPE>
inline void open_fours(const char* packed, float (&weights)[GROUP_OF_CODES][PANEL]) {
  constexpr GroupOfPanel OF = group_of(TYPE);
  const uint8_t* both = reinterpret_cast<const uint8_t*>(packed);
  const uint32_t* scales = reinterpret_cast<const uint32_t*>(packed + OF.scales);
  for (int part = 0; part < GROUP_OF_CODES; part += PART) {
    int times[PANEL], zeros[PANEL];
    for (int c = 0; c < PANEL; c++) {
      times[c] = TYPE == Type::i4 ? int8_t(packed[MULTIPLIERS + part / PART * PANEL + c]) : 1;
      zeros[c] = is_grouped(TYPE) ? scales[part * OF.of_output / GROUP_OF_CODES * PANEL + c] & ZERO_BITS : 8;
    }
    for (int k = 0; k < PART / 2; k += 4, both += 4 * PANEL)
      for (int i = 0; i < 4; i++)
        for (int c = 0; c < PANEL; c++) {
          weights[part + k + i][c] = float(((both[4 * c + i] & 15) - zeros[c]) * times[c]);
          weights[part + PART / 2 + k + i][c] = float(((both[4 * c + i] >> 4) - zeros[c]) * times[c]);
        }
  }
}

// Weights in codes. Operands are codes, too, kept in float32: a sum of 128 products is a whole number below 2^24, so it is exact
// in whatever order it is made, and the same as in the integers of other instruction sets. The sums of what has one scale are
// added in ascending order.
template <Type TYPE>
void gemm_opened(const Gemm& g, int panel, int last) {
  constexpr GroupOfPanel OF = group_of(TYPE);
  constexpr bool IN_HALVES = TYPE == Type::blocks8 || TYPE == Type::blocks4;
  constexpr int DEPTH = GROUP_OF_CODES / OF.of_output;  // inputs that have one scale
  alignas(64) float weights[GROUP_OF_CODES][PANEL], scales[GROUP_OF_CODES / DEPTH][PANEL], sums[ROWS][PANEL];
  static_assert(DEEP % GROUP_OF_CODES == 0);
  for (int first = 0, end; first < g.rows; first = end) {
    end = g.rows - first <= ROWS ? g.rows : g.operand.tile_of(first + ROWS).first;
    for (int p = panel; p < last; p++) {
      const char* packed = g.weights->panel(p);
      std::memset(sums, 0, sizeof sums);
      for (int group = 0; group < g.codes.groups; group++, packed += OF.bytes) {
        if constexpr (TYPE == Type::i8 || TYPE == Type::blocks8) open_codes(packed, weights);
        else open_fours<TYPE>(packed, weights);
        if constexpr (IN_HALVES)
          for (int i = 0; i < PARTS * PANEL; i++) scales[i / PANEL][i % PANEL] = widen_half(reinterpret_cast<const uint16_t*>(packed + OF.scales)[i]);
        else if constexpr (is_grouped(TYPE))
          for (int i = 0; i < OF.of_output * PANEL; i++) scales[i / PANEL][i % PANEL] = scale_of(reinterpret_cast<const uint32_t*>(packed + OF.scales)[i]);
        else std::memcpy(scales, packed + OF.scales, sizeof scales);
        for (int row = first; row < end;) {
          const Operand::Tile tile = g.operand.tile_of(row);
          const float* a = g.operand.row<const float>(row) + g.operand.column(group * GROUP_OF_CODES);
          with_rows<MOST_ROWS>(tile.rows, [&](auto constant) {
            constexpr int R = constant;
            for (int from = 0; from < GROUP_OF_CODES; from += DEPTH) {
              vf counted[R][1][VECTORS] = {};
              multiply<R, 1, float>(a + from, weights[from], 0, DEPTH, counted, [](int) {});
              for (int r = 0; r < R; r++) {
                const float scale = g.codes.scales[size_t(row + r) * g.codes.groups + group];
                float* to = sums[row - first + r];
                for (int v = 0; v < VECTORS; v++)
                  save(to + v * LANES, load(to + v * LANES) + counted[r][0][v] * (scale * load(scales[from / DEPTH] + v * LANES)));
              }
            }
          });
          row += tile.rows;
        }
      }
      finish(g, p, first, end - first, sums[0], PANEL);
    }
  }
}

// Numbers as codes: the integer that is nearest to x * (127 / largest), half to even, and the scale largest / 127. If the largest
// is below 1e-30 they are zeros. One that is not finite makes a scale that is not.
constexpr float MAGIC = 12582912.0f;  // added to a small number it leaves the nearest integer in the lowest bits
struct Range {
  float inverse, scale;

  // most: bits of the numbers without their signs, which are in the numbers' order, and a NaN's before all.
  explicit Range(vi most) {
    int32_t found = most[0];
    for (int i = 1; i < LANES; i++) found = std::max(found, int32_t(most[i]));
    float largest;
    std::memcpy(&largest, &found, 4);
    const bool is_zero = largest < 1e-30f;
    inverse = is_zero ? 0.0f : 127.0f / largest, scale = is_zero ? 0.0f : largest / 127.0f;
  }

  // MAGIC + the code. The bound keeps NaN out of the integers, and the product a number of its own: it is rounded before the
  // sum is.
  vf shifted(vf x) const { return smaller(x * inverse, splat(127.0f)) + MAGIC; }
};
inline vi larger_bits(vi most, vf x) {
  const vi of = bits(x) & 0x7fffffff;
  return of > most ? of : most;
}
inline vi code_of(vf shifted) { return bits(shifted) - bits(splat(MAGIC)); }

// A row of float32 -> codes of each group of 128.
template <class T>
inline void encode_row(const float* x, const Operand& to, const Codes& codes, int row) {
  T* out = to.row<T>(row);
  for (int group = 0; group < codes.groups; group++, x += GROUP_OF_CODES) {
    vi most{};
    for (int i = 0; i < GROUP_OF_CODES; i += LANES) most = larger_bits(most, load(x + i));
    const Range range(most);
    vi totals[PARTS] = {};
    for (int i = 0; i < GROUP_OF_CODES; i += LANES) {
      const vf shifted = range.shifted(load(x + i));
      T* put = out + to.column(group * GROUP_OF_CODES + i);
      if constexpr (std::is_same_v<T, float>) {
        save(put, shifted - MAGIC);
      } else {
        const vi code = code_of(shifted);
        const vb narrowed = __builtin_convertvector(code, vb);
        std::memcpy(put, &narrowed, sizeof narrowed);
        totals[i / PART] += code;
      }
    }
    codes.scales[size_t(row) * codes.groups + group] = range.scale;
    for (int part = 0; part < PARTS; part++) {
      int32_t sum = 0;
      for (int i = 0; i < LANES; i++) sum += totals[part][i];
      codes.sums[(size_t(row) * codes.groups + group) * PARTS + part] = sum;
    }
  }
}

[[maybe_unused]] void encode(const float* x, const Operand& to, const Codes& codes, int row) {
  if (to.type == Type::i8) encode_row<int8_t>(x, to, codes, row);
  else encode_row<float>(x, to, codes, row);
}

[[maybe_unused]] float encode_head(const float* x, int8_t* to, int n) {
  auto part = [&](int i) {
    if (n - i >= LANES) return load(x + i);
    vf rest{};
    for (int j = 0; i + j < n; j++) rest[j] = x[i + j];
    return rest;
  };
  vi most{};
  for (int i = 0; i < n; i += LANES) most = larger_bits(most, part(i));
  const Range range(most);
  for (int i = 0; i < n; i += LANES) {
    const vb narrowed = __builtin_convertvector(code_of(range.shifted(part(i))), vb);
    std::memcpy(to + i, &narrowed, size_t(std::min(LANES, n - i)));
  }
  return range.scale;
}

template <class T>
inline void normalize(const Norm& n, const float* x, const Operand& to, int row, float* kept) {
  T* out = to.row<T>(row);
  const int whole = n.width / LANES * LANES;
  float mean = 0;
  if (n.bias) {
    vf sum{};
    for (int i = 0; i < whole; i += LANES) sum += load(x + i);
    mean = total(sum)[0];
    for (int i = whole; i < n.width; i++) mean += x[i];
    mean /= n.width;
  }
  vf squares{};
  for (int i = 0; i < whole; i += LANES) {
    vf d = load(x + i) - mean;
    squares += d * d;
  }
  float variance = total(squares)[0];
  for (int i = whole; i < n.width; i++) variance += (x[i] - mean) * (x[i] - mean);
  const float factor = 1.0f / std::sqrt(variance / n.width + n.epsilon);
  for (int tile = 0; tile < to.width; tile += to.deep, out += to.tile * to.deep)
    for (int c = 0; c < to.deep; c += LANES) {
      const int i = tile + c;
      if (i + LANES <= n.width) {
        vf y = (load(x + i) - mean) * factor * load(n.weight + i);
        if (n.bias) y += load(n.bias + i);
        save(out + c, y);
        if (kept) save(kept + i, y);
      } else {
        for (int j = 0; j < LANES; j++) {
          float y = 0;
          if (i + j < n.width) {
            y = (x[i + j] - mean) * factor * n.weight[i + j];
            if (n.bias) y += n.bias[i + j];
            if (kept) kept[i + j] = y;
          }
          save_one(out + c + j, y);
        }
      }
    }
}

[[maybe_unused]] void norm(const Norm& n, const float* x, const Operand& to, int row, float* kept) {
  if (to.is_bf16()) normalize<bf16>(n, x, to, row, kept);
  else normalize<float>(n, x, to, row, kept);
}

[[maybe_unused]] void norm_head(const Norm& n, float* x) {
  const int whole = n.width / LANES * LANES;
  vf squares{};
  for (int i = 0; i < whole; i += LANES) squares += load(x + i) * load(x + i);
  float sum = total(squares)[0];
  for (int i = whole; i < n.width; i++) sum += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(sum / n.width + n.epsilon);
  for (int i = 0; i < whole; i += LANES) save(x + i, load(x + i) * factor * load(n.weight + i));
  for (int i = whole; i < n.width; i++) x[i] = x[i] * factor * n.weight[i];
}

[[maybe_unused]] void turn(const Turn& t, float* x) {
  float* y = x + t.half;
  int i = 0;
  for (; i + LANES <= t.half; i += LANES) {
    const vf a = load(x + i), b = load(y + i), c = load(t.cosines + i), s = load(t.sines + i);
    save(x + i, a * c - b * s), save(y + i, b * c + a * s);
  }
  for (; i < t.half; i++) {
    const float a = x[i], b = y[i];
    x[i] = a * t.cosines[i] - b * t.sines[i], y[i] = b * t.cosines[i] + a * t.sines[i];
  }
}

// Vectors of which lane i is lane i of `a`, or of `b` where bit HALF of i is set; and lane i ^ HALF of them.
template <int HALF>
inline vf mixed(vf a, vf b) {
  return __builtin_shuffle(a, b, lanes() + ((lanes() & HALF) != 0 ? vi{} + LANES : vi{}));
}
template <int HALF>
inline vf mixed_across(vf a, vf b) {
  return __builtin_shuffle(a, b, (lanes() ^ HALF) + ((lanes() & HALF) != 0 ? vi{} + LANES : vi{}));
}

// Lane i is what all lanes of vector(i) make together, combined in the order of `total` and `largest`. A vector may be made
// when it is asked for.
template <int HALF = 1, class F, class C>
[[gnu::always_inline]] inline vf across(F vector, C combine, int i = 0) {
  if constexpr (HALF == LANES) {
    return vector(i);
  } else {
    const vf a = across<2 * HALF>(vector, combine, i), b = across<2 * HALF>(vector, combine, i + HALF);
    return combine(mixed<HALF>(a, b), mixed_across<HALF>(a, b));
  }
}
template <class F>
[[gnu::always_inline]] inline vf totals(F vector) {
  return across(vector, [](vf a, vf b) { return a + b; });
}

// LANES rows of LANES elements become columns.
template <int HALF = LANES / 2>
[[gnu::always_inline]] inline void transpose(vf (&x)[LANES]) {
  for (int i = 0; i < LANES; i++)
    if (!(i & HALF)) {
      const vf a = x[i], b = x[i + HALF];
      const vi upper = lanes() & HALF;
      x[i] = __builtin_shuffle(a, b, upper != 0 ? lanes() - HALF + LANES : lanes());
      x[i + HALF] = __builtin_shuffle(a, b, upper != 0 ? lanes() + LANES : lanes() + HALF);
    }
  if constexpr (HALF > 1) transpose<HALF / 2>(x);
}

// Vector i of a row of the cache, as attention orders its elements: bfloat16 come in pairs, so a vector has 2 * LANES
// elements' even or odd ones. `order` puts a row of float32 into this order, `in_order` takes it back.
inline vf piece(const float* row, int i) { return load(row + i * LANES); }
inline vf piece(const bf16* row, int i) { return load_half(row + i / 2 * (2 * LANES), i % 2); }
inline vf piece(const int8_t* row, int i) {
  row += i * LANES;
#if defined(__AVX512F__)
  const vi codes = reinterpret_cast<vi>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row))));
#elif defined(__AVX2__)
  const vi codes = reinterpret_cast<vi>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row))));
#else
  vi codes;
  for (int c = 0; c < LANES; c++) codes[c] = row[c];
#endif
  return __builtin_convertvector(codes, vf);
}
template <class T>
inline void order(float* row, int d) {
  if constexpr (sizeof(T) == sizeof(bf16))
    for (int i = 0; i < d; i += 2 * LANES) {
      const vf a = load(row + i), b = load(row + i + LANES);
      save(row + i, __builtin_shuffle(a, b, 2 * lanes()));
      save(row + i + LANES, __builtin_shuffle(a, b, 2 * lanes() + 1));
    }
}
template <class T>
inline void in_order(float* row, int d) {
  if constexpr (sizeof(T) == sizeof(bf16))
    for (int i = 0; i < d; i += 2 * LANES) {
      const vf even = load(row + i), odd = load(row + i + LANES);
      const vi lane = lanes() / 2 + (lanes() & 1) * LANES;
      save(row + i, __builtin_shuffle(even, odd, lane));
      save(row + i + LANES, __builtin_shuffle(even, odd, lane + LANES / 2));
    }
}

// Calls use(j, x, n, offset) for runs of tokens that lie together: n tokens from key first + j on, the first one `offset` tokens behind
// the beginning of its block, whose keys (or values) begin at element x.
template <class F>
inline void runs(const Attention& a, int head, int64_t first, int n, F use) {
  const int size = a.cache.block_size;
  int64_t block = (a.origin + first) / size;
  int offset = int(a.origin + first - block * size);
  for (int j = 0; j < n; block++, offset = 0) {
    const int here = std::min(n - j, size - offset);
    use(j, a.cache.at(a.blocks[block], head, offset), here, offset);
    j += here;
  }
}

// Where a tile's keys (and values) of a call's first head begin in the cache. Entries past the last repeat it.
struct Places {
  int n;  // of them that are there
  size_t at[KEYS];

  Places(const Attention& a, int64_t first, int64_t end) : n(int(std::min<int64_t>(KEYS, end - first))) {
    runs(a, a.head, first, n, [&](int j, size_t start, int tokens, int) {
      for (int i = 0; i < tokens; i++) at[j + i] = start + size_t(i) * a.cache.head_size;
    });
    std::fill(at + n, at + KEYS, at[n - 1]);
  }
};

// Keys and values may be codes. Their scales multiply a key's scores, and a value's weights, so that codes are multiplied as they are.
template <class T>
constexpr bool IS_CODES = std::is_same_v<T, int8_t>;

// The scales [KEYS] of n keys (or values) from position `first` on, of a call's head; zeros behind them.
inline void load_scales(const Attention& a, const void* cache, int head, int64_t first, int n, float* scales) {
  std::fill(scales + n, scales + KEYS, 0.0f);
  runs(a, a.head + head, first, n, [&](int j, size_t start, int tokens, int offset) {
    std::memcpy(scales + j, static_cast<const char*>(cache) + a.cache.scale(start, offset), sizeof(float) * tokens);
  });
}

// Products with scales are rounded as they are: the compiler may make no one operation of them and of what follows.
inline void settle() { __asm__ volatile("" : : : "memory"); }

// A tile's keys or values of one head, rows of d elements. A reader of row j prefetches row j of what is read next.
template <class T>
struct Rows {
  const T* begin;
  const size_t* at;
  const T* next;
  const size_t* next_at;

  const T* row(int j, int d) const {
    for (int i = 0; i < d; i += int(64 / sizeof(T))) __builtin_prefetch(next + next_at[j] + i);
    return begin + at[j];
  }
};

// A row of queries is scored and blended alone, from the cache, or with others, from a copy that suits many: the order
// of additions is one. A score sums its products in LANES chains, and those as `total` does; a tile's values are added
// from the first key on.

// The scores of one row with a tile's keys. It sees the first `seen`; the others are -infinity. scales: of codes.
template <int D, class T>
inline void score(const float* q, const Rows<T>& keys, const float* scales, int d, int seen, float* p) {
  const int vectors = (D ? D : d) / LANES;
  const vf nothing = splat(-std::numeric_limits<float>::infinity());
  for (int j = 0; j < KEYS; j += LANES) {
    if (j >= seen) {
      save(p + j, nothing);
      continue;
    }
    vf s = totals([&](int key) {
      const T* row = keys.row(j + key, D ? D : d);
      vf sum{};
      for (int i = 0; i < vectors; i++) sum += load(q + i * LANES) * piece(row, i);
      return sum;
    });
    if constexpr (IS_CODES<T>) s *= load(scales + j);
    save(p + j, lanes() < seen - j ? s : nothing);
  }
}

// For many rows of queries, in float32: keys become [d][KEYS], values [KEYS][d].
template <int D, class T>
inline void columns(const Rows<T>& keys, int d, int n, float* out) {
  for (int j = 0; j < n; j += LANES) {
    const T* rows[LANES];
    for (int key = 0; key < LANES; key++) rows[key] = keys.row(j + key, D ? D : d);
    for (int i = 0; i < (D ? D : d) / LANES; i++) {
      vf x[LANES];
      for (int key = 0; key < LANES; key++) x[key] = piece(rows[key], i);
      transpose(x);
      for (int c = 0; c < LANES; c++) save(out + (i * LANES + c) * KEYS + j, x[c]);
    }
  }
}
template <int D, class T>
inline void widened(const Rows<T>& values, int d, int n, float* out) {
  for (int j = 0; j < n; j++, out += D ? D : d) {
    const T* row = values.row(j, D ? D : d);
    for (int i = 0; i < (D ? D : d) / LANES; i++) save(out + i * LANES, piece(row, i));
  }
}

constexpr int WIDE = 2;  // vectors of a block of sums

// The chains from `lane` on, of R rows and some keys, summed as `total` does.
template <int HALF, int R, int D>
[[gnu::always_inline]] inline void chains(const float* q, const float* keys, int d, int lane, vf (&sum)[R][WIDE]) {
  if constexpr (HALF == LANES) {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < WIDE; v++) sum[r][v] = vf{};
    for (int c = lane; c < (D ? D : d); c += LANES)
      for (int r = 0; r < R; r++)
        for (int v = 0; v < WIDE; v++) sum[r][v] += q[r * (D ? D : d) + c] * load(keys + c * KEYS + v * LANES);
  } else {
    vf more[R][WIDE];
    chains<2 * HALF, R, D>(q, keys, d, lane, sum);
    chains<2 * HALF, R, D>(q, keys, d, lane + HALF, more);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < WIDE; v++) sum[r][v] += more[r][v];
  }
}

// The scores of R rows with a tile's keys, of which each row sees as many as the row before, or more.
template <int R, int D, class T>
inline void score_rows(const float* q, const float* keys, const float* scales, int d, const int* seen, float* p) {
  const vf nothing = splat(-std::numeric_limits<float>::infinity());
  for (int j = 0; j < KEYS; j += WIDE * LANES) {
    vf s[R][WIDE] = {};
    if (j < seen[R - 1]) chains<1, R, D>(q, keys + j, d, 0, s);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < WIDE; v++) {
        const int key = j + v * LANES;
        if constexpr (IS_CODES<T>) s[r][v] *= load(scales + key);
        save(p + r * KEYS + key, lanes() < seen[r] - key ? s[r][v] : nothing);
      }
  }
}

// p = e^(score - maximum) of R rows, 1 or LANES, and what this does to their maxima and weights. `old`: what to scale
// earlier sums with.
template <int R>
inline void soften(float* p, float* maximum, float* weight, float* old) {
  const vf nothing = splat(-std::numeric_limits<float>::infinity());
  auto most = [&](int r) {
    vf x = load(p + r * KEYS);
    for (int j = LANES; j < KEYS; j += LANES) x = larger(x, load(p + r * KEYS + j));
    return x;
  };
  auto soften_row = [&](int r, float now) {
    vf all{};
    for (int j = 0; j < KEYS; j += LANES) {
      const vf s = load(p + r * KEYS + j);
      vf e = exponential(s - now);
      e = s == nothing ? vf{} : e;
      save(p + r * KEYS + j, e);
      all += e;
    }
    return all;
  };
  if constexpr (R == 1) {
    const float now = std::max(*maximum, largest(most(0))[0]);
    const vf all = total(soften_row(0, now)), scale = exponential(splat(*maximum - now));
    *weight = (splat(*weight) * scale + all)[0], *maximum = now, *old = scale[0];
  } else {
    const vf before = load(maximum), now = larger(across(most, larger), before);
    const vf all = totals([&](int r) { return soften_row(r, now[r]); }), scale = exponential(before - now);
    save(weight, load(weight) * scale + all), save(maximum, now), save(old, scale);
  }
}

// sums = sums * old + p * values, of R rows and V vectors of each. A row sees as many keys as the row before, or more.
// It adds the values of those and no others: 0 times one that is not finite would not be 0. Even and odd keys are summed
// apart where a row has few vectors, whose sums would wait for each other.
template <int R, int V, class F>
[[gnu::always_inline]] inline void blend(const float* p, F read, const int* seen, const float* old, float* sums,
                                         int d) {
  constexpr int CHAINS = LANES == 16 ? 2 : 1;
  vf part[CHAINS][R][V];
  for (int chain = 0; chain < CHAINS; chain++)
    for (int r = 0; r < R; r++)
      for (int i = 0; i < V; i++) part[chain][r][i] = vf{};
  int j = 0;
  for (; j + CHAINS <= seen[0]; j += CHAINS)
    for (int chain = 0; chain < CHAINS; chain++) {
      vf x[V];
      read(j + chain, x);
      for (int r = 0; r < R; r++)
        for (int i = 0; i < V; i++) part[chain][r][i] += p[r * KEYS + j + chain] * x[i];
    }
  for (; j < seen[R - 1]; j += CHAINS)
    for (int chain = 0; chain < CHAINS; chain++) {
      vf x[V];
      read(j + chain, x);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const vi sees = vi{} + (j + chain) < seen[r];
        for (int i = 0; i < V; i++) {
          const vf more = part[chain][r][i] + p[r * KEYS + j + chain] * x[i];
          part[chain][r][i] = sees ? more : part[chain][r][i];
        }
      }
    }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < V; i++) {
      float* sum = sums + r * d + i * LANES;
      const vf more = CHAINS == 2 ? part[0][r][i] + part[CHAINS - 1][r][i] : part[0][r][i];
      save(sum, load(sum) * old[r] + more);
    }
}

// Calls use(r, R) for rows [r, end), R at a time and the rest in smaller pieces.
template <int R, class F>
inline void in_blocks(int r, int end, F use) {
  for (; r + R <= end; r += R) use(r, std::integral_constant<int, R>());
  if constexpr (R > 1) in_blocks<R / 2>(r, end, use);
}

// x * share to columns [column, column + size) of a row of an operand.
template <class T>
inline void put(const Operand& operand, int row, int column, const float* x, int size, float share) {
  T* begin = operand.row<T>(row);
  while (size) {
    const int run = std::min(size, operand.deep - column % operand.deep);  // of one tile
    T* to = begin + operand.column(column);
    int i = 0;
    for (; i + LANES <= run; i += LANES) save(to + i, load(x + i) * share);
    for (; i < run; i++) save_one(to + i, x[i] * share);
    column += run, x += run, size -= run;
  }
}

[[maybe_unused]] void copy(const float* x, int width, const Operand& to, int row) {
  if (to.is_bf16()) put<bf16>(to, row, 0, x, width, 1.0f);
  else put<float>(to, row, 0, x, width, 1.0f);
}

// Softmax over tiles of 32 keys from the first key on, rescaled at each tile (Milakov and Gimelshein, "Online normalizer
// calculation for softmax"). A query meets the same tiles and the same order of operations whether it is an increment
// or one of an initiation's many, so its result is the same bits.
//
// Tiles are the outer loop and heads the inner one, for keys and then for values: the heads of a block follow one
// another in memory.
template <int D, class T>
void attend(const Attention& a, float* scratch, int padded) {
  constexpr int MANY = 6;  // rows for which a tile's keys are transposed, and its values widened, once for all
  constexpr int ALONE = (D % 64 == 0 && D && LANES > 4 ? 64 : 32) / LANES;  // vectors of one row's sums in registers
  const int d = D ? D : padded, size = a.cache.head_size, rows = a.queries * a.group;  // of a head
  float* tile = scratch;
  float* q = tile + KEYS * d;           // [heads * rows][d]
  float* sums = q + QUERIES * d;        // [heads * rows][d]
  float* p = sums + QUERIES * d;        // [heads * rows][KEYS]: scores, then e^(score - maximum)
  float* maximum = p + QUERIES * KEYS;  // [heads * rows]
  float* weight = maximum + QUERIES;    // [heads * rows]: the sum of e^(score - maximum)
  float* old = weight + QUERIES;        // [heads * rows]
  T* whole = reinterpret_cast<T*>(old + QUERIES);  // [KEYS][d]: rows of the cache that fill no d elements, and zeros
  int seen[QUERIES], unseen[QUERIES];
  if (size < d) std::memset(whole, 0, sizeof(T) * KEYS * d);
  for (int head = 0; head < a.heads; head++)
    for (int r = 0; r < rows; r++) {
      const int row = head * rows + r;
      const float* from = a.q + size_t(r / a.group) * a.ld + size_t(head * a.group + r % a.group) * size;
      for (int i = 0; i < d; i += LANES) save(q + row * d + i, vf{}), save(sums + row * d + i, vf{});
      for (int i = 0; i < size; i++) q[row * d + i] = from[i] * a.scale;
      order<T>(q + row * d, d);
      maximum[row] = -std::numeric_limits<float>::infinity();
      weight[row] = 0;
    }
  const T *keys = static_cast<const T*>(a.cache.keys), *values = static_cast<const T*>(a.cache.values);
  const size_t of_head = a.cache.of_head();
  const int64_t end = a.all ? a.all : std::max(a.least, a.first + a.queries);  // keys that the last query sees
  const int64_t begins = std::max<int64_t>(0, a.first + 1 - a.window) / KEYS * KEYS;  // the tile of the first that any sees
  size_t of_whole[KEYS];
  for (int j = 0; j < KEYS; j++) of_whole[j] = size_t(j) * d;
  alignas(64) float coded[KEYS];  // scales of a head's keys, or values, in codes
  Places next(a, begins, end);
  for (int64_t first = begins; first < end; first += KEYS) {
    const Places here = next;
    const int n = here.n;
    if (first + KEYS < end) next = Places(a, first + KEYS, end);
    int begin = 0, stop = rows;  // rows [begin, stop) see a key of this tile: of keys [unseen, seen) of it
    for (int r = 0; r < rows; r++) {
      const int64_t after = (a.all ? a.all : std::max(a.least, a.first + r / a.group + 1)) - first;
      seen[r] = int(std::clamp<int64_t>(after, 0, n)), unseen[r] = int(std::clamp<int64_t>(after - a.window, 0, n));
      if (!seen[r]) begin = r + 1;
      else if (unseen[r] == n && r < stop) stop = r;
    }
    // Scores of keys before a row's window. Their values are the request's own, and finite: 0 times one is 0.
    auto hide = [&](float* scores) {
      for (int r = begin; r < stop; r++)
        std::fill(scores + r * KEYS, scores + r * KEYS + unseen[r], -std::numeric_limits<float>::infinity());
    };
    // Adds what the bias has for the distance of key and query. Beyond its reach it has the same for all.
    auto add_bias = [&](float* scores, int head) {
      for (int r = begin; r < stop; r++) {
        const int64_t distance = first - (a.first + r / a.group), reach = a.bias_reach;
        const float* of = a.bias + size_t(head * a.group + r % a.group) * a.bias_ld;
        of += std::clamp<int64_t>(distance, -reach - KEYS, reach);
        for (int j = 0; j < KEYS; j += LANES) save(scores + r * KEYS + j, load(scores + r * KEYS + j) + load(of + j));
      }
    };
    // The rows of a head. Those of the head behind it are read next, and behind the last head's those of `then`.
    auto rows_of = [&](const T* from, int head, const T* then, const Places& then_at) {
      Rows<T> found{from + head * of_head, here.at, from + (head + 1) * of_head, here.at};
      if (head + 1 == a.heads) found.next = then, found.next_at = then_at.at;
      if (size == d) return found;
      for (int j = 0; j < n; j++) std::memcpy(whole + j * d, found.row(j, size), sizeof(T) * size);
      return Rows<T>{whole, of_whole, whole, of_whole};
    };
    const bool many = stop - begin >= MANY;
    for (int head = 0; head < a.heads; head++) {
      const Rows<T> of = rows_of(keys, head, values, here);
      const float* queries = q + head * rows * d;
      float* scores = p + head * rows * KEYS;
      if constexpr (IS_CODES<T>) load_scales(a, keys, head, first, n, coded);
      if (many) {
        columns<D>(of, d, n, tile);
        in_blocks<4>(begin, stop, [&](int r, auto together) {
          score_rows<together, D, T>(queries + r * d, tile, coded, d, seen + r, scores + r * KEYS);
        });
      } else {
        for (int r = begin; r < stop; r++) score<D>(queries + r * d, of, coded, d, seen[r], scores + r * KEYS);
      }
      if constexpr (IS_CODES<T>) settle();
      if (a.bias) add_bias(scores, head);
      if (unseen[stop - 1]) hide(scores);
    }
    auto soften_rows = [&](int r, int end) {
      for (; r + LANES <= end; r += LANES) soften<LANES>(p + r * KEYS, maximum + r, weight + r, old + r);
      for (; r < end; r++) soften<1>(p + r * KEYS, maximum + r, weight + r, old + r);
    };
    const bool all = !begin && stop == rows;
    if (all) soften_rows(0, a.heads * rows);  // all heads' together
    for (int head = 0; !all && head < a.heads; head++) soften_rows(head * rows + begin, head * rows + stop);
    for (int head = 0; head < a.heads; head++) {
      const Rows<T> of = rows_of(values, head, keys, next);
      float *weights = p + head * rows * KEYS, *scales = old + head * rows;
      float* outs = sums + head * rows * d;
      if constexpr (IS_CODES<T>) {
        load_scales(a, values, head, first, n, coded);
        for (int r = begin; r < stop; r++)
          for (int j = 0; j < KEYS; j += LANES) save(weights + r * KEYS + j, load(weights + r * KEYS + j) * load(coded + j));
        settle();
      }
      if (many) {
        widened<D>(of, d, n, tile);
        for (int c = 0; c < d; c += WIDE * LANES) {
          auto read = [&](int j, vf(&x)[WIDE]) {
            for (int i = 0; i < WIDE; i++) x[i] = load(tile + j * d + c + i * LANES);
          };
          in_blocks<4>(begin, stop, [&](int r, auto together) {
            blend<together, WIDE>(weights + r * KEYS, read, seen + r, scales + r, outs + r * d + c, d);
          });
        }
      } else {
        for (int v = 0; v < d / LANES; v += ALONE) {
          auto read = [&](int j, vf(&x)[ALONE]) {
            const T* row = of.row(j, d);
            for (int i = 0; i < ALONE; i++) x[i] = piece(row, v + i);
          };
          for (int r = begin; r < stop; r++)
            blend<1, ALONE>(weights + r * KEYS, read, seen + r, scales + r, outs + r * d + v * LANES, d);
        }
      }
    }
  }
  for (int head = 0; head < a.heads; head++)
    for (int r = 0; r < rows; r++) {
      const int row = head * rows + r;
      const float share = 1.0f / weight[row];
      const int to = a.out_row + r / a.group, column = a.out_column + (head * a.group + r % a.group) * size;
      in_order<T>(sums + row * d, d);
      if (a.out.is_bf16()) put<bf16>(a.out, to, column, sums + row * d, size, share);
      else put<float>(a.out, to, column, sums + row * d, size, share);
    }
}

template <class T>
void attend_heads(const Attention& a, float* scratch) {
  switch (a.cache.head_size) {
    case 64: return attend<64, T>(a, scratch, 64);
    case 128: return attend<128, T>(a, scratch, 128);
    default: return attend<0, T>(a, scratch, rounded(a.cache.head_size, 32));
  }
}

[[maybe_unused]] void attention(const Attention& a, float* scratch) {
  if (a.cache.type == Type::i8) attend_heads<int8_t>(a, scratch);
  else if (a.cache.type == Type::bf16) attend_heads<bf16>(a, scratch);
  else attend_heads<float>(a, scratch);
}

[[maybe_unused]] void narrow_all(const float* from, bf16* to, int n) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) save(to + i, load(from + i));
  for (; i < n; i++) to[i] = narrow(from[i]);
}

[[maybe_unused]] void nothing() {}

}  // namespace

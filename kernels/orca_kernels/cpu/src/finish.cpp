// What becomes of the sums of a product: what adapters add, bias, activation, and where it goes.
#include "kernels.h"

namespace {

// 1 - 2 / (1 + e^2x)
inline vf hyperbolic_tangent(vf x) { return 1.0f - 2.0f / (1.0f + exponential(2.0f * x)); }

// Abramowitz and Stegun 7.1.26: an absolute error of 1.5e-7.
inline vf error_function(vf x) {
  vf a = x < 0.0f ? -x : x;
  vf t = 1.0f / (1.0f + 0.3275911f * a);
  vf p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  vf y = 1.0f - p * t * exponential(-a * a);
  return x < 0.0f ? -y : y;
}

template <Activation A>
inline vf activate(vf x) {
  if constexpr (A == Activation::gelu) return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
  // 0.5 (1 + tanh u) = 1 / (1 + e^-2u)
  if constexpr (A == Activation::tanh_gelu)
    return x / (1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x)));
  if constexpr (A == Activation::relu) return x < 0.0f ? vf{} : x;
  if constexpr (A == Activation::silu) return x / (1.0f + exponential(-x));
  if constexpr (A == Activation::tanh) return hyperbolic_tangent(x);
  return x;
}

// What becomes of `rows` x 16 sums of one panel: sums[r * stride ...], of the rows from `first` on.

template <class F>
inline void with_bias(const Gemm& g, int panel, int rows, const float* sums, int stride, F use) {
  vf bias[VECTORS] = {};
  if (g.weights->bias)
    for (int v = 0; v < VECTORS; v++) bias[v] = load(g.weights->bias + panel * PANEL + v * LANES);
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < VECTORS; v++) use(r, v * LANES, load(sums + r * stride + v * LANES) + bias[v]);
}

template <Activation A, class T>
inline void finish_operand(const Gemm& g, int panel, int first, int rows, const float* sums, int stride) {
  const Operand& to = g.out_operand;
  const int column = panel * PANEL;
  for (int done = 0; done < rows;) {
    const Operand::Tile tile = to.tile_of(first + done);
    const int here = std::min(rows - done, tile.first + tile.rows - first - done);
    T* out = to.row<T>(first + done) + to.column(column);
    with_bias(g, panel, here, sums + done * stride, stride,
              [&](int r, int c, vf y) { save(out + r * to.deep + c, activate<A>(y)); });
    done += here;
  }
}

template <Activation A>
inline void finish_operand(const Gemm& g, int panel, int first, int rows, const float* sums, int stride) {
  if (g.out_operand.is_bf16()) finish_operand<A, bf16>(g, panel, first, rows, sums, stride);
  else finish_operand<A, float>(g, panel, first, rows, sums, stride);
}

// The columns of a gate are the first half of a panel, those of `up` the second.
template <Activation A, class T>
inline void finish_gated(const Gemm& g, int panel, int first, int rows, const float* sums, int stride) {
  const Operand& to = g.out_operand;
  const int column = panel * PANEL / 2;
  for (int done = 0; done < rows;) {
    const Operand::Tile tile = to.tile_of(first + done);
    const int here = std::min(rows - done, tile.first + tile.rows - first - done);
    T* out = to.row<T>(first + done) + to.column(column);
    vf kept[VECTORS];
    with_bias(g, panel, here, sums + done * stride, stride, [&](int r, int c, vf y) {
      if constexpr (VECTORS == 1) {
        alignas(64) T both[PANEL];
        save(both, activate<A>(y) * __builtin_shuffle(y, lanes() ^ (PANEL / 2)));
        std::memcpy(out + r * to.deep, both, sizeof(T) * PANEL / 2);
      } else {
        kept[c / LANES] = c < PANEL / 2 ? activate<A>(y) : y;
        if (c >= PANEL / 2) save(out + r * to.deep + c - PANEL / 2, kept[(c - PANEL / 2) / LANES] * y);
      }
    });
    done += here;
  }
}

template <Activation A>
inline void finish_gated(const Gemm& g, int panel, int first, int rows, const float* sums, int stride) {
  if (g.out_operand.is_bf16()) finish_gated<A, bf16>(g, panel, first, rows, sums, stride);
  else finish_gated<A, float>(g, panel, first, rows, sums, stride);
}

// Two panels, of which the first is even: the gates of both fill a vector, so that the activation is computed once for them.
template <Activation A, class T>
inline void finish_two_gated(const Gemm& g, int panel, int first, int rows, const float* sums, const float* second,
                             int stride) {
  const Operand& to = g.out_operand;
  const int column = panel * PANEL / 2;
  vf bias[2] = {};
  if (g.weights->bias)
    for (int p = 0; p < 2; p++) bias[p] = load(g.weights->bias + (panel + p) * PANEL);
  const vi gates = lanes() + (lanes() & LANES / 2), ups = gates + LANES / 2;
  for (int done = 0; done < rows;) {
    const Operand::Tile tile = to.tile_of(first + done);
    const int end = std::min(rows, tile.first + tile.rows - first);
    T* out = to.row<T>(first + done) + to.column(column);
    for (; done < end; done++, out += to.deep) {
      const vf a = load(sums + done * stride) + bias[0], b = load(second + done * stride) + bias[1];
      save(out, activate<A>(__builtin_shuffle(a, b, gates)) * __builtin_shuffle(a, b, ups));
    }
  }
}

// Calls use(activation) with a constant.
template <class F>
inline void with_activation(Activation activation, F use) {
  switch (activation) {
    case Activation::none: return use(std::integral_constant<Activation, Activation::none>());
    case Activation::gelu: return use(std::integral_constant<Activation, Activation::gelu>());
    case Activation::tanh_gelu: return use(std::integral_constant<Activation, Activation::tanh_gelu>());
    case Activation::relu: return use(std::integral_constant<Activation, Activation::relu>());
    case Activation::silu: return use(std::integral_constant<Activation, Activation::silu>());
    case Activation::tanh: return use(std::integral_constant<Activation, Activation::tanh>());
  }
}

constexpr int ADDED = 32;  // rows that get what is added to them at once

// to [R][PANEL] += low B^T of a panel, of R rows that have one B. Where low is in bfloat16, by products of pairs;
// otherwise in two chains of additions, of even and of odd k.
template <int R, class T>
inline void add_low(const Added::Run& run, const T* b, const float* low, int ld, float (*to)[PANEL]) {
  vf sum[2][R][VECTORS] = {};
#pragma GCC unroll 1
  for (int k = 0; k < run.count; k += 2, b += 2 * PANEL)
    for (int i = 0; i < 2; i++)
      for (int v = 0; v < VECTORS; v++) {
        vf w;
        if constexpr (std::is_same_v<T, bf16>) w = load_half(b + v * LANES * 2, i);
        else w = load(b + i * PANEL + v * LANES);
        for (int r = 0; r < R; r++) {
          const float *of = low + r * ld + k + i, one = of[run.first], other = of[run.second];
          if constexpr (VECTORS == 1) sum[i][r][v] += (lanes() < PANEL / 2 ? splat(one) : splat(other)) * w;
          else sum[i][r][v] += (v < VECTORS / 2 ? one : other) * w;
        }
      }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) {
      float* at = to[r] + v * LANES;
      save(at, load(at) + (sum[0][r][v] + sum[1][r][v]));
    }
}

#if defined(__AVX512BF16__)
// HALVES: `second` is not `first`.
template <int R, bool HALVES>
inline void add_pairs(const Added::Run& run, const bf16* b, const bf16* low, int ld, float (*to)[PANEL]) {
  __m512 sum[R] = {};
#pragma GCC unroll 4
  for (int k = 0; k < run.count; k += 2, b += 2 * PANEL) {
    const auto w = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
    for (int r = 0; r < R; r++) {
      int32_t one, other;
      std::memcpy(&one, low + r * ld + run.first + k, 4), std::memcpy(&other, low + r * ld + run.second + k, 4);
      __m512i pairs = _mm512_set1_epi32(one);
      if constexpr (HALVES) pairs = _mm512_mask_set1_epi32(pairs, 0xff00, other);
      sum[r] = _mm512_dpbf16_ps(sum[r], reinterpret_cast<__m512bh>(pairs), w);
    }
  }
  for (int r = 0; r < R; r++) save(to[r], load(to[r]) + reinterpret_cast<vf>(sum[r]));
}

template <int R>
inline void add_low(const Added::Run& run, const bf16* b, const bf16* low, int ld, float (*to)[PANEL]) {
  if (run.first == run.second) add_pairs<R, false>(run, b, low, ld, to);
  else add_pairs<R, true>(run, b, low, ld, to);
}
#endif

// The same of rows from `first` on, whatever their adapters. Rows of one adapter follow one another in `low`. Asks for what the
// panels behind need: each adapter's B is a stream of its own, and they are too many for a processor to foresee.
template <class T, class L>
inline void add_lows(const Added& added, int panel, int first, int rows, float (*to)[PANEL]) {
  constexpr int MOST = 4, AHEAD = 4;  // panels that a product has at once, at most
  const int32_t* at = added.at + first;
  for (int r = 0, end; r < rows; r = end) {
    end = r + 1;
    if (at[r] < 0) continue;
    const int adapter = added.adapters[at[r]];
    while (end < rows && end < r + MOST && at[end] == at[r] + end - r && added.adapters[at[end]] == adapter) end++;
    const Added::Run* run = added.run(adapter, panel);
    if (!run) continue;
    const size_t of_a_panel = size_t(run->count) * PANEL;
    const T* b = reinterpret_cast<const T*>(run->b) + (panel - run->begin) * of_a_panel;
    const bool is_first = !at[r] || added.adapters[at[r] - 1] != adapter;  // of its adapter
    if (is_first && panel + AHEAD < run->end)
      for (size_t i = 0; i < of_a_panel; i += 64 / sizeof(T)) __builtin_prefetch(b + AHEAD * of_a_panel + i, 0, 2);
    const L* low = static_cast<const L*>(added.low) + size_t(at[r]) * added.ld;
    with_rows<MOST>(end - r, [&](auto some) { add_low<some>(*run, b, low, added.ld, to + r); });
  }
}

// `sums` of at most ADDED rows, and what is added to them.
inline void add_to(const Gemm& g, int panel, int first, int rows, const float* sums, int stride, float (&to)[ADDED][PANEL]) {
  // By whole vectors: what is stored in smaller ones, as memcpy does, cannot be loaded until it has left for the cache.
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < VECTORS; v++) save(to[r] + v * LANES, load(sums + r * stride + v * LANES));
#if defined(__AVX512BF16__)
  if (g.added->type == Type::bf16) return add_lows<bf16, bf16>(*g.added, panel, first, rows, to);
#else
  if (g.added->type == Type::bf16) return add_lows<bf16, float>(*g.added, panel, first, rows, to);
#endif
  add_lows<float, float>(*g.added, panel, first, rows, to);
}

void finish_sums(const Gemm& g, int panel, int first, int rows, const float* sums, int stride) {
  const int column = panel * PANEL;
  float* out = g.out + size_t(first) * g.ld + column;
  switch (g.epilogue) {
    case Epilogue::store:
      return with_bias(g, panel, rows, sums, stride, [&](int r, int c, vf y) { save(out + size_t(r) * g.ld + c, y); });
    case Epilogue::add:
      return with_bias(g, panel, rows, sums, stride, [&](int r, int c, vf y) {
        float* to = out + size_t(r) * g.ld + c;
        save(to, load(to) + y);
      });
    case Epilogue::operand:
      return with_activation(g.activation,
                             [&](auto a) { finish_operand<decltype(a)::value>(g, panel, first, rows, sums, stride); });
    case Epilogue::gated:
      return with_activation(g.activation,
                             [&](auto a) { finish_gated<decltype(a)::value>(g, panel, first, rows, sums, stride); });
    case Epilogue::greedy: {
      const int n = std::min(PANEL, g.weights->n - column);
      for (int r = 0; r < rows; r++) {
        float y[PANEL];
        std::copy(sums + r * stride, sums + r * stride + PANEL, y);
        if (g.weights->bias)
          for (int c = 0; c < PANEL; c++) y[c] += g.weights->bias[column + c];
        if (g.out) std::copy(y, y + n, out + size_t(r) * g.ld);
        const int row = first + r;
        if (std::isnan(g.best[row])) continue;  // NaN is larger than every number: such a row has no token
        vf above{};
        for (int v = 0; v < VECTORS; v++) above = load(y + v * LANES) <= g.best[row] ? above : splat(1.0f);
        if (n == PANEL && !(largest(above)[0] > 0.0f)) continue;
        for (int c = 0; c < n && !std::isnan(g.best[row]); c++)  // the first of equals: panels come in ascending order
          if (!(y[c] <= g.best[row])) g.best[row] = y[c], g.index[row] = column + c;
      }
      return;
    }
  }
}

void finish_two_sums(const Gemm& g, int panel, int first, int rows, const float* sums, const float* second, int stride) {
  if constexpr (VECTORS == 1)
    if (g.epilogue == Epilogue::gated)
      return with_activation(g.activation, [&](auto a) {
        constexpr Activation A = decltype(a)::value;
        if (g.out_operand.is_bf16()) finish_two_gated<A, bf16>(g, panel, first, rows, sums, second, stride);
        else finish_two_gated<A, float>(g, panel, first, rows, sums, second, stride);
      });
  finish_sums(g, panel, first, rows, sums, stride);
  finish_sums(g, panel + 1, first, rows, second, stride);
}

}  // namespace

void orca::finish(const Gemm& g, int panel, int first, int rows, const float* sums, int stride) {
  if (!g.added) return finish_sums(g, panel, first, rows, sums, stride);
  alignas(64) float with[ADDED][PANEL];
  for (int done = 0, here; done < rows; done += here) {
    here = std::min(rows - done, ADDED);
    add_to(g, panel, first + done, here, sums + done * stride, stride, with);
    finish_sums(g, panel, first + done, here, with[0], PANEL);
  }
}

void orca::finish_two(const Gemm& g, int panel, int first, int rows, const float* sums, const float* second, int stride) {
  if (!g.added) return finish_two_sums(g, panel, first, rows, sums, second, stride);
  alignas(64) float with[2][ADDED][PANEL];
  for (int done = 0, here; done < rows; done += here) {
    here = std::min(rows - done, ADDED);
    add_to(g, panel, first + done, here, sums + done * stride, stride, with[0]);
    add_to(g, panel + 1, first + done, here, second + done * stride, stride, with[1]);
    finish_two_sums(g, panel, first + done, here, with[0][0], with[1][0], PANEL);
  }
}

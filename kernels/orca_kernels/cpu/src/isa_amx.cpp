// AMX: tiles of 16 rows x 64 bytes. One instruction multiplies 16 x 32 by 32 x 16 bfloat16 and adds to 16 x 16 float32.
//
// A row of a product depends on that row of the left tile alone, so rows that are not there may hold anything.
#include "amx_attention.h"
#include "amx_tiles.h"

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {



void enter() { configure(16); }

void leave() { _tile_release(); }

// Asks for a tile that is wanted soon.
template <_mm_hint NEAR>
inline void ask_tile(const char* tile) {
  for (int line = 0; line < TILE_BYTES; line += 64) _mm_prefetch(tile + line, NEAR);
}

// Up to 16 rows times panels [panel, last), four by four: tiles 0-3 are sums, 4 the operand.
//
// This waits for memory, so the four streams must not pause: tiles are asked for a step ahead, across the end of the panels,
// and sums are finished, some rows a step, while the next four panels are multiplied.
void few_rows(const Gemm& g, int panel, int last) {
  alignas(64) float sums[4][16 * 16];
  const int steps = g.weights->steps;
  const size_t of_a_panel = size_t(steps) * TILE_BYTES;
  auto finish_rows = [&](int four, int begin, int end) {
    for (int p = 0; p < 4 && begin < end; p++)
      finish(g, four + p, begin, end - begin, sums[p] + begin * 16, 16);
  };
  for (int four = panel; four < last; four += 4) {
    const char *a = g.operand.data, *w = g.weights->panel(four);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < steps; step++, a += TILE_BYTES, w += TILE_BYTES) {
      const char* next = step + 1 < steps ? w + TILE_BYTES : g.weights->panel(four + 4 < last ? four + 4 : four);
      _tile_loadd(4, a, 64);
      ask_tile<_MM_HINT_T1>(next);
      _tile_loadd(5, w, 64);
      _tile_dpbf16ps(0, 4, 5);
      ask_tile<_MM_HINT_T1>(next + of_a_panel);
      _tile_loadd(6, w + of_a_panel, 64);
      _tile_dpbf16ps(1, 4, 6);
      ask_tile<_MM_HINT_T1>(next + 2 * of_a_panel);
      _tile_loadd(7, w + 2 * of_a_panel, 64);
      _tile_dpbf16ps(2, 4, 7);
      ask_tile<_MM_HINT_T1>(next + 3 * of_a_panel);
      _tile_loadd(5, w + 3 * of_a_panel, 64);
      _tile_dpbf16ps(3, 4, 5);
      if (four > panel) finish_rows(four - 4, step * g.rows / steps, (step + 1) * g.rows / steps);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  finish_rows(last - 4, 0, g.rows);
}

// 32 rows times 2 panels: tiles 0-3 are sums, 4 and 5 the operand, 6 and 7 the weights. Goes on with the sums of the steps
// before `from`; a float32 that is stored and loaded again is the same, so the order of additions is that of one run over
// all steps. Calls between(step) after each step: the tiles multiply on their own meanwhile.
template <class F>
inline void block(const Gemm& g, int panel, int first, int from, int to, float* sums, F between) {
  const int steps = g.weights->steps;
  const char* a0 = g.operand.data + size_t(first / TILE) * steps * TILE_BYTES;
  const char* a1 = a0 + size_t(steps) * TILE_BYTES;
  const char *w0 = g.weights->panel(panel), *w1 = g.weights->panel(panel + 1);
  if (from) {
    _tile_loadd(0, sums, 128);
    _tile_loadd(1, sums + 16, 128);
    _tile_loadd(2, sums + 16 * 32, 128);
    _tile_loadd(3, sums + 16 * 32 + 16, 128);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int step = from; step < to; step++) {
    const size_t at = size_t(step) * TILE_BYTES;
    _tile_loadd(4, a0 + at, 64);
    _tile_loadd(6, w0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1 + at, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    between(step);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 16 * 32, 128);
  _tile_stored(3, sums + 16 * 32 + 16, 128);
}

// How many steps (of 32 k) deep BLOCKS of rows are multiplied together, and how many pairs of panels in turn. What is used
// again soon lies near: the weights of AT_ONCE steps (16 KB) in the level-1 cache while all rows pass them, the operand of
// PASS steps (768 KB) and the sums of PAIRS (384 KB) in the level-2 cache, 2 MB.
constexpr int AT_ONCE = 8, PASS = 24, PAIRS = 6;

// Rows [first_row, last_row), BLOCKS * 32 at most, times panels [panel, last), in pairs. While a pair is multiplied, the
// pair before is finished, a few rows a step, and the pair after is fetched from memory, a few lines a step.
void many_rows(const Gemm& g, int panel, int last, int first_row, int last_row) {
  alignas(64) float sums[PAIRS + 1][BLOCKS][32 * 32];  // a ring of pairs
  const int steps = g.weights->steps, pairs = (last - panel) / 2, blocks = (last_row - first_row + 31) / 32;
  const bool few = blocks <= 2;  // the weights are not used often enough to keep them near
  const int depth = few ? steps : AT_ONCE, pass = few ? steps : PASS, group = steps > pass ? PAIRS : pairs;
  const int lines = (2 * TILE_BYTES / 64 + blocks - 1) / blocks;  // a step, to fetch two panels while all blocks pass
  int complete = -1;                                              // the pair whose sums wait to be finished
  auto finish_rows = [&](int b, int begin, int end) {
    const int row = first_row + b * 32, rows = std::min(end, last_row - row) - begin;
    const float* from = sums[complete % (PAIRS + 1)][b] + begin * 32;
    if (rows <= 0) return;
    finish_two(g, panel + 2 * complete, row + begin, rows, from, from + 16, 32);
  };
  for (int first = 0; first < pairs; first += group)
    for (int begin = 0; begin < steps; begin += pass) {
      const int end = std::min(steps, begin + pass), end_of_group = std::min(pairs, first + group);
      for (int pair = first; pair < end_of_group; pair++) {
        const char* weights = g.weights->panel(panel + 2 * pair);
        const size_t of_a_panel = size_t(steps) * TILE_BYTES;
        const bool fresh = few || pair == first;  // nothing has fetched these weights
        const bool fetches = !few && pair + 1 < end_of_group;
        for (int from = begin; from < end; from += depth) {
          const int to = std::min(end, from + depth);
          for (int b = 0; b < blocks; b++)
            block(g, panel + 2 * pair, first_row + b * 32, from, to, sums[pair % (PAIRS + 1)][b], [&](int step) {
              const char* tile = weights + size_t(step) * TILE_BYTES;
              if (fresh && !b)
                ask_tile<_MM_HINT_T0>(tile + TILE_BYTES), ask_tile<_MM_HINT_T0>(tile + TILE_BYTES + of_a_panel);
              if (fetches)
                for (int line = b * lines; line < std::min(2 * TILE_BYTES / 64, (b + 1) * lines); line++)
                  _mm_prefetch(tile + (2 + line / 16) * of_a_panel + line % 16 * 64, _MM_HINT_T1);
              if (complete >= 0)
                finish_rows(b, (step - begin) * 32 / (end - begin), (step + 1 - begin) * 32 / (end - begin));
            });
        }
        complete = end == steps ? pair : -1;
      }
    }
  for (int b = 0; b < blocks; b++) finish_rows(b, 0, 32);
}

// 16 rows times 1 panel: what remains.
inline void corner(const Gemm& g, int panel, int first) {
  const int steps = g.weights->steps;
  const char* a = g.operand.data + size_t(first / TILE) * steps * TILE_BYTES;
  const char* w = g.weights->panel(panel);
  _tile_zero(0);
  for (int step = 0; step < steps; step++) {
    const size_t at = size_t(step) * TILE_BYTES;
    _tile_loadd(4, a + at, 64);
    _tile_loadd(5, w + at, 64);
    _tile_dpbf16ps(0, 4, 5);
  }
  alignas(64) float sums[16 * 16];
  _tile_stored(0, sums, 64);
  finish(g, panel, first, std::min(16, g.rows - first), sums, 16);
}

void gemm_tiles(const Gemm& g, int panel, int last) {
  if (g.rows <= TILE) {
    const int fours = panel + (last - panel) / 4 * 4;
    if (panel < fours) few_rows(g, panel, fours);
    panel = fours;
  } else {
    const int even = panel + (last - panel) / 2 * 2;
    for (int row = 0; row < g.rows; row += BLOCKS * 32)
      if (panel < even) many_rows(g, panel, even, row, std::min(g.rows, row + BLOCKS * 32));
    panel = even;
  }
  for (; panel < last; panel++)
    for (int row = 0; row < g.rows; row += TILE) corner(g, panel, row);
}

// Linux lets a process use the tiles once it has asked.
bool runs_here() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const bool has = (edx >> 24 & 1) && (edx >> 22 & 1) && (edx >> 25 & 1);  // AMX-TILE, AMX-BF16, AMX-INT8
  return has && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16") &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

}  // namespace

const orca::Isa orca::isa = {"amx", runs_here, true, Type::i8, MOST_ROWS, DEEP, enter, leave, gemm<false>, gemm_tiles,
                             encode, norm, copy, norm_head, turn, narrow_all, encode_head};

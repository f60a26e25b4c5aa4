// AMX: tiles of 16 rows x 64 bytes. One instruction multiplies 16 x 32 by 32 x 16 bfloat16 and adds to 16 x 16 float32.
//
// A row of a product depends on that row of the left tile alone, so rows that are not there may hold anything.
#define LANES 16
#include "kernels.h"

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int TILE_BYTES = 1024;
constexpr int ROW_BYTES = 768 << 10;  // of operands that stay in the level-2 cache, 2 MiB a core, beside weights

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

void enter() {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = 16;
  // Not _tile_loadconfig: GCC 12's tells the compiler that 8 bytes are read, and the others were never written.
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

void leave() { _tile_release(); }

// How far ahead of the tile in use a panel is fetched from memory, in bytes.
constexpr int AHEAD = 2 * TILE_BYTES;

inline void ahead(const char* tile) {
  for (int line = 0; line < TILE_BYTES; line += 64) _mm_prefetch(tile + AHEAD + line, _MM_HINT_T0);
}

// Up to 16 rows times 4 panels: tiles 0-3 are sums, 4 and 5 the operand.
inline void few_rows(const Gemm& g, int panel) {
  const int steps = g.weights->steps;
  const char* a = static_cast<const char*>(g.operand);
  const char *w0 = g.weights->panel(panel), *w1 = g.weights->panel(panel + 1);
  const char *w2 = g.weights->panel(panel + 2), *w3 = g.weights->panel(panel + 3);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; step++) {
    const size_t at = size_t(step) * TILE_BYTES;
    ahead(w0 + at), ahead(w1 + at), ahead(w2 + at), ahead(w3 + at);
    _tile_loadd(4, a + at, 64);
    _tile_loadd(5, w0 + at, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, w1 + at, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, w2 + at, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, w3 + at, 64);
    _tile_dpbf16ps(3, 4, 5);
  }
  alignas(64) float sums[4][16 * 16];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (int p = 0; p < 4; p++) finish(g, panel + p, 0, g.rows, sums[p], 16);
}

// 32 rows times 2 panels: tiles 0-3 are sums, 4 and 5 the operand, 6 and 7 the weights.
// `fresh`: nothing has fetched these weights yet, so they are prefetched a little ahead of their use. In each step `lines`
// cache lines from `next` on are prefetched too: part of the next two panels.
inline void block(const Gemm& g, int panel, int first, bool fresh, const char* next, int lines, float* sums) {
  const int steps = g.weights->steps;
  const char* a0 = static_cast<const char*>(g.operand) + size_t(first / TILE) * steps * TILE_BYTES;
  const char* a1 = a0 + size_t(steps) * TILE_BYTES;
  const char *w0 = g.weights->panel(panel), *w1 = g.weights->panel(panel + 1);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; step++) {
    const size_t at = size_t(step) * TILE_BYTES;
    if (fresh) ahead(w0 + at), ahead(w1 + at);
    for (int line = 0; line < lines; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    _tile_loadd(4, a0 + at, 64);
    _tile_loadd(6, w0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1 + at, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 16 * 32, 128);
  _tile_stored(3, sums + 16 * 32 + 16, 128);
}

// Rows [first_row, last_row) times panels [panel, last), in blocks. While all blocks but the first of two panels run, they
// prefetch the two panels after these. What a block has stored is finished after the next block, because a load soon
// after a tile's store waits for it.
void many_rows(const Gemm& g, int panel, int last, int first_row, int last_row) {
  alignas(64) float sums[2][32 * 32];
  int pending_panel = -1, pending_row = 0, turn = 0;
  auto finish_pending = [&] {
    if (pending_panel < 0) return;
    const float* from = sums[turn ^ 1];
    const int rows = std::min(32, last_row - pending_row);
    finish(g, pending_panel, pending_row, rows, from, 32);
    finish(g, pending_panel + 1, pending_row, rows, from + 16, 32);
  };
  const int blocks = (last_row - first_row + 31) / 32;
  const int lines = blocks > 1 ? (2 * TILE_BYTES / 64 + blocks - 2) / (blocks - 1) : 0;  // a step, to fetch 2 panels
  const bool streams = lines && lines <= 16;
  for (const int start = panel; panel < last; panel += 2)
    for (int row = first_row; row < last_row; row += 32) {
      const int done = (row - first_row) / 32;
      const bool fetches = streams && done && panel + 2 < last;
      const char* next = g.weights->panel(panel + 2) + size_t(done - 1) * lines * g.weights->steps * 64;
      block(g, panel, row, !done && (panel == start || !streams), next, fetches ? lines : 0, sums[turn]);
      finish_pending();
      pending_panel = panel, pending_row = row, turn ^= 1;
    }
  finish_pending();
}

// 16 rows times 1 panel: what remains.
inline void corner(const Gemm& g, int panel, int first) {
  const int steps = g.weights->steps;
  const char* a = static_cast<const char*>(g.operand) + size_t(first / TILE) * steps * TILE_BYTES;
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
    for (; panel + 4 <= last; panel += 4) few_rows(g, panel);
  } else {
    const int even = panel + (last - panel) / 2 * 2;
    const int rows = std::max(32, ROW_BYTES / (g.weights->steps * STEP * 2) / 32 * 32);
    for (int row = 0; row < g.rows; row += rows) many_rows(g, panel, even, row, std::min(g.rows, row + rows));
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
  const bool has = (edx >> 24 & 1) && (edx >> 22 & 1);  // AMX-TILE, AMX-BF16
  return has && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16") &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

}  // namespace

const orca::Isa orca::amx = {"amx", runs_here, true, enter, leave, gemm_tiles, gemm<false>, norm, narrow_all, attention};

// The formats in memory that all kernels share.
//
// Weights W [N, K] of a linear operation y = x W^T are packed once, in panels of 16 columns (outputs):
//   float32   [N/16][K][16]
//   bfloat16  [N/16][K/2][16][2], the order that AMX and AVX512-BF16 multiply in; elsewhere a 32-bit lane is widened to
//             its two values by a shift and a mask
// K is padded to a multiple of 32 with zeros, N to one of 16. Inputs of a linear operation are operands, in float32, or in
// bfloat16 where the instruction set multiplies it.
// All other activations are float32, row-major.
#pragma once

#include <cstddef>
#include <cstdint>

namespace orca {

constexpr int PANEL = 16;  // columns of a panel
constexpr int STEP = 32;   // columns of an operand's tile of bfloat16; K is padded to whole ones
constexpr int TILE = 16;   // rows of such a tile

using bf16 = uint16_t;

enum class Type : int { f32 = 0, bf16 = 1 };
enum class Activation : int { none = 0, gelu, tanh_gelu, relu, silu, tanh };

inline int rounded(int n, int to) { return (n + to - 1) / to * to; }

// [tiles down][tiles across][tile][deep]: what is multiplied together lies together. A tile of bfloat16 is 16 x 32; the size of
// one of float32 is the instruction set's. A last tile may have fewer rows; the memory behind them is unused. In float32, if it
// has half of a tile's rows or fewer, it shares evenly with the tile before it: one or two rows alone would wait for their own
// additions.
struct Operand {
  struct Tile {
    int index, first, rows;  // its rows are [first, first + rows)
  };

  char* data;
  int rows, width;  // whole tiles wide
  int tile, deep;   // rows and columns of a tile
  bool is_bf16;

  Tile tile_of(int row) const {
    const int rest = rows % tile;
    const bool shares = !is_bf16 && rest && rest <= tile / 2 && rows > tile;
    const int alike = rows / tile - shares, first = alike * tile, left = rows - first;
    if (row < first) return {row / tile, row / tile * tile, tile};
    const int half = shares ? (left + 1) / 2 : left;
    if (row < first + half) return {alike, first, half};
    return {alike + 1, first + half, left - half};
  }

  // Elements from the beginning to column 0 of a row, and from there to another column.
  size_t at(int row) const {
    const Tile of = tile_of(row);
    return size_t(of.index) * tile * width + size_t(row - of.first) * deep;
  }
  size_t column(int c) const { return size_t(c / deep) * tile * deep + c % deep; }

  template <class T>
  T* row(int r) const { return reinterpret_cast<T*>(data) + at(r); }

  // The rows from the first one of a tile on.
  Operand from(int row) const {
    return {data + at(row) * (is_bf16 ? 2 : 4), rows - row, width, tile, deep, is_bf16};
  }
};

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline bf16 narrow(float x) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct Packed {
  Type type;
  int n, k;           // columns (outputs) and rows (inputs), without padding
  int panels, steps;  // N/16 and K/32, rounded up
  void* data;
  float* bias;  // [panels * 16], or null

  const char* panel(int index) const {
    return static_cast<const char*>(data) + size_t(index) * steps * STEP * PANEL * (type == Type::bf16 ? 2 : 4);
  }
};

}  // namespace orca

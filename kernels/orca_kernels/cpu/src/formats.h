// The formats in memory that all kernels share.
//
// Weights W [N, K] of a linear operation y = x W^T are packed once, in panels of 16 columns (outputs):
//   float32   [N/16][K][16]
//   bfloat16  [N/16][K/2][16][2], the order that AMX and AVX512-BF16 multiply in; elsewhere a 32-bit lane is widened to
//             its two values by a shift and a mask
//   codes     [N/16][K/128]: [32][16][4] codes of eight bits, the order that AMX and VNNI multiply in, and the 16 scales of
//             that group of 128 inputs in float32
//   fours     [N/16][K/128]: [4][4][16][4] bytes, of 32 inputs the codes of the first 16 in the lower four bits, 8 more than they
//             are, and those of the other 16 in the upper ones; [4][16] multipliers of eight bits, which make them codes of
//             eight; the 16 scales
//   blocks8   as codes, but for scales [4][16] in float16, of each 32 inputs
//   blocks4   as fours, but for the same scales and no multipliers
//   grouped   as blocks4, but for scales [1, 2 or 4][16] in float32, of each 128, 64 or 32 inputs, whose lowest bits are a zero point:
//             a scale of float16 or bfloat16 has none of them
// K is padded with zeros to a multiple of 32, of all in codes to one of 128, N to one of 16. Inputs of a linear operation are operands,
// in float32, or in bfloat16 where the instruction set multiplies it. Weights in codes, fours and blocks multiply operands in codes (Codes).
// All other activations are float32, row-major.
#pragma once

#include <cstddef>
#include <cstdint>

namespace orca {

constexpr int PANEL = 16;  // columns of a panel
constexpr int STEP = 32;   // columns of an operand's tile of bfloat16; K is padded to whole ones
constexpr int TILE = 16;   // rows of such a tile, and of one of codes, which has as many bytes
constexpr int GROUP_OF_CODES = 128;  // inputs that have one scale: two tiles of 64 codes
constexpr int PART = 32;  // inputs that have one multiplier, in fours
constexpr int PARTS = GROUP_OF_CODES / PART;

using bf16 = uint16_t;

enum class Type : int { f32 = 0, bf16 = 1, i8 = 2, i4 = 3, blocks8 = 4, blocks4 = 5, grouped128 = 6, grouped64 = 7, grouped32 = 8 };
enum class Activation : int { none = 0, gelu, tanh_gelu, relu, silu, tanh };

inline int rounded(int n, int to) { return (n + to - 1) / to * to; }
inline int bytes(Type type) { return type == Type::f32 ? 4 : type == Type::bf16 ? 2 : 1; }

// [tiles down][tiles across][tile][deep]: what is multiplied together lies together. A tile of bfloat16 is 16 x 32, one of codes
// 16 x 64; the size of one of float32 is the instruction set's. A last tile may have fewer rows; the memory behind them is unused. In float32, if it
// has half of a tile's rows or fewer, it shares evenly with the tile before it: one or two rows alone would wait for their own
// additions.
struct Operand {
  struct Tile {
    int index, first, rows;  // its rows are [first, first + rows)
  };

  char* data;
  int rows, width;  // whole tiles wide
  int tile, deep;   // rows and columns of a tile
  Type type;

  bool is_bf16() const { return type == Type::bf16; }

  Tile tile_of(int row) const {
    const int rest = rows % tile;
    const bool shares = type == Type::f32 && rest && rest <= tile / 2 && rows > tile;
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
    return {data + at(row) * bytes(type), rows - row, width, tile, deep, type};
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

// What belongs to an operand's codes. An input is code * scale, with one scale for each row and group.
struct Codes {
  float* scales;  // [rows][groups]
  int32_t* sums;  // [rows][groups][PARTS]: of codes: what unsigned weights, which are some more than the signed ones, multiply too often
  int groups;     // of a row

  Codes from(int row) const { return {scales + size_t(row) * groups, sums + size_t(row) * groups * PARTS, groups}; }
};

constexpr int SCALES = GROUP_OF_CODES * PANEL;                        // where they begin in a group of a panel
constexpr int BYTES_OF_CODES = SCALES + PANEL * int(sizeof(float));  // of a group of a panel: whole lines
constexpr int MULTIPLIERS = SCALES / 2, SCALES_OF_FOURS = MULTIPLIERS + PARTS * PANEL;  // the same of fours
constexpr int BYTES_OF_FOURS = SCALES_OF_FOURS + PANEL * int(sizeof(float));

constexpr bool is_grouped(Type type) { return type == Type::grouped128 || type == Type::grouped64 || type == Type::grouped32; }
constexpr uint32_t ZERO_BITS = 31;  // of a scale of grouped weights

// Bytes of a group of a panel, where its scales begin, and how many each output has.
struct GroupOfPanel {
  int bytes, scales, of_output;
};
constexpr GroupOfPanel grouped(int of_output) { return {MULTIPLIERS + of_output * PANEL * 4, MULTIPLIERS, of_output}; }
constexpr GroupOfPanel group_of(Type type) {
  constexpr int OF_BLOCKS = PARTS * PANEL * 2;
  switch (type) {
    case Type::i8: return {BYTES_OF_CODES, SCALES, 1};
    case Type::i4: return {BYTES_OF_FOURS, SCALES_OF_FOURS, 1};
    case Type::blocks8: return {SCALES + OF_BLOCKS, SCALES, PARTS};
    case Type::blocks4: return {MULTIPLIERS + OF_BLOCKS, MULTIPLIERS, PARTS};
    case Type::grouped128: return grouped(1);
    case Type::grouped64: return grouped(2);
    case Type::grouped32: return grouped(4);
    default: return {0, 0, 0};
  }
}

inline float widen_half(uint16_t x) {  // float16
  const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = x >> 10 & 31, rest = x & 1023;
  uint32_t bits = sign | (exponent + 112) << 23 | rest << 13;
  float value;
  if (exponent == 31) bits = sign | 0x7f800000 | rest << 13;
  if (exponent == 0) {
    value = float(rest) * 0x1p-24f;
    return sign ? -value : value;
  }
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline float scale_of(uint32_t word) {  // of grouped weights
  word &= ~ZERO_BITS;
  float value;
  __builtin_memcpy(&value, &word, 4);
  return value;
}

struct Packed {
  Type type;
  int n, k;           // columns (outputs) and rows (inputs), without padding
  int panels, steps;  // N/16 and K/32, rounded up; of codes K is rounded to whole groups first
  void* data;
  float* bias;  // [panels * 16], or null

  bool is_codes() const { return group_of(type).bytes; }
  int groups() const { return steps / (GROUP_OF_CODES / STEP); }
  size_t panel_bytes() const {
    if (is_codes()) return size_t(groups()) * group_of(type).bytes;
    return size_t(steps) * STEP * PANEL * bytes(type);
  }
  const char* panel(int index) const { return static_cast<const char*>(data) + index * panel_bytes(); }
};

}  // namespace orca

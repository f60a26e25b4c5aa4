// The formats in memory that all kernels share.
//
// Weights W [N, K] of a linear operation y = x W^T are packed once, in panels of 16 columns (outputs):
//   float32   [N/16][K][16]
//   bfloat16  [N/16][K/2][16][2], the order that AMX and AVX512-BF16 multiply in; elsewhere a 32-bit lane is widened to
//             its two values by a shift and a mask
// Inputs of a linear operation ("operands") are tiles of 16 rows x 32 columns, [T/16][K/32][16][32], in float32, or in
// bfloat16 where the instruction set multiplies it. K is padded to a multiple of 32 with zeros, N to one of 16.
// All other activations are float32, row-major.
#pragma once

#include <cstddef>
#include <cstdint>

namespace orca {

constexpr int PANEL = 16;  // columns of a panel
constexpr int STEP = 32;   // columns of an operand's tile
constexpr int TILE = 16;   // rows of an operand's tile

using bf16 = uint16_t;

enum class Type : int { f32 = 0, bf16 = 1 };
enum class Activation : int { none = 0, gelu, tanh_gelu, relu, silu, tanh };

inline int rounded(int n, int to) { return (n + to - 1) / to * to; }

// Where column 0 of a row begins in an operand of `steps` tiles a row; column c is (c / 32) * 512 + c % 32 further.
inline size_t operand_row(size_t row, int steps) { return row / TILE * steps * (TILE * STEP) + row % TILE * STEP; }

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

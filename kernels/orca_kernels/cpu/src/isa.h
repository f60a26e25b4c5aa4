// What an instruction set provides: one table of kernels, in a library of its own. kernels.h makes most of them, from one source.
#pragma once

#include <vector>

#include "formats.h"

namespace orca {

enum class Epilogue : int {
  store,     // out = y
  add,       // out += y: the residual
  operand,   // the next operation's operand = activation(y)
  gated,     // the same = activation(gate) * up, of panels with 8 columns of a gate and the 8 of `up` behind them
  greedy,    // the largest column of each row, NaN before all, and out = y where it is asked for
};

// What adapters add to the products of some rows before anything else: low B^T, of each row's own B, where low is the row's
// x A^T (Hu et al., "LoRA", section 4.1).
struct Added {
  // Of one adapter: `count` numbers of low from `first` on make the first 8 columns of each of these panels, and those from
  // `second` on the other 8. In a panel of a gate and of `up` they are of two As. `count` is even.
  struct Run {
    int begin, end;  // panels
    int first, second, count;
    const char* b;  // of bfloat16 [panels][count / 2][16][2], of float32 [panels][count][16]
  };

  Type type;           // of B
  const void* low;     // [.., ld] of float32, or of bfloat16 where B is and the instruction set multiplies it
  int ld;
  const int32_t* at;   // [rows] a row's in `low`; -1: it gets nothing, and its bits are those without adapters
  const int32_t* adapters;              // of each row of `low`
  const std::vector<std::vector<Run>>* runs;  // by adapter, in the order of their panels

  const Run* run(int adapter, int panel) const {
    if (size_t(adapter) < runs->size())
      for (const Run& one : (*runs)[adapter])
        if (panel < one.end) return panel < one.begin ? nullptr : &one;
    return nullptr;
  }
};

// Rows of an operand times packed weights, plus bias. A row's result depends on nothing but the row: every element is
// accumulated over k in ascending order, in one accumulator, whatever else is computed beside it.
struct Gemm {
  const Packed* weights;
  Operand operand;
  Codes codes;  // of the operand, where the weights are codes
  int rows;  // the operand's first ones, whole tiles
  Epilogue epilogue;
  Activation activation;
  float* out;  // store, add: [rows][ld]; greedy: the logits, or null
  int ld;
  Operand out_operand;  // operand, gated: the next operation's
  const Added* added;   // null: no row gets anything
  float* best;          // greedy: [rows], for the columns of this call
  int32_t* index;
};

struct Norm {
  const float *weight, *bias;  // [width]; bias null: RMSNorm
  float epsilon;
  int width;
};

// One layer's keys and values, [n_blocks, kv_heads, block_size, head_size] each. In codes of eight bits (i8) a number is code * scale,
// and the block of each head has its scales behind it, [block_size] float32.
struct Cache {
  Type type;
  void *keys, *values;
  int kv_heads, block_size, head_size;

  // Elements from one head of a block to the next.
  size_t of_head() const {
    return size_t(block_size) * (head_size + (type == Type::i8 ? int(sizeof(float)) : 0));
  }
  size_t at(int64_t block, int head, int offset) const {
    return (size_t(block) * kv_heads + head) * of_head() + size_t(offset) * head_size;
  }
  // Bytes before the scale of what begins at an element, the one of this offset in its block.
  size_t scale(size_t at, int offset) const {
    return at + size_t(block_size - offset) * head_size + offset * sizeof(float);
  }
};

// Queries of one request: `queries` tokens from position `first` on, of `heads` key/value heads with `group` query heads
// each.
struct Attention {
  const float* q;  // of the first query and head: [queries][heads][group][head_size], a token every ld
  int ld;
  int queries, heads, group;
  int64_t first;
  const int64_t* blocks;  // of the request
  int64_t origin;         // its key that is counted as 0: the first that these queries see
  int64_t all;            // keys that each query sees; 0: those up to its own
  int64_t least;          // keys that each query sees at least: a prompt's, in a prefix LM. There is no window then
  Cache cache;
  bool narrows;  // queries and weights become bfloat16 where the instruction set multiplies it; of keys and values in codes
  int head;  // the first one
  float scale;
  int64_t window;     // keys that a query sees at most, its own among them
  const float* bias;  // of the first head, for key = query; see Bias. Null: none
  int bias_reach, bias_ld;
  Operand out;
  int out_row, out_column;
};

// Rotary positions of one head's elements, in place: pair (j, j + half) is turned by an angle with these cosines and sines.
// Elements behind 2 * half stay as they are.
struct Turn {
  const float *cosines, *sines;  // [half]
  int half;
};

struct Isa {
  const char* name;
  bool (*runs_here)();
  bool multiplies_bf16;  // operands of bfloat16 weights are bfloat16
  Type codes;            // what an operand's codes are kept in: i8, or f32, which holds their sums over a group exactly
  int tile, deep;        // rows and columns of an operand's tile of float32
  void (*enter)();       // in each thread, before its first kernel of a run
  void (*leave)();
  void (*gemm_f32)(const Gemm&, int first_panel, int last_panel);
  void (*gemm_bf16)(const Gemm&, int first_panel, int last_panel);
  void (*encode)(const float* x, const Operand& to, const Codes& codes, int row);  // x [to.width], zeros behind its end
  void (*norm)(const Norm&, const float* x, const Operand& to, int row, float* kept);  // kept: the same as rows, or null
  void (*copy)(const float* x, int width, const Operand& to, int row);
  void (*norm_head)(const Norm&, float* x);  // RMSNorm in place
  void (*turn)(const Turn&, float* x);
  void (*narrow)(const float*, bf16*, int n);
  float (*encode_head)(const float* x, int8_t* to, int n);  // n numbers become codes of one scale, which it returns
};

constexpr int64_t UNBOUNDED = INT64_MAX;  // a window of all keys

constexpr int KEYS = 32;     // keys of a tile of attention: softmax is rescaled once a tile, from the first key on
constexpr int QUERIES = 64;  // rows (queries x heads x group) of one call at most

constexpr int TILED_ROWS = 96;  // rows at most when each head's are padded to tiles of 16

inline size_t attention_scratch(int head_size) {
  size_t d = rounded(head_size, 32);
  return 2 * KEYS * d + TILED_ROWS * (3 * d + 2 * KEYS + 3) + 256;
}

// The library has one set. Some parts are in files of their own, so that several processors compile it at once.
extern const Isa isa;
void gemm_codes(const Gemm&, int first_panel, int last_panel);  // of weights in codes
void attend_cache(const Attention&, float* scratch);             // scratch of attention_scratch(...) floats

// What becomes of `rows` x 16 sums of one panel: sums[r * stride ...], of the rows from `first` on.
void finish(const Gemm&, int panel, int first, int rows, const float* sums, int stride);
// The same of `panel`, an even one, and of the panel behind it, whose sums begin at `second`.
void finish_two(const Gemm&, int panel, int first, int rows, const float* sums, const float* second, int stride);

}  // namespace orca

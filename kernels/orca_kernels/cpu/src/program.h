// A program: the operations of a stage of a model, recorded once when the model is loaded, run for each batch. What a
// CUDA graph is to a GPU.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isa.h"
#include "pool.h"

extern "C" {

// The batch of one run: T tokens of B requests, one request after the other.
struct orca_batch {
  int64_t tokens, requests;
  const int64_t* token_ids;   // [T]
  const int64_t* positions;   // [T]
  const int64_t* slots;       // [T] block * block_size + offset
  const int64_t* starts;      // [B + 1] first token of each request
  const int64_t* blocks;      // [B, columns] block ids
  int64_t columns;
  const int64_t* inputs;      // [B] tokens of the prompt, where they see each other (in an encoder, whose keys and values
                              // come first, or in a prefix LM), or null
  int64_t selected;           // rows that go into the head
  const int64_t* selection;   // [selected] their tokens
  char* keys;                 // [layers, n_blocks, kv_heads, block_size, head_size]; codes with scales, as Cache says
  char* values;
  int64_t layer_bytes;
  int32_t block_size;
  float* logits;              // [selected, logits_stride], or null: only the largest
  int64_t logits_stride;
  float* best;                // [selected]
  int32_t* best_index;        // [selected]
  const int32_t* adapters;    // [T] the adapter of each token, from 0; -1: it has none. Null: none has one
};
}

namespace orca {

// Zeroed memory of its own that the kernel backs with huge pages, where it has them.
class HugePages {
 public:
  HugePages() = default;
  explicit HugePages(size_t bytes);  // rounded up to whole huge pages; data() is null when memory is short
  HugePages(HugePages&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr, other.size_ = 0; }
  HugePages& operator=(HugePages&& other) noexcept {
    std::swap(data_, other.data_), std::swap(size_, other.size_);
    return *this;
  }
  ~HugePages();
  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

// Activations of a program: T rows, rounded up to a whole block of tiles.
struct Buffer {
  int width;      // columns: of float32 rows padded to whole panels, of operands to whole tiles
  Type type;
  int groups = 0;    // of a row of codes; 0: it is no buffer of codes
  int written = -1;  // of codes: the buffer of rows that they are made of
  HugePages memory;
  HugePages scales, sums;  // of codes: as Codes has them

  char* data() const { return memory.data(); }
  size_t row_bytes() const { return size_t(width) * bytes(type); }
  Codes codes() const {
    return {reinterpret_cast<float*>(scales.data()), reinterpret_cast<int32_t*>(sums.data()), groups};
  }
  void hold(int64_t rows);  // throws std::bad_alloc
};

class Program;

struct Step {
  virtual uint32_t tasks(const Program&) const = 0;
  virtual void run(Program&, uint32_t task, int thread) = 0;
  virtual void forget(int) {}  // an adapter's matrices are about to be freed
  virtual ~Step() = default;
};

class Program final : public Region {
 public:
  Program(const Isa& isa, Pool& pool) : isa(isa), pool(pool) {}

  int buffer(int width, bool operand, Type type);
  Operand operand(int buffer, int64_t rows) const;  // a buffer, as the operand of so many rows
  // The same, or the rows of which its codes are made: where an operation writes what the next one multiplies.
  Operand writable(int buffer, int64_t rows) const;
  void encode(int buffer, int64_t rows, int row);  // makes the codes of a row that has been written
  void run(int first, int last, const orca_batch& batch);

  uint32_t tasks(int step) const override { return steps[step]->tasks(*this); }
  void run(int step, uint32_t task, int thread) override { steps[step]->run(*this, task, thread); }

  const Isa& isa;
  Pool& pool;
  std::vector<Buffer> buffers;
  std::vector<std::unique_ptr<Step>> steps;

  // Of the run.
  const orca_batch* batch = nullptr;
  struct Queries {  // of one request, in one call of attention
    int64_t request, token;
    int count;
  };
  std::vector<Queries> queries;
  std::vector<std::vector<float>> scratch;  // of each thread
  std::vector<float> best;                  // [tasks of the head, selected]
  std::vector<int32_t> best_index;
  size_t best_of_a_row = 0;  // tasks of the head
  int group = 1, head_size = 0;
  struct Adapted {  // tokens of one adapter, which are multiplied together
    int adapter, first, rows;  // [first, first + rows) of adapted_tokens
  };
  std::vector<Adapted> adapted;
  std::vector<int32_t> adapted_tokens;  // those with an adapter, by adapter
  std::vector<int32_t> adapted_at;      // [T] where a token is among them; -1: nowhere
  std::vector<int32_t> adapters;        // of each of adapted_tokens
  std::vector<float> lows;              // of one operation: [adapted tokens][its width]
  std::vector<HugePages> operands;      // of each thread: what it multiplies with an adapter's A
  int low_width = 0;                    // of the widest operation
  size_t operand_bytes = 0;             // of the largest of `operands`

 private:
  void plan();
  void plan_adapters();
};

}  // namespace orca

#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <type_traits>
#include <utility>

namespace orca {

constexpr int BLOCK = 6 * TILE;  // rows: whole pairs of tiles of any type
constexpr size_t HUGE_PAGE = size_t(2) << 20;

HugePages::HugePages(size_t bytes) : size_((bytes + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1)) {
  // One page more, so that the whole pages begin at a multiple of their size.
  void* start = mmap(nullptr, size_ + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) {
    size_ = 0;
    return;
  }
  char* first = static_cast<char*>(start);
  data_ = first + (-reinterpret_cast<uintptr_t>(first) & (HUGE_PAGE - 1));
  if (data_ > first) munmap(first, data_ - first);
  const size_t after = HUGE_PAGE - (data_ - first);
  if (after) munmap(data_ + size_, after);
  // A huge page is zeroed whole, also for a buffer of a few KiB: a fifth of a rank's processor time with tiny models.
  if (bytes >= HUGE_PAGE) madvise(data_, size_, MADV_HUGEPAGE);
}

HugePages::~HugePages() {
  if (data_) munmap(data_, size_);
}

void Buffer::hold(int64_t rows) {
  const size_t all = size_t(rounded(int(rows), BLOCK));
  auto hold = [](HugePages& held, size_t bytes) {
    if (held.size() >= bytes) return;
    HugePages larger(bytes);  // of zeros: padding stays zero
    if (!larger.data()) throw std::bad_alloc();
    held = std::move(larger);
  };
  hold(memory, all * row_bytes());
  hold(scales, all * groups * sizeof(float)), hold(sums, all * groups * PARTS * sizeof(int32_t));
}

int Program::buffer(int width, bool operand, Type type) {
  Buffer made;
  made.type = type == Type::i8 ? isa.codes : type;
  made.width = rounded(width, !operand ? PANEL : type == Type::bf16 ? STEP : isa.deep);
  if (type == Type::i8) {
    made.width = rounded(width, std::max(GROUP_OF_CODES, isa.deep)), made.groups = rounded(width, GROUP_OF_CODES) / GROUP_OF_CODES;
    made.written = buffer(made.width, false, Type::f32);
  }
  buffers.push_back(std::move(made));
  return int(buffers.size()) - 1;
}

Operand Program::operand(int buffer, int64_t rows) const {
  const Buffer& of = buffers[buffer];
  const int deep[] = {isa.deep, STEP, GROUP_OF_CODES / 2};
  return {of.data(), int(rows), of.width, of.type == Type::f32 ? isa.tile : TILE, deep[int(of.type)], of.type};
}

Operand Program::writable(int buffer, int64_t rows) const {
  if (buffers[buffer].written < 0) return operand(buffer, rows);
  const Buffer& of = buffers[buffers[buffer].written];
  return {of.data(), int(rows), of.width, std::max(1, int(rows)), of.width, Type::f32};  // one tile: row-major
}

void Program::encode(int buffer, int64_t rows, int row) {
  const Buffer& of = buffers[buffer];
  isa.encode(writable(buffer, rows).row<const float>(row), operand(buffer, rows), of.codes(), row);
}

void Program::run(int first, int last, const orca_batch& b) {
  batch = &b;
  for (Buffer& buffer : buffers) buffer.hold(std::max(b.tokens, b.selected));
  plan();
  plan_adapters();
  best.resize(best_of_a_row * size_t(b.selected));
  best_index.resize(best.size());
  pool.run(*this, first, last);
}

// Cuts the requests' queries into calls of attention, the costly ones last: tasks are taken from the last one on.
void Program::plan() {
  queries.clear();
  if (!head_size) return;
  const int most = std::max(1, QUERIES / group);
  for (int64_t r = 0; r < batch->requests; r++)
    for (int64_t t = batch->starts[r]; t < batch->starts[r + 1]; t += most)
      queries.push_back({r, t, int(std::min<int64_t>(most, batch->starts[r + 1] - t))});
  auto cost = [this](const Queries& q) { return q.count * (batch->positions[q.token] + q.count); };
  std::sort(queries.begin(), queries.end(), [&](const Queries& a, const Queries& b) { return cost(a) < cost(b); });
  scratch.resize(pool.threads());
  for (auto& of_thread : scratch) of_thread.resize(attention_scratch(head_size) + 16);
}

constexpr int ROWS_OF_A_TASK = 8;
constexpr int ROWS_OF_A_PRODUCT = 512;  // of a task that multiplies, at most and but for a tile
constexpr int ROWS_OF_A_DELTA = 64;     // of a task that multiplies with an adapter's A

// Puts the tokens of each adapter together, and cuts them into tasks.
void Program::plan_adapters() {
  adapted.clear(), adapted_tokens.clear(), adapted_at.clear(), adapters.clear();
  if (!batch->adapters) return;
  for (int32_t t = 0; t < batch->tokens; t++)
    if (batch->adapters[t] >= 0) adapted_tokens.push_back(t);
  std::stable_sort(adapted_tokens.begin(), adapted_tokens.end(),
                   [&](int32_t a, int32_t b) { return batch->adapters[a] < batch->adapters[b]; });
  adapted_at.assign(batch->tokens, -1);
  for (size_t i = 0; i < adapted_tokens.size(); i++) {
    const int adapter = batch->adapters[adapted_tokens[i]];
    adapted_at[adapted_tokens[i]] = int32_t(i), adapters.push_back(adapter);
    if (adapted.empty() || adapted.back().adapter != adapter || adapted.back().rows == ROWS_OF_A_DELTA)
      adapted.push_back({adapter, int(i), 0});
    adapted.back().rows++;
  }
  lows.resize(adapted_tokens.size() * size_t(low_width));
  operands.resize(pool.threads());
  for (HugePages& memory : operands)
    if (memory.size() < operand_bytes) {
      memory = HugePages(operand_bytes);
      if (!memory.data()) throw std::bad_alloc();
    }
}

namespace {

uint32_t pieces(int64_t n, int64_t each) { return uint32_t((n + each - 1) / each); }

struct Embed : Step {
  int x;
  const Packed* tokens;
  int64_t first_token;  // of this rank's share of the vocabulary
  float scale;          // of a token's row
  const void* positions;  // [n, width], or null
  Type type;

  uint32_t tasks(const Program& p) const override { return pieces(p.batch->tokens, ROWS_OF_A_TASK); }

  void run(Program& p, uint32_t task, int) override {
    const Buffer& out = p.buffers[x];
    const int64_t end = std::min<int64_t>(p.batch->tokens, int64_t(task + 1) * ROWS_OF_A_TASK);
    for (int64_t t = int64_t(task) * ROWS_OF_A_TASK; t < end; t++) {
      float* row = reinterpret_cast<float*>(out.data() + t * out.row_bytes());
      const int64_t token = p.batch->token_ids[t] - first_token;
      const int width = tokens->k;
      if (token < 0 || token >= tokens->n) {
        std::memset(row, 0, sizeof(float) * width);
      } else {
        const char* panel = tokens->panel(int(token / PANEL));
        const int column = int(token % PANEL);
        if (tokens->type == Type::bf16) {
          const bf16* from = reinterpret_cast<const bf16*>(panel) + 2 * column;
          for (int k = 0; k < width; k++) row[k] = widen(from[k / 2 * 32 + k % 2]);
        } else {
          const float* from = reinterpret_cast<const float*>(panel) + column;
          for (int k = 0; k < width; k++) row[k] = from[k * PANEL];
        }
      }
      if (scale != 1.0f)
        for (int k = 0; k < width; k++) row[k] *= scale;
      if (!positions) continue;
      const size_t at = size_t(p.batch->positions[t]) * width;
      if (type == Type::bf16)
        for (int k = 0; k < width; k++) row[k] += widen(static_cast<const bf16*>(positions)[at + k]);
      else
        for (int k = 0; k < width; k++) row[k] += static_cast<const float*>(positions)[at + k];
    }
  }
};

struct Normalize : Step {
  int x, out;
  Norm norm;       // weight null: none, a copy
  bool keeps;      // x = out
  bool selects;    // the rows that go into the head, and no others

  int64_t rows(const Program& p) const { return selects ? p.batch->selected : p.batch->tokens; }
  uint32_t tasks(const Program& p) const override { return pieces(rows(p), ROWS_OF_A_TASK); }

  void run(Program& p, uint32_t task, int) override {
    const Buffer& from = p.buffers[x];
    const Operand to = p.writable(out, rows(p));
    const bool encodes = p.buffers[out].groups;
    const int64_t end = std::min<int64_t>(rows(p), int64_t(task + 1) * ROWS_OF_A_TASK);
    for (int64_t i = int64_t(task) * ROWS_OF_A_TASK; i < end; i++) {
      const int64_t t = selects ? p.batch->selection[i] : i;
      float* row = reinterpret_cast<float*>(from.data() + t * from.row_bytes());
      if (norm.weight) p.isa.norm(norm, row, to, int(i), keeps ? row : nullptr);
      else p.isa.copy(row, norm.width, to, int(i));
      if (encodes) p.encode(out, rows(p), int(i));
    }
  }
};

// The codes of an operand that has been written.
struct Encode : Step {
  int operand;

  uint32_t tasks(const Program& p) const override { return pieces(p.batch->tokens, ROWS_OF_A_TASK); }

  void run(Program& p, uint32_t task, int) override {
    const int64_t end = std::min<int64_t>(p.batch->tokens, int64_t(task + 1) * ROWS_OF_A_TASK);
    for (int64_t row = int64_t(task) * ROWS_OF_A_TASK; row < end; row++) p.encode(operand, p.batch->tokens, int(row));
  }
};

// Panels of a task, a multiple of `unit`, when `panels` become about `parts` tasks or more. The thread that has most of
// them has as few as possible: it ends last.
int panels_of_a_task(int panels, int parts, int threads, int unit) {
  constexpr int MOST = 48;
  auto most = [=](int each) { return int(pieces(pieces(panels, each), threads)) * each; };
  const int about = std::clamp(panels / parts / unit * unit, unit, MOST);
  int best = about;
  for (int each = std::min(about + unit, MOST); each >= std::max(unit, about / 2); each -= unit)
    if (most(each) < most(best)) best = each;
  return best;
}

// The first half of what adapters add to a linear operation's products: low = x A^T, of each token's own A. A task has tokens of one
// adapter. A row's result depends on nothing but the row, as Gemm's does.
struct Delta : Step {
  int operand;
  Type type;                                  // of A and B
  int width = 0;                              // of a row of low: of all adapters the most
  std::vector<const Packed*> a;               // by adapter: [ranks, inputs], or null
  std::vector<std::vector<Added::Run>> runs;  // by adapter: the second half, which is the linear operation's

  uint32_t tasks(const Program& p) const override { return uint32_t(p.adapted.size()); }

  void forget(int adapter) override {
    if (size_t(adapter) < a.size()) a[adapter] = nullptr, runs[adapter].clear();
  }

  void run(Program& p, uint32_t task, int thread) override {
    const Program::Adapted of = p.adapted[task];
    if (size_t(of.adapter) >= a.size() || !a[of.adapter]) return;
    const Packed& weights = *a[of.adapter];
    const int ld = weights.panels * PANEL;
    Gemm g{};
    g.weights = &weights, g.operand = operand_of(p, weights, of.rows, p.operands[thread].data()), g.rows = of.rows;
    float* made = reinterpret_cast<float*>(g.operand.data + bytes_of(g.operand));
    g.epilogue = Epilogue::store, g.out = made, g.ld = ld;
    gather(p, of, g.operand);
    (type == Type::bf16 ? p.isa.gemm_bf16 : p.isa.gemm_f32)(g, 0, weights.panels);
    for (int r = 0; r < of.rows; r++, made += ld) {
      const size_t at = size_t(of.first + r) * width;
      if (g.operand.is_bf16()) p.isa.narrow(made, reinterpret_cast<bf16*>(p.lows.data()) + at, ld);
      else std::memcpy(p.lows.data() + at, made, sizeof(float) * ld);
    }
  }

  // For the rows of an operation from `row` on.
  Added added(const Program& p, int row) const {
    return {type, p.lows.data(), width, p.adapted_at.data() + row, p.adapters.data(), &runs};
  }

  // Bytes of a thread that multiplies with A.
  static size_t memory(const Program& p, const Packed& a) {
    return bytes_of(operand_of(p, a, ROWS_OF_A_DELTA, nullptr)) + sizeof(float) * ROWS_OF_A_DELTA * a.panels * PANEL;
  }

 private:
  // The operand of a matrix of the model's type.
  static Operand operand_of(const Program& p, const Packed& weights, int rows, char* data) {
    const bool narrow = weights.type == Type::bf16 && p.isa.multiplies_bf16;
    const int deep = narrow ? STEP : p.isa.deep, width = rounded(weights.steps * STEP, deep);
    return {data, rows, width, narrow ? TILE : p.isa.tile, deep, narrow ? Type::bf16 : Type::f32};
  }

  static size_t bytes_of(const Operand& x) { return size_t(rounded(x.rows, BLOCK)) * x.width * bytes(x.type); }

  // Copies the tokens' rows of the operand. Of codes: those of which they were made.
  void gather(Program& p, const Program::Adapted& of, const Operand& to) const {
    const Operand all = p.writable(operand, p.batch->tokens);
    for (int r = 0; r < of.rows; r++) {
      const int t = p.adapted_tokens[of.first + r];
      if (all.type != to.type) {
        p.isa.copy(all.row<const float>(t), to.width, to, r);
        continue;
      }
      const int item = bytes(to.type);
      for (int c = 0; c < to.width; c += to.deep)
        std::memcpy(to.data + (to.at(r) + to.column(c)) * item, all.data + (all.at(t) + all.column(c)) * item, size_t(to.deep) * item);
    }
  }
};

struct Linear : Step {
  int operand, out;
  const Packed* weights;
  const Delta* delta = nullptr;
  Epilogue epilogue;
  Activation activation;
  int of_few, of_some, of_many;  // panels of a task: up to 16 rows, up to 64, more

  // Panels of a task: enough for streams of memory, few enough that threads end together.
  int each(const Program& p) const { return rows(p) <= TILE ? of_few : rows(p) <= 64 ? of_some : of_many; }
  uint32_t parts(const Program& p) const { return pieces(weights->panels, each(p)); }
  int rows(const Program& p) const {
    return int(epilogue == Epilogue::greedy ? p.batch->selected : p.batch->tokens);
  }
  uint32_t tasks(const Program& p) const override { return parts(p) * pieces(rows(p), ROWS_OF_A_PRODUCT); }

  void run(Program& p, uint32_t task, int) override {
    const uint32_t part = task % parts(p);
    const Operand from = p.operand(operand, rows(p));
    auto begin = [&](uint32_t product) {
      const int row = int(product) * ROWS_OF_A_PRODUCT;
      return row < rows(p) ? from.tile_of(row).first : rows(p);
    };
    const int row = begin(task / parts(p));
    Gemm g{};
    g.weights = weights, g.operand = from.from(row), g.codes = p.buffers[operand].codes().from(row), g.rows = begin(task / parts(p) + 1) - row;
    g.epilogue = epilogue, g.activation = activation;
    Added added{};
    if (delta && !p.adapted.empty()) added = delta->added(p, row), g.added = &added;
    if (epilogue == Epilogue::greedy) {
      g.ld = int(p.batch->logits_stride), g.out = p.batch->logits ? p.batch->logits + size_t(row) * g.ld : nullptr;
      const size_t at = size_t(part) * rows(p) + row;
      g.best = p.best.data() + at, g.index = p.best_index.data() + at;
      std::fill(g.best, g.best + g.rows, -std::numeric_limits<float>::infinity());
      std::fill(g.index, g.index + g.rows, 0);
    } else if (epilogue == Epilogue::operand || epilogue == Epilogue::gated) {
      g.out_operand = p.writable(out, rows(p)).from(row);
    } else {
      const Buffer& to = p.buffers[out];
      g.out = reinterpret_cast<float*>(to.data() + row * to.row_bytes()), g.ld = to.width;
    }
    const int first = int(part) * each(p), last = std::min(weights->panels, first + each(p));
    switch (weights->type) {
      case Type::f32: return p.isa.gemm_f32(g, first, last);
      case Type::bf16: return p.isa.gemm_bf16(g, first, last);
      default: return gemm_codes(g, first, last);
    }
  }
};

// The largest of all tasks of the head; the first of equals. NaN is larger than every number.
struct Greediest : Step {
  const Linear* head;

  uint32_t tasks(const Program&) const override { return 1; }

  void run(Program& p, uint32_t, int) override {
    const int64_t rows = p.batch->selected;
    const uint32_t parts = rows ? head->parts(p) : 0;
    for (int64_t r = 0; r < rows; r++) {
      p.batch->best[r] = -std::numeric_limits<float>::infinity(), p.batch->best_index[r] = 0;
      for (uint32_t part = 0; part < parts && !std::isnan(p.batch->best[r]); part++)
        if (!(p.best[part * rows + r] <= p.batch->best[r]))
          p.batch->best[r] = p.best[part * rows + r], p.batch->best_index[r] = p.best_index[part * rows + r];
    }
  }
};

struct Heads {
  int layer, kv_heads, group, head_size;
  Type type;

  Cache cache(const orca_batch& b) const {
    const size_t at = size_t(layer) * b.layer_bytes;
    return {type, b.keys + at, b.values + at, kv_heads, b.block_size, head_size};
  }
};

struct WriteKV : Step {
  int qkv;
  Heads heads;
  Norm query_norm, key_norm;     // of each head; weight null: none
  const float *cosines, *sines;  // [positions, half]
  int half;                      // pairs of a head that are turned; 0: none

  uint32_t tasks(const Program& p) const override { return pieces(p.batch->tokens, ROWS_OF_A_TASK); }

  void run(Program& p, uint32_t task, int) override {
    const Buffer& from = p.buffers[qkv];
    const Cache cache = heads.cache(*p.batch);
    const int size = heads.head_size, keys = heads.kv_heads * heads.group * size, values = keys + heads.kv_heads * size;
    const int64_t end = std::min<int64_t>(p.batch->tokens, int64_t(task + 1) * ROWS_OF_A_TASK);
    for (int64_t t = int64_t(task) * ROWS_OF_A_TASK; t < end; t++) {
      float* row = reinterpret_cast<float*>(from.data() + t * from.row_bytes());
      const int64_t slot = p.batch->slots[t], position = p.batch->positions[t];
      place(p.isa, query_norm, position, row, heads.kv_heads * heads.group);
      place(p.isa, key_norm, position, row + keys, heads.kv_heads);
      for (int head = 0; head < heads.kv_heads; head++) {
        const size_t to = cache.at(slot / cache.block_size, head, int(slot % cache.block_size));
        const size_t scale = cache.scale(to, int(slot % cache.block_size));
        put(p.isa, cache, cache.keys, to, scale, row + keys + head * size);
        put(p.isa, cache, cache.values, to, scale, row + values + head * size);
      }
    }
  }

  // Queries or keys as attention takes them: normalized, and turned by their position.
  void place(const Isa& isa, const Norm& norm, int64_t position, float* x, int n) const {
    const Turn turn{cosines + position * half, sines + position * half, half};
    for (int head = 0; head < n; head++, x += heads.head_size) {
      if (norm.weight) isa.norm_head(norm, x);
      if (half) isa.turn(turn, x);
    }
  }

  // A head's numbers to element `to`; of codes, their scale to byte `scale`.
  static void put(const Isa& isa, const Cache& cache, void* into, size_t to, size_t scale, const float* from) {
    if (cache.type == Type::i8) {
      const float of_codes = isa.encode_head(from, static_cast<int8_t*>(into) + to, cache.head_size);
      std::memcpy(static_cast<char*>(into) + scale, &of_codes, sizeof of_codes);
    } else if (cache.type == Type::bf16) {
      isa.narrow(from, static_cast<bf16*>(into) + to, cache.head_size);
    } else {
      std::memcpy(static_cast<float*>(into) + to, from, sizeof(float) * cache.head_size);
    }
  }
};

// A number for each head and distance of key and query, [heads][KEYS + 2 reach + 1 + KEYS]: at both ends those of the
// reach again, so that a tile's lie together.
struct Bias {
  std::vector<float> table;
  int reach = 0;

  int ld() const { return 2 * reach + 1 + 2 * KEYS; }
  const float* of(int head) const { return table.empty() ? nullptr : table.data() + size_t(head) * ld() + KEYS + reach; }
};

struct Attend : Step {
  int qkv, out;
  Heads heads;
  float scale;
  int64_t window;
  bool narrows;      // as Attention's
  bool sees_input;   // each query sees the keys of the encoder's tokens, and no others
  bool sees_prompt;  // each query sees the keys of the prompt, and those up to its own
  Bias bias;

  // Key/value heads of a task.
  int each(const Program& p) const {
    return std::clamp(int(p.queries.size()) * heads.kv_heads / (p.pool.threads() * 4), 1, heads.kv_heads);
  }
  uint32_t tasks(const Program& p) const override {
    return uint32_t(p.queries.size()) * pieces(heads.kv_heads, each(p));
  }

  void run(Program& p, uint32_t task, int thread) override {
    const int parts = int(pieces(heads.kv_heads, each(p)));
    const Program::Queries& queries = p.queries[task / parts];
    const Buffer& from = p.buffers[qkv];
    float* scratch = p.scratch[thread].data();
    scratch += (-reinterpret_cast<uintptr_t>(scratch) & 63) / 4;
    const int first = int(task % parts) * each(p), last = std::min(heads.kv_heads, first + each(p));
    const int at_once = std::max(1, QUERIES / (queries.count * heads.group));
    for (int head = first; head < last; head += at_once) {
      const int column = head * heads.group * heads.head_size;
      Attention a{};
      a.q = reinterpret_cast<const float*>(from.data() + queries.token * from.row_bytes()) + column, a.ld = from.width;
      a.queries = queries.count, a.heads = std::min(at_once, last - head), a.group = heads.group;
      a.first = p.batch->positions[queries.token];
      a.blocks = p.batch->blocks + queries.request * p.batch->columns;
      const int64_t inputs = p.batch->inputs ? p.batch->inputs[queries.request] : 0;
      a.origin = sees_input || sees_prompt ? 0 : inputs, a.all = sees_input ? inputs : 0;
      a.least = sees_prompt ? inputs : 0;
      a.bias = bias.of(head * heads.group), a.bias_reach = bias.reach, a.bias_ld = bias.ld();
      a.cache = heads.cache(*p.batch), a.narrows = narrows, a.head = head, a.scale = scale, a.window = window;
      a.out = p.writable(out, p.batch->tokens), a.out_row = int(queries.token), a.out_column = column;
      attend_cache(a, scratch);
    }
  }
};

// x += y, after an all-reduce of y.
struct Add : Step {
  int x, y;

  uint32_t tasks(const Program& p) const override { return pieces(p.batch->tokens, ROWS_OF_A_TASK); }

  void run(Program& p, uint32_t task, int) override {
    const int64_t begin = int64_t(task) * ROWS_OF_A_TASK;
    const int64_t rows = std::min<int64_t>(ROWS_OF_A_TASK, p.batch->tokens - begin);
    const Buffer &to = p.buffers[x], &from = p.buffers[y];
    float* into = reinterpret_cast<float*>(to.data() + begin * to.row_bytes());
    const float* what = reinterpret_cast<const float*>(from.data() + begin * from.row_bytes());
    for (int64_t i = 0; i < rows * to.width; i++) into[i] += what[i];
  }
};

// A model's packed weights, one after the other in large pieces.
class Arena {
 public:
  // Null when memory is short.
  void* take(size_t bytes) {
    bytes = (bytes + 63) & ~size_t(63);
    if (bytes > left_) {
      HugePages piece(std::max(bytes, PIECE));
      if (!piece.data()) return nullptr;
      next_ = piece.data(), left_ = piece.size();
      pieces_.push_back(std::move(piece));
    }
    void* taken = next_;
    next_ += bytes, left_ -= bytes;
    return taken;
  }

 private:
  static constexpr size_t PIECE = size_t(32) << 20;
  std::vector<HugePages> pieces_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

// Packs W, whose element (n, k) is source[n * row + k * column]. A task is a panel.
template <class T>
struct Packing final : Region {
  Packed* to;
  const T* source;
  int64_t row, column;

  uint32_t tasks(int) const override { return uint32_t(to->panels); }

  void run(int, uint32_t panel, int) override {
    const int n = std::min(PANEL, to->n - int(panel) * PANEL);
    char* into = const_cast<char*>(to->panel(int(panel)));  // of zeros
    for (int k = 0; k < to->k; k++)
      for (int c = 0; c < n; c++) {
        const T x = source[(int64_t(panel) * PANEL + c) * row + k * column];
        if (to->type == Type::bf16)
          reinterpret_cast<bf16*>(into)[(k / 2 * PANEL + c) * 2 + k % 2] = as_bf16(x);
        else
          reinterpret_cast<float*>(into)[k * PANEL + c] = as_float(x);
      }
  }

  static bf16 as_bf16(bf16 x) { return x; }
  static bf16 as_bf16(float x) { return narrow(x); }
  static float as_float(bf16 x) { return widen(x); }
  static float as_float(float x) { return x; }
};

// Packs codes [n, k], of four bits their multipliers [n, k / 32 rounded up], and scales: float32 [n, groups], of blocks float16
// [n, k / 32 rounded up], of grouped codes float32 with zero points, one for each of their groups. A task is a panel.
struct PackingCodes final : Region {
  Packed* to;
  const int8_t *codes, *multipliers;
  const void* scales;

  uint32_t tasks(int) const override { return uint32_t(to->panels); }

  void run(int, uint32_t panel, int) override {
    const int n = std::min(PANEL, to->n - int(panel) * PANEL), parts = rounded(to->k, PART) / PART;
    for (int c = 0; c < n; c++) {
      const size_t row = size_t(panel) * PANEL + c;
      for (int k = 0; k < to->k; k++) put(panel, c, k, codes[row * to->k + k]);
      for (int part = 0; multipliers && part < parts; part++)
        group(panel, part / PARTS)[MULTIPLIERS + part % PARTS * PANEL + c] = char(multipliers[row * parts + part]);
      const int of_output = group_of(to->type).of_output, count = rounded(to->k, GROUP_OF_CODES / of_output) / (GROUP_OF_CODES / of_output);
      const bool is_half = to->type == Type::blocks8 || to->type == Type::blocks4;
      for (int i = 0; i < count; i++) {
        const size_t at = size_t(i) % of_output * PANEL + c;
        if (is_half) scales_of<uint16_t>(panel, i / of_output)[at] = static_cast<const uint16_t*>(scales)[row * count + i];
        else scales_of<uint32_t>(panel, i / of_output)[at] = static_cast<const uint32_t*>(scales)[row * count + i];
      }
    }
  }

  void put(uint32_t panel, int c, int k, int8_t code) const {
    char* into = group(panel, k / GROUP_OF_CODES);  // of zeros
    const int in_group = k % GROUP_OF_CODES, in_half = k % (PART / 2);
    if (to->type == Type::i8 || to->type == Type::blocks8) {
      into[(in_group / 4 * PANEL + c) * 4 + k % 4] = char(code);
    } else {
      const int line = in_group / PART * PART / 2 + in_half / 4 * 4;
      into[line * PANEL + c * 4 + k % 4] |= char((code + 8) << (k % PART / (PART / 2) * 4));
    }
  }

  char* group(uint32_t panel, int index) const {
    return const_cast<char*>(to->panel(int(panel))) + size_t(index) * group_of(to->type).bytes;
  }

  template <class T>
  T* scales_of(uint32_t panel, int index) const { return reinterpret_cast<T*>(group(panel, index) + group_of(to->type).scales); }
};

}  // namespace

// A model's slice on this machine: its weights, its threads, its program.
struct Model {
  // What was packed, and the memory in which it lies.
  struct Weights {
    Arena arena;
    std::vector<std::unique_ptr<Packed>> packed;

    Packed* keep(std::unique_ptr<Packed> one) {
      packed.push_back(std::move(one));
      return packed.back().get();
    }
  };

  const Isa& isa;
  Weights weights;
  std::map<int, Weights> adapters;  // each has memory of its own, for it may be forgotten
  Weights* packing = &weights;      // where the next matrix goes
  Pool pool;
  Program program;

  Model(const Isa& isa, int threads) : isa(isa), pool(threads, isa.enter, isa.leave), program(isa, pool) {}

  // Room of zeros for W [n, k], and its bias [n]; null when memory is short.
  std::unique_ptr<Packed> packed(Type type, int n, int k, const float* bias) {
    auto made = std::make_unique<Packed>();
    made->type = type, made->n = n, made->k = k, made->bias = nullptr;
    made->panels = rounded(n, PANEL) / PANEL, made->steps = rounded(k, made->is_codes() ? GROUP_OF_CODES : STEP) / STEP;
    made->data = packing->arena.take(made->panels * made->panel_bytes());
    if (bias) made->bias = static_cast<float*>(packing->arena.take(sizeof(float) * made->panels * PANEL));
    if (!made->data || (bias && !made->bias)) return nullptr;
    if (bias) std::copy(bias, bias + n, made->bias);
    return made;
  }

  // Makes the codes of an operand behind the operation that writes it.
  void encode(int operand) {
    if (program.buffers[operand].groups) add<Encode>().operand = operand;
  }

  template <class S>
  S& add() {
    auto step = std::make_unique<S>();
    S& made = *step;
    program.steps.push_back(std::move(step));
    return made;
  }
};

}  // namespace orca

using namespace orca;

// An exception that crosses into the caller ends the process, so each function that may throw returns null or -1 instead, and `orca_run` 0.
// Those that record an operation return 0, or -1.
extern "C" {

// Whether this machine runs the library's instruction set, and its kernel lets this process.
int orca_runs_here() { return isa.runs_here(); }

// Null when the machine does not run it, or there are no more threads or memory.
Model* orca_model(int threads) try {
  return isa.runs_here() ? new Model(isa, threads) : nullptr;
} catch (...) {
  return nullptr;
}

void orca_free(Model* model) { delete model; }

int orca_multiplies_bf16(const Model* model) { return model->isa.multiplies_bf16; }

// Packs W [n, k] in the given type; null when memory is short. The bias [n] is copied.
Packed* orca_pack(Model* model, const void* source, int source_type, int64_t row, int64_t column, int n, int k,
                  int type, const float* bias) try {
  auto packed = model->packed(Type(type), n, k, bias);
  if (!packed) return nullptr;
  auto pack = [&](auto* from) {
    Packing<std::remove_const_t<std::remove_pointer_t<decltype(from)>>> packing;
    packing.to = packed.get(), packing.source = from, packing.row = row, packing.column = column;
    model->pool.run(packing, 0, 1);
  };
  if (Type(source_type) == Type::bf16) pack(static_cast<const bf16*>(source));
  else pack(static_cast<const float*>(source));
  return model->packing->keep(std::move(packed));
} catch (...) {
  return nullptr;
}

// Packs codes of a type (PackingCodes), all contiguous, with multipliers or null; otherwise as `orca_pack`.
Packed* orca_pack_codes(Model* model, const int8_t* codes, const int8_t* multipliers, const void* scales, int n, int k,
                        int type, const float* bias) try {
  auto packed = model->packed(Type(type), n, k, bias);
  if (!packed) return nullptr;
  PackingCodes packing;
  packing.to = packed.get(), packing.codes = codes, packing.multipliers = multipliers, packing.scales = scales;
  model->pool.run(packing, 0, 1);
  return model->packing->keep(std::move(packed));
} catch (...) {
  return nullptr;
}

// The same weights with another bias [n]: an embedding's table as a head. Null when memory is short.
Packed* orca_with_bias(Model* model, const Packed* of, const float* bias) try {
  auto packed = std::make_unique<Packed>(*of);
  packed->bias = static_cast<float*>(model->packing->arena.take(sizeof(float) * packed->panels * PANEL));
  if (!packed->bias) return nullptr;
  std::copy(bias, bias + packed->n, packed->bias);
  return model->packing->keep(std::move(packed));
} catch (...) {
  return nullptr;
}

// What is packed from now on is an adapter's, or the model's own again (-1).
int orca_packs_for(Model* model, int adapter) try {
  model->packing = adapter < 0 ? &model->weights : &model->adapters[adapter];
  return 0;
} catch (...) {
  return -1;
}

// Frees what was packed for an adapter: no operation adds it any more.
void orca_forget(Model* model, int adapter) {
  for (auto& step : model->program.steps) step->forget(adapter);
  if (const auto found = model->adapters.find(adapter); found != model->adapters.end()) {
    if (model->packing == &found->second) model->packing = &model->weights;
    model->adapters.erase(found);
  }
}

// Copies n floats, for norms.
float* orca_floats(Model* model, const float* source, int n) try {
  float* copy = static_cast<float*>(model->weights.arena.take(sizeof(float) * n));
  if (copy) std::copy(source, source + n, copy);
  return copy;
} catch (...) {
  return nullptr;
}

int orca_buffer(Model* model, int width, int operand, int type) try {
  return model->program.buffer(width, operand, Type(type));
} catch (...) {
  return -1;
}

// Row 0 of a buffer that holds at least `rows`, and the elements of a row.
void* orca_rows(Model* model, int buffer, int64_t rows, int64_t* width) try {
  Buffer& found = model->program.buffers[buffer];
  found.hold(rows);
  *width = found.width;
  return found.data();
} catch (...) {
  return nullptr;
}

int orca_steps(const Model* model) { return int(model->program.steps.size()); }

// `positions` [n, width] stays the caller's.
int orca_embed(Model* model, int x, const Packed* tokens, int64_t first_token, float scale, const void* positions,
               int type) try {
  Embed& step = model->add<Embed>();
  step.x = x, step.tokens = tokens, step.first_token = first_token, step.positions = positions, step.type = Type(type);
  step.scale = scale;
  return 0;
} catch (...) {
  return -1;
}

// `weight` null: a copy.
int orca_normalize(Model* model, int x, int out, const float* weight, const float* bias, float epsilon, int width,
                   int keeps, int selects) try {
  Normalize& step = model->add<Normalize>();
  step.x = x, step.out = out, step.norm = {weight, bias, epsilon, width}, step.keeps = keeps, step.selects = selects;
  return 0;
} catch (...) {
  return -1;
}

// What adapters add to the products of the linear operation that is recorded next with it. `type`: of A and B. Null when memory is
// short.
Delta* orca_delta(Model* model, int operand, int type) try {
  Delta& step = model->add<Delta>();
  step.operand = operand, step.type = Type(type);
  return &step;
} catch (...) {
  return nullptr;
}

// An adapter, from 0 on, and its A [ranks, inputs].
int orca_delta_adapter(Model* model, Delta* delta, int adapter, const Packed* a) try {
  const size_t adapters = std::max<size_t>(delta->a.size(), adapter + 1);
  delta->a.resize(adapters), delta->runs.resize(adapters);
  delta->a[adapter] = a, delta->width = std::max(delta->width, a->panels * PANEL);
  Program& program = model->program;
  program.low_width = std::max(program.low_width, delta->width);
  program.operand_bytes = std::max(program.operand_bytes, Delta::memory(program, *a));
  return 0;
} catch (...) {
  return -1;
}

// B of some of an adapter's panels, in their order; as Added::Run has them, which it copies.
int orca_delta_run(Model* model, Delta* delta, int adapter, int begin, int end, int first, int second, int count, const void* b) try {
  const size_t size = size_t(end - begin) * count * PANEL * bytes(delta->type);
  char* copy = static_cast<char*>(model->packing->arena.take(size));
  if (!copy) return -1;
  std::memcpy(copy, b, size);
  delta->runs[adapter].push_back({begin, end, first, second, count, copy});
  return 0;
} catch (...) {
  return -1;
}

// `delta`: null where no adapter adds anything.
int orca_linear(Model* model, int operand, const Packed* weights, int out, int epilogue, int activation, const Delta* delta) try {
  Linear& step = model->add<Linear>();
  step.operand = operand, step.weights = weights, step.out = out, step.delta = delta;
  step.epilogue = Epilogue(epilogue), step.activation = Activation(activation);
  const int threads = model->pool.threads();
  step.of_few = panels_of_a_task(weights->panels, 4 * threads, threads, 4);  // AMX reads four panels at once then
  step.of_some = panels_of_a_task(weights->panels, 4 * threads, threads, 2);
  step.of_many = panels_of_a_task(weights->panels, 2 * threads, threads, 2);
  if (step.epilogue == Epilogue::operand || step.epilogue == Epilogue::gated) model->encode(out);
  if (step.epilogue != Epilogue::greedy) return 0;
  model->program.best_of_a_row = std::max<size_t>(model->program.best_of_a_row, pieces(weights->panels, 2));
  model->add<Greediest>().head = &step;
  return 0;
} catch (...) {
  return -1;
}

// `query_norm`, `key_norm` [head_size] from orca_floats, or null. `cosines`, `sines` [positions, half] stay the caller's.
int orca_write_kv(Model* model, int qkv, int layer, int kv_heads, int group, int head_size, int type,
                  const float* query_norm, const float* key_norm, float epsilon, const float* cosines,
                  const float* sines, int half) try {
  WriteKV& step = model->add<WriteKV>();
  step.qkv = qkv, step.heads = {layer, kv_heads, group, head_size, Type(type)};
  step.query_norm = {query_norm, nullptr, epsilon, head_size}, step.key_norm = {key_norm, nullptr, epsilon, head_size};
  step.cosines = cosines, step.sines = sines, step.half = half;
  return 0;
} catch (...) {
  return -1;
}

// `bias` [kv_heads * group, 2 * reach + 1], or null.
int orca_attend(Model* model, int qkv, int out, int layer, int kv_heads, int group, int head_size, int type, int narrows,
                float scale, int64_t window, int sees_input, int sees_prompt, const float* bias, int reach) try {
  Attend& step = model->add<Attend>();
  step.qkv = qkv, step.out = out, step.heads = {layer, kv_heads, group, head_size, Type(type)}, step.scale = scale;
  step.window = window ? window : UNBOUNDED, step.narrows = narrows, step.sees_input = sees_input, step.sees_prompt = sees_prompt;
  for (int head = 0; bias && head < kv_heads * group; head++, bias += 2 * reach + 1) {
    std::vector<float>& table = step.bias.table;
    step.bias.reach = reach;
    table.insert(table.end(), KEYS, bias[0]);
    table.insert(table.end(), bias, bias + 2 * reach + 1);
    table.insert(table.end(), KEYS, bias[2 * reach]);
  }
  model->program.group = std::max(model->program.group, group);
  model->program.head_size = std::max(model->program.head_size, head_size);
  model->encode(out);
  return 0;
} catch (...) {
  return -1;
}

int orca_add(Model* model, int x, int y) try {
  Add& step = model->add<Add>();
  step.x = x, step.y = y;
  return 0;
} catch (...) {
  return -1;
}

// 0 when memory is short; nothing has run then.
int orca_run(Model* model, int first, int last, const orca_batch* batch) try {
  model->program.run(first, last, *batch);
  return 1;
} catch (...) {
  return 0;
}
}

// The threads that share the work of a run: a list of operations, each of them cut into tasks.
//
// A run is one parallel region. Threads take tasks one by one, and go on to the next operation when all tasks of this
// one are done. Nobody waits for a thread that has not taken a task: on a core that another process keeps busy, it comes
// when it can. A thread that waits spins for a moment, then sleeps in the kernel.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace orca {

struct Region {
  virtual uint32_t tasks(int operation) const = 0;
  virtual void run(int operation, uint32_t task, int thread) = 0;

 protected:
  ~Region() = default;
};

class Pool {
 public:
  // The caller's thread is one of them. Throws std::system_error when there are no more threads to be had. `enter` and `leave` are called in each thread around its tasks of a run.
  Pool(int threads, void (*enter)(), void (*leave)());
  ~Pool();
  int threads() const { return int(workers_.size()) + 1; }
  // Runs operations [first, last) of a region. One thread at a time may call it.
  void run(Region& region, int first, int last);

 private:
  // The tasks of an operation that nobody has taken, and the run they belong to: a thread that comes late finds another
  // run's number, and takes nothing.
  struct alignas(64) Operation {
    std::atomic<uint64_t> left{0};      // run << 32 | tasks
    std::atomic<uint32_t> undone{0};    // tasks
    std::atomic<uint32_t> sleepers{0};  // threads that sleep until undone changes
  };

  void end();
  void work(int thread);
  void take_part(uint32_t run, int thread, bool is_caller);

  static constexpr int OPERATIONS = 512;  // of one region; longer runs are several

  void (*enter_)();
  void (*leave_)();
  std::vector<std::thread> workers_;
  std::unique_ptr<Operation[]> operations_{new Operation[OPERATIONS]};
  std::atomic<uint32_t> bell_{0};  // the number of the run
  std::atomic<bool> ended_{false};
  std::atomic<int> count_{0};
  // Of the run. Read only by a thread that holds a task, which keeps the run from ending.
  Region* region_ = nullptr;
  int first_ = 0;
};

}  // namespace orca

#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace orca {
namespace {

constexpr int SPINS = 2000;  // 50 to 100 us: most operations are shorter, and another process may have the core for longer

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr timespec MOMENT{0, 10'000'000};

// Sleeps until `word` is not `value`, or is woken, or the bound has passed.
void sleep_on(std::atomic<uint32_t>& word, uint32_t value, const timespec* bound) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, bound, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

Pool::Pool(int threads, void (*enter)(), void (*leave)()) : enter_(enter), leave_(leave) {
  try {
    for (int thread = 1; thread < threads; thread++) workers_.emplace_back([this, thread] { work(thread); });
  } catch (...) {
    end();
    throw;
  }
}

Pool::~Pool() { end(); }

void Pool::end() {
  ended_ = true;
  bell_.fetch_add(1);
  wake(bell_);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(Region& region, int first, int last) {
  while (first < last) {
    const int count = std::min(last - first, OPERATIONS);
    const uint32_t run = bell_.load() + 1;
    region_ = &region, first_ = first;
    for (int i = 0; i < count; i++) {
      const uint32_t tasks = region.tasks(first + i);
      operations_[i].undone.store(tasks, std::memory_order_relaxed);
      operations_[i].left.store(uint64_t(run) << 32 | tasks, std::memory_order_release);
    }
    count_.store(count);
    bell_.store(run);
    if (!workers_.empty()) wake(bell_);
    take_part(run, 0, true);
    first += count;
  }
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    uint32_t run;
    for (int spins = 0; (run = bell_.load()) == seen;)
      if (spins < SPINS) spins++, relax();
      else sleep_on(bell_, seen, nullptr);
    if (ended_) return;
    seen = run;
    take_part(run, thread, false);
  }
}

void Pool::take_part(uint32_t run, int thread, bool is_caller) {
  bool entered = false;
  const int count = count_.load();
  for (int i = 0; i < count; i++) {
    Operation& operation = operations_[i];
    uint64_t left = operation.left.load(std::memory_order_acquire);
    while (left >> 32 == run && uint32_t(left)) {
      if (!operation.left.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
      if (!entered) enter_(), entered = true;
      region_->run(first_ + i, uint32_t(left) - 1, thread);
      if (operation.undone.fetch_sub(1) == 1 && operation.sleepers.load()) wake(operation.undone);
      left = operation.left.load(std::memory_order_acquire);
    }
    if (left >> 32 != run) break;  // the run has ended without this thread
    for (int spins = 0; uint32_t undone = operation.undone.load();) {
      if (!is_caller && bell_.load() != run) break;
      if (spins < SPINS) {
        spins++, relax();
        continue;
      }
      operation.sleepers.fetch_add(1);
      sleep_on(operation.undone, undone, &MOMENT);
      operation.sleepers.fetch_sub(1);
    }
  }
  if (entered) leave_();
}

}  // namespace orca

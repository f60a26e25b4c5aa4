// Reads memory as fast as a machine can: each thread goes through its share in several streams at once.
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

typedef uint64_t Line __attribute__((vector_size(64)));  // of a cache

template <int STREAMS>
Line read(const Line* from, size_t lines, size_t ahead) {
  const size_t each = lines / STREAMS;
  Line sum{};
  for (size_t i = 0; i < each; i++)
    for (int stream = 0; stream < STREAMS; stream++) {
      if (ahead) __builtin_prefetch(from + stream * each + i + ahead);
      sum ^= from[stream * each + i];
    }
  return sum;
}

Line read(const Line* from, size_t lines, int streams, size_t ahead) {
  switch (streams) {
    case 1: return read<1>(from, lines, ahead);
    case 2: return read<2>(from, lines, ahead);
    case 4: return read<4>(from, lines, ahead);
    default: return read<8>(from, lines, ahead);
  }
}

}  // namespace

// `bytes` from an address that is a multiple of 64; `streams` 1, 2, 4 or 8 a thread; asks for lines `ahead` of them, or, if 0,
// leaves that to the processor. Returns something of all bytes, so that no compiler leaves them out.
extern "C" uint64_t orca_read(const void* data, size_t bytes, int threads, int streams, size_t ahead) {
  const Line* from = static_cast<const Line*>(data);
  const size_t each = bytes / sizeof(Line) / threads;
  std::vector<Line> sums(threads);
  std::vector<std::thread> others;
  auto part = [&](int thread) { sums[thread] = read(from + thread * each, each, streams, ahead); };
  for (int thread = 1; thread < threads; thread++) others.emplace_back(part, thread);
  part(0);
  for (std::thread& other : others) other.join();
  Line sum{};
  for (const Line& one : sums) sum ^= one;
  return sum[0] ^ sum[7];
}

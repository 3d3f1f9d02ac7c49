// Threads that share the work of an operation. Included by the sources that share work; implemented in pool.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace skipjoin {

// Calls work(context, 0) on the calling thread, and work(context, i) with a distinct i below `threads` on each of up to
// `threads - 1` others that begin in time. `work` must take its tasks from a counter and do all of them if it is called
// only once. Returns when every call has returned.
void run_on_pool(int threads, void (*work)(void *context, int thread), void *context);

template <typename Work> void run_on_pool(int threads, Work &&work) {
  using Plain = std::remove_reference_t<Work>;
  run_on_pool(threads, [](void *context, int thread) { (*static_cast<Plain *>(context))(thread); }, &work);
}

// Calls task(i) for all i in [0, count), `grain` at a time.
template <typename Task> void share(int threads, int64_t count, int64_t grain, Task &&task) {
  std::atomic<int64_t> counter{0};
  run_on_pool(count > grain ? threads : 1, [&](int) {
    for (int64_t from; (from = counter.fetch_add(grain, std::memory_order_relaxed)) < count;)
      for (int64_t i = from; i < std::min(count, from + grain); i++) task(i);
  });
}

} // namespace skipjoin

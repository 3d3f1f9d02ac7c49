// See pool.inc.cpp.
//
// An OpenMP team waits for its last thread at the end of every loop. If another process occupies one of the cores, each
// operation costs a scheduler tick. Here the caller opens a run, works, and closes it as soon as no task remains,
// without waiting for threads that have not begun by then.
//
// Waiting threads spin briefly and then sleep, so that an idle server uses no CPU time. While a step is open they spin for
// as long as the pauses between operations usually are, unless other processes want the core.
#include "calls.inc.cpp"
#include "pool.inc.cpp"

#include <climits>
#include <csignal>
#include <new>
#include <pthread.h>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace {

// Longer than pauses within a compiled operation, and than the remainder of a nearly finished task.
constexpr int64_t kSpinNs = 20000;
constexpr int64_t kMostNs = 200000;      // longest spin in a step: what Python takes between two operations
constexpr int64_t kBackOffNs = 10000000; // time of brief spins after a sign that other threads want cores
constexpr int kForget = 256;             // waits, about two steps, after which a long pause is forgotten by two thirds
constexpr int kLooks = 32; // checks of the value between two reads of the clock

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  asm volatile("yield");
#endif
}

// Returns how often the system has taken the core from this thread for another one.
int64_t involuntary_switches() {
#if defined(__linux__)
  rusage usage;
  return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw : 0;
#else
  return 0;
#endif
}

// Spin of one thread while it waits. Predicts pauses as long as the recent ones.
class Patience {
public:
  void begin() { begin_ = skipjoin::now_ns(), checked_ = 0; }

  // Returns whether to spin on.
  bool lasts(bool is_step_open) {
    int64_t now = skipjoin::now_ns();
    if (now < begin_ + kSpinNs) return true;
    if (!is_step_open || now < brief_until_) return false;
    if (now < checked_ + kSpinNs) return true;
    int64_t switches = involuntary_switches();
    bool is_wanted = switches > switches_; // since the last look, be it in this wait or before it
    checked_ = now, switches_ = switches;
    // The thread that this one waits for may have lost its core.
    bool is_long = now > begin_ + std::min(2 * longest_, kMostNs);
    if (is_wanted || is_long) brief_until_ = now + kBackOffNs;
    return !is_wanted && !is_long;
  }

  void end(bool is_step_open) {
    if (!is_step_open) return; // pauses between steps are not predicted
    int64_t pause = skipjoin::now_ns() - begin_;
    longest_ -= longest_ / kForget;
    if (pause < kMostNs) longest_ = std::max(longest_, pause);
  }

private:
  int64_t begin_ = 0, checked_ = 0, switches_ = 0, longest_ = kMostNs / 2, brief_until_ = 0;
};

// A number that threads wait on until it is no longer `old`, spinning at first.
class Gate {
public:
  std::atomic<int> value{0};

  // Returns the new value.
  int wait_while(int old, const std::atomic<int> &open_steps) {
    thread_local Patience patience;
    patience.begin();
    for (int now, looks = 1;; looks++) {
      if ((now = value.load(std::memory_order_acquire)) != old) {
        if (looks > kLooks) patience.end(open_steps.load(std::memory_order_relaxed));
        return now;
      }
      relax();
      if (looks % kLooks || patience.lasts(open_steps.load(std::memory_order_relaxed))) continue;
      // The order of these two and that of `wake` guarantee that one side sees the other's write.
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      sleep(old);
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
  }

  // Must be called after every change of the value, which must be sequentially consistent.
  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<int *>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
#endif
  }

private:
  // Returns when the value is not `old`, possibly spuriously.
  void sleep(int old) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<int *>(&value), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return value.load(std::memory_order_seq_cst) != old; });
#endif
  }

  std::atomic<int> sleepers_{0};
#if !defined(__linux__)
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
};

class Pool {
public:
  void run(int threads, void (*work)(void *, int), void *context) {
    // A second caller, or a task that is itself a caller, works alone, because the cores are in use.
    if (threads <= 1 || taken_.exchange(true, std::memory_order_acquire)) return work(context, 0);
    start(threads - 1);
    work_ = work, context_ = context, wanted_ = std::min(threads - 1, started_);
    if (wanted_ == 0) {
      work(context, 0);
    } else {
      inside_.value.store(kOpen, std::memory_order_release);
      turn_.value.fetch_add(1, std::memory_order_seq_cst);
      turn_.wake();
      work(context, 0);
      int inside = inside_.value.fetch_and(~kOpen, std::memory_order_seq_cst) & ~kOpen;
      while (inside) inside = inside_.wait_while(inside, open_steps_);
    }
    taken_.store(false, std::memory_order_release);
  }

  void open_step() { open_steps_.fetch_add(1, std::memory_order_relaxed); }

  void close_step() { open_steps_.fetch_sub(1, std::memory_order_relaxed); }

private:
  static constexpr int kOpen = 1 << 30; // flag above the number of threads inside

  // Starts threads until there are at least this many, if the system permits.
  void start(int count) {
    if (started_ >= count || is_refused_) return;
    // Signals are left to Python's threads, except faults of a thread itself: if it blocked them, the process would
    // exit without the stacks that a handler prints.
    sigset_t others, before;
    sigfillset(&others);
    for (int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigdelset(&others, fault);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    try {
      for (; started_ < count; started_++) std::thread([this, i = started_ + 1] { serve(i); }).detach();
    } catch (const std::system_error &) {
      is_refused_ = true; // the existing threads do the work
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void serve(int index) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "skipjoin-pool");
#endif
    for (int turn = 0;;) {
      turn = turn_.wait_while(turn, open_steps_);
      int inside = inside_.value.load(std::memory_order_relaxed);
      while (inside & kOpen)
        if (inside_.value.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) {
          // Nothing of this run changes until the thread leaves.
          if (index <= wanted_) work_(context_, index);
          inside_.value.fetch_sub(1, std::memory_order_seq_cst);
          inside_.wake();
          break;
        }
    }
  }

  std::atomic<bool> taken_{false};
  std::atomic<int> open_steps_{0};
  alignas(64) Gate turn_;   // number of runs so far
  alignas(64) Gate inside_; // number of threads at work, and kOpen
  void (*work_)(void *, int) = nullptr;
  void *context_ = nullptr;
  int wanted_ = 0, started_ = 0;
  bool is_refused_ = false;
};

// Never destroyed, because threads wait in it until the process exits.
alignas(Pool) unsigned char memory[sizeof(Pool)];

Pool &pool() {
  static Pool *made = [] {
    // A forked process has none of the threads, and possibly an open run that nothing would close.
    pthread_atfork(nullptr, nullptr, [] { new (memory) Pool; });
    return new (memory) Pool;
  }();
  return *made;
}

} // namespace

void skipjoin::run_on_pool(int threads, void (*work)(void *, int), void *context) {
  pool().run(threads, work, context);
}

// Between these calls, threads spin for longer. Steps of several callers may overlap.
extern "C" void skipjoin_open_step() { pool().open_step(); }
extern "C" void skipjoin_close_step() { pool().close_step(); }

int64_t *skipjoin::measured = nullptr;

// Measures all operations from now on; null ends that.
extern "C" void skipjoin_measure(int64_t *into) { skipjoin::measured = into; }

#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pool {
namespace {

using Clock = std::chrono::steady_clock;

// Between two operations of a step a thread waits for work without giving its core away: waking up
// takes longer than most operations.
constexpr auto kAwake = std::chrono::microseconds(50);
constexpr std::uint64_t kClosed = 0xffffffff;  // more units than any job that is shared has

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Pool {
 public:
  bool set_threads(int count) {
    const std::lock_guard<std::mutex> guard(running_);
    stop();
    num_threads_ = 1;
    try {
      for (int i = 1; i < count; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::exception&) {  // no thread, or no memory, is left
      stop();
      return false;
    }
    num_threads_ = count;
    return true;
  }

  int num_threads() const { return num_threads_; }

  void run(std::int64_t num_units, void (*work)(const void*, std::int64_t), const void* context) {
    // Whoever finds the others busy, or has too little to share or too much to count, works alone.
    if (num_units <= 1 || num_units >= std::int64_t{kClosed} || num_threads_ <= 1 ||
        !running_.try_lock()) {
      for (std::int64_t unit = 0; unit < num_units; ++unit) work(context, unit);
      return;
    }
    const std::lock_guard<std::mutex> guard(running_, std::adopt_lock);
    work_ = work;
    context_ = context;
    num_units_.store(num_units, std::memory_order_release);  // after the last job was closed
    num_done_.store(0, std::memory_order_relaxed);
    const std::uint64_t job = ((next_.load(std::memory_order_relaxed) >> 32) + 1) & 0xffffffff;
    next_.store(job << 32);
    if (num_asleep_.load() > 0) {
      const std::lock_guard<std::mutex> lock(sleeping_);
      wake_.notify_all();
    }
    take_units(job);
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_units; ++spins) {
      if (spins < 4096) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
    next_.store(job << 32 | kClosed);
  }

  // A child process has none of the threads, and locks in any state: it works alone.
  void forget_after_fork() {
    new (&threads_) std::vector<std::thread>();
    new (&running_) std::mutex();
    new (&sleeping_) std::mutex();
    new (&wake_) std::condition_variable();
    num_asleep_.store(0);
    num_threads_ = 1;
  }

 private:
  // Works on a job while it has units; they are done when they are counted.
  void take_units(std::uint64_t job) {
    std::uint64_t ticket = next_.load(std::memory_order_acquire);
    while (ticket >> 32 == job) {
      const auto unit = static_cast<std::int64_t>(ticket & kClosed);
      if (unit >= num_units_.load(std::memory_order_acquire)) return;
      if (next_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
        work_(context_, unit);  // the job lasts until this unit is counted
        num_done_.fetch_add(1, std::memory_order_release);
        ticket = next_.load(std::memory_order_acquire);
      }
    }
  }

  void serve() {
    std::uint64_t seen = next_.load() >> 32;
    for (;;) {
      const std::uint64_t job = wait_for_another(seen);
      if (stopping_.load()) return;
      take_units(job);
      seen = job;
    }
  }

  std::uint64_t wait_for_another(std::uint64_t seen) {
    const Clock::time_point tired = Clock::now() + kAwake;
    for (int spins = 1;; ++spins) {
      const std::uint64_t job = next_.load(std::memory_order_acquire) >> 32;
      if (job != seen || stopping_.load(std::memory_order_relaxed)) return job;
      pause();
      if (spins % 64 == 0 && Clock::now() > tired) break;
    }
    std::unique_lock<std::mutex> lock(sleeping_);
    num_asleep_.fetch_add(1);
    wake_.wait(lock, [&] { return next_.load() >> 32 != seen || stopping_.load(); });
    num_asleep_.fetch_sub(1);
    return next_.load() >> 32;
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(sleeping_);
      stopping_.store(true);
      wake_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    stopping_.store(false);
  }

  std::mutex running_;  // held by the thread whose job it is
  std::vector<std::thread> threads_;
  std::atomic<int> num_threads_{1};
  void (*work_)(const void*, std::int64_t) = nullptr;
  const void* context_ = nullptr;
  std::atomic<std::int64_t> num_units_{0};
  std::atomic<std::int64_t> num_done_{0};
  std::atomic<std::uint64_t> next_{0};  // number of the job, and below 32 bits of it the next unit
  std::mutex sleeping_;
  std::condition_variable wake_;
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> stopping_{false};
};

// Never destroyed: threads may still wait when the process ends.
Pool& the_pool() {
  static Pool* const pool = [] {
    static Pool* made = new Pool;
    pthread_atfork(nullptr, nullptr, [] { made->forget_after_fork(); });
    return made;
  }();
  return *pool;
}

struct Scratch {
  float* memory = nullptr;
  std::int64_t size = 0;
  ~Scratch() { std::free(memory); }

  float* of(std::int64_t num_floats) {
    if (size < num_floats) {
      std::free(memory);
      size = (num_floats + 15) / 16 * 16;
      memory = static_cast<float*>(std::aligned_alloc(64, 4 * size));
      if (memory == nullptr) std::abort();  // on a thread that has nobody to tell
    }
    return memory;
  }
};

}  // namespace

void run(std::int64_t num_units, void (*work)(const void*, std::int64_t), const void* context) {
  the_pool().run(num_units, work, context);
}

bool set_threads(int count) { return the_pool().set_threads(count); }

int num_threads() { return the_pool().num_threads(); }

float* scratch(std::int64_t num_floats) {
  thread_local Scratch kept;
  return kept.of(num_floats);
}

float* shared_scratch(std::int64_t num_floats) {
  thread_local Scratch kept;
  return kept.of(num_floats);
}

}  // namespace pool

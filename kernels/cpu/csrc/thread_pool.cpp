#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>
#include <utility>

namespace triptych {
namespace {

constexpr int kBarrierSpin = 4;  // microseconds; a barrier's threads arrive about together
constexpr int kIdleSpin = 20;    // the next step often follows within the scheduler's time for one
constexpr int kYields = 16;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A pause takes 10 to 140 cycles, by processor.
int measure_pauses_per_microsecond() {
  using Clock = std::chrono::steady_clock;
  constexpr int kPauses = 256;
  int best = 1;
  for (int round = 0; round < 3; ++round) {
    const auto start = Clock::now();
    for (int i = 0; i < kPauses; ++i) pause();
    const std::chrono::duration<double, std::micro> spent = Clock::now() - start;
    best = std::max(best, static_cast<int>(kPauses / std::max(spent.count(), 1e-3)));
  }
  return std::min(best, 1000);
}

int pin(pthread_t thread, int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<unsigned>(core), &cores);
  return pthread_setaffinity_np(thread, sizeof cores, &cores);
}

void check_cores(const std::vector<int>& affinity) {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  sched_getaffinity(0, sizeof usable, &usable);
  for (const int core : affinity)
    if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(static_cast<unsigned>(core), &usable))
      throw std::invalid_argument("this process may not run on core " + std::to_string(core));
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  static_assert(sizeof word == sizeof(uint32_t), "the kernel reads the atomic as a plain word");
  syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

}  // namespace

ThreadPool::ThreadPool(int threads, std::vector<int> affinity)
    : size_(threads),
      affinity_(std::move(affinity)),
      pauses_per_microsecond_(measure_pauses_per_microsecond()) {
  if (threads < 1)
    throw std::invalid_argument("threads is " + std::to_string(threads) + ", must be at least 1");
  check_cores(affinity_);
  try {
    for (int i = 1; i < threads; ++i) {
      threads_.emplace_back([this, i] { serve(i); });
      if (!affinity_.empty())
        pin(threads_.back().native_handle(), affinity_[static_cast<size_t>(i) % affinity_.size()]);
    }
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::pin_caller() const {
  if (!affinity_.empty()) pin(pthread_self(), affinity_[0]);
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const uint32_t passed = barriers_.value.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    change(barriers_, passed + 1);
  } else {
    wait_while(barriers_, passed, kBarrierSpin);
  }
}

void ThreadPool::start(Call call, void* context) {
  call_ = call;
  context_ = context;
  if (size_ > 1) change(runs_, runs_.value.load(std::memory_order_relaxed) + 1);
  call(context, 0);
  barrier();
}

void ThreadPool::serve(int thread) {
  for (uint32_t run = 0;; ++run) {
    wait_while(runs_, run, kIdleSpin);
    if (stops_.load(std::memory_order_acquire)) return;
    call_(context_, thread);
    barrier();
  }
}

void ThreadPool::stop() {
  stops_.store(true, std::memory_order_release);
  change(runs_, runs_.value.load(std::memory_order_relaxed) + 1);
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::wait_while(Word& word, uint32_t value, int microseconds) const {
  for (int i = microseconds * pauses_per_microsecond_; i > 0; --i) {
    if (word.value.load(std::memory_order_acquire) != value) return;
    pause();
  }
  for (int i = 0; i < kYields; ++i) {
    if (word.value.load(std::memory_order_acquire) != value) return;
    sched_yield();
  }
  // Sequentially consistent, as in change(): either the sleeper is counted there, or it sees the
  // new value here.
  word.sleepers.fetch_add(1);
  while (word.value.load() == value) futex(word.value, FUTEX_WAIT_PRIVATE, value);
  word.sleepers.fetch_sub(1);
}

void ThreadPool::change(Word& word, uint32_t value) {
  word.value.store(value);
  if (word.sleepers.load() > 0) futex(word.value, FUTEX_WAKE_PRIVATE, INT_MAX);
}

}  // namespace triptych

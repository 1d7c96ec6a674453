// Threads that work in step: the caller is thread 0, the others wait on a futex between runs.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace triptych {

class ThreadPool {
 public:
  // `threads` >= 1 counts the caller. Worker i is pinned to core affinity[i % size]; with an empty
  // list nobody is. Throws std::invalid_argument for threads < 1 and for a core that this process
  // may not use.
  ThreadPool(int threads, std::vector<int> affinity);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Pins the calling thread to affinity[0], for good. Threads that it starts later inherit that.
  void pin_caller() const;

  // Calls work(thread) on every thread, thread 0 being the caller, and returns when all are done.
  // One run at a time. `work` must not throw, and all threads must pass the same barriers.
  template <typename Work>
  void run(Work&& work) {
    using Plain = std::remove_reference_t<Work>;
    start([](void* context, int thread) { (*static_cast<Plain*>(context))(thread); },
          const_cast<void*>(static_cast<const void*>(&work)));
  }

  // Inside run(): returns when every thread has called it. What any thread wrote before is visible
  // to all after. Spins for a few microseconds, then yields, then sleeps: a waiter that only spun
  // would keep the awaited thread off a core that they share.
  void barrier();

 private:
  using Call = void (*)(void* context, int thread);

  // What one thread writes and others poll, on a cache line of its own.
  struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};
  };

  void start(Call call, void* context);
  void serve(int thread);
  void stop();
  void wait_while(Word& word, uint32_t value, int microseconds) const;
  static void change(Word& word, uint32_t value);

  int size_;
  std::vector<int> affinity_;
  int pauses_per_microsecond_;
  Word runs_;                                // runs begun
  Word barriers_;                            // barriers passed
  alignas(64) std::atomic<int> arrived_{0};  // threads at the next barrier
  alignas(64) std::atomic<bool> stops_{false};
  Call call_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace triptych

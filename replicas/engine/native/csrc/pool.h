// The threads of one model: the caller and size - 1 others, which meet at barriers within a step.
//
// Not OpenMP: torch brings a runtime of its own, and two of them fight for the cores by spinning.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace ts {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Pool {
 public:
  explicit Pool(int size) : size_(size) {
    for (int index = 1; index < size; ++index) threads_.emplace_back([this, index] { work(index); });
  }
  ~Pool() {
    stop_.store(true, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // body(0) here and body(1), ... on the others; returns when all have.
  void run(const std::function<void(int)>& body) {
    if (size_ > 1) {
      body_ = &body;
      generation_.fetch_add(1, std::memory_order_release);
      generation_.notify_all();
    }
    body(0);
    barrier();
  }

  void barrier() {
    if (size_ == 1) return;
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      phase_.notify_all();
      return;
    }
    await(phase_, phase);
  }

 private:
  static constexpr int kSpinsToSleep = 2000;  // some 30 us: what is waited for is mostly nearer than that

  // Sleeping, and not only yielding, leaves a core free, and the kernel moves there whom it had put behind another process:
  // beside one busy process on 2 cores a step took 10 times as long with threads that spun.
  static void await(const std::atomic<int>& value, int old) {
    for (int spins = 0; spins < kSpinsToSleep; ++spins) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
  }

  void work(int index) {
    int seen = 0;
    while (true) {
      await(generation_, seen);
      seen = generation_.load(std::memory_order_acquire);
      if (stop_.load(std::memory_order_acquire)) return;
      (*body_)(index);
      barrier();
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* body_ = nullptr;
  alignas(64) std::atomic<int> generation_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
  std::atomic<bool> stop_{false};
};

// Hands out 0, 1, ..., count - 1 to whichever thread asks. `reset` while nobody asks.
class Tasks {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace ts

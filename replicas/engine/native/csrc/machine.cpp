#include "simd.h"

#include "machine.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "pool.h"

#if TS_X86
namespace ts {
namespace {

template <class Body>
double least_seconds(Pool& pool, int rounds, const Body& body) {
  double least = 1e30;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(body);
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return least;
}

// `streams` places at once, with or without asking for what comes next.
void read(const uint8_t* data, size_t bytes, int streams, bool ahead) {
  const size_t each = bytes / streams / 256 * 256;
  constexpr int kSums = 256 / kRegister;
  Ints sum[kSums] = {};
  for (size_t at = 0; at < each; at += 256)
    for (int stream = 0; stream < streams; ++stream) {
      const uint8_t* from = data + stream * each + at;
      for (int line = 0; ahead && line < 256; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(from) + 4096 + line, _MM_HINT_T0);
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) sum[i] = exclusive_or(sum[i], load_ints(from + i * kRegister));
    }
  for (Ints& one : sum) pin(one);
}

constexpr long kMultiplies = 20'000'000;
constexpr int kSums = 12;  // more than latency times throughput

// One operation on each of the sums, over and over.
template <class Sum, class Operation>
void repeat(const Operation& operation) {
  Sum sum[kSums] = {};
  for (long i = 0; i < kMultiplies / kSums; ++i)
#pragma GCC unroll 12
    for (Sum& one : sum) {
      one = operation(one);
      pin(one);
    }
}

void multiply_wide() {
  const Floats x = zeros();
  repeat<Floats>([&](Floats sum) { return fma(x, x, sum); });
}

void multiply_narrow() {
  const Pairs weight = Pairs::from(all_ints(0));
  const PairItem x[2] = {};
  repeat<Floats>([&](Floats sum) { return weight.add_to(sum, x); });
}

template <class Dot>
void multiply_bytes() {
  uint8_t x[8] = {};
  asm volatile("" : "+m"(x));  // what a compiler knows to be 0 it doesn't multiply
  Ints bytes = all_ints(0);
  repeat<Ints>([&](Ints sum) {
    pin(bytes);  // else the products, which are always the same, would be made once
    return Dot::add(sum, Dot::prepare(bytes), x);
  });
}

}  // namespace

double read_rate(const void* data, size_t bytes, int threads, int rounds) {
  Pool pool(threads);
  const auto* from = static_cast<const uint8_t*>(data);
  const size_t each = bytes / threads;
  double best = 0.0;
  for (int streams : {1, 2, 4, 8})
    for (bool ahead : {false, true}) {
      const double s = least_seconds(pool, rounds, [&](int thread) { read(from + thread * each, each, streams, ahead); });
      best = std::max(best, static_cast<double>(bytes) / s);
    }
  return best;
}

double multiply_rate(int kind, int threads, int rounds) {
  Pool pool(threads);
  struct Loop {
    void (*run)();
    int kind, multiplies_per_lane;
  };
  const Loop loops[] = {{multiply_wide, 0, 1}, {multiply_narrow, 1, 2}, {multiply_bytes<ByteDot>, 2, 4}, {multiply_bytes<NibbleDot>, 2, 4}};
  double best = 0.0;
  for (const Loop& loop : loops) {
    if (loop.kind != kind) continue;
    const double s = least_seconds(pool, rounds, [&](int) { loop.run(); });
    best = std::max(best, static_cast<double>(kLanes) * loop.multiplies_per_lane * (kMultiplies / kSums * kSums) * threads / s);
  }
  return best;
}

}  // namespace ts
#endif

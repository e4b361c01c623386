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
  __m512i sum[4] = {};
  for (size_t at = 0; at < each; at += 256)
    for (int stream = 0; stream < streams; ++stream) {
      const uint8_t* from = data + stream * each + at;
      for (int i = 0; i < 4; ++i) {
        if (ahead) _mm_prefetch(reinterpret_cast<const char*>(from) + 4096 + i * 64, _MM_HINT_T0);
        sum[i] = _mm512_xor_si512(sum[i], _mm512_loadu_si512(from + i * 64));
      }
    }
  const __m512i all = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
  asm volatile("" ::"v"(all));
}

constexpr long kMultiplies = 20'000'000;
constexpr int kSums = 12;  // more than latency times throughput

void multiply_wide() {
  __m512 sum[kSums] = {};
  const __m512 x = _mm512_set1_ps(0.0f);
  for (long i = 0; i < kMultiplies / kSums; ++i)
#pragma GCC unroll 12
    for (__m512& one : sum) {
      one = _mm512_fmadd_ps(x, x, one);
      asm volatile("" : "+v"(one));
    }
}

void multiply_narrow() {
  __m512 sum[kSums] = {};
  const __m512bh x = (__m512bh)_mm512_setzero_si512();
  for (long i = 0; i < kMultiplies / kSums; ++i)
#pragma GCC unroll 12
    for (__m512& one : sum) {
      one = _mm512_dpbf16_ps(one, x, x);
      asm volatile("" : "+v"(one));
    }
}

void multiply_bytes() {
  __m512i sum[kSums] = {};
  const __m512i x = _mm512_setzero_si512();
  for (long i = 0; i < kMultiplies / kSums; ++i)
#pragma GCC unroll 12
    for (__m512i& one : sum) {
      one = _mm512_dpbusd_epi32(one, x, x);
      asm volatile("" : "+v"(one));
    }
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
  void (*const kinds[])() = {multiply_wide, multiply_narrow, multiply_bytes};
  const double lanes[] = {16, 32, 64};
  const double s = least_seconds(pool, rounds, [&](int) { kinds[kind](); });
  return lanes[kind] * (kMultiplies / kSums * kSums) * threads / s;
}

}  // namespace ts
#endif

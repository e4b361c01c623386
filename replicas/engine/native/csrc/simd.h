// Vectors of fp32 and integer numbers, in one vocabulary for two kinds of CPU. The sources are built once for each: with
// TS_AVX512 for those that have it, without for the others; features.cpp tells at run time which build a machine can run.
//
//   kLanes                 fp32 numbers in a register: 16, or 8
//   Pairs, PairItem        bf16 weights in pairs along k, and the form that their inputs have
//   ByteDot, NibbleDot     exact products of weights in 0..255, or 0..15, with int8 inputs, four along k in each lane
//
// Every file that computes includes this first: the pragmas in the files below let the compiler use the instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__) && defined(__GNUC__)
#define TS_X86 1
#else
#define TS_X86 0
#endif

#if TS_X86
#ifdef TS_AVX512
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

namespace ts {

constexpr size_t kRegister = kLanes * sizeof(float);  // bytes

// While it lives, numbers below 2**-126 are 0 on this thread: weights of far tokens are that small, and each such product would
// take a hundred cycles.
class FlushTiny {
 public:
  FlushTiny() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushTiny() { _mm_setcsr(before_); }
  FlushTiny(const FlushTiny&) = delete;
  FlushTiny& operator=(const FlushTiny&) = delete;

 private:
  const unsigned before_;
};

// e**x to about 2 units in the last place; NaN stays NaN, below -87 it is 0. Cephes' polynomial on [-ln2/2, ln2/2].
inline Floats exp(Floats x) {
  const Floats bounded = max(all(-104.0f), min(all(88.7f), x));
  const Floats n = round(mul(bounded, all(1.44269504f)));
  Floats r = subtract_product(n, all(0.693359375f), bounded);
  r = subtract_product(n, all(-2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, all(c));
  p = fma(p, mul(r, r), add(r, all(1.0f)));
  return scale_by_power(p, n);
}

// The same to 4e-5, for what becomes bf16 anyway: Taylor's polynomial of 2**x on [-1/2, 1/2].
inline Floats coarse_exp(Floats x) {
  const Floats t = mul(max(all(-104.0f), x), all(1.44269504f));
  const Floats n = round(t), f = sub(t, n);
  Floats p = all(9.6181291e-3f);
  for (float c : {5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) p = fma(p, f, all(c));
  return scale_by_power(p, n);
}

}  // namespace ts
#endif

// Instruction sets and small vector helpers. Every file that computes includes this first: the pragma below lets the compiler
// use AVX-512 in what follows, and ts_features() tells at run time whether the machine has it, so one build serves all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__) && defined(__GNUC__)
#define TS_X86 1
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#include <immintrin.h>
#else
#define TS_X86 0
#endif

#if TS_X86
namespace ts {

constexpr int kLanes = 16;  // fp32 numbers in a register

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline __m512 half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline __m512 widen(const uint16_t* p) {  // 16 bf16 numbers as fp32
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline void narrow(uint16_t* p, __m512 v) {  // 16 fp32 numbers as bf16, to nearest even
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
inline uint16_t narrow1(float x) {
  uint16_t two[8];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(two), (__m128i)_mm_cvtneps_pbh(_mm_set1_ps(x)));
  return two[0];
}
inline __mmask16 first(int count) { return count >= kLanes ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }
// 4 bytes, as every lane's: two bf16 numbers, or four int8 ones.
inline __m512i spread(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

// e**x to about 2 units in the last place; NaN stays NaN, below -87 it is 0. Cephes' polynomial on [-ln2/2, ln2/2].
inline __m512 exp(__m512 x) {
  const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(88.7f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), bounded);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// The same to 4e-5, for what becomes bf16 anyway: Taylor's polynomial of 2**x on [-1/2, 1/2].
inline __m512 coarse_exp(__m512 x) {
  const __m512 t = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-104.0f), x), _mm512_set1_ps(1.44269504f));
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT), f = _mm512_sub_ps(t, n);
  __m512 p = _mm512_set1_ps(9.6181291e-3f);
  for (float c : {5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

}  // namespace ts
#endif

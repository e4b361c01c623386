// AVX-512 with byte (VNNI) and bf16 products. Included by simd.h alone.
#pragma once

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#include <immintrin.h>

namespace ts {

constexpr int kLanes = 16;
constexpr int kProductSums = 24;  // registers of a product's sums, of 32 in all
using Floats = __m512;
using Ints = __m512i;

inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
inline Floats round(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
inline Floats scale_by_power(Floats a, Floats n) { return _mm512_scalef_ps(a, n); }  // a * 2**n
inline float reduce_max(Floats a) { return _mm512_reduce_max_ps(a); }
inline float reduce_add(Floats a) { return _mm512_reduce_add_ps(a); }
inline bool any_nan(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }

inline __mmask16 first(int count) { return count >= kLanes ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }
// The first `count` numbers, and `rest` behind them; memory beyond isn't read.
inline Floats load_first(const float* p, int count, Floats rest) { return _mm512_mask_loadu_ps(rest, first(count), p); }
inline Floats keep_first(Floats a, int count) { return _mm512_maskz_mov_ps(first(count), a); }  // and zeros

inline Floats load_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline Floats load_bytes(const uint8_t* p) {  // of int8 numbers
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void narrow(uint16_t* p, Floats v) {  // as bf16, to nearest even
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}

inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints round_to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline int32_t reduce_add(Ints a) { return _mm512_reduce_add_epi32(a); }
inline Ints exclusive_or(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints low_nibbles(Ints a) { return _mm512_and_si512(a, _mm512_set1_epi8(0x0f)); }
inline Ints high_nibbles(Ints a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
inline Floats as_floats(Ints a) { return _mm512_castsi512_ps(a); }
// 4 bytes, as every lane's.
inline Ints spread(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

// Keeps a sum in a register, and its chain of additions as it is written.
inline void pin(Floats& a) { asm volatile("" : "+v"(a)); }
inline void pin(Ints& a) { asm volatile("" : "+v"(a)); }

using PairItem = uint16_t;  // bf16
struct Pairs {
  __m512i both;
  static Pairs from(Ints a) { return {a}; }
  // sum + (k, k+1) of each lane times those at x
  Floats add_to(Floats sum, const PairItem* x) const { return _mm512_dpbf16_ps(sum, (__m512bh)both, (__m512bh)spread(x)); }
};

struct ByteDot {
  static constexpr int kItem = 1;  // bytes of an input
  struct Weight {
    __m512i bytes;
  };
  static Weight prepare(Ints a) { return {a}; }
  static Ints add(Ints dot, Weight weight, const uint8_t* x) { return _mm512_dpbusd_epi32(dot, weight.bytes, spread(x)); }
  static Ints finish(Ints dot) { return dot; }
  // Numbers of a register, which fit into int8, as inputs.
  static void store(uint8_t* p, Ints a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a)); }
};
using NibbleDot = ByteDot;

}  // namespace ts

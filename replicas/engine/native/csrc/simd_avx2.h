// AVX2, with fused multiply-adds: what CPUs have that lack AVX-512. Included by simd.h alone.
//
// There are no products of bf16: weights are widened as they are loaded, and multiplied with inputs that stay fp32. Nor are
// there of bytes without saturation: int8 weights are widened to 16 bits, and only those of 4 bits are multiplied as bytes.
#pragma once

#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace ts {

constexpr int kLanes = 8;
constexpr int kProductSums = 12;  // registers of a product's sums, of 16 in all
using Floats = __m256;
using Ints = __m256i;

inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }  // b where either is NaN
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats abs(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats subtract_product(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
inline Floats round(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2**n, in two steps because a power below 2**-126 has no exponent of its own.
inline Floats scale_by_power(Floats a, Floats n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  const auto power = [&](__m256i e) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, bias), 23)); };
  return _mm256_mul_ps(_mm256_mul_ps(a, power(half)), power(_mm256_sub_epi32(whole, half)));
}
inline float reduce_max(Floats a) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_add(Floats a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline bool any_nan(Floats a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }

inline __m256i first(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
// The first `count` numbers, and `rest` behind them; memory beyond isn't read.
inline Floats load_first(const float* p, int count, Floats rest) {
  const __m256i mask = first(count);
  return _mm256_blendv_ps(rest, _mm256_maskload_ps(p, mask), _mm256_castsi256_ps(mask));
}
inline Floats keep_first(Floats a, int count) { return _mm256_and_ps(a, _mm256_castsi256_ps(first(count))); }  // and zeros

inline Floats load_halves(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline Floats load_bytes(const uint8_t* p) {  // of int8 numbers
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void narrow(uint16_t* p, Floats v) {  // as bf16, to nearest even
  const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i wide = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Ints all_ints(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints round_to_ints(Floats a) { return _mm256_cvtps_epi32(a); }
inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline int32_t reduce_add(Ints a) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0b01001110));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0b10110001)));
}
inline Ints exclusive_or(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
inline Ints low_nibbles(Ints a) { return _mm256_and_si256(a, _mm256_set1_epi8(0x0f)); }
inline Ints high_nibbles(Ints a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
inline Floats as_floats(Ints a) { return _mm256_castsi256_ps(a); }
// 4 bytes, as every lane's.
inline Ints spread(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

// Keeps a sum in a register, and its chain of additions as it is written: the compiler would add products pairwise, all of them
// waiting in memory.
inline void pin(Floats& a) { asm volatile("" : "+x"(a)); }
inline void pin(Ints& a) { asm volatile("" : "+x"(a)); }

using PairItem = float;
struct Pairs {
  __m256 even, odd;
  static Pairs from(Ints a) {
    return {as_floats(_mm256_slli_epi32(a, 16)), as_floats(_mm256_and_si256(a, _mm256_set1_epi32(0xffff0000)))};
  }
  // sum + (k, k+1) of each lane times those at x
  Floats add_to(Floats sum, const PairItem* x) const { return fma(odd, _mm256_broadcast_ss(x + 1), fma(even, _mm256_broadcast_ss(x), sum)); }
};

struct ByteDot {
  static constexpr int kItem = 2;  // bytes of an input: of four, 0, 2, 1, 3
  struct Weight {
    __m256i even, odd;  // 16 bits each
  };
  static Weight prepare(Ints a) { return {_mm256_and_si256(a, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(a, 8)}; }
  static Ints add(Ints dot, Weight weight, const uint8_t* x) {
    dot = _mm256_add_epi32(dot, _mm256_madd_epi16(weight.even, spread(x)));
    dot = _mm256_add_epi32(dot, _mm256_madd_epi16(weight.odd, spread(x + 4)));
    pin(dot);
    return dot;
  }
  static Ints finish(Ints dot) { return dot; }
  // Numbers of a register, which fit into int8, as inputs.
  static void store(uint8_t* p, Ints a) {
    const __m128i all = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(all, order));
  }
};

struct NibbleDot {
  static constexpr int kItem = 1;
  struct Weight {
    __m256i bytes;
  };
  static Weight prepare(Ints a) { return {a}; }
  // Sums of 16 bits: eight additions of two products up to 15 * 127 fit.
  static Ints add(Ints dot, Weight weight, const uint8_t* x) {
    dot = _mm256_add_epi16(dot, _mm256_maddubs_epi16(weight.bytes, spread(x)));
    pin(dot);
    return dot;
  }
  static Ints finish(Ints dot) { return _mm256_madd_epi16(dot, _mm256_set1_epi16(1)); }
  static void store(uint8_t* p, Ints a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
};

}  // namespace ts

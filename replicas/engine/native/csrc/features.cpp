// Built without the instructions that it asks about: calling it is safe on every CPU, and so is loading either build.
#include <cstdint>

// Bit 0: this CPU runs the build for AVX2, bit 1: the one for AVX-512.
extern "C" __attribute__((visibility("default"))) int32_t ts_features() {
#if defined(__x86_64__) && defined(__GNUC__)
  const bool narrow = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool wide = narrow && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  return (narrow ? 1 : 0) | (wide ? 2 : 0);
#else
  return 0;
#endif
}

// What the machine can do at best, measured: reading memory and multiplying, by this many threads at once.
#pragma once

#include <cstddef>

namespace ts {

// Bytes a second, the best of several ways to read `bytes` bytes at `data`, `rounds` times each.
double read_rate(const void* data, size_t bytes, int threads, int rounds);

// Multiply-adds a second of fp32 (0), bf16 (1) or int8 (2) from registers.
double multiply_rate(int kind, int threads, int rounds);

}  // namespace ts

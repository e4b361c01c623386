// A packed weight matrix and its products. Outputs are in panels of 16, a register's lanes, and four panels make a strip:
//
//   strip 0: k-step 0: panel 0 | panel 1 | panel 2 | panel 3,  k-step 1: panel 0 | ...      strip 1: ...
//
//   format     k-step    a panel's bytes in it
//   fp32       1         16 x fp32
//   bf16       2         16 x (bf16 k, bf16 k+1)
//   int8       32        8 x [16 x (4 x uint8)]: value + 128; one fp32 scale an output beside the panels
//   int8_g32   32        the same; behind the four panels, 16 x fp16 scale of each
//   int4       32        4 x [16 x (4 x uint8)]: low nibbles are k 0..15, high ones 16..31; 16 x fp16 scale, 16 x fp16 minimum
//
// An output is the sum of its products in the order of k in one lane, whatever the number of rows beside it: a row's result
// doesn't depend on its batch, bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ts {

enum class Format : int32_t { kFp32 = 0, kBf16 = 1, kInt8 = 2, kInt8G32 = 3, kInt4 = 4 };

constexpr int kPanel = 16;
constexpr int kStrip = 64;
constexpr int kGroup = 32;
// How many inputs share a scale. By 32 the perplexity of the embedded model rises by 0.3 %, by 16 it doesn't, and products of
// many rows take a quarter longer: int8, whose weights alone cost as much, takes 32.
constexpr int input_group(Format format) { return format == Format::kInt8 ? 32 : 16; }

// What will be needed next: a product of many rows asks memory for it while it multiplies.
struct Next {
  const uint8_t* data = nullptr;
  size_t bytes = 0;
};

struct Linear {
  Format format = Format::kFp32;
  int32_t rows = 0;     // outputs
  int32_t columns = 0;  // inputs; even, and a multiple of 32 for the integer formats
  uint8_t* data = nullptr;
  const float* scale = nullptr;  // int8: [rows, padded to strips]
  const float* bias = nullptr;   // or none: [rows, padded]

  int num_panels() const { return num_strips() * (kStrip / kPanel); }
  int num_strips() const { return (rows + kStrip - 1) / kStrip; }
  size_t strip_bytes() const;
  Next panels(int first_panel, int num_panels) const;
  size_t bytes() const { return strip_bytes() * num_strips(); }
};

// Inputs of a Linear for some rows, in the form that its format multiplies.
//   fp32, bf16: the numbers.  int formats: int8 numbers, for each group of inputs their scale, and what corrects sums.
struct Inputs {
  std::vector<uint8_t> numbers;
  std::vector<float> scale;    // [rows, groups]
  std::vector<int32_t> sum;    // [rows, groups]: -128 * sum of the int8 numbers, for weights that are stored + 128
  std::vector<float> weighed;  // [rows, columns / 32]: sum of the numbers as they are multiplied, for minimums

  // Room for so many rows of so many numbers, whatever the format.
  void reserve(int num_rows, int columns);
  // Row `row` from fp32 numbers. A number that isn't finite makes the whole row NaN, in every format.
  void set(Format format, int row, const float* numbers, int columns);
};

// How a product goes through a matrix: so many panels at a time (2 or 4), with at most so many rows in registers. All give the
// same numbers; which is fastest depends on the machine and on the number of rows, and is measured when a model is loaded.
struct Variant {
  int32_t panels, rows;
};
std::vector<Variant> variants(Format format);

// tile[row * 64 + output]: the outputs of panels [first_panel, first_panel + variant.panels) for `num_rows` rows of `inputs`
// from `first_row`, bias and scale included.
void multiply(const Linear& linear, Variant variant, int first_panel, const Inputs& inputs, int first_row, int num_rows,
              Next next, float* tile);

// Fills `linear.data` from row-major numbers: fp32 [rows, columns], bf16 [rows, columns], int8 [rows, columns], or int4
// [rows, columns / 2] in GGUF's order; `scale` and `minimum` are fp16 [rows, columns / 32] where the format has them.
void pack(const Linear& linear, const void* numbers, const uint16_t* scale, const uint16_t* minimum, int first_strip, int end_strip);

// Row `row` of the matrix as fp32 [columns]: an embedding.
void unpack_row(const Linear& linear, int row, float* numbers);

}  // namespace ts

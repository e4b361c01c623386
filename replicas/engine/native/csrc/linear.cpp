#include "simd.h"

#include "linear.h"

#include <cmath>
#include <limits>
#include <utility>

#if TS_X86
// Loops over what is held in registers: left to itself, the compiler puts large ones into memory.
#define TS_UNROLL _Pragma("GCC unroll 32")

namespace ts {
namespace {

constexpr size_t kAhead = 2048;  // bytes: what is asked of memory before it is needed
constexpr size_t kHalves = 32;  // bytes of 16 fp16 numbers

// Where things are within a step of a strip. Lines of memory are kept whole: a register is loaded from one of them.
struct Layout {
  size_t panel;   // bytes from a panel to the next
  size_t halves;  // where the first panel's fp16 numbers are, scale before minimum
  size_t next_halves;
  size_t bytes;  // of the step
};
constexpr Layout layout(Format format) {
  switch (format) {
    case Format::kInt8: return {8 * 64, 0, 0, 4 * 8 * 64};
    case Format::kInt8G32: return {8 * 64, 4 * 8 * 64, kHalves, 4 * (8 * 64 + kHalves)};
    case Format::kInt4: return {4 * 64 + 2 * kHalves, 4 * 64, 4 * 64 + 2 * kHalves, 4 * (4 * 64 + 2 * kHalves)};
    default: return {64, 0, 0, 4 * 64};
  }
}

int step_columns(Format format) { return format == Format::kFp32 ? 1 : format == Format::kBf16 ? 2 : kGroup; }

size_t input_bytes(Format format, int columns) {
  return static_cast<size_t>(columns) * (format == Format::kFp32 ? 4 : format == Format::kBf16 ? 2 : 1);
}

bool is_integer(Format format) { return step_columns(format) == kGroup; }

// Asks for `lines` lines of memory a step.
struct Ahead {
  const uint8_t* data;
  int lines;

  void ask(size_t step) const {
    const char* from = reinterpret_cast<const char*>(data) + step * lines * 64;
    for (int line = 0; line < lines; ++line) _mm_prefetch(from + line * 64, _MM_HINT_T1);
  }
};

// R rows by P neighbouring panels of a strip, all of K in order. The two floating-point formats differ in one instruction.
template <bool kNarrow, int R, int P>
void multiply_floats(const uint8_t* panel, const uint8_t* input, size_t row_bytes, int steps, Ahead ahead, float* tile) {
  __m512 sum[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sum[r][p] = _mm512_setzero_ps();
  for (int step = 0; step < steps; ++step, panel += 4 * 64) {
    __m512i weight[P];
    for (int p = 0; p < P; ++p) weight[p] = _mm512_loadu_si512(panel + p * 64);
    if (R <= 2)
      for (int p = 0; p < P; ++p) _mm_prefetch(reinterpret_cast<const char*>(panel) + kAhead + p * 64, _MM_HINT_T0);
    else
      ahead.ask(step);
    for (int r = 0; r < R; ++r) {
      const __m512i x = spread(input + r * row_bytes + step * 4);
      for (int p = 0; p < P; ++p)
        sum[r][p] = kNarrow ? _mm512_dpbf16_ps(sum[r][p], (__m512bh)weight[p], (__m512bh)x)
                            : _mm512_fmadd_ps(_mm512_castsi512_ps(weight[p]), _mm512_castsi512_ps(x), sum[r][p]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) store(tile + r * kStrip + p * kPanel, sum[r][p]);
}

// The same for the integer formats: exact dot products of a group of inputs, then fp32.
template <Format F, int R, int P>
void multiply_integers(const uint8_t* panel, const uint8_t* halves, int columns, const Inputs& inputs, int first_row, Ahead ahead, float* tile) {
  constexpr Layout kLayout = layout(F);
  const size_t groups = columns / kGroup, row_bytes = columns;
  const uint8_t* input = inputs.numbers.data() + first_row * row_bytes;
  constexpr int kSides = kGroup / input_group(F);
  const float* scale = inputs.scale.data() + first_row * groups * kSides;
  const int32_t* offset = inputs.sum.data() + first_row * groups * kSides;
  const float* weighed = inputs.weighed.data() + first_row * groups;
  const __m512i low = _mm512_set1_epi8(0x0f);
  __m512 sum[R][P];
  TS_UNROLL
  for (int r = 0; r < R; ++r)
    TS_UNROLL
    for (int p = 0; p < P; ++p) sum[r][p] = _mm512_setzero_ps();
  for (size_t group = 0; group < groups; ++group, panel += kLayout.bytes, halves += kLayout.bytes, input += kGroup) {
    if (R <= 2) {
      TS_UNROLL
      for (size_t line = 0; line < P * kLayout.bytes / 4; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(panel) + kAhead + line, _MM_HINT_T0);
    } else {
      ahead.ask(group);
    }
    TS_UNROLL
    for (int p = 0; p < P; ++p) {
      const uint8_t* weights = panel + p * kLayout.panel;
      const uint8_t* scales = halves + p * kLayout.next_halves;
      __m512 part[R];
      TS_UNROLL
      for (int side = 0; side < kSides; ++side) {
        __m512i dot[R];
        TS_UNROLL
        for (int r = 0; r < R; ++r)
          dot[r] = F == Format::kInt4 ? _mm512_setzero_si512() : _mm512_set1_epi32(offset[(r * groups + group) * kSides + side]);
        TS_UNROLL
        for (int j = 0; j < 8 / kSides; ++j) {
          __m512i weight = _mm512_loadu_si512(weights + (F == Format::kInt4 ? j : side * 4 + j) * 64);
          if constexpr (F == Format::kInt4)
            weight = _mm512_and_si512(side == 0 ? weight : _mm512_srli_epi16(weight, 4), low);
          TS_UNROLL
          for (int r = 0; r < R; ++r)
            dot[r] = _mm512_dpbusd_epi32(dot[r], weight, spread(input + r * row_bytes + side * input_group(F) + j * 4));
        }
        TS_UNROLL
        for (int r = 0; r < R; ++r) {
          const __m512 x_scale = _mm512_set1_ps(scale[(r * groups + group) * kSides + side]);
          const __m512 exact = _mm512_cvtepi32_ps(dot[r]);
          if constexpr (F == Format::kInt8) sum[r][p] = _mm512_fmadd_ps(exact, x_scale, sum[r][p]);
          else part[r] = side == 0 ? _mm512_mul_ps(exact, x_scale) : _mm512_fmadd_ps(exact, x_scale, part[r]);
        }
      }
      if constexpr (F != Format::kInt8)
        TS_UNROLL
        for (int r = 0; r < R; ++r) {
          sum[r][p] = _mm512_fmadd_ps(part[r], half(scales), sum[r][p]);
          if constexpr (F == Format::kInt4)
            sum[r][p] = _mm512_fmadd_ps(half(scales + kHalves), _mm512_set1_ps(weighed[r * groups + group]), sum[r][p]);
        }
    }
  }
  TS_UNROLL
  for (int r = 0; r < R; ++r)
    TS_UNROLL
    for (int p = 0; p < P; ++p) store(tile + r * kStrip + p * kPanel, sum[r][p]);
}

// R rows of a product by P neighbouring panels of a strip.
using Kernel = void (*)(const Linear&, const uint8_t*, int, const Inputs&, int, Next, float*);

template <bool kNarrow, int R, int P>
void rows_of_floats(const Linear& linear, const uint8_t* strip, int first_panel, const Inputs& inputs, int first_row, Next next,
                    float* tile) {
  const size_t row_bytes = input_bytes(linear.format, linear.columns);
  const uint8_t* input = inputs.numbers.data() + first_row * row_bytes;
  const int steps = linear.columns / (kNarrow ? 2 : 1);
  const Ahead ahead{next.data, static_cast<int>((next.bytes / 64 + steps - 1) / steps)};
  multiply_floats<kNarrow, R, P>(strip + first_panel * 64, input, row_bytes, steps, ahead, tile);
}

template <Format F, int R, int P>
void rows_of_integers(const Linear& linear, const uint8_t* strip, int first_panel, const Inputs& inputs, int first_row, Next next,
                      float* tile) {
  constexpr Layout kLayout = layout(F);
  // One row needs many panels for enough sums under way, many rows have no registers for more than one.
  constexpr int kAtOnce = R == 1 ? P : R == 2 ? 2 : 1;
  const size_t share = next.bytes * kAtOnce / P, groups = linear.columns / kGroup;
  for (int p = 0; p < P; p += kAtOnce) {
    const Ahead ahead{next.data + p / kAtOnce * share, static_cast<int>((share / 64 + groups - 1) / groups)};
    const uint8_t* panel = strip + (first_panel + p) * kLayout.panel;
    const uint8_t* halves = strip + kLayout.halves + (first_panel + p) * kLayout.next_halves;
    multiply_integers<F, R, kAtOnce>(panel, halves, linear.columns, inputs, first_row, ahead, tile + p * kPanel);
  }
}

constexpr int kMostRows = 12;
struct Kernels {
  Kernel of[kMostRows];  // by rows - 1
};

template <bool kNarrow, int P, int... R>
Kernels floats(std::integer_sequence<int, R...>) {
  return {{rows_of_floats<kNarrow, R + 1, P>...}};
}
template <Format F, int P, int... R>
Kernels integers(std::integer_sequence<int, R...>) {
  return {{rows_of_integers<F, R + 1, P>...}};
}
template <int N>
using Rows = std::make_integer_sequence<int, N>;

// By format, and by panels: two or four. The sums of all must fit into 32 registers, with what they are made of.
const Kernels kKernels[5][2] = {
    {floats<false, 2>(Rows<12>()), floats<false, 4>(Rows<6>())},
    {floats<true, 2>(Rows<12>()), floats<true, 4>(Rows<6>())},
    {integers<Format::kInt8, 2>(Rows<8>()), integers<Format::kInt8, 4>(Rows<8>())},
    {integers<Format::kInt8G32, 2>(Rows<8>()), integers<Format::kInt8G32, 4>(Rows<8>())},
    {integers<Format::kInt4, 2>(Rows<8>()), integers<Format::kInt4, 4>(Rows<8>())},
};

}  // namespace

size_t Linear::strip_bytes() const { return layout(format).bytes * (columns / step_columns(format)); }

// Whole strips: panels of one lie among each other.
Next Linear::panels(int first_panel, int num_panels) const {
  const int strip = first_panel / 4;
  if (first_panel % 4 != 0 || strip >= num_strips()) return {};
  return {data + strip * strip_bytes(), strip_bytes() * static_cast<size_t>((num_panels + 3) / 4)};
}

std::vector<Variant> variants(Format format) {
  if (is_integer(format)) return {{4, 8}, {2, 8}, {4, 4}, {2, 4}};
  return {{4, 6}, {2, 12}, {2, 8}, {4, 4}};
}

void Inputs::reserve(int num_rows, int columns) {
  const size_t room = static_cast<size_t>(num_rows) * columns, num_groups = room / input_group(Format::kInt4);
  if (numbers.size() >= room * sizeof(float)) return;
  numbers.resize(room * sizeof(float));
  scale.resize(num_groups);
  sum.resize(num_groups);
  weighed.resize(num_groups);
}

void Inputs::set(Format format, int row, const float* from, int columns) {
  const size_t row_bytes = input_bytes(format, columns);
  uint8_t* to = numbers.data() + row * row_bytes;
  if (format == Format::kFp32) {
    std::memcpy(to, from, row_bytes);
    return;
  }
  if (format == Format::kBf16) {
    for (int k = 0; k < columns; k += kLanes) {
      const __mmask16 mask = first(columns - k);
      const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from + k));
      _mm256_mask_storeu_epi16(to + 2 * k, mask, narrow);
    }
    return;
  }
  __m512 zero_if_finite = _mm512_setzero_ps();
  const int size = input_group(format);
  const size_t first_group = static_cast<size_t>(row) * (columns / size);
  for (int group = 0; group < columns / size; ++group) {
    const __m512 a = load(from + group * size), b = size == kLanes ? a : load(from + group * size + kLanes);
    zero_if_finite = _mm512_fmadd_ps(a, _mm512_setzero_ps(), _mm512_fmadd_ps(b, _mm512_setzero_ps(), zero_if_finite));
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    int total = 0;
    for (int part = 0; part < size; part += kLanes) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(part == 0 ? a : b, inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + group * size + part), _mm512_cvtsepi32_epi8(q));
      total += _mm512_reduce_add_epi32(q);
    }
    scale[first_group + group] = largest / 127.0f;
    sum[first_group + group] = -128 * total;
    if (format != Format::kInt4) continue;
    float& weight = weighed[(first_group + group) / 2];
    weight = (group % 2 == 0 ? 0.0f : weight) + largest / 127.0f * total;
  }
  if (std::isnan(_mm512_reduce_add_ps(zero_if_finite))) scale[first_group] = std::numeric_limits<float>::quiet_NaN();
}

void multiply(const Linear& linear, Variant variant, int first_panel, const Inputs& inputs, int first_row, int num_rows,
              Next next, float* tile) {
  const uint8_t* strip = linear.data + first_panel / 4 * linear.strip_bytes();
  const Kernel* kernels = kKernels[static_cast<int>(linear.format)][variant.panels == 4].of;
  const int parts = (num_rows + variant.rows - 1) / variant.rows;
  for (int part = 0, row = 0; part < parts; ++part) {
    const int count = num_rows / parts + (part < num_rows % parts);
    const size_t begin = next.bytes * part / parts / 64 * 64, end = next.bytes * (part + 1) / parts / 64 * 64;
    kernels[count - 1](linear, strip, first_panel % 4, inputs, first_row + row, {next.data + begin, end - begin}, tile + row * kStrip);
    row += count;
  }
  if (linear.scale == nullptr && linear.bias == nullptr) return;
  for (int row = 0; row < num_rows; ++row)
    for (int p = 0; p < variant.panels * kPanel; p += kPanel) {
      __m512 value = load(tile + row * kStrip + p);
      if (linear.scale != nullptr) value = _mm512_mul_ps(value, load(linear.scale + first_panel * kPanel + p));
      if (linear.bias != nullptr) value = _mm512_add_ps(value, load(linear.bias + first_panel * kPanel + p));
      store(tile + row * kStrip + p, value);
    }
}

void pack(const Linear& linear, const void* numbers, const uint16_t* scale, const uint16_t* minimum, int first_strip,
          int end_strip) {
  const auto* bytes = static_cast<const uint8_t*>(numbers);
  const Layout place = layout(linear.format);
  const size_t groups = linear.columns / kGroup;
  const int steps = linear.columns / step_columns(linear.format);
  const size_t item = linear.format == Format::kFp32 ? 4 : linear.format == Format::kBf16 ? 2 : 1;
  const size_t row_bytes = linear.format == Format::kInt4 ? linear.columns / 2 : linear.columns * item;
  for (int output = first_strip * kStrip; output < end_strip * kStrip; ++output) {
    const int lane = output % kPanel, panel = output % kStrip / kPanel;
    uint8_t* strip = linear.data + output / kStrip * linear.strip_bytes();
    uint8_t *to = strip + panel * place.panel, *halves = strip + place.halves + panel * place.next_halves + lane * 2;
    const bool real = output < linear.rows;  // else padding: zeros, with a scale of 0
    const uint8_t* from = bytes + static_cast<size_t>(real ? output : 0) * row_bytes;
    for (int step = 0; step < steps; ++step, to += place.bytes, halves += place.bytes) {
      if (!is_integer(linear.format)) {
        if (real) std::memcpy(to + lane * 4, from + step * 4, 4);
        else std::memset(to + lane * 4, 0, 4);
        continue;
      }
      if (linear.format == Format::kInt4) {
        // Byte i of the file's 16 has k = i and k = i + 16, which is what a lane's 4 bytes of j = i / 4 shall have.
        for (int j = 0; j < 4; ++j) {
          uint32_t four = 0;
          if (real) std::memcpy(&four, from + step * 16 + j * 4, 4);
          std::memcpy(to + j * 64 + lane * 4, &four, 4);
        }
      } else {
        for (int j = 0; j < 8; ++j) {
          uint32_t four = 0;
          if (real) std::memcpy(&four, from + step * kGroup + j * 4, 4);
          four ^= 0x80808080u;  // int8 + 128 as uint8
          std::memcpy(to + j * 64 + lane * 4, &four, 4);
        }
      }
      const size_t index = static_cast<size_t>(real ? output : 0) * groups + step;
      const uint16_t none = 0;
      if (scale != nullptr) std::memcpy(halves, real ? scale + index : &none, 2);
      if (minimum != nullptr) std::memcpy(halves + kHalves, real ? minimum + index : &none, 2);
    }
  }
}

void unpack_row(const Linear& linear, int row, float* numbers) {
  const Layout place = layout(linear.format);
  const int steps = linear.columns / step_columns(linear.format), lane = row % kPanel, panel = row % kStrip / kPanel;
  const uint8_t* strip = linear.data + row / kStrip * linear.strip_bytes();
  const uint8_t *from = strip + panel * place.panel, *halves = strip + place.halves + panel * place.next_halves + lane * 2;
  const auto halved = [](const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
  };
  for (int step = 0; step < steps; ++step, from += place.bytes, halves += place.bytes) {
    if (linear.format == Format::kFp32) {
      std::memcpy(numbers + step, from + lane * 4, 4);
    } else if (linear.format == Format::kBf16) {
      uint32_t both;
      std::memcpy(&both, from + lane * 4, 4);
      const uint32_t two[2] = {both << 16, both & 0xffff0000u};
      std::memcpy(numbers + step * 2, two, 8);
    } else if (linear.format == Format::kInt4) {
      const float scale = halved(halves), minimum = halved(halves + kHalves);
      for (int k = 0; k < 16; ++k) {
        const uint8_t both = from[k / 4 * 64 + lane * 4 + k % 4];
        numbers[step * kGroup + k] = scale * (both & 15) + minimum;
        numbers[step * kGroup + 16 + k] = scale * (both >> 4) + minimum;
      }
    } else {
      const float scale = linear.format == Format::kInt8 ? linear.scale[row] : halved(halves);
      for (int k = 0; k < kGroup; ++k) numbers[step * kGroup + k] = scale * (from[k / 4 * 64 + lane * 4 + k % 4] - 128);
    }
  }
}

}  // namespace ts
#endif

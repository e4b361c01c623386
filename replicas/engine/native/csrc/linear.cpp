#include "simd.h"

#include "linear.h"

#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#if TS_X86
// Loops over what is held in registers: left to itself, the compiler puts large ones into memory.
#define TS_UNROLL _Pragma("GCC unroll 32")

namespace ts {
namespace {

constexpr size_t kAhead = 2048;  // bytes: what is asked of memory before it is needed
constexpr size_t kHalves = 32;  // bytes of 16 fp16 numbers
constexpr int kPerPanel = kPanel / kLanes;  // registers

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

// Bytes of an input, in the form that the format multiplies.
size_t item_bytes(Format format) {
  switch (format) {
    case Format::kFp32: return sizeof(float);
    case Format::kBf16: return sizeof(PairItem);
    case Format::kInt4: return NibbleDot::kItem;
    default: return ByteDot::kItem;
  }
}

bool is_integer(Format format) { return step_columns(format) == kGroup; }

// Asks for so many lines of memory evenly over a product's steps.
class Ahead {
 public:
  Ahead(const uint8_t* data, size_t num_lines, size_t steps) : data_(reinterpret_cast<const char*>(data)) {
    if (num_lines == 0) return;
    lines_ = (num_lines + steps - 1) / steps;
    while (lines_ == 1 && num_lines << (shift_ + 1) <= steps) ++shift_;
  }

  void ask(size_t step) const {
    if ((step & ((size_t{1} << shift_) - 1)) != 0) return;
    const char* from = data_ + (step >> shift_) * lines_ * 64;
    for (size_t line = 0; line < lines_; ++line) _mm_prefetch(from + line * 64, _MM_HINT_T1);
  }

 private:
  const char* data_;
  size_t lines_ = 0;  // at every 2**shift-th step
  int shift_ = 0;
};

// R rows by N registers of outputs that lie side by side in a strip, all of K in order.
template <bool kNarrow, int R, int N>
void multiply_floats(const uint8_t* weights, const void* inputs, int columns, Ahead ahead, float* tile) {
  using Item = std::conditional_t<kNarrow, PairItem, float>;
  constexpr int kColumns = kNarrow ? 2 : 1;
  const Item* input = static_cast<const Item*>(inputs);
  Floats sum[R][N];
  TS_UNROLL
  for (int r = 0; r < R; ++r)
    TS_UNROLL
    for (int n = 0; n < N; ++n) sum[r][n] = zeros();
  for (int step = 0; step < columns / kColumns; ++step, weights += 4 * 64, input += kColumns) {
    if (R <= 2)
      for (size_t line = 0; line < N * kRegister; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(weights) + kAhead + line, _MM_HINT_T0);
    else
      ahead.ask(step);
    if constexpr (kNarrow) {
      Pairs weight[N];
      TS_UNROLL
      for (int n = 0; n < N; ++n) weight[n] = Pairs::from(load_ints(weights + n * kRegister));
      TS_UNROLL
      for (int r = 0; r < R; ++r)
        TS_UNROLL
        for (int n = 0; n < N; ++n) sum[r][n] = weight[n].add_to(sum[r][n], input + static_cast<size_t>(r) * columns);
    } else {
      Floats weight[N];
      TS_UNROLL
      for (int n = 0; n < N; ++n) weight[n] = load(reinterpret_cast<const float*>(weights + n * kRegister));
      TS_UNROLL
      for (int r = 0; r < R; ++r) {
        const Floats x = all(input[static_cast<size_t>(r) * columns]);
        TS_UNROLL
        for (int n = 0; n < N; ++n) sum[r][n] = fma(weight[n], x, sum[r][n]);
      }
    }
  }
  TS_UNROLL
  for (int r = 0; r < R; ++r)
    TS_UNROLL
    for (int n = 0; n < N; ++n) store(tile + r * kStrip + n * kLanes, sum[r][n]);
}

// The same for the integer formats, N registers of whole panels or one that begins at lane `lane` of its panel: exact dot
// products of a group of inputs, then fp32.
template <Format F, int R, int N>
void multiply_integers(const uint8_t* panel, const uint8_t* halves, int columns, const Inputs& inputs, int first_row, Ahead ahead, float* tile) {
  using Dot = std::conditional_t<F == Format::kInt4, NibbleDot, ByteDot>;
  constexpr Layout kLayout = layout(F);
  constexpr int kSides = kGroup / input_group(F);
  const size_t groups = columns / kGroup, row_bytes = static_cast<size_t>(columns) * Dot::kItem;
  const uint8_t* input = inputs.numbers.data() + first_row * row_bytes;
  const float* scale = inputs.scale.data() + first_row * groups * kSides;
  const int32_t* offset = inputs.sum.data() + first_row * groups * kSides;
  const float* weighed = inputs.weighed.data() + first_row * groups;
  Floats sum[R][N];
  TS_UNROLL
  for (int r = 0; r < R; ++r)
    TS_UNROLL
    for (int n = 0; n < N; ++n) sum[r][n] = zeros();
  for (size_t group = 0; group < groups; ++group, panel += kLayout.bytes, halves += kLayout.bytes, input += kGroup * Dot::kItem) {
    if (R <= 2) {
      TS_UNROLL
      for (size_t line = 0; line < N * kLayout.bytes / (4 * kPerPanel); line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(panel) + kAhead + line, _MM_HINT_T0);
    } else {
      ahead.ask(group);
    }
    TS_UNROLL
    for (int n = 0; n < N; ++n) {
      const uint8_t* weights = panel + n / kPerPanel * kLayout.panel + n % kPerPanel * kRegister;
      const uint8_t* scales = halves + n / kPerPanel * kLayout.next_halves + n % kPerPanel * kLanes * 2;
      Floats part[R];
      TS_UNROLL
      for (int side = 0; side < kSides; ++side) {
        Ints dot[R];
        TS_UNROLL
        for (int r = 0; r < R; ++r) dot[r] = all_ints(F == Format::kInt4 ? 0 : offset[(r * groups + group) * kSides + side]);
        TS_UNROLL
        for (int j = 0; j < 8 / kSides; ++j) {
          Ints four = load_ints(weights + (F == Format::kInt4 ? j : side * 4 + j) * 64);
          if constexpr (F == Format::kInt4) four = side == 0 ? low_nibbles(four) : high_nibbles(four);
          const typename Dot::Weight weight = Dot::prepare(four);
          TS_UNROLL
          for (int r = 0; r < R; ++r)
            dot[r] = Dot::add(dot[r], weight, input + r * row_bytes + (side * input_group(F) + j * 4) * Dot::kItem);
        }
        TS_UNROLL
        for (int r = 0; r < R; ++r) {
          const Floats x_scale = all(scale[(r * groups + group) * kSides + side]);
          const Floats exact = to_floats(Dot::finish(dot[r]));
          if constexpr (F == Format::kInt8) sum[r][n] = fma(exact, x_scale, sum[r][n]);
          else part[r] = side == 0 ? mul(exact, x_scale) : fma(exact, x_scale, part[r]);
        }
      }
      if constexpr (F != Format::kInt8)
        TS_UNROLL
        for (int r = 0; r < R; ++r) {
          sum[r][n] = fma(part[r], load_halves(scales), sum[r][n]);
          if constexpr (F == Format::kInt4)
            sum[r][n] = fma(load_halves(scales + kHalves), all(weighed[r * groups + group]), sum[r][n]);
        }
    }
  }
  TS_UNROLL
  for (int r = 0; r < R; ++r)
    TS_UNROLL
    for (int n = 0; n < N; ++n) store(tile + r * kStrip + n * kLanes, sum[r][n]);
}

// R rows of a product by P neighbouring panels of a strip.
using Kernel = void (*)(const Linear&, const uint8_t*, int, const Inputs&, int, Next, float*);

// As many registers at a time as the sums of R rows leave room for, and no more than P panels have.
constexpr int at_once(int rows, int panels) {
  int count = panels * kPerPanel;
  while (count > 1 && rows * count > kProductSums) count /= 2;
  return count;
}

template <bool kNarrow, int R, int P>
void rows_of_floats(const Linear& linear, const uint8_t* strip, int first_panel, const Inputs& inputs, int first_row, Next next,
                    float* tile) {
  constexpr int kAtOnce = at_once(R, P), kPasses = P * kPerPanel / kAtOnce;
  const uint8_t* input = inputs.numbers.data() + first_row * (linear.columns * item_bytes(linear.format));
  const size_t share = next.bytes / kPasses / 64 * 64, steps = linear.columns / (kNarrow ? 2 : 1);
  for (int pass = 0; pass < kPasses; ++pass) {
    const Ahead ahead(next.data + pass * share, share / 64, steps);
    const size_t first = pass * kAtOnce;
    multiply_floats<kNarrow, R, kAtOnce>(strip + first_panel * 64 + first * kRegister, input, linear.columns, ahead, tile + first * kLanes);
  }
}

template <Format F, int R, int P>
void rows_of_integers(const Linear& linear, const uint8_t* strip, int first_panel, const Inputs& inputs, int first_row, Next next,
                      float* tile) {
  constexpr Layout kLayout = layout(F);
  // One row needs many registers for enough sums under way, many rows have no room for more than one.
  constexpr int kAtOnce = R == 1 ? P * kPerPanel : R == 2 ? 2 : 1, kPasses = P * kPerPanel / kAtOnce;
  const size_t share = next.bytes / kPasses / 64 * 64, groups = linear.columns / kGroup;
  for (int pass = 0; pass < kPasses; ++pass) {
    const Ahead ahead(next.data + pass * share, share / 64, groups);
    const int first = pass * kAtOnce, panel = first_panel + first / kPerPanel, lane = first % kPerPanel * kLanes;
    const uint8_t* weights = strip + panel * kLayout.panel + lane * 4;
    const uint8_t* halves = strip + kLayout.halves + panel * kLayout.next_halves + lane * 2;
    multiply_integers<F, R, kAtOnce>(weights, halves, linear.columns, inputs, first_row, ahead, tile + first * kLanes);
  }
}

// By rows - 1.
constexpr int kMostRows = 12;
struct Kernels {
  Kernel of[kMostRows];
};

template <bool kNarrow, int P, int... R>
constexpr Kernels floats(std::integer_sequence<int, R...>) {
  return {{rows_of_floats<kNarrow, R + 1, P>...}};
}
template <Format F, int P, int... R>
constexpr Kernels integers(std::integer_sequence<int, R...>) {
  return {{rows_of_integers<F, R + 1, P>...}};
}
template <int N>
using Rows = std::make_integer_sequence<int, N>;

// By format, and by panels: two or four. The sums must fit into the registers, with what they are made of. Constant: what runs
// when the library is loaded must not need its instructions.
constexpr int kIntegers = kLanes == 16 ? 8 : 4, kFloats = kLanes == 16 ? 12 : 6;
constexpr Kernels kKernels[5][2] = {
    {floats<false, 2>(Rows<kFloats>()), floats<false, 4>(Rows<6>())},
    {floats<true, 2>(Rows<kFloats>()), floats<true, 4>(Rows<6>())},
    {integers<Format::kInt8, 2>(Rows<kIntegers>()), integers<Format::kInt8, 4>(Rows<kIntegers>())},
    {integers<Format::kInt8G32, 2>(Rows<kIntegers>()), integers<Format::kInt8G32, 4>(Rows<kIntegers>())},
    {integers<Format::kInt4, 2>(Rows<kIntegers>()), integers<Format::kInt4, 4>(Rows<kIntegers>())},
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
  if (is_integer(format)) return {{4, kIntegers}, {2, kIntegers}, {4, kIntegers / 2}, {2, kIntegers / 2}};
  return {{4, 6}, {2, kFloats}, {2, kFloats * 2 / 3}, {4, 4}};
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
  const size_t row_bytes = columns * item_bytes(format);
  uint8_t* to = numbers.data() + row * row_bytes;
  if (!is_integer(format)) {
    if (item_bytes(format) == sizeof(float)) {
      std::memcpy(to, from, row_bytes);
      return;
    }
    int k = 0;
    for (; k + kLanes <= columns; k += kLanes) narrow(reinterpret_cast<uint16_t*>(to) + k, load(from + k));
    if (k == columns) return;
    uint16_t rest[kLanes];
    narrow(rest, load_first(from + k, columns - k, zeros()));
    std::memcpy(to + 2 * k, rest, 2 * (columns - k));
    return;
  }
  constexpr int kMostRegisters = kGroup / kLanes;
  const auto put = format == Format::kInt4 ? NibbleDot::store : ByteDot::store;
  const int size = input_group(format), num_registers = size / kLanes;
  const size_t first_group = static_cast<size_t>(row) * (columns / size);
  Floats zero_if_finite = zeros();
  for (int group = 0; group < columns / size; ++group) {
    Floats x[kMostRegisters], most = zeros();
    for (int i = 0; i < num_registers; ++i) {
      x[i] = load(from + group * size + i * kLanes);
      zero_if_finite = fma(x[i], zeros(), zero_if_finite);
      most = max(most, abs(x[i]));
    }
    const float largest = reduce_max(most);
    const Floats inverse = all(largest > 0.0f ? 127.0f / largest : 0.0f);
    int total = 0;
    for (int i = 0; i < num_registers; ++i) {
      const Ints q = round_to_ints(mul(x[i], inverse));
      put(to + (group * size + i * kLanes) * item_bytes(format), q);
      total += reduce_add(q);
    }
    scale[first_group + group] = largest / 127.0f;
    sum[first_group + group] = -128 * total;
    if (format != Format::kInt4) continue;
    float& weight = weighed[(first_group + group) / 2];
    weight = (group % 2 == 0 ? 0.0f : weight) + largest / 127.0f * total;
  }
  if (std::isnan(reduce_add(zero_if_finite))) scale[first_group] = std::numeric_limits<float>::quiet_NaN();
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
    for (int p = 0; p < variant.panels * kPanel; p += kLanes) {
      Floats value = load(tile + row * kStrip + p);
      if (linear.scale != nullptr) value = mul(value, load(linear.scale + first_panel * kPanel + p));
      if (linear.bias != nullptr) value = add(value, load(linear.bias + first_panel * kPanel + p));
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

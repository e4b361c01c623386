#include "simd.h"

#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#if TS_X86
namespace ts {
namespace {

constexpr int kMostAtOnce = 4;  // blocks
constexpr int kPerBlock = kBlock / kLanes;  // registers
constexpr bool kRounds = sizeof(PairItem) == 2;  // what meets bf16 numbers becomes bf16 as well
// Whole registers of that many sums; the greatest power of two that R rows leave room for.
constexpr int room_for(int rows, int registers_each) {
  int count = kMostAtOnce;
  while (count > 1 && rows * count * registers_each > kProductSums) count /= 2;
  return count;
}
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A register's numbers of a block as fp32, whatever they are stored as.
struct WideNumbers {
  static constexpr bool kNarrow = false;
  static constexpr size_t kItem = 4;
  static Floats at(const uint8_t* side, size_t index) { return load(reinterpret_cast<const float*>(side) + index); }
};
struct ByteNumbers {
  static constexpr bool kNarrow = false;
  static constexpr size_t kItem = 1;
  static Floats at(const uint8_t* side, size_t index) { return load_bytes(side + index); }
};
struct NarrowNumbers {
  static constexpr bool kNarrow = true;
};

// Blocks lie anywhere, so no prefetcher of the machine's guesses what comes next.
inline void ask_for(const uint8_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T0); }

// scores[r * kPart + token] of R rows for B neighbouring blocks. rows: fp32, or PairItem where the cache is bf16.
template <class N, int R, int B>
void score_blocks(const uint8_t* const* keys, const float* scale, const void* const* rows, int dim, float* scores) {
  constexpr bool kAsks = R <= 3;  // many rows are a prompt's: they multiply longer than they read
  constexpr int C = B * kPerBlock;
  Floats sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = zeros();
  if constexpr (N::kNarrow) {
    for (int pair = 0; pair < dim / 2; ++pair) {
      Pairs key[C];
      for (int c = 0; c < C; ++c) key[c] = Pairs::from(load_ints(keys[c / kPerBlock] + pair * 64 + c % kPerBlock * kRegister));
      for (int b = 0; kAsks && b < B; ++b) {
        ask_for(keys[b] + pair * 64 + static_cast<size_t>(dim) * kBlock * 2);  // the values, which lie behind the keys
        ask_for(keys[b + B] + pair * 64);
      }
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = key[c].add_to(sum[r][c], static_cast<const PairItem*>(rows[r]) + pair * 2);
    }
  } else {
    for (int d = 0; d < dim; ++d) {
      const size_t at = static_cast<size_t>(d) * kBlock;
      Floats key[C];
      for (int c = 0; c < C; ++c) key[c] = N::at(keys[c / kPerBlock], at + c % kPerBlock * kLanes);
      for (int b = 0; kAsks && b < B; ++b) {
        ask_for(keys[b] + (at + static_cast<size_t>(dim) * kBlock) * N::kItem);
        ask_for(keys[b + B] + at * N::kItem);
      }
      for (int r = 0; r < R; ++r) {
        const Floats x = all(static_cast<const float*>(rows[r])[d]);
        for (int c = 0; c < C; ++c) sum[r][c] = fma(key[c], x, sum[r][c]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      store(scores + r * kPart + c * kLanes, scale == nullptr ? sum[r][c] : mul(sum[r][c], all(scale[c / kPerBlock])));
}

template <class N, int R>
void score_part(const uint8_t* const* keys, const float* scale, int num_blocks, const void* const* rows, int dim, float* scores) {
  constexpr int kMany = room_for(R, kPerBlock);  // enough sums under way to hide an instruction's latency
  int block = 0;
  for (; block + kMany <= num_blocks; block += kMany)
    score_blocks<N, R, kMany>(keys + block, scale == nullptr ? nullptr : scale + block, rows, dim, scores + block * kBlock);
  for (; block < num_blocks; ++block)
    score_blocks<N, R, 1>(keys + block, scale == nullptr ? nullptr : scale + block, rows, dim, scores + block * kBlock);
}

// One row's scores become weights: exp(score - largest), 0 for what it doesn't see.
template <bool kCoarse>
void weigh(float* scores, int num_blocks, int visible, float* largest, float* total) {
  if (visible <= 0) {
    std::fill_n(scores, num_blocks * kBlock, 0.0f);
    *largest = kMinusInfinity;
    *total = 0.0f;
    return;
  }
  Floats most = all(kMinusInfinity);
  for (int token = 0; token < visible; token += kLanes) most = max(most, load_first(scores + token, visible - token, most));
  *largest = reduce_max(most);
  const Floats peak = all(*largest);
  Floats sum = zeros();
  for (int token = 0; token < num_blocks * kBlock; token += kLanes) {
    const Floats below = sub(load(scores + token), peak);
    const Floats weight = keep_first(kCoarse ? coarse_exp(below) : exp(below), visible - token);
    sum = add(sum, weight);
    store(scores + token, weight);
  }
  *total = reduce_add(sum);
}

// out[r * stride + first_dim ...]: R rows' weighted sums of values over a part, for C registers of dimensions.
template <class N, int R, int C>
void sum_values(const uint8_t* const* values, int num_blocks, const void* weights, int dim, int first_dim, float* out,
                size_t stride) {
  Floats sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = zeros();
  for (int block = 0; block < num_blocks; ++block) {
    if constexpr (N::kNarrow) {
      for (int pair = 0; pair < kBlock / 2; ++pair) {
        const uint8_t* from = values[block] + (static_cast<size_t>(pair) * dim + first_dim) * 4;
        Pairs value[C];
        for (int c = 0; c < C; ++c) value[c] = Pairs::from(load_ints(from + c * kRegister));
        const PairItem* weight = static_cast<const PairItem*>(weights) + block * kBlock + pair * 2;
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) sum[r][c] = value[c].add_to(sum[r][c], weight + r * kPart);
      }
    } else {
      for (int token = 0; token < kBlock; ++token) {
        Floats value[C];
        for (int c = 0; c < C; ++c) value[c] = N::at(values[block], static_cast<size_t>(token) * dim + first_dim + c * kLanes);
        for (int r = 0; r < R; ++r) {
          const Floats weight = all(static_cast<const float*>(weights)[r * kPart + block * kBlock + token]);
          for (int c = 0; c < C; ++c) sum[r][c] = fma(value[c], weight, sum[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(out + r * stride + first_dim + c * kLanes, sum[r][c]);
}

// What attention needs of a part of a context: where its blocks are.
struct Part {
  const uint8_t* keys[kPartBlocks + kMostAtOnce];  // with the last one repeated, for what asks ahead
  const uint8_t* values[kPartBlocks];
  float key_scale[kPartBlocks], value_scale[kPartBlocks];
  int num_blocks = 0;
};

template <class N, int R>
void attend_rows(const Part& part, Format format, const Queries& queries, int first_row, int part_start, int dim,
                 AttentionScratch& scratch, Partial& out) {
  constexpr bool kRounded = N::kNarrow && kRounds;
  const void* rows[R];
  for (int r = 0; r < R; ++r)
    rows[r] = kRounded ? static_cast<const void*>(scratch.narrow_rows.data() + static_cast<size_t>(first_row + r) * dim)
                         : queries.rows[first_row + r];
  float* scores = scratch.scores.data();
  const bool scaled = format == Format::kInt8;
  score_part<N, R>(part.keys, scaled ? part.key_scale : nullptr, part.num_blocks, rows, dim, scores);
  for (int r = 0; r < R; ++r) {
    float* row = scores + r * kPart;
    if (part_start < queries.first) row[0] = kMinusInfinity;
    const int visible = std::min(queries.visible[first_row + r] - part_start, part.num_blocks * kBlock);
    weigh<N::kNarrow>(row, part.num_blocks, visible, &out.largest[first_row + r], &out.total[first_row + r]);
    if (kRounded)
      for (int token = 0; token < part.num_blocks * kBlock; token += kLanes)
        narrow(scratch.narrow_scores.data() + r * kPart + token, load(row + token));
    if (scaled)
      for (int token = 0; token < part.num_blocks * kBlock; token += kLanes)
        store(row + token, mul(load(row + token), all(part.value_scale[token / kBlock])));
  }
  const void* weights = kRounded ? static_cast<const void*>(scratch.narrow_scores.data()) : scores;
  float* weighted = out.weighted.data() + static_cast<size_t>(first_row) * dim;
  constexpr int kMany = room_for(R, 1);
  int d = 0;
  for (; d + kMany * kLanes <= dim; d += kMany * kLanes)
    sum_values<N, R, kMany>(part.values, part.num_blocks, weights, dim, d, weighted, dim);
  for (; d < dim; d += kLanes) sum_values<N, R, 1>(part.values, part.num_blocks, weights, dim, d, weighted, dim);
}

template <class N>
void attend_numbers(const Part& part, Format format, const Queries& queries, int part_start, int dim,
                    AttentionScratch& scratch, Partial& out) {
  using Rows = void (*)(const Part&, Format, const Queries&, int, int, int, AttentionScratch&, Partial&);
  static const Rows kRows[] = {attend_rows<N, 1>, attend_rows<N, 2>, attend_rows<N, 3>,
                               attend_rows<N, 4>, attend_rows<N, 5>, attend_rows<N, 6>};
  for (int row = 0; row < queries.count;) {
    const int count = std::min(6, queries.count - row);
    kRows[count - 1](part, format, queries, row, part_start, dim, scratch, out);
    row += count;
  }
}

// A side (keys or values) of an int8 block: `count` new tokens from `offset`, under one scale that fits old and new.
template <bool kKeys>
void write_bytes(uint8_t* side, float* scale, int dim, int offset, int count, const float* from, size_t stride) {
  auto* bytes = reinterpret_cast<int8_t*>(side);
  const auto at = [&](int token, int d) -> int8_t& { return bytes[kKeys ? d * kBlock + token : token * dim + d]; };
  float largest = 0.0f;
  bool finite = true;
  for (int token = 0; token < count; ++token)
    for (int d = 0; d < dim; ++d) {
      const float magnitude = std::fabs(from[token * stride + d]);
      largest = std::max(largest, magnitude);
      finite &= std::isfinite(magnitude);
    }
  if (!finite) largest = std::numeric_limits<float>::quiet_NaN();  // so that the sequence's answer ends as an error
  const float wanted = largest / 127.0f, old = offset == 0 ? 0.0f : *scale;
  if (!(wanted <= old)) {
    const float ratio = old / wanted;
    for (int token = 0; token < offset; ++token)
      for (int d = 0; d < dim; ++d) at(token, d) = static_cast<int8_t>(std::isfinite(ratio) ? std::nearbyint(at(token, d) * ratio) : 0.0f);
    *scale = wanted;
  } else {
    *scale = old;
  }
  const float inverse = *scale > 0.0f && std::isfinite(*scale) ? 1.0f / *scale : 0.0f;
  for (int token = 0; token < count; ++token)
    for (int d = 0; d < dim; ++d) {
      const float q = std::nearbyint(from[token * stride + d] * inverse);
      at(offset + token, d) = static_cast<int8_t>(std::isfinite(q) ? std::min(127.0f, std::max(-127.0f, q)) : 0.0f);
    }
}

}  // namespace

void write_block(const KvCache& cache, int layer, int block, int head, int offset, int count, const float* keys,
                 const float* values, size_t stride, bool clear) {
  const int dim = cache.dim, end = offset + count;
  uint8_t *key_side = cache.keys(layer, block, head), *value_side = cache.values(layer, block, head);
  if (cache.format == Format::kInt8) {
    float* scale = cache.scale(layer, block, head);
    write_bytes<true>(key_side, scale, dim, offset, count, keys, stride);
    write_bytes<false>(value_side, scale + 1, dim, offset, count, values, stride);
    return;  // bytes are finite
  }
  if (cache.format == Format::kFp32) {
    auto *to_keys = reinterpret_cast<float*>(key_side), *to_values = reinterpret_cast<float*>(value_side);
    for (int token = 0; token < count; ++token) {
      for (int d = 0; d < dim; ++d) to_keys[d * kBlock + offset + token] = keys[token * stride + d];
      std::memcpy(to_values + (offset + token) * dim, values + token * stride, sizeof(float) * dim);
    }
    if (clear) std::memset(to_values + end * dim, 0, sizeof(float) * dim * (kBlock - end));
    return;
  }
  auto *to_keys = reinterpret_cast<uint32_t*>(key_side);
  auto *to_values = reinterpret_cast<uint16_t*>(value_side);
  uint16_t row[256];
  for (int token = 0; token < count; ++token) {
    const int slot = offset + token;
    for (int d = 0; d < dim; d += kLanes) narrow(row + d, load(keys + token * stride + d));
    for (int pair = 0; pair < dim / 2; ++pair) std::memcpy(to_keys + pair * kBlock + slot, row + pair * 2, 4);
    for (int d = 0; d < dim; d += kLanes) narrow(row + d, load(values + token * stride + d));
    uint16_t* to = to_values + static_cast<size_t>(slot / 2) * dim * 2 + slot % 2;
    for (int d = 0; d < dim; ++d) to[d * 2] = row[d];
  }
  if (!clear) return;
  for (int slot = end; slot < kBlock; ++slot) {
    uint16_t* to = to_values + static_cast<size_t>(slot / 2) * dim * 2 + slot % 2;
    for (int d = 0; d < dim; ++d) to[d * 2] = 0;
  }
}

void read_token(const KvCache& cache, int layer, int block, int head, int offset, float* keys, float* values) {
  const uint8_t *key_side = cache.keys(layer, block, head), *value_side = cache.values(layer, block, head);
  const float* scale = cache.scale(layer, block, head);
  const auto wide = [](const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    const uint32_t whole = static_cast<uint32_t>(bits) << 16;
    float number;
    std::memcpy(&number, &whole, 4);
    return number;
  };
  for (int d = 0; d < cache.dim; ++d) {
    const int key = d * kBlock + offset, value = offset * cache.dim + d;
    if (cache.format == Format::kFp32) {
      keys[d] = reinterpret_cast<const float*>(key_side)[key];
      values[d] = reinterpret_cast<const float*>(value_side)[value];
    } else if (cache.format == Format::kInt8) {
      keys[d] = reinterpret_cast<const int8_t*>(key_side)[key] * scale[0];
      values[d] = reinterpret_cast<const int8_t*>(value_side)[value] * scale[1];
    } else {
      keys[d] = wide(key_side + (d / 2 * kBlock + offset) * 4 + d % 2 * 2);
      values[d] = wide(value_side + (offset / 2 * cache.dim + d) * 4 + offset % 2 * 2);
    }
  }
}

void Partial::shape(int dim) {
  largest.resize(kTileRows);
  total.resize(kTileRows);
  weighted.resize(static_cast<size_t>(kTileRows) * dim);
}

void AttentionScratch::shape(int dim) {
  scores.resize(6 * kPart);
  narrow_scores.resize(6 * kPart);
  narrow_rows.resize(static_cast<size_t>(kTileRows) * dim);
  one.shape(dim);
}

void attend_part(const KvCache& cache, int layer, int head, const int32_t* table, const Queries& queries, int index,
                 AttentionScratch& scratch, Partial& out) {
  const int start = index * kPart, dim = cache.dim;
  const int end = *std::max_element(queries.visible, queries.visible + queries.count);
  Part part;
  part.num_blocks = std::min(kPartBlocks, (end - start + kBlock - 1) / kBlock);
  for (int block = 0; block < part.num_blocks; ++block) {
    const int where = table[start / kBlock + block];
    part.keys[block] = cache.keys(layer, where, head);
    part.values[block] = cache.values(layer, where, head);
    if (cache.format == Format::kInt8) {
      part.key_scale[block] = cache.scale(layer, where, head)[0];
      part.value_scale[block] = cache.scale(layer, where, head)[1];
    }
  }
  std::fill_n(part.keys + part.num_blocks, kMostAtOnce, part.keys[part.num_blocks - 1]);
  switch (cache.format) {
    case Format::kFp32: return attend_numbers<WideNumbers>(part, cache.format, queries, start, dim, scratch, out);
    case Format::kInt8: return attend_numbers<ByteNumbers>(part, cache.format, queries, start, dim, scratch, out);
    default: break;
  }
  for (int row = 0; kRounds && row < queries.count; ++row)
    for (int d = 0; d < dim; d += kLanes)
      narrow(scratch.narrow_rows.data() + static_cast<size_t>(row) * dim + d, load(queries.rows[row] + d));
  attend_numbers<NarrowNumbers>(part, cache.format, queries, start, dim, scratch, out);
}

void merge(Partial& into, const Partial& next, int count, int dim) {
  for (int row = 0; row < count; ++row) {
    if (next.total[row] == 0.0f) continue;  // it sees nothing of that part; NaN is not 0
    const float largest = std::max(into.largest[row], next.largest[row]);
    const float before = std::exp(into.largest[row] - largest), after = std::exp(next.largest[row] - largest);
    into.total[row] = into.total[row] * before + next.total[row] * after;
    float* to = into.weighted.data() + static_cast<size_t>(row) * dim;
    const float* from = next.weighted.data() + static_cast<size_t>(row) * dim;
    for (int d = 0; d < dim; d += kLanes)
      store(to + d, fma(load(from + d), all(after), mul(load(to + d), all(before))));
    into.largest[row] = largest;
  }
}

}  // namespace ts
#endif

// Attention over the paged KV cache, block by block where the blocks lie: nothing is gathered, and a pass over a context serves
// all query rows of a tile, which are the heads of a group for one token or several.
//
// A block of 16 tokens of one key-value head, D numbers a token, keys first:
//
//   format    keys, so that a register holds the 16 tokens           values, so that a register holds 16 dimensions
//   fp32      [D][16] x fp32                                          [16][D] x fp32
//   bf16      [D / 2][16] x (d, d + 1)                                [8][D] x (token 2i, token 2i + 1)
//   int8      [D][16] x int8, one fp32 scale                          [16][D] x int8, one fp32 scale
//
//   data:   [layers][blocks][kv_heads][keys | values]      scales: [layers][blocks][kv_heads][2]
//
// A context is taken in parts of 256 tokens, counted from its beginning; each part has its own maximum and sum, and parts are
// merged in order. What a row gets therefore depends on its own context alone, not on batch, chunk or threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "linear.h"

namespace ts {

constexpr int kBlock = 16;
constexpr int kPartBlocks = 16;
constexpr int kPart = kBlock * kPartBlocks;
constexpr int kTileRows = 48;  // query rows (tokens x heads of a group) that share a pass

struct KvCache {
  Format format = Format::kBf16;  // kFp32, kBf16 or kInt8
  int32_t layers = 0, blocks = 0, heads = 0, dim = 0;
  uint8_t* data = nullptr;
  float* scales = nullptr;

  size_t side_bytes() const { return static_cast<size_t>(kBlock) * dim * (format == Format::kFp32 ? 4 : format == Format::kBf16 ? 2 : 1); }
  size_t bytes() const { return side_bytes() * 2 * heads * blocks * layers; }
  uint8_t* keys(int layer, int block, int head) const {
    return data + ((static_cast<size_t>(layer) * blocks + block) * heads + head) * 2 * side_bytes();
  }
  uint8_t* values(int layer, int block, int head) const { return keys(layer, block, head) + side_bytes(); }
  float* scale(int layer, int block, int head) const {  // [2]: of keys, of values
    return scales + ((static_cast<size_t>(layer) * blocks + block) * heads + head) * 2;
  }
};

// Store `count` tokens from `offset` on in a block. keys, values: fp32, a token each `stride` numbers. What lies behind them
// in the block becomes 0 if `clear`: it is masked out but read, and 0 * NaN is NaN.
void write_block(const KvCache& cache, int layer, int block, int head, int offset, int count, const float* keys,
                 const float* values, size_t stride, bool clear);

// Token `offset` of a block as fp32 [dim].
void read_token(const KvCache& cache, int layer, int block, int head, int offset, float* keys, float* values);

// Query rows of one key-value head whose contexts are the same sequence's; row i sees tokens [first, visible[i]).
struct Queries {
  int count = 0, first = 0;  // first: 0, or 1
  const float* rows[kTileRows];  // scaled
  int visible[kTileRows];
};

// What attention over one part, or several, has come to: maxima, sums, and values weighted relative to the maximum.
struct Partial {
  std::vector<float> largest, total, weighted;  // [kTileRows], [kTileRows], [kTileRows, dim]
  void shape(int dim);
};

struct AttentionScratch {
  std::vector<float> scores;
  std::vector<uint16_t> narrow_rows, narrow_scores;
  Partial one;
  void shape(int dim);
};

// Attention of `queries` over tokens [part * 256, (part + 1) * 256) of the sequence with this block table.
void attend_part(const KvCache& cache, int layer, int head, const int32_t* table, const Queries& queries, int part,
                 AttentionScratch& scratch, Partial& out);

// `into` and `next` as one; `into` is the earlier part.
void merge(Partial& into, const Partial& next, int count, int dim);

}  // namespace ts

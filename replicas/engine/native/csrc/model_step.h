// What model.cpp, model_attention.cpp and draft.cpp share of a step: a thread's own memory, and products with what becomes of them.
#pragma once

#include "simd.h"

#include "model.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#if TS_X86
namespace ts {

using Clock = std::chrono::steady_clock;

inline constexpr int kTaskRows = 48;
inline constexpr size_t kBegin = 16384;  // bytes
// Matrices to time products with: for few rows enough of them not to lie in a cache, for many, which multiply longer than they
// read, as many as take no time.
inline constexpr size_t kTunedLinears = 24, kTunedByManyRows = 6;
// Up to so many rows every thread prepares a product's inputs for itself: that takes less time than meeting at a barrier.
inline constexpr int kOwnRows = 2;


inline void normalize(const float* from, const float* weight, float eps, int size, float* to) {
  Floats squares = zeros();
  for (int i = 0; i < size; i += kLanes) {
    const Floats x = load_first(from + i, size - i, zeros());
    squares = fma(x, x, squares);
  }
  const float scale = 1.0f / std::sqrt(reduce_add(squares) / size + eps);
  for (int i = 0; i < size; ++i) to[i] = from[i] * scale * weight[i];
}

struct Model::Thread {
  int index = 0, next_tasks = 0;
  Inputs inputs;
  std::vector<float> row, tile = std::vector<float>(kTaskRows * kStrip);
  AttentionScratch attention;
  Partial partial;
  Clock::time_point since;
};

// store(first output, number of outputs, row, tile of the row)
template <class Store>
void Model::product(const Linear& linear, Variant variant, const Inputs& inputs, int num_rows, const Linear* after, Thread& own,
                    Store store) {
  Tasks& tasks = tasks_[own.next_tasks];
  const int panels = linear.num_panels() / variant.panels, chunks = (num_rows + kTaskRows - 1) / kTaskRows;
  for (int task = tasks.take(); task < panels * chunks; task = tasks.take()) {
    const int panel = task / chunks * variant.panels, chunk = task % chunks;
    const int first = num_rows * chunk / chunks, end = num_rows * (chunk + 1) / chunks;
    // Who takes the task after the next ones will most likely be this thread; after the last come those of the next product.
    const int later = panel + variant.panels * pool.size();
    Next next;
    if (chunk == 0 && later < linear.num_panels()) next = linear.panels(later, variant.panels);
    else if (chunk == 0 && after != nullptr) next = after->panels(later - linear.num_panels(), 4);
    multiply(linear, variant, panel, inputs, first, end - first, next, own.tile.data());
    for (int row = first; row < end; ++row)
      store(panel * kPanel, variant.panels * kPanel, row, own.tile.data() + (row - first) * kStrip);
  }
  if (after == nullptr || num_rows > kOwnRows) return;
  // While this thread waits for the others and prepares the next inputs, the next matrix begins to come.
  const Next begin = after->panels(own.index * 4, 4);
  for (size_t line = 0; line < std::min(begin.bytes, kBegin); line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(begin.data) + line, _MM_HINT_T1);
}


// `from` [rows, columns] as a product's inputs, normalized if there is a weight for that, through the matrix. `which`: see prepare.
template <class Store>
void Model::apply(const Linear& linear, const float* from, const float* weight, const int32_t* which, int count,
                  const Linear* after, Thread& own, Store store) {
  const Inputs& inputs = prepare(linear.format, from, linear.columns, weight, which, count, own);
  product(linear, variant_for(linear.format, count), inputs, count, after, own, store);
}

// What a product's outputs become: `to` [rows, width], whose last panels may be padding.
inline auto store_into(float* to, int width) {
  return [to, width](int first, int count, int row, const float* tile) {
    if (first < width) std::memcpy(to + static_cast<size_t>(row) * width + first, tile, std::min(count, width - first) * sizeof(float));
  };
}

inline auto add_into(float* to, int width) {
  return [to, width](int first, int count, int row, const float* tile) {
    float* sums = to + static_cast<size_t>(row) * width + first;
    for (int i = 0; i < std::min(count, width - first); ++i) sums[i] += tile[i];
  };
}

// Outputs are 16 rows of gate, 16 of up, 16 of gate, ...
inline auto gate_into(float* to, int width) {
  return [to, width](int first, int count, int row, const float* tile) {
    float* gated = to + static_cast<size_t>(row) * width + first / 2;
    const int pairs = std::min(count / 2, width - first / 2);
    for (int i = 0; i < pairs; i += kLanes) {
      const float* pair = tile + i / kPanel * 2 * kPanel + i % kPanel;
      const Floats g = load(pair), u = load(pair + kPanel);
      store(gated + i, mul(div(g, add(all(1.0f), exp(sub(zeros(), g)))), u));
    }
  };
}

}  // namespace ts
#endif

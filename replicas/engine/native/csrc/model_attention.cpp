#include "model_step.h"

#if TS_X86
namespace ts {

int Model::num_parts(const Batch& batch, const Item& item) const {
  const int32_t visible = batch.spans[item.span * 4 + 2] + item.first_row + item.num_rows;
  return (visible + kPart - 1) / kPart;
}

void Model::attention(const Batch& batch, int layer, Thread& own) {
  const bool together = decode_only_ && !split_;  // a row's head writes what that head alone reads: no need to wait in between
  if (!together) {
    Tasks& tasks = tasks_[own.next_tasks];
    const int count = static_cast<int>(units_.size()) * shape.kv_heads;
    for (int task = tasks.take(); task < count; task = tasks.take())
      rotate(batch, layer, units_[task / shape.kv_heads], task % shape.kv_heads);
    sync(own, kRotate);
  }
  Tasks& tasks = tasks_[own.next_tasks];
  const int count = static_cast<int>(split_ ? part_tasks_.size() / 3 : items_.size() * shape.kv_heads);
  for (int task = tasks.take(); task < count; task = tasks.take()) {
    if (split_) {
      attend_split(batch, layer, task, own);
      continue;
    }
    const int item = task / shape.kv_heads, kv_head = task % shape.kv_heads;
    if (together) rotate(batch, layer, units_[item], kv_head);
    attend(batch, layer, items_[item], kv_head, own);
  }
  sync(own, kAttend);
}

// Query and key heads of a group get their positions; queries are scaled; keys and values go to the cache.
void Model::rotate(const Batch& batch, int layer, const Unit& unit, int kv_head) {
  const int32_t* span = batch.spans + unit.span * 4;
  const int dim = shape.dim, half = dim / 2, first_row = span[0] + unit.first_row, start = span[2] + unit.first_row;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const float* qk_norm = layers[layer].qk_norm;
  const Angles& angles = layer < shape.layers ? angles_ : draft.angles;
  for (int row = 0; row < unit.num_rows; ++row) {
    const float *cos = angles.cos + static_cast<size_t>(start + row) * half, *sin = angles.sin + static_cast<size_t>(start + row) * half;
    float* numbers = qkv_.data() + static_cast<size_t>(first_row + row) * qkv_width_;
    for (int g = 0; g <= group_; ++g) {
      const int head = g < group_ ? kv_head * group_ + g : shape.heads + kv_head;
      float* x = numbers + head * dim;
      if (qk_norm != nullptr) normalize(x, qk_norm + head * dim, shape.eps, dim, x);
      const float by = g < group_ ? scale : 1.0f;
      for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = (a * cos[i] - b * sin[i]) * by;
        x[i + half] = (b * cos[i] + a * sin[i]) * by;
      }
    }
  }
  const int32_t end = span[2] + span[1], last = start + unit.num_rows;
  const int32_t block = batch.tables[span[3] + start / kBlock];
  // The span begins to fill its last block and leaves a rest of it.
  const bool clear = last == end && end % kBlock != 0 && (end - 1) / kBlock * kBlock >= span[2];
  const float* keys = qkv_.data() + static_cast<size_t>(first_row) * qkv_width_ + (shape.heads + kv_head) * dim;
  write_block(cache, layer, block, kv_head, start % kBlock, unit.num_rows, keys, keys + shape.kv_heads * dim, qkv_width_, clear);
}

Queries Model::queries_of(const Batch& batch, int layer, const Item& item, int kv_head) const {
  const int32_t* span = batch.spans + item.span * 4;
  Queries queries;
  queries.first = layer < shape.layers ? 0 : 1;
  for (int row = 0; row < item.num_rows; ++row)
    for (int g = 0; g < group_; ++g) {
      queries.rows[queries.count] = qkv_.data() + static_cast<size_t>(span[0] + item.first_row + row) * qkv_width_ +
                                    (kv_head * group_ + g) * shape.dim;
      queries.visible[queries.count++] = span[2] + item.first_row + row + 1;
    }
  return queries;
}

void Model::attend(const Batch& batch, int layer, const Item& item, int kv_head, Thread& own) {
  const Queries queries = queries_of(batch, layer, item, kv_head);
  const int32_t* table = batch.tables + batch.spans[item.span * 4 + 3];
  attend_part(cache, layer, kv_head, table, queries, 0, own.attention, own.partial);
  for (int part = 1; part < num_parts(batch, item); ++part) {
    attend_part(cache, layer, kv_head, table, queries, part, own.attention, own.attention.one);
    merge(own.partial, own.attention.one, queries.count, shape.dim);
  }
  finish(batch, item, kv_head, own.partial);
}

// One part of a context; whoever comes last merges all of them, in order.
void Model::attend_split(const Batch& batch, int layer, int task, Thread& own) {
  const int32_t* which = part_tasks_.data() + static_cast<size_t>(task) * 3;
  const Item& item = items_[which[0]];
  const Queries queries = queries_of(batch, layer, item, which[1]);
  const int32_t* table = batch.tables + batch.spans[item.span * 4 + 3];
  attend_part(cache, layer, which[1], table, queries, which[2], own.attention, partials_[task]);
  std::atomic<int>& left = parts_left_[static_cast<size_t>(which[0]) * shape.kv_heads + which[1]];
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const int parts = num_parts(batch, item), first = task - which[2];
  left.store(parts, std::memory_order_relaxed);  // for the next layer
  for (int part = 1; part < parts; ++part) merge(partials_[first], partials_[first + part], queries.count, shape.dim);
  finish(batch, item, which[1], partials_[first]);
}

void Model::finish(const Batch& batch, const Item& item, int kv_head, const Partial& partial) {
  const int first_row = batch.spans[item.span * 4] + item.first_row, dim = shape.dim;
  for (int row = 0; row < item.num_rows; ++row)
    for (int g = 0; g < group_; ++g) {
      const int index = row * group_ + g;
      const Floats inverse = all(1.0f / partial.total[index]);
      float* to = attended_.data() + (static_cast<size_t>(first_row + row) * shape.heads + kv_head * group_ + g) * dim;
      const float* from = partial.weighted.data() + static_cast<size_t>(index) * dim;
      for (int d = 0; d < dim; d += kLanes) store(to + d, mul(load(from + d), inverse));
    }
}

}  // namespace ts
#endif

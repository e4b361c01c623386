#include "simd.h"

#include "model.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#if TS_X86
namespace ts {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTaskRows = 48;
constexpr size_t kBegin = 16384;  // bytes
// Matrices to time products with: for few rows enough of them not to lie in a cache, for many, which multiply longer than they
// read, as many as take no time.
constexpr size_t kTunedLinears = 24, kTunedByManyRows = 6;
// Up to so many rows every thread prepares a product's inputs for itself: that takes less time than meeting at a barrier.
constexpr int kOwnRows = 2;

void normalize(const float* from, const float* weight, float eps, int size, float* to) {
  Floats squares = zeros();
  for (int i = 0; i < size; i += kLanes) {
    const Floats x = load_first(from + i, size - i, zeros());
    squares = fma(x, x, squares);
  }
  const float scale = 1.0f / std::sqrt(reduce_add(squares) / size + eps);
  for (int i = 0; i < size; ++i) to[i] = from[i] * scale * weight[i];
}

}  // namespace

struct Model::Thread {
  int index = 0, next_tasks = 0;
  Inputs inputs;
  std::vector<float> row, tile = std::vector<float>(kTaskRows * kStrip);
  AttentionScratch attention;
  Partial partial;
  Clock::time_point since;
};

Model::Model(const Shape& shape, const float* cos, const float* sin)
    : shape(shape),
      layers(shape.layers),
      pool(shape.threads),
      cos_(cos),
      sin_(sin),
      qkv_width_((shape.heads + 2 * shape.kv_heads) * shape.dim),
      mlp_width_((shape.mlp + kGroup - 1) / kGroup * kGroup),
      group_(shape.heads / shape.kv_heads),
      tasks_(static_cast<size_t>(shape.layers) * 10 + 8) {
  for (int format = 0; format < kFormats; ++format)
    std::fill_n(chosen[format], kRowClasses, variants(static_cast<Format>(format)).front());
  for (int index = 0; index < shape.threads; ++index) {
    threads_.push_back(std::make_unique<Thread>());
    threads_.back()->index = index;
    threads_.back()->row.resize(std::max({shape.hidden, mlp_width_, shape.heads * shape.dim}) + kLanes);
    threads_.back()->inputs.reserve(kOwnRows, std::max({shape.hidden, mlp_width_, shape.heads * shape.dim}));
    threads_.back()->attention.shape(shape.dim);
    threads_.back()->partial.shape(shape.dim);
  }
}

Model::~Model() = default;

void Model::forward(const Batch& batch) {
  lay_out(batch);
  pool.run([&](int thread) { run(batch, thread); });
}

void Model::lay_out(const Batch& batch) {
  const size_t rows = batch.num_rows;
  const auto grow = [](std::vector<float>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  };
  grow(hidden_, rows * shape.hidden);
  grow(qkv_, rows * qkv_width_);
  grow(attended_, rows * shape.heads * shape.dim);
  grow(mlp_, rows * mlp_width_);
  const int widest = std::max({shape.hidden, mlp_width_, shape.heads * shape.dim});
  inputs_.reserve(batch.num_rows, widest);
  for (Tasks& one : tasks_) one.reset();
  for (auto& thread : threads_) thread->next_tasks = 0;

  items_.clear();
  units_.clear();
  decode_only_ = true;
  const int most = std::max(1, kTileRows / group_);
  for (int32_t span = 0; span < batch.num_spans; ++span) {
    const int32_t* one = batch.spans + span * 4;
    const int32_t num_rows = one[1], start = one[2];
    decode_only_ &= num_rows == 1;
    for (int32_t row = 0; row < num_rows; row += most) items_.push_back({span, row, std::min(most, num_rows - row)});
    for (int32_t row = 0; row < num_rows;) {
      const int32_t count = std::min(num_rows - row, kBlock - (start + row) % kBlock);
      units_.push_back({span, row, count});
      row += count;
    }
  }
  part_tasks_.clear();
  size_t num_parts = 0;
  for (const Item& item : items_) num_parts += this->num_parts(batch, item);
  const size_t whole = items_.size() * shape.kv_heads;
  split_ = pool.size() > 1 && whole < 4 * static_cast<size_t>(pool.size()) && num_parts > items_.size();
  if (!split_) return;
  if (num_parts_left_ < whole) {
    parts_left_ = std::make_unique<std::atomic<int>[]>(whole);
    num_parts_left_ = whole;
  }
  for (size_t item = 0; item < items_.size(); ++item)
    for (int head = 0; head < shape.kv_heads; ++head) {
      const int parts = this->num_parts(batch, items_[item]);
      parts_left_[item * shape.kv_heads + head].store(parts, std::memory_order_relaxed);
      for (int part = 0; part < parts; ++part)
        part_tasks_.insert(part_tasks_.end(), {static_cast<int32_t>(item), head, part});
    }
  while (partials_.size() < part_tasks_.size() / 3) {
    partials_.emplace_back();
    partials_.back().shape(shape.dim);
  }
}

int Model::num_parts(const Batch& batch, const Item& item) const {
  const int32_t visible = batch.spans[item.span * 4 + 2] + item.first_row + item.num_rows;
  return (visible + kPart - 1) / kPart;
}

void Model::sync(Thread& own, Phase phase) {
  pool.barrier();
  ++own.next_tasks;
  if (own.index != 0 || phase == kPhases) return;
  const Clock::time_point now = Clock::now();
  phase_s[phase] += std::chrono::duration<double>(now - own.since).count();
  own.since = now;
}

// `rows` picks rows of `from`, if given; `norm` is applied, if given.
const Inputs& Model::prepare(Format format, const float* from, int columns, const float* norm, const int32_t* rows,
                             int num_rows, Thread& own) {
  const bool alone = num_rows <= kOwnRows;
  Inputs& inputs = alone ? own.inputs : inputs_;
  Tasks& tasks = tasks_[own.next_tasks];
  const auto one = [&](int row) {
    const float* numbers = from + static_cast<size_t>(rows == nullptr ? row : rows[row]) * columns;
    if (norm != nullptr) {
      normalize(numbers, norm, shape.eps, columns, own.row.data());
      numbers = own.row.data();
    }
    inputs.set(format, row, numbers, columns);
  };
  if (alone) {
    for (int row = 0; row < num_rows; ++row) one(row);
    return inputs;
  }
  constexpr int kRows = 4;
  for (int task = tasks.take(); task * kRows < num_rows; task = tasks.take())
    for (int row = task * kRows; row < std::min(num_rows, task * kRows + kRows); ++row) one(row);
  pool.barrier();
  ++own.next_tasks;
  return inputs;
}

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

Variant Model::variant_for(Format format, int num_rows) const {
  int row_class = 0;
  while (row_class + 1 < kRowClasses && num_rows > 1 << row_class) ++row_class;
  return chosen[static_cast<int>(format)][row_class];
}

double Model::seconds_of(const std::vector<const Linear*>& linears, Variant variant, int num_rows) {
  double least = 1e9;
  for (int round = 0; round < 3; ++round) {
    for (Tasks& one : tasks_) one.reset();
    for (auto& thread : threads_) thread->next_tasks = 0;
    const Clock::time_point start = Clock::now();
    pool.run([&](int thread) {
      for (const Linear* linear : linears) {
        product(*linear, variant, inputs_, num_rows, nullptr, *threads_[thread], [](int, int, int, const float*) {});
        sync(*threads_[thread], kPhases);
      }
    });
    least = std::min(least, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return least;
}

void Model::tune() {
  const int widest = std::max({shape.hidden, mlp_width_, shape.heads * shape.dim});
  for (int format = 0; format < kFormats; ++format) {
    std::vector<const Linear*> linears;
    for (const Layer& layer : layers)
      for (const Linear* linear : {&layer.qkv, &layer.down})  // few panels, and many columns
        if (linear->format == static_cast<Format>(format)) linears.push_back(linear);
    if (linears.empty() && head.format == static_cast<Format>(format)) linears.push_back(&head);
    if (linears.empty()) continue;
    for (int row_class = 0; row_class < kRowClasses; ++row_class) {
      linears.resize(std::min(linears.size(), row_class < 3 ? kTunedLinears : kTunedByManyRows));
      const int num_rows = std::min(1 << row_class, kTaskRows);
      inputs_.reserve(num_rows, widest);
      double least = 1e9;
      for (const Variant variant : variants(static_cast<Format>(format))) {
        const double seconds = seconds_of(linears, variant, num_rows);
        if (seconds >= least) continue;
        least = seconds;
        chosen[format][row_class] = variant;
      }
    }
  }
}

void Model::run(const Batch& batch, int thread) {
  const FlushTiny flush;
  Thread& own = *threads_[thread];
  own.since = Clock::now();
  const int rows = batch.num_rows, hidden = shape.hidden;
  const auto store_into = [](float* to, int width) {
    return [to, width](int first, int count, int row, const float* tile) {  // the last panels may be padding
      if (first < width) std::memcpy(to + static_cast<size_t>(row) * width + first, tile, std::min(count, width - first) * sizeof(float));
    };
  };
  const auto add_to_hidden = [&](int first, int count, int row, const float* tile) {
    float* to = hidden_.data() + static_cast<size_t>(row) * hidden + first;
    for (int i = 0; i < std::min(count, hidden - first); ++i) to[i] += tile[i];
  };
  const auto gate = [&](int first, int count, int row, const float* tile) {
    float* to = mlp_.data() + static_cast<size_t>(row) * mlp_width_ + first / 2;
    const int width = std::min(count / 2, mlp_width_ - first / 2);
    for (int i = 0; i < width; i += kLanes) {
      const float* pair = tile + i / kPanel * 2 * kPanel + i % kPanel;
      const Floats g = load(pair), u = load(pair + kPanel);
      ts::store(to + i, mul(div(g, add(all(1.0f), exp(sub(zeros(), g)))), u));
    }
  };
  // `from` [rows, columns] as a product's inputs, normalized if there is a weight for that, through the matrix.
  const auto apply = [&](const Linear& linear, const float* from, const float* weight, const int32_t* which, int count,
                         const Linear* after, const auto& to) {
    const Inputs& inputs = prepare(linear.format, from, linear.columns, weight, which, count, own);
    product(linear, variant_for(linear.format, count), inputs, count, after, own, to);
  };

  for (int row = tasks_[0].take(); row < rows; row = tasks_[0].take())
    unpack_row(embedding, batch.token_ids[row], hidden_.data() + static_cast<size_t>(row) * hidden);
  sync(own, kEmbed);
  for (int index = 0; index < shape.layers; ++index) {
    const Layer& layer = layers[index];
    apply(layer.qkv, hidden_.data(), layer.attention_norm, nullptr, rows, &layer.output, store_into(qkv_.data(), qkv_width_));
    sync(own, kQkv);
    attention(batch, index, own);
    apply(layer.output, attended_.data(), nullptr, nullptr, rows, &layer.gate_up, add_to_hidden);
    sync(own, kOutput);
    apply(layer.gate_up, hidden_.data(), layer.mlp_norm, nullptr, rows, &layer.down, gate);
    sync(own, kGateUp);
    apply(layer.down, mlp_.data(), nullptr, nullptr, rows, index + 1 < shape.layers ? &layers[index + 1].qkv : &head, add_to_hidden);
    sync(own, kDown);
  }
  if (batch.num_samples == 0) return;
  apply(head, hidden_.data(), norm, batch.sample_rows, batch.num_samples, nullptr, store_into(batch.logits, shape.vocab));
  sync(own, kHead);
  Tasks& tasks = tasks_[own.next_tasks];
  for (int row = tasks.take(); row < batch.num_samples; row = tasks.take()) {
    const float* logits = batch.logits + static_cast<size_t>(row) * shape.vocab;
    Floats most = all(-INFINITY);
    bool not_numbers = false;
    for (int i = 0; i < shape.vocab; i += kLanes) {
      const Floats x = load_first(logits + i, shape.vocab - i, most);
      not_numbers |= any_nan(x);
      most = max(most, x);
    }
    const float best = reduce_max(most);
    batch.best[row] = -1;
    if (not_numbers || !std::isfinite(best)) continue;
    batch.best[row] = std::find(logits, logits + shape.vocab, best) - logits;
  }
  sync(own, kBest);
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
  for (int row = 0; row < unit.num_rows; ++row) {
    const float *cos = cos_ + static_cast<size_t>(start + row) * half, *sin = sin_ + static_cast<size_t>(start + row) * half;
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

Queries Model::queries_of(const Batch& batch, const Item& item, int kv_head) const {
  const int32_t* span = batch.spans + item.span * 4;
  Queries queries;
  for (int row = 0; row < item.num_rows; ++row)
    for (int g = 0; g < group_; ++g) {
      queries.rows[queries.count] = qkv_.data() + static_cast<size_t>(span[0] + item.first_row + row) * qkv_width_ +
                                    (kv_head * group_ + g) * shape.dim;
      queries.visible[queries.count++] = span[2] + item.first_row + row + 1;
    }
  return queries;
}

void Model::attend(const Batch& batch, int layer, const Item& item, int kv_head, Thread& own) {
  const Queries queries = queries_of(batch, item, kv_head);
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
  const Queries queries = queries_of(batch, item, which[1]);
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

#include "model_step.h"

#if TS_X86
namespace ts {

Model::Model(const Shape& shape, const float* cos, const float* sin)
    : shape(shape),
      layers(shape.layers + 1),  // the last is a draft head's
      pool(shape.threads),
      angles_{cos, sin},
      qkv_width_((shape.heads + 2 * shape.kv_heads) * shape.dim),
      mlp_width_((shape.mlp + kGroup - 1) / kGroup * kGroup),
      group_(shape.heads / shape.kv_heads),
      tasks_(static_cast<size_t>(shape.layers) * 10 + 8) {
  for (int format = 0; format < kFormats; ++format)
    std::fill_n(chosen[format], kRowClasses, variants(static_cast<Format>(format)).front());
  for (int index = 0; index < shape.threads; ++index) {
    threads_.push_back(std::make_unique<Thread>());
    threads_.back()->index = index;
    threads_.back()->attention.shape(shape.dim);
    threads_.back()->partial.shape(shape.dim);
  }
  widen(std::max({shape.hidden, mlp_width_, shape.heads * shape.dim}));
}

void Model::widen(int columns) {
  widest_ = std::max(widest_, columns);
  for (auto& thread : threads_) {
    thread->row.resize(widest_ + kLanes);
    thread->inputs.reserve(kOwnRows, widest_);
  }
}

Model::~Model() = default;

void Model::forward(const Batch& batch) {
  lay_out(batch);
  if (features.count > 0) note_tokens(batch);
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
  inputs_.reserve(batch.num_rows, widest_);
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
  for (int format = 0; format < kFormats; ++format) {
    std::vector<const Linear*> linears;
    for (const Layer& layer : layers)
      for (const Linear* linear : {&layer.qkv, &layer.down})  // few panels, and many columns
        if (linear->data != nullptr && linear->format == static_cast<Format>(format)) linears.push_back(linear);
    if (linears.empty() && head.format == static_cast<Format>(format)) linears.push_back(&head);
    if (linears.empty()) continue;
    for (int row_class = 0; row_class < kRowClasses; ++row_class) {
      linears.resize(std::min(linears.size(), row_class < 3 ? kTunedLinears : kTunedByManyRows));
      const int num_rows = std::min(1 << row_class, kTaskRows);
      inputs_.reserve(num_rows, widest_);
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
  for (int row = tasks_[0].take(); row < rows; row = tasks_[0].take())
    unpack_row(embedding, batch.token_ids[row], hidden_.data() + static_cast<size_t>(row) * hidden);
  sync(own, kEmbed);
  for (int index = 0; index < shape.layers; ++index) {
    const Layer& layer = layers[index];
    keep_features(index, rows, own);
    apply(layer.qkv, hidden_.data(), layer.attention_norm, nullptr, rows, &layer.output, own, store_into(qkv_.data(), qkv_width_));
    sync(own, kQkv);
    finish_layer(batch, index, index + 1 < shape.layers ? &layers[index + 1].qkv : &head, own);
  }
  keep_features(shape.layers, rows, own);
  if (batch.num_samples == 0) return;
  apply(head, hidden_.data(), norm, batch.sample_rows, batch.num_samples, nullptr, own, store_into(batch.logits, shape.vocab));
  sync(own, kHead);
  find_best(batch.logits, shape.vocab, batch.num_samples, batch.best, own);
}

// From queries, keys and values on; `after` is the matrix that is read next.
void Model::finish_layer(const Batch& batch, int index, const Linear* after, Thread& own) {
  const Layer& layer = layers[index];
  const int rows = batch.num_rows, width = layer.down.columns;
  attention(batch, index, own);
  apply(layer.output, attended_.data(), nullptr, nullptr, rows, &layer.gate_up, own, add_into(hidden_.data(), shape.hidden));
  sync(own, kOutput);
  apply(layer.gate_up, hidden_.data(), layer.mlp_norm, nullptr, rows, &layer.down, own, gate_into(mlp_.data(), width));
  sync(own, kGateUp);
  apply(layer.down, mlp_.data(), nullptr, nullptr, rows, after, own, add_into(hidden_.data(), shape.hidden));
  sync(own, kDown);
}

void Model::find_best(const float* logits, int width, int count, int64_t* best, Thread& own) {
  Tasks& tasks = tasks_[own.next_tasks];
  for (int row = tasks.take(); row < count; row = tasks.take()) {
    const float* one = logits + static_cast<size_t>(row) * width;
    Floats most = all(-INFINITY);
    bool not_numbers = false;
    for (int i = 0; i < width; i += kLanes) {
      const Floats x = load_first(one + i, width - i, most);
      not_numbers |= any_nan(x);
      most = max(most, x);
    }
    const float largest = reduce_max(most);
    best[row] = -1;
    if (not_numbers || !std::isfinite(largest)) continue;
    best[row] = std::find(one, one + width, largest) - one;
  }
  sync(own, kBest);
}

// Rows that enter `layer`, if a draft head wants them. Nobody changes them before the next barrier.
void Model::keep_features(int layer, int num_rows, Thread& own) {
  for (int index = 0; index < features.count; ++index) {
    if (features.layers[index] != layer) continue;
    for (int row = own.index; row < num_rows; row += pool.size()) {
      const float* from = hidden_.data() + static_cast<size_t>(row) * shape.hidden;
      uint16_t* to = features.data + (static_cast<size_t>(slots_[row]) * features.count + index) * shape.hidden;
      for (int i = 0; i < shape.hidden; i += kLanes) narrow(to + i, load(from + i));
    }
  }
}

// Which slots the rows have, and what of the draft layer holds no more: a token that changes, and all behind it in its block.
void Model::note_tokens(const Batch& batch) {
  slots_.resize(batch.num_rows);
  for (int32_t span = 0; span < batch.num_spans; ++span) {
    const int32_t* one = batch.spans + span * 4;
    for (int32_t row = 0; row < one[1]; ++row) {
      const int32_t position = one[2] + row, offset = position % kBlock;
      const int32_t block = batch.tables[one[3] + position / kBlock], slot = block * kBlock + offset;
      slots_[one[0] + row] = slot;
      const int32_t token = batch.token_ids[one[0] + row];
      // Offset 0 is what a block begins to be filled with: what is there may be another sequence's.
      if (offset == 0 || features.tokens[slot] != token) features.drafted[block] = std::min<uint8_t>(features.drafted[block], offset);
      features.tokens[slot] = token;
    }
  }
}

}  // namespace ts
#endif

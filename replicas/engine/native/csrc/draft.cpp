// An EAGLE-3 head over the model's own cache. In terms of the cache's positions p, which are one more than the head's slots:
//
//   z       fc(features of p - 1), or what came out at p - 1 where that is a draft
//   pair    norm(embedding of token p) | norm(z)
//   z       + attention(pair), + MLP: out; head(norm(out)) is the draft for p + 1
#include "model_step.h"

#if TS_X86
namespace ts {
namespace {

constexpr int kFused = 3;  // layers that fc takes

Floats widened(const uint16_t* from) {
  alignas(64) uint32_t bits[kLanes];
  for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<uint32_t>(from[i]) << 16;
  return as_floats(load_ints(bits));
}

}  // namespace

void Model::add_draft(const Draft& head) {
  draft = head;
  widen(std::max({kFused * shape.hidden, layers[shape.layers].down.columns}));
}

int Model::run_draft(const DraftBatch& batch) {
  const int count = batch.num_spans;
  std::fill_n(batch.tokens, static_cast<size_t>(count) * batch.max_depth, -1);
  std::vector<int32_t> tokens, spans, samples, of_sample;  // of_sample: which span of `batch`
  feature_slots_.clear();
  for (int index = 0; index < count; ++index) {
    const int32_t* one = batch.spans + index * 4;
    const int32_t* table = batch.tables + one[3];
    int from = 0;
    while (from < one[0]) {
      const int drafted = features.drafted[table[from / kBlock]];
      from += drafted;
      if (drafted < kBlock) break;
    }
    // The last known token's row gives the first draft, and its keys may be there already.
    from = std::max(1, std::min(from, one[0] - 1));
    const int end = std::min<int>(one[0], from + batch.max_rows - static_cast<int>(tokens.size()));
    if (end <= from) continue;
    spans.insert(spans.end(), {static_cast<int32_t>(tokens.size()), end - from, from, one[3]});
    for (int position = from; position < end; ++position) {
      const int slot = table[position / kBlock] * kBlock + position % kBlock;
      const int before = table[(position - 1) / kBlock] * kBlock + (position - 1) % kBlock;
      if (position == one[0] - 1) features.tokens[slot] = one[1];
      tokens.push_back(features.tokens[slot]);
      feature_slots_.push_back(before);
    }
    features.drafted[table[(end - 1) / kBlock]] = (end - 1) % kBlock + 1;
    for (int block = from / kBlock; block < (end - 1) / kBlock; ++block) features.drafted[table[block]] = kBlock;
    if (end < one[0] || one[2] <= 0) continue;
    samples.push_back(static_cast<int32_t>(tokens.size()) - 1);
    of_sample.push_back(index);
  }
  if (tokens.empty()) return 0;
  int num_rows = 0;
  for (int depth = 0;; ++depth) {
    const int num_samples = static_cast<int>(samples.size());
    draft_logits_.resize(std::max(draft_logits_.size(), static_cast<size_t>(num_samples) * draft.head.rows));
    draft_best_.resize(num_samples);
    const Batch rows{static_cast<int32_t>(tokens.size()), static_cast<int32_t>(spans.size() / 4), num_samples, tokens.data(),
                     spans.data(), batch.tables, samples.data(), draft_logits_.data(), draft_best_.data()};
    lay_out(rows);
    pool.run([&](int thread) { draft_rows(rows, depth == 0, thread); });
    num_rows += rows.num_rows;
    // The next rows are the drafts that are to be gone on from; their hidden numbers move to the front.
    std::vector<int32_t> next_of;
    tokens.clear();
    spans.clear();
    for (int sample = 0; sample < num_samples; ++sample) {
      if (draft_best_[sample] < 0) continue;
      const int index = of_sample[sample];
      const int32_t* one = batch.spans + index * 4;
      const int32_t token = draft.target_of[draft_best_[sample]];
      batch.tokens[index * batch.max_depth + depth] = token;
      if (depth + 1 >= one[2]) continue;
      const int row = static_cast<int>(tokens.size());
      float* to = hidden_.data() + static_cast<size_t>(row) * shape.hidden;
      const float* from = hidden_.data() + static_cast<size_t>(samples[sample]) * shape.hidden;
      if (draft.returns_normed) normalize(from, draft.norm, shape.eps, shape.hidden, to);
      else std::memmove(to, from, shape.hidden * sizeof(float));
      spans.insert(spans.end(), {row, 1, one[0] + depth, one[3]});
      tokens.push_back(token);
      next_of.push_back(index);
    }
    if (tokens.empty()) return num_rows;
    of_sample = next_of;
    samples.resize(tokens.size());
    for (size_t row = 0; row < samples.size(); ++row) samples[row] = static_cast<int32_t>(row);
  }
}

// hidden_ = fc(features)
void Model::fuse_features(int num_rows, Thread& own) {
  const int hidden = shape.hidden, width = kFused * hidden;
  Tasks& tasks = tasks_[own.next_tasks];
  for (int row = tasks.take(); row < num_rows; row = tasks.take()) {
    const uint16_t* from = features.data + static_cast<size_t>(feature_slots_[row]) * features.count * hidden;
    float* to = fused_.data() + static_cast<size_t>(row) * width;
    for (int i = 0; i < width; i += kLanes) store(to + i, widened(from + i));
    if (draft.feature_norm == nullptr) continue;
    const int parts = draft.norms_features_apart ? kFused : 1, size = width / parts;
    for (int part = 0; part < parts; ++part)
      normalize(to + part * size, draft.feature_norm + part * size, shape.eps, size, to + part * size);
  }
  sync(own, kEmbed);
  apply(draft.fc, fused_.data(), nullptr, nullptr, num_rows, &layers[shape.layers].qkv, own, store_into(hidden_.data(), hidden));
  sync(own, kEmbed);
}

void Model::draft_rows(const Batch& batch, bool from_features, int thread) {
  const FlushTiny flush;
  Thread& own = *threads_[thread];
  own.since = Clock::now();
  const int rows = batch.num_rows, hidden = shape.hidden;
  const Layer& layer = layers[shape.layers];
  if (thread == 0) {
    fused_.resize(std::max(fused_.size(), static_cast<size_t>(rows) * kFused * hidden));
    pairs_.resize(std::max(pairs_.size(), static_cast<size_t>(rows) * 2 * hidden));
  }
  sync(own, kEmbed);
  if (from_features) fuse_features(rows, own);
  const Linear& table = draft.embedding.data == nullptr ? embedding : draft.embedding;
  Tasks& tasks = tasks_[own.next_tasks];
  for (int row = tasks.take(); row < rows; row = tasks.take()) {
    float* pair = pairs_.data() + static_cast<size_t>(row) * 2 * hidden;
    float* z = hidden_.data() + static_cast<size_t>(row) * hidden;
    unpack_row(table, batch.token_ids[row], own.row.data());
    normalize(own.row.data(), draft.embedding_norm, shape.eps, hidden, pair);
    normalize(z, draft.hidden_norm, shape.eps, hidden, pair + hidden);
    if (draft.residual_is_normed) std::memcpy(z, pair + hidden, hidden * sizeof(float));
  }
  sync(own, kEmbed);
  apply(layer.qkv, pairs_.data(), nullptr, nullptr, rows, &layer.output, own, store_into(qkv_.data(), qkv_width_));
  sync(own, kQkv);
  finish_layer(batch, shape.layers, &draft.head, own);
  if (batch.num_samples == 0) return;
  apply(draft.head, hidden_.data(), draft.norm, batch.sample_rows, batch.num_samples, nullptr, own,
        store_into(batch.logits, draft.head.rows));
  sync(own, kHead);
  find_best(batch.logits, draft.head.rows, batch.num_samples, batch.best, own);
}

}  // namespace ts
#endif

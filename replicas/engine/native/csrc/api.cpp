// What replicas/engine/native/library.py calls. Plain C: no Python and no torch, so that one build serves all versions of both.
#include "simd.h"

#include <cstdint>

#if TS_X86
#include <sys/mman.h>

#include <algorithm>

#include "machine.h"
#include "model.h"

namespace {

ts::Linear* place(ts::Model& model, int layer, int which) {
  switch (which) {
    case 0: return &model.embedding;
    case 1: return &model.head;
    case 2: return &model.layers[layer].qkv;
    case 3: return &model.layers[layer].output;
    case 4: return &model.layers[layer].gate_up;
    case 6: return &model.draft.fc;
    case 7: return &model.draft.head;
    case 8: return &model.draft.embedding;
    default: return &model.layers[layer].down;
  }
}

}  // namespace
#endif

#define TS_API extern "C" __attribute__((visibility("default")))

#if TS_X86

TS_API ts::Model* ts_create(const ts::Shape* shape, const float* cos, const float* sin) { return new ts::Model(*shape, cos, sin); }

TS_API void ts_free(ts::Model* model) { delete model; }

TS_API int64_t ts_linear_bytes(const ts::Linear* linear) { return static_cast<int64_t>(linear->bytes()); }

// Packs into `linear->data` and makes it the model's.
TS_API void ts_set_linear(ts::Model* model, int32_t layer, int32_t which, const ts::Linear* linear, const void* numbers,
                          const uint16_t* scale, const uint16_t* minimum) {
  if (numbers != nullptr) {
    ts::Tasks tasks;
    constexpr int kStrips = 4;
    model->pool.run([&](int) {
      for (int task = tasks.take(); task * kStrips < linear->num_strips(); task = tasks.take())
        ts::pack(*linear, numbers, scale, minimum, task * kStrips, std::min(linear->num_strips(), task * kStrips + kStrips));
    });
  }
  *place(*model, layer, which) = *linear;
}

// which: 0 before attention, 1 before the MLP, 2 of queries and keys, 3 after the last layer.
TS_API void ts_set_norm(ts::Model* model, int32_t layer, int32_t which, const float* weight) {
  if (which == 3) model->norm = weight;
  else (which == 0 ? model->layers[layer].attention_norm : which == 1 ? model->layers[layer].mlp_norm : model->layers[layer].qk_norm) = weight;
}

TS_API void ts_set_cache(ts::Model* model, const ts::KvCache* cache) { model->cache = *cache; }

// From now on steps keep what a draft head wants.
TS_API void ts_set_features(ts::Model* model, const ts::Features* features) { model->features = *features; }

// The head's own matrices and its layer's are set by ts_set_linear; those of `head` are ignored.
TS_API void ts_set_draft(ts::Model* model, const ts::Draft* head) {
  ts::Draft whole = *head;
  whole.fc = model->draft.fc;
  whole.head = model->draft.head;
  whole.embedding = model->draft.embedding;
  model->add_draft(whole);
}

TS_API int32_t ts_draft(ts::Model* model, const ts::DraftBatch* batch) { return model->run_draft(*batch); }

TS_API void ts_forward(ts::Model* model, const ts::Batch* batch) { model->forward(*batch); }

TS_API void ts_tune(ts::Model* model) { model->tune(); }

// [kFormats, kRowClasses, 2] panels and rows of the variants that `ts_tune` has chosen.
TS_API void ts_variants(const ts::Model* model, int32_t* variants) {
  std::memcpy(variants, model->chosen, sizeof(model->chosen));
}

// [kPhases] seconds since the model was made.
TS_API void ts_phases(const ts::Model* model, double* seconds) { std::copy(model->phase_s, model->phase_s + ts::kPhases, seconds); }

TS_API void ts_read_token(const ts::KvCache* cache, int32_t layer, int32_t block, int32_t head, int32_t offset, float* keys,
                          float* values) {
  ts::read_token(*cache, layer, block, head, offset, keys, values);
}

TS_API void ts_write_token(const ts::KvCache* cache, int32_t layer, int32_t block, int32_t head, int32_t offset,
                           const float* keys, const float* values) {
  ts::write_block(*cache, layer, block, head, offset, 1, keys, values, 0, false);
}

// outputs [num_rows, strips * 64] = inputs [num_rows, columns] by the packed matrix, on one thread: to try a variant of the kernel.
TS_API void ts_multiply(const ts::Linear* linear, int32_t variant, const float* inputs, int32_t num_rows, float* outputs) {
  ts::Inputs prepared;
  prepared.reserve(num_rows, linear->columns);
  for (int row = 0; row < num_rows; ++row)
    prepared.set(linear->format, row, inputs + static_cast<size_t>(row) * linear->columns, linear->columns);
  const int width = linear->num_strips() * ts::kStrip;
  std::vector<float> tile(static_cast<size_t>(num_rows) * ts::kStrip);
  const ts::Variant chosen = ts::variants(linear->format).at(variant);
  for (int panel = 0; panel < linear->num_panels(); panel += chosen.panels) {
    ts::multiply(*linear, chosen, panel, prepared, 0, num_rows, {}, tile.data());
    for (int row = 0; row < num_rows; ++row)
      std::copy_n(tile.data() + row * ts::kStrip, chosen.panels * ts::kPanel,
                  outputs + static_cast<size_t>(row) * width + panel * ts::kPanel);
  }
}

TS_API void ts_pack(const ts::Linear* linear, const void* numbers, const uint16_t* scale, const uint16_t* minimum) {
  ts::pack(*linear, numbers, scale, minimum, 0, linear->num_strips());
}

TS_API void ts_unpack_row(const ts::Linear* linear, int32_t row, float* numbers) { ts::unpack_row(*linear, row, numbers); }

// Large pages: a step touches all of the weights, and a page table walk every 4 KB costs a tenth of the bandwidth.
TS_API void ts_large_pages(void* data, int64_t bytes) {
  const uintptr_t page = 1 << 21, first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

TS_API double ts_read_rate(const void* data, int64_t bytes, int32_t threads, int32_t rounds) {
  return ts::read_rate(data, bytes, threads, rounds);
}

TS_API double ts_multiply_rate(int32_t kind, int32_t threads, int32_t rounds) { return ts::multiply_rate(kind, threads, rounds); }

#endif

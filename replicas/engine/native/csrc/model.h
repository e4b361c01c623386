// A decoder's step as one call: all layers, on all threads of the model, without a return to Python.
//
//   embed | norm, qkv | rotate, write keys and values | attend | output | norm, gate and up | down | ... | norm, head | best
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "pool.h"

namespace ts {

struct Shape {
  int32_t vocab, hidden, layers, heads, kv_heads, dim, mlp, threads;
  float eps;
};

// A step's rows as replicas/engine/batch.py lays them out. All pointers are the caller's and valid during the call.
struct Batch {
  int32_t num_rows, num_spans, num_samples;
  const int32_t* token_ids;    // [num_rows]
  const int32_t* spans;        // [num_spans, 4]: first row, number of rows, position of the first, where its table begins
  const int32_t* tables;       // the spans' block tables, one after the other
  const int32_t* sample_rows;  // [num_samples]
  float* logits;               // [num_samples, vocab]
  int64_t* best;               // [num_samples]: the first of the largest logits, -1 where that is not a finite number
};

struct Layer {
  const float *attention_norm = nullptr, *mlp_norm = nullptr;
  const float* qk_norm = nullptr;  // [heads + kv_heads, dim], where the family has it
  Linear qkv, output, gate_up, down;  // gate_up: 16 rows of gate, 16 of up, 16 of gate, ...
};

struct Angles {
  const float *cos = nullptr, *sin = nullptr;  // [positions, dim / 2]
};

// What a draft head is given of the model's steps, by slot of the KV cache: it shares the cache's blocks, and so their fate.
struct Features {
  static constexpr int kMost = 4;
  int32_t count = 0;             // of layers; 0: nothing is kept
  int32_t layers[kMost] = {};    // ascending: the rows that enter this layer; the number of layers: that leave the last
  uint16_t* data = nullptr;      // bf16 [blocks * kBlock, count, hidden]
  int32_t* tokens = nullptr;     // [blocks * kBlock]
  uint8_t* drafted = nullptr;    // [blocks]: so many of a block's slots, from its first, hold the draft layer's keys and values
};

// An EAGLE-3 head (arXiv 2503.01840) of the model's own shape. Its layer is `layers[shape.layers]`, also of the cache, except
// that the cache has its slot t, which sees token t + 1, at position t + 1: so what lies in a block depends on the block's own
// tokens and those before it, and sequences share it as they share the model's. Position 0 has none.
struct Draft {
  Linear fc, head;                         // [hidden, 3 * hidden], [draft vocabulary, hidden]
  Linear embedding;                        // or none: the model's
  const float *embedding_norm = nullptr, *hidden_norm = nullptr, *norm = nullptr;
  const float* feature_norm = nullptr;     // [3 * hidden] or none: of the three by themselves, or of all together
  const int32_t* target_of = nullptr;      // [draft vocabulary]
  Angles angles;
  bool norms_features_apart = false, residual_is_normed = false, returns_normed = false;
};

// A draft of `depth` tokens for each sequence, greedily, one after the other.
struct DraftBatch {
  int32_t num_spans, max_depth, max_rows;
  const int32_t* spans;   // [num_spans, 4]: known tokens, the last of them, depth, where its table begins
  const int32_t* tables;  // blocks for known tokens + depth - 1
  int32_t* tokens;        // [num_spans, max_depth]: drafts, -1 from where there are none
};

constexpr int kFormats = 5;
constexpr int kRowClasses = 7;  // 1, 2, 3-4, 5-8, 9-16, 17-32, more rows

enum Phase { kEmbed, kQkv, kRotate, kAttend, kOutput, kGateUp, kDown, kHead, kBest, kPhases };

class Model {
 public:
  Model(const Shape& shape, const float* cos, const float* sin);
  ~Model();
  void forward(const Batch& batch);
  // Measures, for each format that a layer has, which variant of its product is fastest at 1, 2, 3 to 4, 5 to 8, ... rows.
  void tune();
  // Brings the draft layer up to the last known tokens, over at most `max_rows` of them, and drafts behind those it got to.
  // Returns the number of rows.
  int run_draft(const DraftBatch& batch);
  void add_draft(const Draft& head);

  const Shape shape;
  std::vector<Layer> layers;
  Linear embedding, head;
  const float* norm = nullptr;
  KvCache cache;
  Features features;
  Draft draft;
  Pool pool;
  Variant chosen[kFormats][kRowClasses];
  double phase_s[kPhases] = {};  // thread 0's time in each, waiting included, since the model was made

 private:
  struct Thread;  // what each thread has for itself
  struct Item {  // query rows of one span that attend together
    int32_t span, first_row, num_rows;
  };
  struct Unit {  // rows whose keys and values go to one block
    int32_t span, first_row, num_rows;
  };

  void lay_out(const Batch& batch);
  void run(const Batch& batch, int thread);
  void attention(const Batch& batch, int layer, Thread& own);
  void rotate(const Batch& batch, int layer, const Unit& unit, int kv_head);
  void attend(const Batch& batch, int layer, const Item& item, int kv_head, Thread& own);
  void attend_split(const Batch& batch, int layer, int task, Thread& own);
  Queries queries_of(const Batch& batch, int layer, const Item& item, int kv_head) const;
  void finish(const Batch& batch, const Item& item, int kv_head, const Partial& partial);
  const Inputs& prepare(Format format, const float* from, int columns, const float* norm, const int32_t* rows, int num_rows,
                        Thread& own);
  void keep_features(int layer, int num_rows, Thread& own);
  void note_tokens(const Batch& batch);
  void finish_layer(const Batch& batch, int layer, const Linear* after, Thread& own);
  void find_best(const float* logits, int width, int count, int64_t* best, Thread& own);
  void draft_rows(const Batch& batch, bool from_features, int thread);
  void fuse_features(int num_rows, Thread& own);
  template <class Store>
  void apply(const Linear& linear, const float* from, const float* weight, const int32_t* which, int count, const Linear* after,
             Thread& own, Store store);
  template <class Store>
  void product(const Linear& linear, Variant variant, const Inputs& inputs, int num_rows, const Linear* after, Thread& own,
               Store store);
  Variant variant_for(Format format, int num_rows) const;
  double seconds_of(const std::vector<const Linear*>& linears, Variant variant, int num_rows);
  void sync(Thread& own, Phase phase);
  int num_parts(const Batch& batch, const Item& item) const;
  void widen(int columns);

  const Angles angles_;
  int qkv_width_, mlp_width_, group_, widest_ = 0;
  std::vector<float> hidden_, qkv_, attended_, mlp_;
  std::vector<float> fused_, pairs_, draft_logits_;  // of draft rows: features, then embedding and hidden side by side
  std::vector<int32_t> slots_;  // of the rows
  std::vector<int32_t> feature_slots_;
  std::vector<int64_t> draft_best_;
  Inputs inputs_;
  std::vector<Item> items_;
  std::vector<Unit> units_;
  std::vector<int32_t> part_tasks_;  // [tasks, 3]: item, kv_head, part; used where contexts are split among threads
  std::vector<Partial> partials_;    // one a split task
  std::unique_ptr<std::atomic<int>[]> parts_left_;
  size_t num_parts_left_ = 0;
  bool decode_only_ = false, split_ = false;
  std::vector<Tasks> tasks_;
  std::vector<std::unique_ptr<Thread>> threads_;
};

}  // namespace ts

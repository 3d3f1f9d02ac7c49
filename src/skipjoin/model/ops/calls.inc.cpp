// Arguments of operations, with the fields of calls.py. Included by the sources that run operations.
#pragma once

#include <cstdint>
#include <ctime>

namespace skipjoin {

// Weights in codes with a scale, and perhaps a minimum, per group of inputs; see grouped.cpp.
struct Groups {
  const uint8_t *strips;
  int64_t strip_bytes, outputs, inputs;
  int64_t bits, group; // 4, 6 or 8; inputs per scale: 16 or a multiple of 32
  int64_t offset;      // subtracted from codes
  int64_t scale_bytes; // 2: float16, 4: float
  int64_t has_minimums;
  const int8_t *values; // of each code, [16], or null
  const float *bias;    // [strips * kLanes], or null
};

struct Linear {
  const void *x;
  int64_t x_stride, rows;
  const void *weights;
  const float *bias; // [panels * kPanel] or null
  const Groups *groups; // instead of weights: matrices whose outputs follow one another, or null
  int64_t matrices, n, k;
  void *out; // [rows, n], or [rows, n / 2] if gated
  int64_t out_stride;
  int64_t gated, add, activation;
  void *scratch;
  int64_t threads, way; // see `Way` in layer_ops.cpp
  const void *then;     // weights of the next product, or null; thread i prefetches their panel i at the end
  int64_t then_bytes;   // per panel
  const void *delta;    // [rows, n], added with the bias, or null
  int64_t delta_stride;
};

// Queries or keys [tokens][heads][dim], to be normalized and rotated in place.
struct Heads {
  void *x;
  int64_t token_stride, head_stride, tokens, heads, dim;
  const void *weight; // of the norm, or null
  double eps, offset;
  const float *cos_sin; // [positions][2 * pairs], or null
  const int64_t *positions;
  int64_t pairs;
};

// Products of experts, and which of them each row uses; see experts.cpp.
struct Experts {
  const Linear *up, *down; // of each expert
  int64_t count, per_row, among; // among: shares are the softmax over the chosen logits, else over all, times scale
  double scale;
  const void *x;
  int64_t x_stride, rows;
  const int64_t *chosen; // [rows][per_row], likewise shares
  const float *shares;
  void *total; // [rows][outputs], contiguous
  int64_t threads;
};

struct AttentionCall {
  const void *query, *key, *value; // new tokens: [tokens][heads][dim]
  int64_t query_token, query_head, key_token, key_head, value_token, value_head; // strides
  void *keys, *values; // cache of one layer: [block][slot][kv head][dim]
  void *out;           // [tokens][heads][dim], contiguous
  int64_t block_stride, slot_stride, head_stride;
  const int64_t *slots, *query_start, *context, *tables;
  const int64_t *reversed; // null: every sequence ascends
  int64_t segments, table_width, block_size, is_int8; // is_int8: the cache has codes, each row followed by its scale
  int64_t heads, kv_heads, dim, window;
  double scale, cap;  // cap: bound of scores, or 0
  const float *sinks; // score of each head that has no value, or null
  // Attention of whole texts: all tokens of a segment, or at most `window` away, without a cache. `keys` and `values` are
  // those of the tokens, with `slot_stride` and `head_stride`.
  int64_t whole;
  const float *bias; // [heads][bias_stride], added to products: that of query i and key j is at bias_middle + i - j; or null
  int64_t bias_stride, bias_middle;
};

// Operations by kind, for benchmarks. kProducts: others than those of layers. kHeads: norms and rotation of queries and
// keys.
enum Kind { kProducts, kAttention, kNorms, kHeads, kKvWrite, kQkv, kOutput, kMlp };

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

// Nanoseconds and number of operations of each kind, [kinds][2], or null when they are not measured.
extern int64_t *measured;

// Measures the operation in whose scope it is.
class Timed {
public:
  explicit Timed(Kind kind) : to_(measured ? measured + 2 * kind : nullptr), begin_(to_ ? now_ns() : 0) {}
  ~Timed() {
    if (to_) to_[0] += now_ns() - begin_, to_[1]++;
  }

private:
  int64_t *to_, begin_;
};

} // namespace skipjoin

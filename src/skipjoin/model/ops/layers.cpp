// All layers of a step in one call: the operations of layer_ops.cpp and paged_attention.cpp in the order in which
// Python would call them, so that results have the same bits.
#include "calls.inc.cpp"

#include <algorithm>
#include <vector>

namespace {

using skipjoin::AttentionCall;
using skipjoin::Experts;
using skipjoin::Heads;
using skipjoin::Kind;
using skipjoin::Linear;

// Layer with RMS norms: attention, then an MLP, with the fields of calls.py.
struct Layer {
  Linear qkv, output, up, down; // their inputs, outputs and threads are those of the step
  const void *norm, *mlp_norm;
  const void *after_attention, *after_mlp; // of outputs before they are added, or null
  const void *query_norm, *key_norm; // or null
  const float *cos_sin;              // or null
  int64_t pairs, window;
  double eps, offset; // of norms
  const float *sinks; // or null
  const Experts *experts; // or null; instead of `down`, after the router `up`
};

// Products of an adapter whose result changes one of the model. down.k is 0 if the adapter has none there.
struct Pair {
  Linear down, up;
};

// Rows that use an adapter, after those of the one before, and its pairs for `qkv`, `output`, `up` and `down` of each layer.
struct Adapted {
  const Pair *pairs;
  int64_t first, rows;
};

struct Step {
  const Layer *layers;
  int64_t count, rows;
  void *x;                                       // residual stream, [rows, hidden], contiguous
  void *normed, *qkv, *attended, *inner; // outputs
  void *const *keys, *const *values;             // cache of each layer
  AttentionCall attention;                       // without what depends on the layer
  const int64_t *positions;
  const void *final_norm; // weights of the norm after the last layer, or null
  void *scratch;          // for the largest product
  int64_t threads, itemsize;
  const Adapted *adapted;
  int64_t adapters;
  void *low, *delta; // outputs of `Pair::down`, and changes before an activation
};

enum Product { kQkv, kOutput, kUp, kDown, kProductsPerLayer };
constexpr Kind kKinds[kProductsPerLayer] = {skipjoin::kQkv, skipjoin::kOutput, skipjoin::kMlp, skipjoin::kMlp};

} // namespace

extern "C" {

void skipjoin_multiply(int64_t type, const Linear *call);
int64_t skipjoin_panel_bytes(int64_t type, const Linear *call);
void skipjoin_rms_norm(int64_t type, const void *x, int64_t outer, int64_t outer_stride, int64_t inner,
                       int64_t inner_stride, int64_t width, const void *weight, float eps, float offset, void *out,
                       int64_t threads);
void skipjoin_prepare_heads(int64_t type, const Heads *call, int64_t threads);
void skipjoin_add(int64_t type, const void *x, void *total, int64_t count, int64_t threads);
void skipjoin_paged_attention(int64_t type, const AttentionCall *call, int64_t threads);
void skipjoin_route(int64_t type, const void *logits, int64_t stride, int64_t rows, const Experts *experts,
                    int64_t *chosen, float *shares, int64_t threads);
void skipjoin_experts(int64_t type, const Experts *call);
}

namespace {

constexpr int64_t kSmall = 1 << 18; // products that take less time than sharing the work would

void run(int64_t type, const Step &s, Linear call, const void *x, int64_t rows, void *out, int64_t out_stride, bool add) {
  call.x = x, call.x_stride = call.k, call.rows = rows;
  call.out = out, call.out_stride = out_stride, call.add = add, call.scratch = s.scratch;
  call.threads = rows * call.n * call.k < kSmall ? 1 : s.threads;
  skipjoin_multiply(type, &call);
}

// Writes or adds what adapters change of [rows, width]. pair: index of their pairs.
void adapt(int64_t type, const Step &s, int64_t pair, const void *x, void *out, int64_t width, bool add) {
  for (int64_t a = 0; a < s.adapters; a++) {
    const Adapted &of = s.adapted[a];
    const Linear &down = of.pairs[pair].down, &up = of.pairs[pair].up;
    if (!down.k) continue;
    run(type, s, down, (const char *)x + of.first * down.k * s.itemsize, of.rows, s.low, down.n, false);
    run(type, s, up, s.low, of.rows, (char *)out + of.first * width * s.itemsize, width, add);
  }
}

// Sets the changes of rows without a pair to negative zeros, whose addition changes no number.
void clear(const Step &s, int64_t pair, int64_t width) {
  int64_t done = 0;
  auto clear_to = [&](int64_t row) {
    int64_t begin = done * width, count = (row - done) * width;
    if (s.itemsize == 4)
      std::fill_n((uint32_t *)s.delta + begin, count, 0x80000000u);
    else
      std::fill_n((uint16_t *)s.delta + begin, count, (uint16_t)0x8000);
  };
  for (int64_t a = 0; a < s.adapters; a++) {
    const Adapted &of = s.adapted[a];
    if (of.pairs[pair].down.k) clear_to(of.first), done = of.first + of.rows;
  }
  clear_to(s.rows);
}

// then: next product, whose weights may be fetched early, or null.
void multiply(int64_t type, const Step &s, Linear call, int64_t pair, const void *x, void *out, bool add,
              const Linear *then) {
  call.x = x, call.x_stride = call.k, call.rows = s.rows;
  call.out = out, call.out_stride = call.gated ? call.n / 2 : call.n, call.add = add, call.scratch = s.scratch, call.threads = s.threads;
  if (then) call.then = then->groups ? then->groups->strips : then->weights, call.then_bytes = skipjoin_panel_bytes(type, then);
  bool is_activated = call.gated || call.activation;
  bool is_adapted = std::any_of(s.adapted, s.adapted + s.adapters, [&](auto &of) { return of.pairs[pair].down.k; });
  if (is_adapted && is_activated) {
    clear(s, pair, call.n);
    adapt(type, s, pair, x, s.delta, call.n, false);
    call.delta = s.delta;
  }
  {
    skipjoin::Timed timed(kKinds[pair % kProductsPerLayer]);
    skipjoin_multiply(type, &call);
  }
  if (is_adapted && !is_activated) adapt(type, s, pair, x, out, call.n, true);
}

void normalize(int64_t type, const Step &s, const void *weight, const Layer &layer, void *out) {
  int64_t hidden = layer.qkv.k;
  skipjoin_rms_norm(type, s.x, s.rows, hidden, 1, 0, hidden, weight, layer.eps, layer.offset, out, s.threads);
}

// Adds a product to the residual stream, after its norm if that is not null. then: as of `multiply`.
void add(int64_t type, const Step &s, const Layer &layer, const Linear &call, int64_t pair, const void *x,
         const void *norm, const Linear *then) {
  if (!norm) return multiply(type, s, call, pair, x, s.x, true, then);
  int64_t hidden = layer.qkv.k;
  multiply(type, s, call, pair, x, s.normed, false, then);
  skipjoin_rms_norm(type, s.normed, s.rows, hidden, 1, 0, hidden, norm, layer.eps, layer.offset, s.normed, s.threads);
  skipjoin_add(type, s.normed, s.x, s.rows * hidden, s.threads);
}

void attend(int64_t type, const Step &s, const Layer &layer, int64_t index) {
  AttentionCall call = s.attention;
  int64_t heads = call.heads, kv_heads = call.kv_heads, dim = call.dim, width = (heads + 2 * kv_heads) * dim;
  auto at = [&](void *base, int64_t element) { return (char *)base + element * s.itemsize; };
  char *query = at(s.qkv, 0), *key = at(s.qkv, heads * dim);
  call.value = at(s.qkv, (heads + kv_heads) * dim);
  call.query_token = call.key_token = call.value_token = width;
  call.query_head = call.key_head = call.value_head = dim;
  auto prepare = [&](char *x, int64_t count, const void *weight) {
    Heads part{x, width, dim, s.rows, count, dim, weight, layer.eps, layer.offset, layer.cos_sin, s.positions, layer.pairs};
    skipjoin_prepare_heads(type, &part, s.threads);
  };
  if (layer.query_norm || layer.cos_sin) {
    prepare(query, heads, layer.query_norm);
    prepare(key, kv_heads, layer.key_norm);
  }
  call.query = query, call.key = key, call.out = s.attended;
  call.keys = s.keys[index], call.values = s.values[index], call.window = layer.window, call.sinks = layer.sinks;
  skipjoin_paged_attention(type, &call, s.threads);
}

// Adds the experts of the normalized rows, of which s.inner has the logits.
void add_experts(int64_t type, const Step &s, const Layer &layer) {
  thread_local std::vector<int64_t> chosen;
  thread_local std::vector<float> shares;
  Experts call = *layer.experts;
  chosen.resize(s.rows * call.per_row), shares.resize(s.rows * call.per_row);
  skipjoin_route(type, s.inner, call.count, s.rows, &call, chosen.data(), shares.data(), s.threads);
  call.x = s.normed, call.x_stride = layer.up.k, call.rows = s.rows, call.total = s.x, call.threads = s.threads;
  call.chosen = chosen.data(), call.shares = shares.data();
  skipjoin_experts(type, &call);
}

} // namespace

extern "C" {

int64_t skipjoin_layer_bytes() { return sizeof(Layer); }

int64_t skipjoin_step_bytes() { return sizeof(Step); }

int64_t skipjoin_pair_bytes() { return sizeof(Pair); }

// Adds the layers' outputs to x, and normalizes it if there is a final norm. type: as in layer_ops.cpp.
void skipjoin_layers(int64_t type, const Step *step) {
  const Step &s = *step;
  for (int64_t i = 0; i < s.count; i++) {
    const Layer &layer = s.layers[i];
    int64_t pair = i * kProductsPerLayer;
    normalize(type, s, layer.norm, layer, s.normed);
    multiply(type, s, layer.qkv, pair + kQkv, s.normed, s.qkv, false, nullptr); // attention would evict weights
    attend(type, s, layer, i);
    add(type, s, layer, layer.output, pair + kOutput, s.attended, layer.after_attention, &layer.up);
    normalize(type, s, layer.mlp_norm, layer, s.normed);
    multiply(type, s, layer.up, pair + kUp, s.normed, s.inner, false, layer.experts ? nullptr : &layer.down);
    if (layer.experts)
      add_experts(type, s, layer);
    else
      add(type, s, layer, layer.down, pair + kDown, s.inner, layer.after_mlp, i + 1 < s.count ? &s.layers[i + 1].qkv : nullptr);
  }
  if (s.final_norm) normalize(type, s, s.final_norm, s.layers[s.count - 1], s.x);
}
}

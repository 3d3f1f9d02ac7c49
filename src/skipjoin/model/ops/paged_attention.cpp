// Attention over the paged cache for CPUs.
//
// Keys are processed in blocks of kKeys, counted from the sequence's first. Each block yields scores, then weights, the
// exponentials of their distance to the maximum so far, then weighted values, which are added to a query's sums. If a
// block raises the maximum, the sums are first scaled down. Two functions do this: `attend_many`, with a lane per
// query, for prompts, and `attend_few`, which reads keys and values once and in order, for decodes. Both compute every
// number by the same operations in the same order. A token's result thus depends neither on other tokens nor on how its
// prompt is cut into chunks.
//
// - A score is a sum per lane over the vectors of the head's units in order. Then neighbors are added, then neighbors
//   of those sums, and so on. With tiles it is the instruction's sum of 32 inputs at a time.
// - The sum of weights adds every sixteenth key in order, and then these sixteen sums.
// - Weighted values are added in the order of the keys: two at a time, with weights rounded to bfloat16, where inputs
//   are in pairs, and 32 at a time with tiles. Keys that a query does not see have weight 0, which changes no sum.
// - A cache of int8 has codes, and the scale of each row after them. Queries and codes are multiplied as floats, and the
//   sum by the key's scale. Weights are multiplied by the value's scale, and then the codes.
#include "calls.inc.cpp"
#include "pool.inc.cpp"
#include "tiles.inc.cpp"

#include <algorithm>
#include <atomic>
#include <vector>

namespace {

constexpr int kKeys = 128;         // per block
constexpr int kFew = 8;            // maximum queries per key-value head of `attend_few`
constexpr int kStepKeys = 32;      // keys that are skipped at a time if no query sees them
constexpr int kTotals = 16;        // sums of weights per query; key t is added to sum t % kTotals
constexpr int kTaskPanels = 16;    // panels of queries per prompt task, which share copies of keys and values
constexpr float kLeast = -1e30f;   // below every score
constexpr double kLog2E = 1.4426950408889634;
constexpr int kMaxCode = 127;
constexpr float kMinScale = 0x1p-100f; // as in int8_rows.py

using Call = skipjoin::AttentionCall;

// Types are those of the model (T) and of the cache (C), which is T or int8_t.
template <typename C> constexpr bool kHasScales = std::is_same_v<C, int8_t>;

// Returns the scale after the codes of a row.
SKIPJOIN_INLINE float scale_after(const int8_t *row, int64_t dim) {
  float scale;
  std::memcpy(&scale, row + dim, sizeof scale);
  return scale;
}

// Loads kLanes units as the cache's type needs them, of which `count` inputs exist.
template <typename C, typename T> SKIPJOIN_INLINE void load_query(const T *from, int64_t count, Unit<C> *to) {
  if constexpr (kHasScales<C>)
    store(to, load(from, count));
  else
    load_units(from, count, to);
}

// Buffers that a thread reuses between tasks.
struct Scratch {
  int64_t segment = -1;
  std::vector<int64_t> rows; // offset in the cache of each key of one segment
  std::vector<float> memory;

  // Returns a buffer of `count` floats in front of others, aligned to a vector.
  template <typename... Sizes> float *take(Sizes... sizes) {
    size_t total = kLanes;
    ((total += padded(sizes)), ...);
    if (memory.size() < total) memory.resize(total);
    return (float *)(((uintptr_t)memory.data() + 4 * kLanes - 1) & ~(uintptr_t)(4 * kLanes - 1));
  }

  static int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }
};

void locate(const Call &c, int64_t segment, Scratch &s) {
  if (s.segment == segment) return;
  if (c.whole) {
    int64_t first = c.query_start[segment], count = c.query_start[segment + 1] - first;
    s.segment = segment;
    s.rows.resize(count + kStepKeys);
    for (int64_t t = 0; t < count + kStepKeys; t++) s.rows[t] = (first + std::min(t, count - 1)) * c.slot_stride;
    return;
  }
  const int64_t *table = c.tables + segment * c.table_width, context = c.context[segment];
  s.segment = segment;
  s.rows.resize(context + kStepKeys);
  bool down = c.reversed && c.reversed[segment];
  for (int64_t t = 0; t < context;) {
    int64_t base = *table++ * c.block_stride;
    for (int64_t slot = 0; slot < c.block_size && t < context; slot++)
      s.rows[t++] = base + (down ? c.block_size - 1 - slot : slot) * c.slot_stride;
  }
  // Keys are scored several at a time, so beyond the end the last key is read again.
  std::fill(s.rows.begin() + context, s.rows.end(), s.rows[context - 1]);
}

// Queries [first, first + count) of a segment's length * group queries, for each of some key-value heads.
struct Task {
  int64_t segment, head, heads, first, count;
};

// The queries of a task, and the keys that each of them sees.
struct Queries {
  const Call &c;
  int64_t group, begin, length, start, first, count;

  Queries(const Call &c, const Task &task)
      : c(c), group(c.heads / c.kv_heads), begin(c.query_start[task.segment]),
        length(c.query_start[task.segment + 1] - begin), start(c.whole ? 0 : c.context[task.segment] - length),
        first(task.first), count(task.count) {}

  int64_t token(int64_t q) const { return begin + (first + q) / group; }
  int64_t head(int64_t q, int64_t kv_head) const { return kv_head * group + (first + q) % group; }
  int64_t position(int64_t q) const { return start + (first + q) / group; }
  int64_t end_key(int64_t q) const {
    if (!c.whole) return position(q) + 1;
    return c.window ? std::min(length, position(q) + c.window + 1) : length;
  }
  // Of whole texts, the window does not include the token itself.
  int64_t first_key(int64_t q) const {
    return c.window ? std::max<int64_t>(0, position(q) + !c.whole - c.window) : 0;
  }
  // Returns the first key of the first block and the end of the keys over all queries.
  int64_t lowest() const { return first_key(0) / kKeys * kKeys; }
  int64_t highest() const { return end_key(count - 1); }
  // Returns the number of keys of a block before the first that any query from `q` on sees, which are skipped.
  int64_t unseen(int64_t q, int64_t block) const {
    return std::max<int64_t>(0, first_key(q) - block) / kStepKeys * kStepKeys;
  }

  template <typename T> const T *at(int64_t q, int64_t kv_head) const {
    return (const T *)c.query + token(q) * c.query_token + head(q, kv_head) * c.query_head;
  }
};

// Maps products of queries and keys to scores, which are base-2 logarithms of unnormalized weights: `bounded`, then times
// `factor`.
struct Scale {
  Floats factor, inner;
  bool has_cap;

  explicit Scale(const Call &c)
      : factor(splat((float)((c.cap ? c.cap : c.scale) * kLog2E))), inner(splat(c.cap ? (float)(2 * c.scale / c.cap) : 0)),
        has_cap(c.cap != 0) {}

  // Returns the hyperbolic tangent of half of `inner` times x.
  SKIPJOIN_INLINE Floats bounded(Floats x) const { return 1.0f - 2.0f / (1.0f + exponential(x * inner)); }
};

// Returns the maximum score and the sum of weights before the first key: those of the head's sink.
SKIPJOIN_INLINE float first_top(const Call &c, int64_t head) {
  return c.sinks ? std::max(kLeast, (float)(c.sinks[head] * kLog2E)) : kLeast;
}

SKIPJOIN_INLINE float first_total(const Call &c) { return c.sinks ? 1.0f : 0.0f; }

template <typename C> SKIPJOIN_INLINE Floats weight_of(Floats score, Floats scale, Floats top) {
  return power_of_two<sizeof(C) <= 2>(fma(score, scale, -top));
}

// Returns the factor of the sums when the maximum score grows.
template <typename C> SKIPJOIN_INLINE Floats shrink(Floats before, Floats top) {
  return power_of_two<sizeof(C) <= 2>(before - top);
}

SKIPJOIN_INLINE bool differ(Floats a, Floats b) { return std::memcmp(&a, &b, sizeof a) != 0; }

// Returns whether this process attends with tiles. It then does so everywhere, because their sums are rounded
// differently.
template <typename C> bool has_tiles() { return std::is_same_v<C, bfloat16> && have_tiles(); }

// Prefetches the values of `count` rows that will be needed.
template <typename C> SKIPJOIN_INLINE void fetch(const C *from, const int64_t *rows, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; i++) {
    for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(C)) __builtin_prefetch(from + rows[i] + d, 0, 2);
    // Rows of int8 are not aligned to lines, so the scale may be on the next one.
    if constexpr (kHasScales<C>) __builtin_prefetch(from + rows[i] + dim, 0, 2);
  }
}

#include "attend_many.inc.cpp"

#include "attend_few.inc.cpp"

// Each task has one head, or several if a segment has few queries. The longest tasks come first.
std::vector<Task> make_tasks(const Call &c, int threads) {
  constexpr int kTasksPerThread = 4; // enough for load balance
  std::vector<Task> tasks;
  int64_t group = c.heads / c.kv_heads;
  int64_t together = std::clamp<int64_t>(c.segments * c.kv_heads / (threads * kTasksPerThread), 1, c.kv_heads);
  for (int64_t i = 0; i < c.segments; i++) {
    int64_t queries = (c.query_start[i + 1] - c.query_start[i]) * group, most = kTaskPanels * kPanel;
    if (queries <= kFew && !c.whole) {
      for (int64_t head = 0; head < c.kv_heads; head += together)
        tasks.push_back({i, head, std::min(together, c.kv_heads - head), 0, queries});
    } else {
      for (int64_t first = (queries - 1) / most * most; first >= 0; first -= most)
        for (int64_t head = 0; head < c.kv_heads; head++)
          tasks.push_back({i, head, 1, first, std::min(most, queries - first)});
    }
  }
  return tasks;
}

// Rounds a row to codes of at most kMaxCode, and stores their scale after them. A row that is not finite gets a scale
// that is not finite.
template <typename T> void encode(const T *row, int64_t dim, int8_t *to) {
  Ints tops{}; // the bits of magnitudes are ordered like them, NaN last
  for (int64_t d = 0; d < dim; d += kLanes) {
    Ints bits = (Ints)magnitude(load(row + d, dim - d));
    tops = bits > tops ? bits : tops;
  }
  int32_t top = 0;
  for (int i = 0; i < kLanes; i++) top = std::max(top, tops[i]);
  float scale;
  std::memcpy(&scale, &top, sizeof scale);
  scale = scale / kMaxCode;
  if (scale < kMinScale) scale = kMinScale;
  for (int64_t d = 0; d < dim; d += kLanes) {
    // Adding a number whose last bit is worth 1 rounds to an integer.
    Ints codes = (Ints)(load(row + d, dim - d) / splat(scale) + splat(0x1.8p23f)) - (Ints)splat(0x1.8p23f);
    Bytes bytes = __builtin_convertvector(codes, Bytes);
    std::memcpy(to + d, &bytes, std::min<int64_t>(kLanes, dim - d));
  }
  std::memcpy(to + dim, &scale, sizeof scale);
}

template <typename T, typename C> void write(const Call &c, int64_t token) {
  int64_t slot = c.slots[token];
  int64_t to = slot / c.block_size * c.block_stride + slot % c.block_size * c.slot_stride;
  for (int64_t h = 0; h < c.kv_heads; h++) {
    const T *key = (const T *)c.key + token * c.key_token + h * c.key_head;
    const T *value = (const T *)c.value + token * c.value_token + h * c.value_head;
    C *to_key = (C *)c.keys + to + h * c.head_stride, *to_value = (C *)c.values + to + h * c.head_stride;
    if constexpr (kHasScales<C>) {
      encode(key, c.dim, to_key);
      encode(value, c.dim, to_value);
    } else {
      std::memcpy(to_key, key, c.dim * sizeof(T));
      std::memcpy(to_value, value, c.dim * sizeof(T));
    }
  }
}

template <typename T, typename C> void paged_attention(const Call &c, int threads) {
  int64_t tokens = c.query_start[c.segments];
  std::vector<Task> tasks = make_tasks(c, threads);
  if (!c.whole) {
    skipjoin::Timed timed(skipjoin::kKvWrite);
    // Few tokens are written faster than the work is shared.
    skipjoin::share(tokens > 64 ? threads : 1, tokens, 16, [&](int64_t t) { write<T, C>(c, t); });
  }
  skipjoin::Timed timed(skipjoin::kAttention);
  std::atomic<size_t> counter{0};
  skipjoin::run_on_pool(threads, [&](int) {
    thread_local Scratch scratch;
    scratch.segment = -1;
    [[maybe_unused]] bool is_shaped = false; // for prompts
    for (size_t i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
      bool is_few = tasks[i].count <= kFew && !c.whole;
#ifdef SKIPJOIN_TILES
      if (has_tiles<C>() && !is_few && !is_shaped) shape_tiles(TileShapes(kTile));
      is_shaped = !is_few;
#endif
      is_few ? attend_few<T, C>(c, tasks[i], scratch) : attend_many<T, C>(c, tasks[i], scratch);
    }
#ifdef SKIPJOIN_TILES
    if (has_tiles<C>()) release_tiles();
#endif
  });
}

template <typename T> void paged_attention(const Call &c, int threads) {
  c.is_int8 ? paged_attention<T, int8_t>(c, threads) : paged_attention<T, T>(c, threads);
}

} // namespace

extern "C" {

int64_t skipjoin_attention_call_bytes() { return sizeof(Call); }

// type: as in layer_ops.cpp.
void skipjoin_paged_attention(int64_t type, const Call *call, int64_t threads) {
  if (type == 0) paged_attention<float>(*call, threads);
  if (type == 1) paged_attention<bfloat16>(*call, threads);
  if constexpr (kHasHalf)
    if (type == 2) paged_attention<half>(*call, threads);
}
}

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
constexpr int kTaskPanels = 8;     // panels of queries per prompt task, which share copies of keys and values
constexpr float kLeast = -1e30f;   // below every score
constexpr double kLog2E = 1.4426950408889634;

using Call = skipjoin::AttentionCall;

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
  const int64_t *table = c.tables + segment * c.table_width, context = c.context[segment];
  s.segment = segment;
  s.rows.resize(context + kStepKeys);
  int64_t skipped = c.offsets ? c.offsets[segment] : 0;
  bool down = c.reversed && c.reversed[segment];
  for (int64_t t = 0, slot = skipped; t < context; slot = 0) {
    int64_t base = table[(t + skipped) / c.block_size] * c.block_stride;
    for (; slot < c.block_size && t < context; slot++)
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
  int64_t group, begin, start, first, count;

  Queries(const Call &c, const Task &task)
      : c(c), group(c.heads / c.kv_heads), begin(c.query_start[task.segment]),
        start(c.context[task.segment] - (c.query_start[task.segment + 1] - begin)), first(task.first),
        count(task.count) {}

  int64_t token(int64_t q) const { return begin + (first + q) / group; }
  int64_t head(int64_t q, int64_t kv_head) const { return kv_head * group + (first + q) % group; }
  int64_t end_key(int64_t q) const { return start + (first + q) / group + 1; }
  int64_t first_key(int64_t q) const { return c.window ? std::max<int64_t>(0, end_key(q) - c.window) : 0; }
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

// Scores are base-2 logarithms of unnormalized weights.
SKIPJOIN_INLINE Floats scale_of(const Call &c) { return splat((float)(c.scale * kLog2E)); }

template <typename T> SKIPJOIN_INLINE Floats weight_of(Floats score, Floats scale, Floats top) {
  return power_of_two<sizeof(T) == 2>(fma(score, scale, -top));
}

// Returns the factor of the sums when the maximum score grows.
template <typename T> SKIPJOIN_INLINE Floats shrink(Floats before, Floats top) {
  return power_of_two<sizeof(T) == 2>(before - top);
}

SKIPJOIN_INLINE bool differ(Floats a, Floats b) { return std::memcmp(&a, &b, sizeof a) != 0; }

// Returns whether this process attends with tiles. It then does so everywhere, because their sums are rounded
// differently.
template <typename T> bool has_tiles() { return std::is_same_v<T, bfloat16> && have_tiles(); }

// Prefetches the values of `count` rows that will be needed.
template <typename T> SKIPJOIN_INLINE void fetch(const T *from, const int64_t *rows, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(from + rows[i] + d, 0, 2);
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
    if (queries <= kFew) {
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

template <typename T> void write(const Call &c, int64_t token) {
  int64_t slot = c.slots[token];
  int64_t to = slot / c.block_size * c.block_stride + slot % c.block_size * c.slot_stride;
  for (int64_t h = 0; h < c.kv_heads; h++) {
    const T *key = (const T *)c.key + token * c.key_token + h * c.key_head;
    const T *value = (const T *)c.value + token * c.value_token + h * c.value_head;
    std::memcpy((T *)c.keys + to + h * c.head_stride, key, c.dim * sizeof(T));
    std::memcpy((T *)c.values + to + h * c.head_stride, value, c.dim * sizeof(T));
  }
}

template <typename T> void paged_attention(const Call &c, int threads) {
  int64_t tokens = c.query_start[c.segments];
  std::vector<Task> tasks = make_tasks(c, threads);
  // Few tokens are written faster than the work is shared.
  skipjoin::share(tokens > 64 ? threads : 1, tokens, 16, [&](int64_t t) { write<T>(c, t); });
  std::atomic<size_t> counter{0};
  skipjoin::run_on_pool(threads, [&](int) {
    thread_local Scratch scratch;
    scratch.segment = -1;
    [[maybe_unused]] int64_t shape = -1;
    for (size_t i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
#ifdef SKIPJOIN_TILES
      int64_t wanted = tasks[i].count <= kFew ? tasks[i].count : 0;
      if (has_tiles<T>() && wanted != shape) shape_tiles(wanted ? few_shapes(wanted) : TileShapes(kTile));
      shape = wanted;
#endif
      if (tasks[i].count <= kFew)
        attend_few<T>(c, tasks[i], scratch);
      else
        attend_many<T>(c, tasks[i], scratch);
    }
#ifdef SKIPJOIN_TILES
    if (has_tiles<T>() && shape >= 0) release_tiles();
#endif
  });
}

} // namespace

extern "C" {

int64_t skipjoin_attention_call_bytes() { return sizeof(Call); }

// type: as in layer_ops.cpp.
void skipjoin_paged_attention(int64_t type, const Call *call, int64_t threads) {
  skipjoin::Timed timed(skipjoin::kAttention);
  if (type == 0) paged_attention<float>(*call, threads);
  if (type == 1) paged_attention<bfloat16>(*call, threads);
  if constexpr (kHasHalf)
    if (type == 2) paged_attention<half>(*call, threads);
}
}

// Attention over the paged cache for CPUs.
//
// Keys come in blocks of kKeys, counted from the sequence's first. Of each block the scores, then the exponentials of
// their distance to the largest so far, then the weighted values are added to a query's sums; where a block brings a
// larger score, what was there is scaled down first. Two functions do this: `attend_many` with a lane per query, for
// prompts, and `attend_few` with a lane per key, which reads keys and values once and in order, for decodes. Every
// number is made by the same operations in the same order in both: a token's result does not depend on the tokens
// beside it, and not on how a prompt is cut.
#include "pool.inc.cpp"
#include "products.inc.cpp"

#include <algorithm>
#include <atomic>
#include <vector>

namespace {

constexpr int kKeys = 128;        // per block
constexpr int kFew = 8;           // queries per key-value head that are decoded; see `attend_few`
constexpr int kScored = 4 * kLanes; // keys that are scored at a time for few queries
constexpr int kTogether = 4;      // of which so many are multiplied by a value that is in a register
constexpr int kTotals = 16;       // sums of exponentials per query: key t is in sum t % kTotals
constexpr int kTaskPanels = 8;    // panels of queries per task of a prompt: they share the copies of keys and values
constexpr int kUnits = 256;       // units of a head multiplied at a time
constexpr int kRow = kUnits + 16; // units from one copied key to the next: no power of two, so that they share no cache set
constexpr float kLeast = -1e30f;  // below every score

struct Call {
  const void *query, *key, *value; // new tokens: [tokens][heads][dim]
  int64_t query_token, query_head, key_token, key_head, value_token, value_head; // strides
  void *keys, *values;                         // cache of one layer: [block][slot][kv head][dim]
  int64_t block_stride, slot_stride, head_stride;
  void *out; // [tokens][heads][dim], contiguous
  const int64_t *slots, *query_start, *context, *tables;
  const int64_t *offsets, *reversed; // null: every sequence begins at its first slot and goes up
  int64_t segments, table_width, block_size, heads, kv_heads, dim, window;
  double scale;
};

// Buffers that a thread reuses between tasks.
struct Scratch {
  int64_t segment = -1;
  std::vector<int64_t> rows; // of one segment: offset of each key in the cache
  std::vector<float> memory;

  // A buffer of so many floats in front of others, aligned to a vector.
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
  s.rows.resize(context + kScored);
  int64_t skipped = c.offsets ? c.offsets[segment] : 0;
  bool down = c.reversed && c.reversed[segment];
  for (int64_t t = 0, slot = skipped; t < context; slot = 0) {
    int64_t base = table[(t + skipped) / c.block_size] * c.block_stride;
    for (; slot < c.block_size && t < context; slot++)
      s.rows[t++] = base + (down ? c.block_size - 1 - slot : slot) * c.slot_stride;
  }
  // Keys are scored several at a time: beyond the end the last key is read again.
  std::fill(s.rows.begin() + context, s.rows.end(), s.rows[context - 1]);
}

// Queries [first, first + count) of a segment's length * group, for each of some key-value heads.
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
  // The first key of the first block, and the end of the keys, of all of them.
  int64_t lowest() const { return first_key(0) / kKeys * kKeys; }
  int64_t highest() const { return end_key(count - 1); }

  template <typename T> const T *at(int64_t q, int64_t kv_head) const {
    return (const T *)c.query + token(q) * c.query_token + head(q, kv_head) * c.query_head;
  }
};

// One more block: the exponentials' base goes from the old largest score to `top`.
SKIPJOIN_INLINE Floats shrink(Floats before, Floats top) { return exponential(before - top); }

SKIPJOIN_INLINE Floats weight_of(Floats score, Floats top) { return exponential(score - top); }

// ---- many queries: a lane each

// Copies keys or values of a block as units or floats: row t to to[t * pitch], `count` numbers per row.
template <typename T> void copy_units(const T *from, const int64_t *rows, int64_t keys, int64_t count, Unit<T> *to) {
  constexpr int per = kInputs<T>;
  for (int64_t t = 0; t < keys; t++)
    for (int64_t i = 0; i < count; i += kLanes * per) load_units(from + rows[t] + i, count - i, to + t * kRow + i / per);
}

template <typename T> void copy_floats(const T *from, const int64_t *rows, int64_t keys, int64_t count, float *to) {
  for (int64_t t = 0; t < keys; t++)
    for (int64_t i = 0; i < count; i += kLanes) store(to + t * kRow + i, load(from + rows[t] + i, count - i));
}

// `rows` rows of at most kMaxRows at a time.
template <typename In, typename W, int ROW, int UNIT, int ROWS = kMaxRows>
void add_products(int64_t rows, const In *inputs, const W *weights, int64_t units, Floats (*sums)[kVectors]) {
  for (; rows >= ROWS; rows -= ROWS, inputs += ROWS * ROW, sums += ROWS)
    multiply<In, W, ROWS, ROW, UNIT>(inputs, weights, units, sums);
  if constexpr (ROWS > 1) {
    if (rows) add_products<In, W, ROW, UNIT, ROWS / 2>(rows, inputs, weights, units, sums);
  }
}

using Lanes = Floats[kVectors]; // of a panel of queries

// What is known of a panel of queries: [kTotals] sums of exponentials, then [dim] sums of values.
struct Panel {
  Lanes *totals, *sums, top;
};

// Scores of a block's keys [keys] -> weights, in place.
void weigh(const Queries &queries, int64_t panel, int64_t block, int64_t keys, Floats scale, Lanes *scores, Panel &p,
           int64_t dim) {
  int64_t first = panel * kPanel, last = std::min<int64_t>(queries.count, first + kPanel) - 1;
  bool all_see = queries.end_key(first) >= block + keys && queries.first_key(last) <= block;
  Floats top[kVectors];
  for (int v = 0; v < kVectors; v++) {
    Ints from{}, to{};
    for (int i = 0; i < kLanes && !all_see; i++) {
      int64_t q = std::min(first + v * kLanes + i, last);
      from[i] = (int32_t)(std::max(queries.first_key(q), block) - block);
      to[i] = (int32_t)(std::min(queries.end_key(q), block + keys) - block);
    }
    top[v] = p.top[v];
    for (int64_t t = 0; t < keys; t++) {
      Floats score = scores[t][v] * scale;
      if (!all_see) {
        Ints at = (Ints)splat((uint32_t)t);
        score = (at >= from) & (at < to) ? score : splat(-INFINITY);
      }
      scores[t][v] = score;
      top[v] = larger(score, top[v]);
    }
  }
  for (int v = 0; v < kVectors; v++) {
    Floats factor = shrink(p.top[v], top[v]);
    p.top[v] = top[v];
    for (int i = 0; i < kTotals; i++) p.totals[i][v] *= factor;
    for (int64_t d = 0; d < dim; d++) p.sums[d][v] *= factor;
    for (int64_t t = 0; t < keys; t++) {
      scores[t][v] = weight_of(scores[t][v], top[v]);
      p.totals[t % kTotals][v] += scores[t][v];
    }
  }
}

template <typename T> void write_out(const Queries &queries, int64_t head, int64_t panel, Panel &p) {
  const Call &c = queries.c;
  for (int v = 0; v < kVectors; v++)
    for (int i = 0; i < kLanes; i++) {
      int64_t q = panel * kPanel + v * kLanes + i;
      if (q >= queries.count) return;
      float totals[kTotals];
      for (int j = 0; j < kTotals; j++) totals[j] = p.totals[j][v][i];
      float factor = 1.0f / sum_of(totals, kTotals);
      T *out = (T *)c.out + (queries.token(q) * c.heads + queries.head(q, head)) * c.dim;
      const float *sums = (const float *)p.sums + v * kLanes + i;
      for (int64_t d = 0; d < c.dim; d += kLanes) {
        Floats value{};
        for (int64_t j = 0; j < std::min<int64_t>(kLanes, c.dim - d); j++) value[j] = sums[(d + j) * kPanel];
        store(out + d, value * factor, c.dim - d);
      }
    }
}

// Panels of queries of one key-value head.
template <typename T> void attend_many(const Call &c, const Task &task, Scratch &s) {
  locate(c, task.segment, s);
  Queries queries(c, task);
  int64_t panels = (task.count + kPanel - 1) / kPanel, units = units_of<T>(c.dim);
  // Keys and values of a block, scores, then per panel: queries, sums and totals.
  int64_t copy = kKeys * kRow, values_copy = kKeys * kRow * ((c.dim + kUnits - 1) / kUnits);
  int64_t per_panel = (units + c.dim + kTotals) * kPanel;
  float *at = s.take(copy, values_copy, kKeys * kPanel, panels * per_panel);
  auto *keys = (Unit<T> *)at;
  float *values = at + copy;
  auto *scores = (Lanes *)(values + values_copy);
  float *state = (float *)(scores + kKeys);
  std::memset(state, 0, panels * per_panel * 4);
  Panel known[kTaskPanels];
  Unit<T> *query[kTaskPanels];
  for (int64_t p = 0; p < panels; p++) {
    query[p] = (Unit<T> *)(state + p * per_panel);
    known[p].totals = (Lanes *)(query[p] + units * kPanel);
    known[p].sums = known[p].totals + kTotals;
    for (Floats &top : known[p].top) top = splat(kLeast);
    for (int64_t q = p * kPanel; q < std::min(task.count, (p + 1) * kPanel); q++) {
      const T *from = queries.at<T>(q, task.head);
      for (int64_t u = 0; u < units; u += kLanes) {
        Unit<T> some[kLanes];
        load_units(from + u * kInputs<T>, c.dim - u * kInputs<T>, some);
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, units - u); i++)
          query[p][(u + i) * kPanel + q % kPanel] = some[i];
      }
    }
  }
  const T *head_keys = (const T *)c.keys + task.head * c.head_stride;
  const T *head_values = (const T *)c.values + task.head * c.head_stride;
  Floats scale = splat((float)c.scale);
  for (int64_t block = queries.lowest(); block < queries.highest(); block += kKeys) {
    int64_t here = std::min<int64_t>(kKeys, queries.highest() - block);
    const int64_t *rows = &s.rows[block];
    bool is_wide = units > kUnits; // then keys are copied in parts, again for each panel
    if (!is_wide) copy_units(head_keys, rows, here, c.dim, keys);
    for (int64_t d = 0; d < c.dim; d += kUnits)
      copy_floats(head_values + d, rows, here, std::min<int64_t>(kUnits, c.dim - d), values + d / kUnits * copy);
    for (int64_t p = 0; p < panels; p++) {
      // Keys behind the panel's last query are left out; a block without a key changes nothing.
      int64_t last = std::min(task.count, (p + 1) * kPanel) - 1, seen = std::min(here, queries.end_key(last) - block);
      if (seen <= 0 || queries.first_key(p * kPanel) >= block + here) continue;
      std::memset((void *)scores, 0, seen * sizeof(Lanes));
      for (int64_t u = 0; u < units; u += kUnits) {
        int64_t some = std::min<int64_t>(kUnits, units - u), from = u * kInputs<T>;
        if (is_wide) copy_units(head_keys + from, rows, here, std::min(some * kInputs<T>, c.dim - from), keys);
        add_products<Unit<T>, Unit<T>, kRow, 1>(seen, keys, query[p] + u * kPanel, some, scores);
      }
      weigh(queries, p, block, seen, scale, scores, known[p], c.dim);
      for (int64_t d = 0; d < c.dim; d += kUnits)
        add_products<float, float, 1, kRow>(std::min<int64_t>(kUnits, c.dim - d), values + d / kUnits * copy,
                                            (const float *)scores, seen, known[p].sums + d);
    }
  }
  for (int64_t p = 0; p < panels; p++) write_out<T>(queries, task.head, p, known[p]);
}

// ---- few queries: a lane per key, or per number of a head

// Rows that are needed next. They are fetched a vector of keys at a time, between the arithmetic of others: the processor
// waits where too many are on their way.
template <typename T> struct Next {
  const T *from;
  const int64_t *rows;
  int64_t keys, dim;

  void fetch(int64_t first) const {
    for (int64_t i = first; i < std::min(keys, first + kLanes); i++)
      for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(from + rows[i] + d, 0, 2);
  }
};

// Scores of kScored keys for `count` queries: query q's units begin at query[q * pitch], its scores at
// scores[q * kKeys]. Several vectors of keys at a time, since each sum waits for the product before.
template <typename T>
void score(const Unit<T> *query, int64_t pitch, int64_t count, const T *keys, const int64_t *rows, int64_t dim,
           float *scores, const Next<T> &next) {
  constexpr int per = kInputs<T>, vectors = kScored / kLanes;
  using Column = std::conditional_t<per == 2, Words, Floats>;
  Floats sums[kFew][vectors] = {};
  for (int64_t d = 0; d < dim; d += kLanes * per) {
    Words columns[vectors][kLanes];
    for (int v = 0; v < vectors; v++) {
      const int64_t *some = rows + v * kLanes;
      if (d == 0) next.fetch(v * kLanes);
      if (dim - d >= kLanes * per) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) columns[v][i] = whole_units(keys + some[i] + d);
      } else {
        for (int i = 0; i < kLanes; i++) load_units(keys + some[i] + d, dim - d, (Unit<T> *)&columns[v][i]);
      }
      transpose(columns[v]);
    }
    int64_t units = std::min<int64_t>(kLanes, units_of<T>(dim - d));
    for (int64_t q = 0; q < count; q++) {
      const Unit<T> *from = query + q * pitch + d / per;
      Floats sum[vectors];
      for (int v = 0; v < vectors; v++) sum[v] = sums[q][v];
      for (int64_t u = 0; u < units; u++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[v] = fma(splat(from[u]), (Column)columns[v][u], sum[v]);
      for (int v = 0; v < vectors; v++) sums[q][v] = sum[v];
    }
  }
  for (int64_t q = 0; q < count; q++)
    for (int v = 0; v < vectors; v++) store(scores + q * kKeys + v * kLanes, sums[q][v]);
}

// Adds the weighted values of `keys` tokens to the sums of COUNT queries, for the numbers [d, d + VECTORS * kLanes) of a
// head. weights: [COUNT][kKeys]; sums: [COUNT][width].
template <typename T, int COUNT, int VECTORS>
void gather(const T *values, const int64_t *rows, int64_t keys, int64_t d, int64_t dim, const float *weights,
            float *sums, int64_t width) {
  Floats acc[COUNT][VECTORS];
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < VECTORS; v++) acc[q][v] = load(sums + q * width + d + v * kLanes);
  bool whole = d + VECTORS * kLanes <= dim;
  for (int64_t t = 0; t < keys; t++) {
    const T *row = values + rows[t] + d;
    Floats value[VECTORS];
    for (int v = 0; v < VECTORS; v++)
      value[v] = whole ? load(row + v * kLanes) : load(row + v * kLanes, dim - d - v * kLanes);
    for (int q = 0; q < COUNT; q++) {
      Floats weight = splat(weights[q * kKeys + t]);
      for (int v = 0; v < VECTORS; v++) acc[q][v] = fma(weight, value[v], acc[q][v]);
    }
  }
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < VECTORS; v++) store(sums + q * width + d + v * kLanes, acc[q][v]);
}

constexpr int kGathered = kLanes == 16 ? 4 : 2; // vectors of a value at a time

template <typename T, int COUNT = kTogether>
void gather_all(int64_t count, const T *values, const int64_t *rows, int64_t keys, int64_t dim, const float *weights,
                float *sums, int64_t width) {
  for (; count >= COUNT; count -= COUNT, weights += COUNT * kKeys, sums += COUNT * width)
    for (int64_t d = 0; d < dim; d += kGathered * kLanes)
      gather<T, COUNT, kGathered>(values, rows, keys, d, dim, weights, sums, width);
  if constexpr (COUNT > 1) {
    if (count) gather_all<T, COUNT / 2>(count, values, rows, keys, dim, weights, sums, width);
  }
}

// At most kFew queries of some key-value heads. Heads are the inner loop: those of one block are adjacent, and memory is
// fastest read in order.
template <typename T> void attend_few(const Call &c, const Task &task, Scratch &s) {
  locate(c, task.segment, s);
  Queries queries(c, task);
  int64_t count = task.count, pitch = Scratch::padded(units_of<T>(c.dim));
  int64_t width = (c.dim + kGathered * kLanes - 1) / (kGathered * kLanes) * kGathered * kLanes, all = task.heads * count;
  // Per head and query: units of the query, scores, totals, sums, the largest score.
  float *at = s.take(all * pitch, all * kKeys, all * kTotals, all * width, all);
  auto *query = (Unit<T> *)at;
  float *scores = at + all * pitch, *totals = scores + all * kKeys, *sums = totals + all * kTotals;
  float *tops = sums + all * width;
  std::memset(totals, 0, all * (kTotals + width) * 4);
  std::fill(tops, tops + all, kLeast);
  for (int64_t h = 0; h < task.heads; h++)
    for (int64_t q = 0; q < count; q++) {
      const T *from = queries.at<T>(q, task.head + h);
      for (int64_t u = 0; u < pitch; u += kLanes)
        load_units(from + u * kInputs<T>, c.dim - u * kInputs<T>, query + (h * count + q) * pitch + u);
    }
  const T *keys = (const T *)c.keys + task.head * c.head_stride;
  const T *values = (const T *)c.values + task.head * c.head_stride;
  Floats scale = splat((float)c.scale);
  // Keys before the first that any query sees add nothing.
  int64_t unseen = queries.first_key(0) / kScored * kScored;
  for (int64_t block = queries.lowest(); block < queries.highest(); block += kKeys) {
    int64_t here = std::min<int64_t>(kKeys, queries.highest() - block), skipped = std::max<int64_t>(0, unseen - block);
    const int64_t *rows = &s.rows[block];
    for (int64_t t = skipped; t < here; t += kScored)
      for (int64_t h = 0; h < task.heads; h++) {
        const T *head_keys = keys + h * c.head_stride;
        Next<T> next{values, rows + skipped, here - skipped, c.dim};
        if (h + 1 < task.heads)
          next = {head_keys + c.head_stride, rows + t, here - t, c.dim};
        else if (t + kScored < here)
          next = {keys, rows + t + kScored, here - t - kScored, c.dim};
        float *to = scores + h * count * kKeys + t;
        score(query + h * count * pitch, pitch, count, head_keys, rows + t, c.dim, to, next);
      }
    for (int64_t h = 0; h < task.heads; h++)
      for (int64_t q = 0; q < count; q++) {
        int64_t i = h * count + q;
        int64_t from = std::max(queries.first_key(q) - block, skipped), to = std::min(queries.end_key(q) - block, here);
        float *own = scores + i * kKeys;
        Floats hidden = splat(-INFINITY), top = splat(tops[i]);
        for (int64_t t = skipped; t < here; t += kLanes) {
          Ints key = lane_numbers() + (int32_t)t;
          Floats value = load(own + t) * scale;
          value = (key >= (int32_t)from) & (key < (int32_t)to) ? value : hidden;
          store(own + t, value);
          top = larger(value, top);
        }
        top = splat(largest(top));
        Floats factor = shrink(splat(tops[i]), top);
        tops[i] = top[0];
        for (int64_t d = 0; d < width; d += kLanes) store(sums + i * width + d, load(sums + i * width + d) * factor);
        for (int d = 0; d < kTotals; d += kLanes)
          store(totals + i * kTotals + d, load(totals + i * kTotals + d) * factor);
        for (int64_t t = skipped; t < here; t += kLanes) {
          Floats weight = weight_of(load(own + t), top);
          store(own + t, weight);
          float *total = totals + i * kTotals + t % kTotals;
          store(total, load(total) + weight);
        }
      }
    for (int64_t t = skipped; t < here; t += kScored)
      for (int64_t h = 0; h < task.heads; h++) {
        const T *head_values = values + h * c.head_stride;
        Next<T> next{keys, rows + kKeys, std::max<int64_t>(0, queries.highest() - block - kKeys), c.dim};
        if (h + 1 < task.heads)
          next = {head_values + c.head_stride, rows + t, here - t, c.dim};
        else if (t + kScored < here)
          next = {values, rows + t + kScored, here - t - kScored, c.dim};
        for (int64_t u = t; u < std::min<int64_t>(here, t + kScored); u += kLanes) {
          next.fetch(u - t);
          gather_all<T>(count, head_values, rows + u, std::min<int64_t>(kLanes, here - u), c.dim,
                        scores + h * count * kKeys + u, sums + h * count * width, width);
        }
      }
  }
  for (int64_t h = 0; h < task.heads; h++)
    for (int64_t q = 0; q < count; q++) {
      int64_t i = h * count + q;
      float factor = 1.0f / sum_of(totals + i * kTotals, kTotals);
      T *out = (T *)c.out + (queries.token(q) * c.heads + queries.head(q, task.head + h)) * c.dim;
      for (int64_t d = 0; d < c.dim; d += kLanes) store(out + d, load(sums + i * width + d) * factor, c.dim - d);
    }
}

// ----

// One head per task, and the longest first; several heads if a segment has few queries.
std::vector<Task> make_tasks(const Call &c, int threads) {
  constexpr int kTasksPerThread = 4; // enough for balance
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
  // Few tokens are written faster than they are shared.
  skipjoin::share(tokens > 64 ? threads : 1, tokens, 16, [&](int64_t t) { write<T>(c, t); });
  std::atomic<size_t> counter{0};
  skipjoin::run_on_pool(threads, [&](int) {
    thread_local Scratch scratch;
    scratch.segment = -1;
    for (size_t i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
      // One query per head is few even where its group is large.
      if (tasks[i].count <= kFew)
        attend_few<T>(c, tasks[i], scratch);
      else
        attend_many<T>(c, tasks[i], scratch);
    }
  });
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

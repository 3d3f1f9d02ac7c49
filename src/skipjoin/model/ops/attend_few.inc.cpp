// Attention of at most kFew queries, which reads keys and values in place, for decodes. Included by
// paged_attention.cpp.

// Loads kLanes units of keys or values: a whole vector, or its first `count` inputs.
template <typename T> SKIPJOIN_INLINE Words units_at(const T *from, int64_t count) {
  if (count >= kLanes * kInputs<T>) return whole_units(from);
  Words units;
  load_units(from, count, (Unit<T> *)&units);
  return units;
}

// Computes the scores of kLanes keys for one query, whose units are padded with zeros.
template <typename T>
SKIPJOIN_INLINE Floats score(const Unit<T> *query, const T *keys, const int64_t *rows, int64_t dim) {
  constexpr int per = kInputs<T>;
  using Column = std::conditional_t<per == 2, Words, Floats>;
  constexpr int some = kLanes > 8 ? 8 : kLanes; // whose addresses fit the registers
  Floats sums[kLanes] = {};
  int64_t whole = dim / (kLanes * per) * (kLanes * per);
#pragma GCC unroll 2
  for (int first = 0; first < kLanes; first += some)
    for (int64_t d = 0; d < whole; d += kLanes * per) {
      auto part = (Column)lanes_of(query + d / per, 0);
#pragma GCC unroll 8
      for (int i = first; i < first + some; i++)
        sums[i] = fma(part, (Column)whole_units(keys + rows[i] + d), sums[i]);
    }
  if (whole < dim) {
    auto part = (Column)lanes_of(query + whole / per, 0);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
      sums[i] = fma(part, (Column)units_at(keys + rows[i] + whole, dim - whole), sums[i]);
  }
  return sum_each(sums);
}

// Number of vectors of a value's units that are added at a time.
constexpr int kAdded = kLanes == 16 ? 4 : 2;

// Adds the weighted values of `keys` tokens to the sums of COUNT queries, for head dimensions from `d` on: those of
// kAdded vectors, or half as many where neighboring keys are in pairs, in the order of `interleave`. weights:
// [COUNT][kKeys] floats, or bfloat16 in the same memory; sums: [COUNT][width].
template <typename T, int COUNT>
void add_values(const T *values, const int64_t *rows, int64_t keys, int64_t d, int64_t dim, const float *weights,
                float *sums, int64_t width) {
  Floats acc[COUNT][kAdded];
#pragma GCC unroll 4
  for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 4
    for (int v = 0; v < kAdded; v++) acc[q][v] = load(sums + q * width + d + v * kLanes);
  if constexpr (kInputs<T> == 2) {
#ifdef SKIPJOIN_BF16
    auto add = [&](int64_t t, auto &&numbers) {
#pragma GCC unroll 2
      for (int v = 0; v < kAdded; v += 2) {
        Words pairs[2];
        interleave(numbers(t, v), numbers(t + 1, v), pairs[0], pairs[1]);
#pragma GCC unroll 4
        for (int q = 0; q < COUNT; q++) {
          Words weight = splat(((const Pair *)(weights + q * kKeys))[t / 2]);
          for (int i = 0; i < 2; i++) acc[q][v + i] = fma(weight, pairs[i], acc[q][v + i]);
        }
      }
    };
    bool is_whole = d + kAdded * kLanes <= dim;
    int64_t whole = is_whole ? keys / 2 * 2 : 0;
    for (int64_t t = 0; t < whole; t += 2)
      add(t, [&](int64_t key, int v) { return whole_units(values + rows[key] + d + v * kLanes); });
    for (int64_t t = whole; t < keys; t += 2)
      add(t, [&](int64_t key, int v) {
        return load_pairs(values + rows[key] + d + v * kLanes, key < keys ? dim - d - v * kLanes : 0);
      });
#endif
  } else {
    auto add = [&](int64_t t, auto &&numbers) {
      Floats value[kAdded];
#pragma GCC unroll 4
      for (int v = 0; v < kAdded; v++) value[v] = numbers(values + rows[t] + d, v);
#pragma GCC unroll 4
      for (int q = 0; q < COUNT; q++) {
        float number = weights[q * kKeys + t];
        if constexpr (kHasScales<T>) number *= scale_after(values + rows[t], dim);
        Floats weight = splat(number);
#pragma GCC unroll 4
        for (int v = 0; v < kAdded; v++) acc[q][v] = fma(weight, value[v], acc[q][v]);
      }
    };
    if (d + kAdded * kLanes <= dim)
      for (int64_t t = 0; t < keys; t++) add(t, [&](const T *row, int v) { return load(row + v * kLanes); });
    else
      for (int64_t t = 0; t < keys; t++)
        add(t, [&](const T *row, int v) { return load(row + v * kLanes, dim - d - v * kLanes); });
  }
#pragma GCC unroll 4
  for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 4
    for (int v = 0; v < kAdded; v++) store(sums + q * width + d + v * kLanes, acc[q][v]);
}

constexpr int kTogether = 4; // queries multiplied by one value in a register

template <typename T>
void add_values(int64_t count, const T *values, const int64_t *rows, int64_t keys, int64_t dim, const float *weights,
                float *sums, int64_t width) {
  for (int64_t some; count > 0; count -= some, weights += some * kKeys, sums += some * width) {
    some = std::min<int64_t>(count, kTogether);
    with_count<kTogether>(some, [&](auto queries) {
      for (int64_t d = 0; d < dim; d += kAdded * kLanes)
        add_values<T, queries>(values, rows, keys, d, dim, weights, sums, width);
    });
  }
}

// State of a task's queries per key-value head and query: units ([units][count] of a head with tiles), scores or
// weights, totals, sums and maximum score.
template <typename T, typename C> struct Few {
  int64_t count, units, width, all;
  Unit<C> *query;
  float *scores, *totals, *sums, *tops, *scales;

  Few(const Queries &queries, const Task &task, Scratch &s)
      : count(task.count), units(Scratch::padded(units_of<C>(queries.c.dim))),
        width((queries.c.dim + kAdded * kLanes - 1) / (kAdded * kLanes) * kAdded * kLanes), all(task.heads * count) {
    query = (Unit<C> *)s.take(all * units, all * kKeys, all * kTotals, all * width, all,
                              kHasScales<C> ? task.heads * kKeys : 0);
    scores = (float *)query + all * units, totals = scores + all * kKeys, sums = totals + all * kTotals;
    tops = sums + all * width, scales = tops + Scratch::padded(all);
    std::memset(totals, 0, all * (kTotals + width) * 4);
    for (int64_t i = 0; i < all; i++) {
      tops[i] = first_top(queries.c, queries.head(i % count, task.head + i / count));
      totals[i * kTotals] = first_total(queries.c);
    }
    int64_t step = has_tiles<C>() ? count : 1;
    for (int64_t i = 0; i < all; i++) {
      const T *from = queries.at<T>(i % count, task.head + i / count);
      Unit<C> *to = query + (step == 1 ? i * units : i / count * count * units + i % count);
      for (int64_t u = 0; u < units; u += kLanes) {
        Unit<C> some[kLanes];
        load_query<C>(from + u * kInputs<C>, queries.c.dim - u * kInputs<C>, some);
        for (int64_t j = 0; j < kLanes; j++) to[(u + j) * step] = some[j];
      }
    }
  }

  // Converts the scores of keys [from, to) of a block to weights in place. Query i sees those from `first` up to but
  // excluding `end`. Weights after them are 0 up to a whole step of keys.
  void weigh(int64_t i, int64_t from, int64_t to, int64_t first, int64_t end, const Scale &scale) {
    float *own = scores + i * kKeys, *total = totals + i * kTotals, *sum = sums + i * width;
    Floats hidden = splat(-INFINITY), before = splat(tops[i]), top = before;
    int64_t whole = (to + kStepKeys - 1) / kStepKeys * kStepKeys;
    for (int64_t t = from; t < whole; t += kLanes) {
      Floats score = load(own + t);
      if constexpr (kHasScales<C>) score *= load(scales + i / count * kKeys + t);
      if (scale.has_cap) score = scale.bounded(score);
      if (t < first || t + kLanes > end) {
        Ints key = lane_numbers() + (int32_t)t;
        score = (key >= (int32_t)first) & (key < (int32_t)end) ? score : hidden;
        store(own + t, score);
      } else if (kHasScales<C> || scale.has_cap) {
        store(own + t, score);
      }
      top = larger(score * scale.factor, top);
    }
    top = splat(largest(top));
    if (differ(before, top)) {
      Floats factor = shrink<C>(before, top);
      for (int64_t d = 0; d < width; d += kLanes) store(sum + d, load(sum + d) * factor);
      for (int d = 0; d < kTotals; d += kLanes) store(total + d, load(total + d) * factor);
      tops[i] = top[0];
    }
    for (int64_t t = from; t < whole; t += kLanes) {
      Floats weight = weight_of<C>(load(own + t), scale.factor, top);
      if constexpr (kInputs<C> == 2)
        store((bfloat16 *)own + t, weight);
      else
        store(own + t, weight);
      store(total + t % kTotals, load(total + t % kTotals) + weight);
    }
  }

  void write_out(const Queries &queries, const Task &task) const {
    const Call &c = queries.c;
    for (int64_t i = 0; i < all; i++) {
      int64_t q = i % count;
      Floats factor = splat(1.0f / sum_of(totals + i * kTotals, kTotals));
      T *out = (T *)c.out + (queries.token(q) * c.heads + queries.head(q, task.head + i / count)) * c.dim;
      for (int64_t d = 0; d < c.dim; d += 2 * kLanes) {
        Floats low = load(sums + i * width + d) * factor, high = load(sums + i * width + d + kLanes) * factor;
#ifdef SKIPJOIN_BF16
        if constexpr (kInputs<C> == 2) in_order(low, high);
#endif
        store(out + d, low, c.dim - d);
        if (c.dim > d + kLanes) store(out + d + kLanes, high, c.dim - d - kLanes);
      }
    }
  }
};

#ifdef SKIPJOIN_TILES

// Tiles 0 and 1 hold sums, 2 weights, 3 pairs of values, 4 scores, 5 keys, and 6 queries in columns.
inline TileShapes few_shapes(int64_t count) {
  TileShapes shapes(kTile);
  for (int tile : {0, 1, 2}) shapes.rows[tile] = count;
  for (int tile : {4, 6}) shapes.bytes[tile] = 4 * count;
  return shapes;
}

// Computes scores of kTile keys. queries: [units][count]; stride: distance between keys, or 0; scores: [count][kKeys].
inline void score_by_tiles(const Pair *queries, int64_t count, const bfloat16 *keys, const int64_t *rows, int64_t stride,
                           int64_t dim, float *scores) {
  alignas(64) Pair copy[kTile][kTilePairs];
  alignas(64) float square[kTile][kTile];
  SKIPJOIN_ZERO_TILE(4);
  for (int64_t d = 0; d < dim; d += 2 * kTilePairs) {
    if (stride && d + 2 * kTilePairs <= dim) {
      SKIPJOIN_LOAD_TILE(5, keys + rows[0] + d, 2 * stride);
    } else {
      for (int i = 0; i < kTile; i++) {
        Words units = load_pairs(keys + rows[i] + d, dim - d);
        std::memcpy(copy[i], &units, sizeof units);
      }
      SKIPJOIN_LOAD_TILE(5, copy, 64);
    }
    SKIPJOIN_LOAD_TILE(6, queries + d / 2 * count, 4 * count);
    SKIPJOIN_MULTIPLY_TILES(4, 5, 6);
  }
  if (count == 1) {
    SKIPJOIN_STORE_TILE(4, scores, 4);
    return;
  }
  SKIPJOIN_STORE_TILE(4, square, 64);
  transpose((Words *)square);
  for (int64_t q = 0; q < count; q++) std::memcpy(scores + q * kKeys, square[q], sizeof square[q]);
}

// Returns the distance between consecutive rows of kTile rows, or 0 if it varies.
inline int64_t stride_of(const int64_t *rows) {
  int64_t stride = rows[1] - rows[0], differ = 0;
  for (int i = 1; i < kTile; i++) differ |= rows[i] - rows[i - 1] ^ stride;
  return differ ? 0 : stride;
}

// Adds the weighted values of at most kStepKeys tokens to the sums of the queries, like `add_values`.
inline void add_by_tiles(const bfloat16 *values, const int64_t *rows, int64_t keys, int64_t dim, const float *weights,
                         float *sums, int64_t width) {
  alignas(64) Words pairs[2][kTilePairs];
  SKIPJOIN_LOAD_TILE(2, weights, 4 * kKeys);
  for (int64_t d = 0; d < dim; d += 2 * kLanes) {
    auto numbers = [&](int64_t t) { return load_pairs(values + rows[t] + d, t < keys ? dim - d : 0); };
    for (int i = 0; i < kTilePairs; i++) interleave(numbers(2 * i), numbers(2 * i + 1), pairs[0][i], pairs[1][i]);
    SKIPJOIN_LOAD_TILE(0, sums + d, 4 * width);
    SKIPJOIN_LOAD_TILE(3, pairs[0], 64);
    SKIPJOIN_MULTIPLY_TILES(0, 2, 3);
    SKIPJOIN_STORE_TILE(0, sums + d, 4 * width);
    SKIPJOIN_LOAD_TILE(1, sums + d + kLanes, 4 * width);
    SKIPJOIN_LOAD_TILE(3, pairs[1], 64);
    SKIPJOIN_MULTIPLY_TILES(1, 2, 3);
    SKIPJOIN_STORE_TILE(1, sums + d + kLanes, 4 * width);
  }
}

#endif

// Attends for at most kFew queries of some key-value heads. Heads are the inner loop, because the heads of a block are
// adjacent and memory is fastest when read in order.
template <typename T, typename C> void attend_few(const Call &c, const Task &task, Scratch &s) {
  constexpr int64_t kFetched = 16; // keys fetched ahead of use
  locate(c, task.segment, s);
  Queries queries(c, task);
  Few<T, C> few(queries, task, s);
  int64_t count = task.count, end = queries.highest();
  const C *keys = (const C *)c.keys + task.head * c.head_stride;
  const C *values = (const C *)c.values + task.head * c.head_stride;
  Scale scale(c);
  bool by_tiles = has_tiles<C>();
  for (int64_t block = queries.lowest(); block < end; block += kKeys) {
    int64_t from = block + queries.unseen(0, block), to = std::min(block + kKeys, end);
    for (int64_t t = from; t < to; t += kFetched) {
#ifdef SKIPJOIN_TILES
      int64_t stride = by_tiles ? stride_of(&s.rows[t]) : 0;
#endif
      for (int64_t h = 0; h < task.heads; h++) {
        const C *own = keys + h * c.head_stride;
        if (t + kFetched < to)
          fetch(own, &s.rows[t + kFetched], kFetched, c.dim);
        else
          fetch(values + h * c.head_stride, &s.rows[from], kFetched, c.dim);
        float *scores = few.scores + h * count * kKeys + t - block;
        const Unit<C> *query = few.query + h * count * few.units;
        if constexpr (kHasScales<C>)
          for (int64_t i = 0; i < kFetched; i++)
            few.scales[h * kKeys + t - block + i] = scale_after(own + s.rows[t + i], c.dim);
#ifdef SKIPJOIN_TILES
        if constexpr (kInputs<C> == 2)
          if (by_tiles) {
            score_by_tiles(query, count, own, &s.rows[t], stride, c.dim, scores);
            continue;
          }
#endif
        for (int64_t q = 0; q < count; q++)
          for (int64_t u = 0; u < kFetched; u += kLanes)
            store(scores + q * kKeys + u, score(query + q * few.units, own, &s.rows[t + u], c.dim));
      }
    }
    for (int64_t i = 0; i < few.all; i++)
      few.weigh(i, from - block, to - block, queries.first_key(i % count) - block, queries.end_key(i % count) - block,
                scale);
    int64_t step = by_tiles ? kStepKeys : kFetched;
    for (int64_t t = from; t < to; t += step)
      for (int64_t h = 0; h < task.heads; h++) {
        const C *own = values + h * c.head_stride;
        if (t + step < to)
          fetch(own, &s.rows[t + step], step, c.dim);
        else if (to < end)
          fetch(keys + h * c.head_stride, &s.rows[to], kFetched, c.dim);
        const float *weights = few.scores + h * count * kKeys;
        if constexpr (kInputs<C> == 2)
          weights += (t - block) / 2;
        else
          weights += t - block;
        float *sums = few.sums + h * count * few.width;
        int64_t some = std::min(step, to - t);
#ifdef SKIPJOIN_TILES
        if constexpr (kInputs<C> == 2)
          if (by_tiles) {
            add_by_tiles(own, &s.rows[t], some, c.dim, weights, sums, few.width);
            continue;
          }
#endif
        add_values(count, own, &s.rows[t], some, c.dim, weights, sums, few.width);
      }
  }
  few.write_out(queries, task);
}

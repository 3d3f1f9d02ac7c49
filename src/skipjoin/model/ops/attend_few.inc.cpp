// Attention of at most kFew queries, which reads keys and values in place, for decodes. Included by
// paged_attention.cpp.

// Loads kLanes units of keys or values: a whole vector, or its first `count` inputs.
template <typename T> SKIPJOIN_INLINE Words units_at(const T *from, int64_t count) {
  if (count >= kLanes * kInputs<T>) return whole_units(from);
  Words units;
  load_units(from, count, (Unit<T> *)&units);
  return units;
}

// Computes the scores of kLanes keys for QUERIES queries, whose units are padded with zeros and `pitch` apart. Several
// queries share what it takes to widen a key. to: [QUERIES] scores, kKeys apart.
template <typename T, int QUERIES>
SKIPJOIN_INLINE void score(const Unit<T> *query, int64_t pitch, const T *keys, const int64_t *rows, int64_t dim,
                           float *to) {
  constexpr int per = kInputs<T>;
  using Column = std::conditional_t<per == 2, Words, Floats>;
  // Keys whose addresses and sums fit the registers.
  constexpr int some = std::min(kLanes, kLanes > 8 || QUERIES == 1 ? 8 : 4);
  Floats sums[QUERIES][kLanes] = {};
  int64_t whole = dim / (kLanes * per) * (kLanes * per);
#pragma GCC unroll 2
  for (int first = 0; first < kLanes; first += some)
    for (int64_t d = 0; d < whole; d += kLanes * per) {
      Column parts[QUERIES];
#pragma GCC unroll 2
      for (int q = 0; q < QUERIES; q++) parts[q] = (Column)lanes_of(query + q * pitch + d / per, 0);
#pragma GCC unroll 8
      for (int i = first; i < first + some; i++) {
        auto key = (Column)whole_units(keys + rows[i] + d);
#pragma GCC unroll 2
        for (int q = 0; q < QUERIES; q++) sums[q][i] = fma(parts[q], key, sums[q][i]);
      }
    }
#pragma GCC unroll 2
  for (int q = 0; q < QUERIES; q++) {
    if (whole < dim) {
      auto part = (Column)lanes_of(query + q * pitch + whole / per, 0);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++)
        sums[q][i] = fma(part, (Column)units_at(keys + rows[i] + whole, dim - whole), sums[q][i]);
    }
    store(to + q * kKeys, sum_each(sums[q]));
  }
}

// Number of vectors of a value that are added at a time: the minimum, and that for a number of queries. Few queries take
// more vectors, so that enough independent sums hide the latency of additions while all of them fit the registers.
constexpr int kAdded = kLanes == 16 ? 4 : 2;
constexpr int added(int queries) { return kLanes == 16 || queries > 2 ? kAdded : queries == 2 ? 4 : 8; }

// Adds the weighted values of `keys` tokens to the sums of COUNT queries, for head dimensions from `d` on: those of
// ADDED vectors, or half as many where neighboring keys are in pairs, in the order of `interleave`. weights:
// [COUNT][kKeys] floats, or bfloat16 in the same memory; sums: [COUNT][width].
template <typename T, int COUNT, int ADDED>
void add_values(const T *values, const int64_t *rows, int64_t keys, int64_t d, int64_t dim, const float *weights,
                float *sums, int64_t width) {
  Floats acc[COUNT][ADDED];
#pragma GCC unroll 4
  for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 8
    for (int v = 0; v < ADDED; v++) acc[q][v] = load(sums + q * width + d + v * kLanes);
  if constexpr (kInputs<T> == 2) {
#ifdef SKIPJOIN_BF16
    auto add = [&](int64_t t, auto &&numbers) {
#pragma GCC unroll 2
      for (int v = 0; v < ADDED; v += 2) {
        Words pairs[2];
        interleave(numbers(t, v), numbers(t + 1, v), pairs[0], pairs[1]);
#pragma GCC unroll 4
        for (int q = 0; q < COUNT; q++) {
          Words weight = splat(((const Pair *)(weights + q * kKeys))[t / 2]);
          for (int i = 0; i < 2; i++) acc[q][v + i] = fma(weight, pairs[i], acc[q][v + i]);
        }
      }
    };
    bool is_whole = d + ADDED * kLanes <= dim;
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
      Floats value[ADDED];
#pragma GCC unroll 8
      for (int v = 0; v < ADDED; v++) value[v] = numbers(values + rows[t] + d, v);
#pragma GCC unroll 4
      for (int q = 0; q < COUNT; q++) {
        float number = weights[q * kKeys + t];
        if constexpr (kHasScales<T>) number *= scale_after(values + rows[t], dim);
        Floats weight = splat(number);
#pragma GCC unroll 8
        for (int v = 0; v < ADDED; v++) acc[q][v] = fma(weight, value[v], acc[q][v]);
      }
    };
    if (d + ADDED * kLanes <= dim)
      for (int64_t t = 0; t < keys; t++) add(t, [&](const T *row, int v) { return load(row + v * kLanes); });
    else
      for (int64_t t = 0; t < keys; t++)
        add(t, [&](const T *row, int v) { return load(row + v * kLanes, dim - d - v * kLanes); });
  }
#pragma GCC unroll 4
  for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 8
    for (int v = 0; v < ADDED; v++) store(sums + q * width + d + v * kLanes, acc[q][v]);
}

constexpr int kTogether = 4; // queries multiplied by one value in a register

template <typename T>
void add_values(int64_t count, const T *values, const int64_t *rows, int64_t keys, int64_t dim, const float *weights,
                float *sums, int64_t width) {
  for (int64_t some; count > 0; count -= some, weights += some * kKeys, sums += some * width) {
    some = std::min<int64_t>(count, kTogether);
    with_count<kTogether>(some, [&](auto queries) {
      constexpr int most = added(queries);
      int64_t d = 0;
      for (; d + most * kLanes <= dim; d += most * kLanes)
        add_values<T, queries, most>(values, rows, keys, d, dim, weights, sums, width);
      for (; d < dim; d += kAdded * kLanes)
        add_values<T, queries, kAdded>(values, rows, keys, d, dim, weights, sums, width);
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
    Floats totals[kTotals / kLanes];
    for (int d = 0; d < kTotals / kLanes; d++) totals[d] = load(total + d * kLanes);
    for (int64_t t = from; t < whole; t += kTotals)
#pragma GCC unroll 4
      for (int d = 0; d < kTotals / kLanes; d++) {
        int64_t at = t + d * kLanes;
        Floats weight = weight_of<C>(load(own + at), scale.factor, top);
        if constexpr (kInputs<C> == 2)
          store((bfloat16 *)own + at, weight);
        else
          store(own + at, weight);
        totals[d] += weight;
      }
    for (int d = 0; d < kTotals / kLanes; d++) store(total + d * kLanes, totals[d]);
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

constexpr int kQueryTiles = 4; // tiles that hold the queries of a head while its keys are scored

// Tiles 0 to 3 hold queries in columns, 4 and 7 scores, 5 and 6 keys.
inline TileShapes score_shapes(int64_t count) {
  TileShapes shapes(kTile);
  for (int tile : {0, 1, 2, 3, 4, 7}) shapes.bytes[tile] = 4 * count;
  return shapes;
}

// Tiles 0 and 1 hold sums, 2, 4, 5 and 6 weights of kStepKeys keys each, 3 and 7 pairs of values.
inline TileShapes value_shapes(int64_t count) {
  TileShapes shapes(kTile);
  for (int tile : {0, 1, 2, 4, 5, 6}) shapes.rows[tile] = count;
  return shapes;
}

// Returns the distance between consecutive rows of kTile rows, or 0 if it varies.
inline int64_t stride_of(const int64_t *rows) {
  int64_t stride = rows[1] - rows[0], differ = 0;
  for (int i = 1; i < kTile; i++) differ |= rows[i] - rows[i - 1] ^ stride;
  return differ ? 0 : stride;
}

// Computes the products of kTile keys and queries [units][count], whose rows are `pitch` bytes apart.
inline void score_tile(const Pair *queries, int64_t count, const bfloat16 *keys, const int64_t *rows, int64_t dim,
                       float *to, int64_t pitch) {
  alignas(64) Pair copy[kTile][kTilePairs];
  SKIPJOIN_ZERO_TILE(4);
  for (int64_t d = 0; d < dim; d += 2 * kTilePairs) {
    for (int i = 0; i < kTile; i++) {
      Words units = load_pairs(keys + rows[i] + d, dim - d);
      std::memcpy(copy[i], &units, sizeof units);
    }
    SKIPJOIN_LOAD_TILE(5, copy, 64);
    SKIPJOIN_LOAD_TILE(0, queries + d / 2 * count, 4 * count);
    SKIPJOIN_MULTIPLY_TILES(4, 5, 0);
  }
  SKIPJOIN_STORE_TILE(4, to, pitch);
}

// Like two `score_tile`, for whole tiles of keys in place and queries in tiles from 0 on. Two sums hide the latency of
// each other.
template <int TILES>
inline void score_two(const bfloat16 *first, int64_t first_stride, const bfloat16 *second, int64_t second_stride,
                      float *to, int64_t pitch) {
  constexpr int64_t width = 2 * kTilePairs;
  SKIPJOIN_ZERO_TILE(4);
  SKIPJOIN_ZERO_TILE(7);
  SKIPJOIN_LOAD_TILE(5, first, 2 * first_stride);
  SKIPJOIN_MULTIPLY_TILES(4, 5, 0);
  SKIPJOIN_LOAD_TILE(6, second, 2 * second_stride);
  SKIPJOIN_MULTIPLY_TILES(7, 6, 0);
  if constexpr (TILES > 1) {
    SKIPJOIN_LOAD_TILE(5, first + width, 2 * first_stride);
    SKIPJOIN_MULTIPLY_TILES(4, 5, 1);
    SKIPJOIN_LOAD_TILE(6, second + width, 2 * second_stride);
    SKIPJOIN_MULTIPLY_TILES(7, 6, 1);
  }
  if constexpr (TILES > 2) {
    SKIPJOIN_LOAD_TILE(5, first + 2 * width, 2 * first_stride);
    SKIPJOIN_MULTIPLY_TILES(4, 5, 2);
    SKIPJOIN_LOAD_TILE(6, second + 2 * width, 2 * second_stride);
    SKIPJOIN_MULTIPLY_TILES(7, 6, 2);
  }
  if constexpr (TILES > 3) {
    SKIPJOIN_LOAD_TILE(5, first + 3 * width, 2 * first_stride);
    SKIPJOIN_MULTIPLY_TILES(4, 5, 3);
    SKIPJOIN_LOAD_TILE(6, second + 3 * width, 2 * second_stride);
    SKIPJOIN_MULTIPLY_TILES(7, 6, 3);
  }
  SKIPJOIN_STORE_TILE(4, to, pitch);
  SKIPJOIN_STORE_TILE(7, to + kTile * pitch / 4, pitch);
}

// Rows that are needed next. `until` prefetches them up to this share, in parts, so that memory is never idle.
template <typename C> struct Ahead {
  const C *from;
  const int64_t *rows;
  int64_t count, dim, done = 0;

  SKIPJOIN_INLINE void until(int64_t part, int64_t parts) {
    int64_t end = count * part / parts;
    fetch(from, rows + done, end - done, dim);
    done = end;
  }
};

// Computes the scores of a block's first `keys` keys for one head. scores: [count][kKeys]
inline void score_by_tiles(const Pair *queries, int64_t count, const bfloat16 *keys, const int64_t *rows, int64_t some,
                           int64_t dim, float *scores, Ahead<bfloat16> ahead) {
  alignas(64) float products[kKeys * kTile];
  int64_t pitch = count <= 2 ? 4 * count : 4 * kTile;
  bool is_whole = dim % (2 * kTilePairs) == 0 && dim <= 2 * kTilePairs * kQueryTiles;
  if (is_whole) {
    int64_t tiles = dim / (2 * kTilePairs), size = kTilePairs * count;
    SKIPJOIN_LOAD_TILE(0, queries, 4 * count);
    if (tiles > 1) SKIPJOIN_LOAD_TILE(1, queries + size, 4 * count);
    if (tiles > 2) SKIPJOIN_LOAD_TILE(2, queries + 2 * size, 4 * count);
    if (tiles > 3) SKIPJOIN_LOAD_TILE(3, queries + 3 * size, 4 * count);
  }
  for (int64_t t = 0; t < some; t += kStepKeys) {
    ahead.until(std::min(t + kStepKeys, some), some);
    float *to = products + t * pitch / 4;
    int64_t first = is_whole ? stride_of(rows + t) : 0, second = is_whole ? stride_of(rows + t + kTile) : 0;
    // Behind the end the last key is read again, from where it is.
    if (first && t + kStepKeys <= some && second) {
      with_count<kQueryTiles>(dim / (2 * kTilePairs), [&](auto tiles) {
        score_two<tiles>(keys + rows[t], first, keys + rows[t + kTile], second, to, pitch);
      });
      continue;
    }
    score_tile(queries, count, keys, rows + t, dim, to, pitch);
    score_tile(queries, count, keys, rows + t + kTile, dim, to + kTile * pitch / 4, pitch);
    if (is_whole) SKIPJOIN_LOAD_TILE(0, queries, 4 * count);
  }
  for (int64_t t = 0; t < some; t += kTile) {
    float *from = products + t * pitch / 4;
    if (count == 1) {
      std::memcpy(scores + t, from, 4 * kTile);
    } else if (count == 2) {
      const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      __m512 low = (__m512)load(from), high = (__m512)load(from + kTile);
      store(scores + t, (Floats)_mm512_permutex2var_ps(low, even, high));
      store(scores + kKeys + t, (Floats)_mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high));
    } else {
      transpose((Words *)from);
      for (int64_t q = 0; q < count; q++) std::memcpy(scores + q * kKeys + t, from + q * kTile, 4 * kTile);
    }
  }
}

// Adds the weighted values of a block's first `keys` tokens to the sums of a head's queries, like `add_values`.
inline void add_by_tiles(const bfloat16 *values, const int64_t *rows, int64_t keys, int64_t dim, const float *weights,
                         float *sums, int64_t width, Ahead<bfloat16> ahead) {
  alignas(64) Words pairs[2][2][kTilePairs];
  int64_t steps = (keys + kStepKeys - 1) / kStepKeys;
  SKIPJOIN_LOAD_TILE(2, weights, 4 * kKeys);
  if (steps > 1) SKIPJOIN_LOAD_TILE(4, weights + kTilePairs, 4 * kKeys);
  if (steps > 2) SKIPJOIN_LOAD_TILE(5, weights + 2 * kTilePairs, 4 * kKeys);
  if (steps > 3) SKIPJOIN_LOAD_TILE(6, weights + 3 * kTilePairs, 4 * kKeys);
  for (int64_t d = 0; d < dim; d += 2 * kLanes) {
    SKIPJOIN_LOAD_TILE(0, sums + d, 4 * width);
    SKIPJOIN_LOAD_TILE(1, sums + d + kLanes, 4 * width);
    for (int64_t s = 0; s < steps; s++) {
      ahead.until(d / (2 * kLanes) * steps + s + 1, (dim + 2 * kLanes - 1) / (2 * kLanes) * steps);
      Words(*pair)[kTilePairs] = pairs[s % 2]; // the other is being read
      const int64_t *row = rows + s * kStepKeys;
      int64_t some = keys - s * kStepKeys;
      if (some >= kStepKeys && d + 2 * kLanes <= dim) {
        auto numbers = [&](int64_t t) { return whole_units(values + row[t] + d); };
        for (int i = 0; i < kTilePairs; i++) interleave(numbers(2 * i), numbers(2 * i + 1), pair[0][i], pair[1][i]);
      } else {
        auto numbers = [&](int64_t t) { return load_pairs(values + row[t] + d, t < some ? dim - d : 0); };
        for (int i = 0; i < kTilePairs; i++) interleave(numbers(2 * i), numbers(2 * i + 1), pair[0][i], pair[1][i]);
      }
      SKIPJOIN_LOAD_TILE(3, pair[0], 64);
      SKIPJOIN_LOAD_TILE(7, pair[1], 64);
      switch (s) {
      case 0:
        SKIPJOIN_MULTIPLY_TILES(0, 2, 3);
        SKIPJOIN_MULTIPLY_TILES(1, 2, 7);
        break;
      case 1:
        SKIPJOIN_MULTIPLY_TILES(0, 4, 3);
        SKIPJOIN_MULTIPLY_TILES(1, 4, 7);
        break;
      case 2:
        SKIPJOIN_MULTIPLY_TILES(0, 5, 3);
        SKIPJOIN_MULTIPLY_TILES(1, 5, 7);
        break;
      default:
        SKIPJOIN_MULTIPLY_TILES(0, 6, 3);
        SKIPJOIN_MULTIPLY_TILES(1, 6, 7);
      }
    }
    SKIPJOIN_STORE_TILE(0, sums + d, 4 * width);
    SKIPJOIN_STORE_TILE(1, sums + d + kLanes, 4 * width);
  }
}

// Attends with tiles. While the keys or values of a head are used, those of the next one are prefetched.
template <typename T> void attend_few_by_tiles(const Call &c, const Task &task, Scratch &s, Few<T, bfloat16> &few) {
  Queries queries(c, task);
  int64_t count = task.count, end = queries.highest();
  const bfloat16 *parts[] = {(const bfloat16 *)c.keys + task.head * c.head_stride,
                             (const bfloat16 *)c.values + task.head * c.head_stride};
  Scale scale(c);
  auto begin_of = [&](int64_t block) { return block + queries.unseen(0, block); };
  auto end_of = [&](int64_t block) { return std::min(block + kKeys, end); };
  int64_t lowest = queries.lowest(), first = begin_of(lowest);
  Ahead<bfloat16>{parts[0], &s.rows[first], end_of(lowest) - first, c.dim}.until(1, 1);
  for (int64_t block = lowest; block < end; block += kKeys) {
    int64_t from = begin_of(block), to = end_of(block), next = block + kKeys;
    for (int part = 0; part < 2; part++) {
      shape_tiles(part == 0 ? score_shapes(count) : value_shapes(count));
      for (int64_t h = 0; h < task.heads; h++) {
        const bfloat16 *own = parts[part] + h * c.head_stride;
        Ahead<bfloat16> ahead{own + c.head_stride, &s.rows[from], to - from, c.dim};
        if (h + 1 == task.heads) ahead.from = parts[1 - part];
        if (h + 1 == task.heads && part == 1) {
          int64_t begin = next < end ? begin_of(next) : 0;
          ahead.rows = &s.rows[begin], ahead.count = next < end ? end_of(next) - begin : 0;
        }
        float *scores = few.scores + h * count * kKeys;
        if (part == 0)
          score_by_tiles(few.query + h * count * few.units, count, own, &s.rows[from], to - from, c.dim,
                         scores + from - block, ahead);
        else
          add_by_tiles(own, &s.rows[from], to - from, c.dim, scores + (from - block) / 2, few.sums + h * count * few.width,
                       few.width, ahead);
      }
      for (int64_t i = 0; part == 0 && i < few.all; i++)
        few.weigh(i, from - block, to - block, queries.first_key(i % count) - block, queries.end_key(i % count) - block,
                  scale);
    }
  }
  few.write_out(queries, task);
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
#ifdef SKIPJOIN_TILES
  if constexpr (kInputs<C> == 2)
    if (has_tiles<C>()) return attend_few_by_tiles(c, task, s, few);
#endif
  Scale scale(c);
  for (int64_t block = queries.lowest(); block < end; block += kKeys) {
    int64_t from = block + queries.unseen(0, block), to = std::min(block + kKeys, end);
    for (int64_t t = from; t < to; t += kFetched)
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
        for (int64_t q = 0; q < count; q += 2)
          for (int64_t u = 0; u < kFetched; u += kLanes) {
            const Unit<C> *some = query + q * few.units;
            float *to = scores + q * kKeys + u;
            if (q + 1 < count)
              score<C, 2>(some, few.units, own, &s.rows[t + u], c.dim, to);
            else
              score<C, 1>(some, few.units, own, &s.rows[t + u], c.dim, to);
          }
      }
    for (int64_t i = 0; i < few.all; i++)
      few.weigh(i, from - block, to - block, queries.first_key(i % count) - block, queries.end_key(i % count) - block,
                scale);
    for (int64_t t = from; t < to; t += kFetched)
      for (int64_t h = 0; h < task.heads; h++) {
        const C *own = values + h * c.head_stride;
        if (t + kFetched < to)
          fetch(own, &s.rows[t + kFetched], kFetched, c.dim);
        else if (to < end)
          fetch(keys + h * c.head_stride, &s.rows[to], kFetched, c.dim);
        const float *weights = few.scores + h * count * kKeys;
        if constexpr (kInputs<C> == 2)
          weights += (t - block) / 2;
        else
          weights += t - block;
        float *sums = few.sums + h * count * few.width;
        add_values(count, own, &s.rows[t], std::min(kFetched, to - t), c.dim, weights, sums, few.width);
      }
  }
  few.write_out(queries, task);
}

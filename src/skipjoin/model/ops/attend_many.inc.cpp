// Attention of many queries with a lane each, for prompts. Included by paged_attention.cpp.

// Number of keys whose scores are summed at a time, and lanes of their units: sums, a panel's vectors and one input
// must fit into the registers. See `add_tree`.
#if defined(SKIPJOIN_AVX512)
constexpr int kScored = 2, kSummed = 4;
#elif defined(SKIPJOIN_AVX2)
constexpr int kScored = 3, kSummed = 2;
#elif defined(SKIPJOIN_NEON)
constexpr int kScored = 3, kSummed = 2;
#else
constexpr int kScored = 1, kSummed = 2;
#endif

// Padding of rows, so that their length is not a power of two and they do not share a cache set.
constexpr int64_t kSpare = 16;
constexpr int64_t kPairRow = kKeys / 2 + kSpare;

using Lanes = Floats[kVectors]; // one lane per query of a panel

// State of a panel of queries: [kTotals] sums of weights, [dim] sums of values, the maximum score, and the visible
// keys.
struct Panel {
  Lanes *totals, *sums, top;
  Ints first_key[kVectors], end_key[kVectors];

  Panel(const Queries &queries, int64_t head, int64_t panel, Lanes *state) : totals(state), sums(state + kTotals) {
    for (int v = 0; v < kVectors; v++) {
      totals[0][v] = splat(first_total(queries.c));
      for (int i = 0; i < kLanes; i++) {
        int64_t q = std::min(panel * kPanel + v * kLanes + i, queries.count - 1);
        top[v][i] = first_top(queries.c, queries.head(q, head));
        first_key[v][i] = (int32_t)queries.first_key(q), end_key[v][i] = (int32_t)queries.end_key(q);
      }
    }
  }

  // Returns whether every query sees all keys from `from` to `to`.
  bool all_see(int64_t from, int64_t to) const {
    return end_key[0][0] >= to && first_key[kVectors - 1][kLanes - 1] <= from;
  }
};

// Computes scores of ROWS keys for a panel of queries, from lanes [FIRST, FIRST + COUNT) of their units only.
template <int ROWS, int FIRST, int COUNT, typename U>
SKIPJOIN_INLINE void add_tree(const U *keys, int64_t pitch, const U *queries, int64_t units, Lanes *sums) {
  if constexpr (COUNT > kSummed) {
    Lanes others[ROWS];
    add_tree<ROWS, FIRST, COUNT / 2>(keys, pitch, queries, units, sums);
    add_tree<ROWS, FIRST + COUNT / 2, COUNT / 2>(keys, pitch, queries, units, others);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) sums[r][v] += others[r][v];
  } else {
    Lanes acc[COUNT][ROWS] = {};
    for (int64_t u = FIRST; u < units; u += kLanes)
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; i++) {
        decltype(lanes_of(queries, 0)) columns[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) columns[v] = lanes_of(queries + (u + i) * kPanel, v);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
          auto key = splat(keys[r * pitch + u + i]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; v++) acc[i][r][v] = fma(key, columns[v], acc[i][r][v]);
        }
      }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        if constexpr (COUNT == 4)
          sums[r][v] = (acc[0][r][v] + acc[1][r][v]) + (acc[2][r][v] + acc[3][r][v]);
        else
          sums[r][v] = acc[0][r][v] + acc[1][r][v];
      }
  }
}

// Computes scores of `count` keys, whose units are `pitch` apart, for a panel of queries. units: a multiple of kLanes.
template <typename U>
void score_many(const U *keys, int64_t pitch, int64_t count, const U *queries, int64_t units, Lanes *scores) {
  int64_t t = 0;
  for (; t + kScored <= count; t += kScored)
    add_tree<kScored, 0, kLanes>(keys + t * pitch, pitch, queries, units, scores + t);
  for (; t < count; t++) add_tree<1, 0, kLanes>(keys + t * pitch, pitch, queries, units, scores + t);
}

// Adds inputs times panel to sums[rows], with steps as in `multiply`. Splits rows evenly, because with a single row the
// processor would wait for its own sums.
template <typename In>
void add_products(int64_t rows, const In *inputs, int64_t row_step, int64_t unit_step, const In *weights, int64_t units,
                  Lanes *sums) {
  for (int64_t parts = (rows + kMaxRows - 1) / kMaxRows; parts > 0; parts--) {
    int64_t some = (rows + parts - 1) / parts;
    with_count<kMaxRows>(some, [&](auto count) {
      multiply<count, true>(inputs, row_step, unit_step, weights, units, sums, NothingSoon());
    });
    rows -= some, inputs += some * row_step, sums += some;
  }
}

// Computes scores of `count` keys as `score_many` does, but adds units in order: no decode has to find the same bits.
template <typename U>
void score_whole(const U *keys, int64_t pitch, int64_t count, const U *queries, int64_t units, Lanes *scores) {
  std::memset(scores, 0, count * sizeof(Lanes));
  add_products(count, keys, pitch, 1, queries, units, scores);
}

// Copy of a block's keys and values for `attend_many`: keys [kKeys][key_row] units, values [kKeys][value_row] floats,
// or [value_row][kPairRow] pairs of neighboring keys where inputs are in pairs. Those of int8 are codes, with the scales
// of keys and values.
template <typename C> struct Copies {
  int64_t dim, units, key_row, value_row;
  Unit<C> *keys = nullptr, *values = nullptr;
  float key_scales[kHasScales<C> ? kKeys : 1] = {}, value_scales[kHasScales<C> ? kKeys : 1] = {};

  explicit Copies(int64_t dim)
      : dim(dim), units(Scratch::padded(units_of<C>(dim))), key_row(units + kSpare), value_row(Scratch::padded(dim)) {
    if constexpr (kInputs<C> == 1) value_row += kSpare;
  }

  int64_t key_size() const { return kKeys * key_row; }
  int64_t value_size() const { return value_row * (kInputs<C> == 2 ? kPairRow : kKeys); }

  void copy_scales(const C *key, const C *value, const int64_t *rows, int64_t count) {
    if constexpr (kHasScales<C>)
      for (int64_t t = 0; t < count; t++)
        key_scales[t] = scale_after(key + rows[t], dim), value_scales[t] = scale_after(value + rows[t], dim);
  }

  void copy_keys(const C *from, const int64_t *rows, int64_t count) {
    constexpr int per = kInputs<C>;
    for (int64_t t = 0; t < count; t++)
      for (int64_t u = 0; u < units; u += kLanes)
        load_units(from + rows[t] + u * per, dim - u * per, keys + t * key_row + u);
  }

  void copy_values(const C *from, const int64_t *rows, int64_t count) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      if constexpr (kInputs<C> == 2) {
        for (int64_t t = 0; t < kKeys && t < count; t += 2 * kLanes) {
          Words pairs[kLanes];
          for (int i = 0; i < kLanes; i++) {
            auto half_of = [&](int64_t key) { // keys after the last are zeros, because their weights may be read
              return key < count ? (Words)load(from + rows[key] + d, dim - d) : Words{};
            };
            pairs[i] = half_of(t + 2 * i) >> 16 | half_of(t + 2 * i + 1);
          }
          transpose(pairs);
          for (int i = 0; i < kLanes; i++) std::memcpy(values + (d + i) * kPairRow + t / 2, &pairs[i], sizeof pairs[i]);
        }
      } else {
        for (int64_t t = 0; t < count; t++) store(values + t * value_row + d, load(from + rows[t] + d, dim - d));
      }
    }
  }
};

// Adds the bias of distances to products of the block's keys [from, to) and a panel of queries from `query` on.
inline void add_bias(const Call &c, int64_t head, int64_t query, int64_t block, int64_t from, int64_t to,
                     Lanes *scores) {
  const float *bias = c.bias + head * c.bias_stride + c.bias_middle + query - block;
  for (int64_t t = from; t < to; t++)
    for (int v = 0; v < kVectors; v++) scores[t][v] += load(bias - t + v * kLanes);
}

// Converts the scores of a block's keys [from, to) to weights in place, as the values need them. Weights after them are
// 0 up to a whole step of keys.
template <typename C>
void weigh(Panel &p, int64_t block, int64_t from, int64_t to, const Scale &scale, const Copies<C> &copies,
           Lanes *scores) {
  bool all_see = p.all_see(block + from, block + to);
  int64_t dim = copies.dim;
  Floats hidden = splat(-INFINITY);
  if constexpr (kHasScales<C>)
    for (int64_t t = from; t < to; t++)
      for (int v = 0; v < kVectors; v++) scores[t][v] *= splat(copies.key_scales[t]);
  if (scale.has_cap)
    for (int64_t t = from; t < to; t++)
      for (int v = 0; v < kVectors; v++) scores[t][v] = scale.bounded(scores[t][v]);
  for (; to % kStepKeys; to++)
    for (int v = 0; v < kVectors; v++) scores[to][v] = hidden;
  for (int v = 0; v < kVectors; v++) {
    if (!all_see)
      for (int64_t t = from; t < to; t++) {
        Ints key = (Ints)splat((uint32_t)(block + t));
        scores[t][v] = (key >= p.first_key[v]) & (key < p.end_key[v]) ? scores[t][v] : hidden;
      }
    // Alternates between several sums, because each addition waits for the previous one.
    Floats top = p.top[v], tops[4] = {top, top, top, top};
    for (int64_t t = from; t < to; t += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) tops[i] = larger(scores[t + i][v] * scale.factor, tops[i]);
    top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
    if (differ(p.top[v], top)) {
      Floats factor = shrink<C>(p.top[v], top);
      for (int i = 0; i < kTotals; i++) p.totals[i][v] *= factor;
      for (int64_t d = 0; d < dim; d++) p.sums[d][v] *= factor;
      p.top[v] = top;
    }
    Floats totals[kTotals];
    for (int i = 0; i < kTotals; i++) totals[i] = p.totals[i][v];
    for (int64_t t = from; t < to; t += kTotals)
#pragma GCC unroll 16
      for (int i = 0; i < kTotals; i += kInputs<C>) {
        Floats weight = weight_of<C>(scores[t + i][v], scale.factor, top);
        totals[i] += weight;
#ifdef SKIPJOIN_BF16
        if constexpr (kInputs<C> == 2) {
          Floats next = weight_of<C>(scores[t + i + 1][v], scale.factor, top);
          totals[i + 1] += next;
          scores[(t + i) / 2][v] = (Floats)paired(weight, next);
          continue;
        }
#endif
        if constexpr (kHasScales<C>) weight *= splat(copies.value_scales[t + i]);
        scores[t + i][v] = weight;
      }
    for (int i = 0; i < kTotals; i++) p.totals[i][v] = totals[i];
  }
}

template <typename T> void write_out(const Queries &queries, int64_t head, int64_t panel, const Panel &p) {
  const Call &c = queries.c;
  for (int v = 0; v < kVectors; v++) {
    int64_t first = panel * kPanel + v * kLanes, count = std::min<int64_t>(kLanes, queries.count - first);
    T *to[kLanes];
    for (int64_t i = 0; i < count; i++)
      to[i] = (T *)c.out + (queries.token(first + i) * c.heads + queries.head(first + i, head)) * c.dim;
    Floats total[kTotals];
    for (int i = 0; i < kTotals; i++) total[i] = p.totals[i][v];
    for (int width = kTotals / 2; width; width /= 2)
      for (int i = 0; i < width; i++) total[i] += total[i + width];
    Floats factor = 1.0f / total[0];
    for (int64_t d = 0; d < c.dim; d += kLanes) {
      Words square[kLanes];
      for (int i = 0; i < kLanes; i++) square[i] = (Words)(d + i < c.dim ? p.sums[d + i][v] * factor : Floats{});
      transpose(square);
      for (int64_t i = 0; i < count; i++) store(to[i] + d, (Floats)square[i], c.dim - d);
    }
  }
}

// Packs a panel of queries for `score_many`: [units][kPanel].
template <typename T, typename C>
void pack_queries(const Queries &queries, int64_t head, int64_t panel, int64_t units, Unit<C> *to) {
  for (int64_t u = 0; u < units; u += kLanes)
    for (int v = 0; v < kVectors; v++) {
      Words square[kLanes] = {};
      for (int64_t i = 0, q = panel * kPanel + v * kLanes; i < kLanes && q < queries.count; i++, q++)
        load_query<C>(queries.at<T>(q, head) + u * kInputs<C>, queries.c.dim - u * kInputs<C>, (Unit<C> *)&square[i]);
      transpose(square);
      for (int i = 0; i < kLanes; i++) std::memcpy(to + (u + i) * kPanel + v * kLanes, &square[i], sizeof square[i]);
    }
}

#ifdef SKIPJOIN_TILES

// Like `score_many`, for whole tiles of keys.
inline void score_by_tiles(const Pair *keys, int64_t pitch, int64_t count, const Pair *queries, int64_t units,
                           Lanes *scores) {
  for (int64_t t = 0; t < count; t += 2 * kTile, keys += 2 * kTile * pitch) {
    auto *to = (float *)(scores + t);
    if (t + kTile < count)
      add_tiles<true>(keys, keys + kTile * pitch, 4 * pitch, queries, units / kTilePairs, true, to);
    else
      add_tiles<false>(keys, keys, 4 * pitch, queries, units / kTilePairs, true, to);
  }
}

// Adds values [dims][kPairRow] times weights of whole tiles to sums[dims].
inline void add_by_tiles(int64_t dims, const Pair *values, const Pair *weights, int64_t pairs, Lanes *sums) {
  int64_t steps = (pairs + kTilePairs - 1) / kTilePairs, pitch = 4 * kPairRow;
  for (int64_t d = 0; d < dims; d += 2 * kTile, values += 2 * kTile * kPairRow) {
    auto *to = (float *)(sums + d);
    if (d + kTile < dims)
      add_tiles<true>(values, values + kTile * kPairRow, pitch, weights, steps, false, to);
    else
      add_tiles<false>(values, values, pitch, weights, steps, false, to);
  }
}

#endif

// Attends for panels of queries of one key-value head.
template <typename T, typename C> void attend_many(const Call &c, const Task &task, Scratch &s) {
  locate(c, task.segment, s);
  Queries queries(c, task);
  Copies<C> copies(c.dim);
  int64_t panels = (task.count + kPanel - 1) / kPanel, units = copies.units, dims = Scratch::padded(c.dim);
  // Keys and values of a block, its scores, then per panel: queries, totals and sums.
  int64_t per_panel = (units + kTotals + dims) * kPanel;
  float *at = s.take(copies.key_size(), copies.value_size(), kKeys * kPanel, panels * per_panel);
  copies.keys = (Unit<C> *)at;
  copies.values = copies.keys + Scratch::padded(copies.key_size());
  auto *scores = (Lanes *)(copies.values + Scratch::padded(copies.value_size()));
  float *state = (float *)(scores + kKeys);
  std::memset(state, 0, panels * per_panel * 4);
  std::vector<Panel> known;
  Unit<C> *query[kTaskPanels];
  const C *keys = (const C *)c.keys + task.head * c.head_stride;
  const C *values = (const C *)c.values + task.head * c.head_stride;
  int64_t soon = queries.lowest();
  // Prefetches the keys and values up to `end`.
  auto fetch_until = [&](int64_t end) {
    if (end <= soon) return;
    fetch(keys, &s.rows[soon], end - soon, c.dim);
    fetch(values, &s.rows[soon], end - soon, c.dim);
    soon = end;
  };
  fetch_until(std::min(soon + kKeys, queries.highest()));
  for (int64_t p = 0; p < panels; p++) {
    query[p] = (Unit<C> *)(state + p * per_panel);
    known.emplace_back(queries, task.head, p, (Lanes *)(query[p] + units * kPanel));
    pack_queries<T, C>(queries, task.head, p, units, query[p]);
  }
  Scale scale(c);
  for (int64_t block = queries.lowest(); block < queries.highest(); block += kKeys) {
    int64_t here = std::min<int64_t>(kKeys, queries.highest() - block);
    copies.copy_keys(keys, &s.rows[block], here);
    copies.copy_values(values, &s.rows[block], here);
    copies.copy_scales(keys, values, &s.rows[block], here);
    int64_t next = block + kKeys, end = std::min<int64_t>(next + kKeys, queries.highest());
    for (int64_t p = 0; p < panels; p++) {
      fetch_until(next + (end - next) * (p + 1) / panels);
      // Skips keys that no query of the panel sees. A block without visible keys changes nothing.
      int64_t last = std::min(task.count, (p + 1) * kPanel) - 1, to = std::min(here, queries.end_key(last) - block);
      int64_t from = queries.unseen(p * kPanel, block);
      if (from >= to) continue;
      const Unit<C> *some_keys = copies.keys + from * copies.key_row;
      bool by_tiles = has_tiles<C>();
#ifdef SKIPJOIN_TILES
      if constexpr (kInputs<C> == 2)
        if (by_tiles) score_by_tiles(some_keys, copies.key_row, to - from, query[p], units, scores + from);
#endif
      if (!by_tiles && c.whole)
        score_whole(some_keys, copies.key_row, to - from, query[p], units, scores + from);
      else if (!by_tiles)
        score_many(some_keys, copies.key_row, to - from, query[p], units, scores + from);
      if (c.bias) add_bias(c, task.head, task.first + p * kPanel, block, from, to, scores);
      weigh(known[p], block, from, to, scale, copies, scores);
      auto *weights = (const Unit<C> *)(scores + from / kInputs<C>);
      int64_t steps = (to - from + kInputs<C> - 1) / kInputs<C>;
      if constexpr (kInputs<C> == 1) {
        const float *some = copies.values + from * copies.value_row;
        add_products(c.dim, some, 1, copies.value_row, weights, steps, known[p].sums);
      } else {
        const Unit<C> *some = copies.values + from / 2;
#ifdef SKIPJOIN_TILES
        if (by_tiles) add_by_tiles(dims, some, weights, steps, known[p].sums);
#endif
        if (!by_tiles) add_products(c.dim, some, kPairRow, 1, weights, steps, known[p].sums);
      }
    }
  }
  for (int64_t p = 0; p < panels; p++) write_out<T>(queries, task.head, p, known[p]);
}

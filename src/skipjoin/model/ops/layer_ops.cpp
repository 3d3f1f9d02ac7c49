// Layer operations for CPUs: matrix products for few rows, norms and rotary embedding.
//
// The entry points are plain C, so that building needs only a compiler. Types are float, bfloat16 and, where the
// processor converts it, float16; sums are float. The result of a row never depends on other rows; see
// products.inc.cpp.
#include "outputs.inc.cpp"
#include "pool.inc.cpp"
#include "tiles.inc.cpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <vector>

using skipjoin::Heads;
using skipjoin::Linear;

extern "C" {

int64_t skipjoin_grouped_scratch_bytes(int64_t rows, int64_t inputs, int64_t threads);
void skipjoin_grouped_linear(int64_t type, const Linear *call);
}

namespace {

constexpr int kRowBlock = 10 * kMaxRows; // rows per task, whose inputs fit the second-level cache
constexpr int kOwnTiles = 2; // with at most this many tiles of inputs, packing them per thread beats waiting

// Implementation of a product: in units of its type, or for bfloat16 pairs also in floats, with the bits of a processor
// without pair instructions, or by tiles. A weight keeps one implementation, because each rounds differently.
enum Way { kByVectors, kByFloats, kByTiles };

// Number of units of the inputs in packed weights, rounded up to whole tiles where there are tiles.
template <typename T> int64_t packed_units(int64_t k) {
  int64_t whole = kInputs<T> == 2 ? kTilePairs : 1;
  return (units_of<T>(k) + whole - 1) / whole * whole;
}

// Number of panels. Gated ones have half of the columns of each half of the outputs.
int64_t panels_of(int64_t n, int64_t gated) {
  int64_t width = gated ? n / 2 : n, per_panel = gated ? kPanel / 2 : kPanel;
  return (width + per_panel - 1) / per_panel;
}

// Returns the output in a panel's column, or -1.
int64_t output_of(int64_t n, int64_t gated, int64_t panel, int column) {
  int64_t width = gated ? n / 2 : n, half = kPanel / 2;
  int64_t output = gated ? panel * half + column % half : panel * kPanel + column;
  if (output >= width) return -1;
  return gated && column >= half ? output + width : output;
}

// Packs rows [first, first + rows) of x in the order in which `multiply` reads them.
template <typename T, typename In> void pack_inputs(const Linear &c, int64_t first, int rows, In *packed) {
  constexpr int parts = kParts<In, Unit<T>>;
  int64_t units = units_of<T>(c.k);
  for (int64_t u = 0; u < units; u += kLanes)
    for (int begin = 0; begin < rows; begin += kLanes) {
      int some = std::min(kLanes, rows - begin);
      Words square[kLanes] = {};
      for (int64_t i = 0; i < some; i++) {
        const T *row = (const T *)c.x + (first + begin + i) * c.x_stride;
        load_units(row + u * kInputs<T>, c.k - u * kInputs<T>, (Unit<T> *)&square[i]);
      }
      transpose(square);
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, units - u); i++)
        for (int part = 0; part < parts; part++) {
          Words lanes = parts == 2 ? (Words)one_of(square[i], part) : square[i];
          store_some(packed + ((u + i) * parts + part) * rows + begin, lanes, some);
        }
    }
}

// Writes the sums of one tile to output rows, with bias and gate, activation or addition.
template <typename T>
void finish(const Linear &c, int64_t panel, int64_t first, int64_t rows, Floats (*sums)[kVectors]) {
  constexpr int half = kVectors / 2;
  int64_t width = c.gated ? c.n / 2 : c.n;
  for (int64_t r = 0; r < rows; r++) {
    T *row = (T *)c.out + (first + r) * c.out_stride;
    for (int v = 0; v < kVectors; v++) {
      int64_t at = panel * kPanel + v * kLanes;
      if (c.bias) sums[r][v] += load(c.bias + at);
    }
    for (int v = 0; v < (c.gated ? half : kVectors); v++) {
      int64_t column = panel * (c.gated ? kPanel / 2 : kPanel) + v * kLanes;
      if (column >= width) break;
      shift<T>(c, first + r, column, width - column, sums[r][v]);
      if (c.gated) shift<T>(c, first + r, width + column, width - column, sums[r][half + v]);
      put(c, row + column, width - column, sums[r][v], sums[r][c.gated ? half + v : v]);
    }
  }
}

// Division of the rows into tiles whose sizes differ by one at most: the first `whole` ones have `rows` rows.
struct Tiles {
  int64_t count, whole;
  int rows;

  explicit Tiles(int64_t m)
      : count((m + kMaxRows - 1) / kMaxRows), rows(count ? (m + count - 1) / count : 0) {
    whole = m - count * (rows - 1);
  }

  int rows_of(int64_t tile) const { return tile < whole ? rows : rows - 1; }
  int64_t first_of(int64_t tile) const { return tile * rows - std::max<int64_t>(0, tile - whole); }
};

template <typename T> using Stored = std::conditional_t<kInputs<T> == 2, Pair, T>;

// In: `Unit<T>` or float.
template <typename T, typename In> void linear(const Linear &c) {
  using W = Stored<T>;
  int64_t inputs = units_of<T>(c.k) * kParts<In, Unit<T>>, units = inputs / kParts<In, W>;
  int64_t panel_size = packed_units<T>(c.k) * kParts<In, Unit<T>> / kParts<In, W> * kPanel;
  int64_t panels = panels_of(c.n, c.gated);
  Tiles tiles(c.rows);
  int64_t tile_size = inputs * tiles.rows, per_block = kRowBlock / kMaxRows;
  int64_t blocks = (tiles.count + per_block - 1) / per_block;
  bool each_packs = tiles.count <= kOwnTiles;
  auto pack = [&](int64_t t, In *to) { pack_inputs<T>(c, tiles.first_of(t), tiles.rows_of(t), to + t * tile_size); };
  auto *scratch = (In *)c.scratch;
  if (!each_packs) skipjoin::share(c.threads, tiles.count, 1, [&](int64_t t) { pack(t, scratch); });
  std::atomic<int64_t> counter{0};
  skipjoin::run_on_pool(c.threads, [&](int thread) {
    auto take = [&] { return counter.fetch_add(1, std::memory_order_relaxed); };
    int64_t task = take();
    if (task >= panels * blocks) return; // other threads took all tasks
    In *packed = scratch;
    if (each_packs) {
      packed += thread * tiles.count * tile_size;
      for (int64_t t = 0; t < tiles.count; t++) pack(t, packed);
    }
    auto weights_of = [&](int64_t task) { return (const W *)c.weights + task % panels * panel_size; };
    // Another product may follow this one's last tasks.
    auto *then = c.then ? (const char *)c.then + thread * c.then_bytes : (const char *)c.weights;
    // Tasks are taken one by one, so that a thread that loses its core does not delay the others. Each thread knows its
    // next task: later products of a panel find its weights cached, which gives memory time for those of the next
    // panel.
    for (int64_t next; task < panels * blocks; task = next) {
      next = take();
      int64_t panel = task % panels, begin = task / panels * per_block, end = std::min(tiles.count, begin + per_block);
      const W *weights = weights_of(task);
      bool is_last = next >= panels * blocks;
      const char *later = is_last ? then : (const char *)weights_of(next);
      int64_t bytes_each = (kPanel * sizeof(W) + end - begin - 1) / (end - begin);
      if (is_last) bytes_each = std::min(bytes_each, c.then_bytes / (units * (end - begin)));
      for (int64_t t = begin; t < end; t++) {
        Floats sums[kMaxRows][kVectors];
        auto sum_up = [&](auto soon) {
          with_count<kMaxRows>(tiles.rows_of(t), [&](auto rows) {
            multiply<rows, false>(packed + t * tile_size, 1, rows, weights, units, sums, soon);
          });
        };
        if (end - begin == 1)
          sum_up(OwnSoon{later});
        else
          sum_up(OthersSoon{later + (t - begin) * units * bytes_each, bytes_each});
        finish<T>(c, panel, tiles.first_of(t), tiles.rows_of(t), sums);
      }
    }
  });
}

// Measures the seconds of a product whose inputs and weights are in the first-level cache.
template <typename In> double seconds_in_cache() {
  constexpr int units = 64;
  alignas(64) In inputs[units * kParts<In, Pair> * kMaxRows];
  alignas(64) Pair weights[units * kPanel];
  std::fill(std::begin(inputs), std::end(inputs), In());
  std::fill(std::begin(weights), std::end(weights), Pair());
  Floats sums[kMaxRows][kVectors];
  auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 8; i++) {
    multiply<kMaxRows, false>(inputs, 1, kMaxRows, weights, units, sums, NothingSoon());
    asm volatile("" : : "r"(&sums) : "memory");
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Returns whether floats are faster for bfloat16 that comes in pairs. A pair instruction does the work of two float
// instructions in the time of one (Zen 4) or four (Emerald Rapids). The implementations thus differ by a factor of two,
// so that every start decides alike.
bool floats_are_faster() {
#ifdef SKIPJOIN_BF16
  static const bool decided = [] {
    double pairs = HUGE_VAL, floats = HUGE_VAL;
    for (int i = 0; i < 20; i++) { // alternately, with the minimum of each: other load only adds time
      pairs = std::min(pairs, seconds_in_cache<Pair>());
      floats = std::min(floats, seconds_in_cache<float>());
    }
    return floats < pairs;
  }();
  return decided;
#else
  return false;
#endif
}

#ifdef SKIPJOIN_TILES

constexpr int64_t kTileBytes = 640 << 10; // inputs per task, which fit the second-level cache
constexpr int kChunk = 8;                 // tiles of inputs whose weights of a panel fit the first-level cache
constexpr int kTileSums = 2 * kTile * kPanel; // sums of up to two tiles of inputs

int64_t tile_scratch(int64_t m, int64_t k) { return k % (2 * kTilePairs) ? m * packed_units<bfloat16>(k) * 4 : 0; }

void linear_by_tiles(const Linear &c) {
  if (c.rows == 0) return;
  int64_t units = packed_units<bfloat16>(c.k), steps = units / kTilePairs, x_stride = c.x_stride;
  auto *x = (const bfloat16 *)c.x;
  if (units * 2 != c.k) { // partial tiles: copy the rows and pad them with zeros
    auto *copy = (bfloat16 *)c.scratch;
    for (int64_t r = 0; r < c.rows; r++) {
      std::memcpy(copy + r * units * 2, x + r * x_stride, c.k * 2);
      std::memset(copy + r * units * 2 + c.k, 0, (units * 2 - c.k) * 2);
    }
    x = copy, x_stride = units * 2;
  }
  // The last tile ends with the last row, so some rows may be computed twice.
  int64_t rows = std::min<int64_t>(c.rows, kTile), tiles = (c.rows + rows - 1) / rows;
  auto first_row = [&](int64_t tile) { return std::min(tile * rows, c.rows - rows); };
  int64_t panels = panels_of(c.n, c.gated), blocks = (c.rows * units * 4 + kTileBytes - 1) / kTileBytes;
  int64_t per_block = ((tiles + blocks - 1) / blocks + 1) / 2 * 2;
  blocks = (tiles + per_block - 1) / per_block;
  auto *weights = (const Pair *)c.weights;
  std::atomic<int64_t> counter{0};
  skipjoin::run_on_pool(c.threads, [&](int) {
    shape_tiles(TileShapes((int)rows));
    thread_local std::vector<float> memory;
    memory.resize(std::max<size_t>(memory.size(), per_block / 2 * kTileSums + kTile));
    auto *all = (float *)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    // Each thread knows its next task before it begins one, and prefetches the first weights of that.
    int64_t next = counter++;
    for (int64_t task = next; task < panels * blocks; task = next) {
      next = counter++;
      int64_t panel = task % panels, begin = task / panels * per_block, end = std::min(tiles, begin + per_block);
      int64_t passes = (end - begin + 1) / 2, lines = (2 * kTilePairs + passes - 1) / passes;
      const Pair *own = weights + panel * units * kPanel;
      for (int64_t s = 0; s < steps; s += kChunk) {
        int64_t some = std::min<int64_t>(kChunk, steps - s);
        bool is_last = s + some == steps;
        const Pair *at = own + s * kTilePairs * kPanel;
        const Pair *later = is_last ? weights + next % panels * units * kPanel : at + some * kTilePairs * kPanel;
        for (int64_t t = begin; t < end; t += 2) {
          int64_t pass = (t - begin) / 2, count = std::min<int64_t>(2, end - t);
          const bfloat16 *in = x + first_row(t) * x_stride + s * 2 * kTilePairs;
          const bfloat16 *other = x + first_row(t + count - 1) * x_stride + s * 2 * kTilePairs;
          float *sums = all + pass * kTileSums;
          const char *ahead = (const char *)later + pass * 64 * lines * some;
          if (count == 2)
            add_tiles<true>(in, other, x_stride * 2, at, some, s == 0, sums, ahead, lines);
          else
            add_tiles<false>(in, other, x_stride * 2, at, some, s == 0, sums, ahead, lines);
          for (int64_t i = 0; is_last && i < count; i++) {
            int64_t first = (t + i) * rows, skipped = first - first_row(t + i);
            auto *own = (Floats(*)[kVectors])sums + i * kTile + skipped;
            finish<bfloat16>(c, panel, first, rows - skipped, own);
          }
        }
      }
    }
    release_tiles();
  });
}

#endif

// Matrices of k inputs whose rows follow each other.
struct Parts {
  const void *const *rows;
  const int64_t *counts;

  template <typename T> const T *row(int64_t index, int64_t k) const {
    int64_t part = 0;
    for (; index >= counts[part]; part++) index -= counts[part];
    return (const T *)rows[part] + index * k;
  }
};

// Packs [n, k] into panels, zero-padded.
template <typename T> void pack_weights(Parts parts, int64_t n, int64_t k, int64_t gated, T *packed, int threads) {
  constexpr int per = kInputs<T>, block = 64 / (per * sizeof(T)); // units of a cache line of a row
  struct Inputs {
    T of[per];
  };
  int64_t units = packed_units<T>(k), whole = k / per;
  skipjoin::share(threads, panels_of(n, gated), 1, [&](int64_t p) {
    Inputs *panel = (Inputs *)packed + p * units * kPanel;
    const T *rows[kPanel];
    for (int column = 0; column < kPanel; column++) {
      int64_t output = output_of(n, gated, p, column);
      rows[column] = output < 0 ? nullptr : parts.row<T>(output, k);
    }
    // By blocks, because columns of a whole panel would be far apart in memory.
    for (int64_t first = 0; first < units; first += block)
      for (int column = 0; column < kPanel; column++) {
        Inputs *to = panel + column;
        const T *row = rows[column];
        int64_t u = first, end = std::min(first + block, units), copied = row ? std::min(end, whole) : u;
        for (; u < copied; u++) std::memcpy(to + u * kPanel, row + u * per, sizeof(Inputs));
        for (; u < end; u++)
          for (int64_t i = u * per; i < (u + 1) * per; i++) to[u * kPanel].of[i % per] = row && i < k ? row[i] : T(0);
      }
  });
}

// Copies rows of packed weights that are not gated.
template <typename T>
void panel_rows(const T *packed, int64_t k, const int64_t *ids, int64_t count, T *out, int threads) {
  constexpr int per = kInputs<T>;
  int64_t size = packed_units<T>(k) * kPanel * per;
  skipjoin::share(count > 16 ? threads : 1, count, 4, [&](int64_t row) {
    const T *from = packed + ids[row] / kPanel * size + ids[row] % kPanel * per;
    T *to = out + row * k;
    for (int64_t i = 0; i < k / per * per; i += per, from += kPanel * per) std::memcpy(to + i, from, per * sizeof(T));
    if (k % per) to[k - 1] = *from;
  });
}

constexpr int64_t kSharedValues = 1 << 15; // fewer take less time than sharing the work of a norm or rotation would

// Writes the norm of a row. offset: added to the weights.
template <typename T>
SKIPJOIN_INLINE void norm_row(const T *from, int64_t width, const T *weight, float eps, float offset, T *out) {
  Floats squares{};
  int64_t whole = width / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Floats value = load(from + i);
    squares = fma(value, value, squares);
  }
  if (whole < width) {
    Floats value = load(from + whole, width - whole);
    squares = fma(value, value, squares);
  }
  Floats scale = splat(1.0f / std::sqrt(sum_of(squares) / width + eps));
  for (int64_t i = 0; i < whole; i += kLanes) store(out + i, load(from + i) * scale * (load(weight + i) + offset));
  if (whole < width) {
    Floats factor = load(weight + whole, width - whole) + offset;
    store(out + whole, load(from + whole, width - whole) * scale * factor, width - whole);
  }
}

// Writes the norm of a row's distances from their mean. weight and bias: or null.
template <typename T>
SKIPJOIN_INLINE void center_row(const T *from, int64_t width, const T *weight, const T *bias, float eps, T *out) {
  Floats sums{}, squares{};
  for (int64_t i = 0; i < width; i += kLanes) sums += load(from + i, width - i);
  Floats mean = splat(sum_of(sums) / width);
  int64_t whole = width / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Floats value = load(from + i) - mean;
    squares = fma(value, value, squares);
  }
  if (whole < width) {
    Floats value = (Ints)splat((uint32_t)(width - whole)) > lane_numbers() ? load(from + whole, width - whole) - mean : Floats{};
    squares = fma(value, value, squares);
  }
  Floats scale = splat(1.0f / std::sqrt(sum_of(squares) / width + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats value = (load(from + i, width - i) - mean) * scale;
    if (weight) value *= load(weight + i, width - i);
    if (bias) value += load(bias + i, width - i);
    store(out + i, value, width - i);
  }
}

// Rotates the first 2 * pairs values of a head in place. cosine: of the position, followed by the sines.
template <typename T> SKIPJOIN_INLINE void rotate_head(T *first, const float *cosine, int64_t pairs) {
  const float *sine = cosine + pairs;
  T *second = first + pairs;
  for (int64_t i = 0; i < pairs; i += kLanes) {
    int64_t count = pairs - i;
    Floats a = load(first + i, count), b = load(second + i, count);
    Floats c = load(cosine + i, count), s = load(sine + i, count);
    store(first + i, fma(a, c, -(b * s)), count);
    store(second + i, fma(b, c, a * s), count);
  }
}

// x: [outer][inner][width], strided in the first two dimensions; out: contiguous.
template <typename T>
void rms_norm(const T *x, int64_t outer, int64_t outer_stride, int64_t inner, int64_t inner_stride, int64_t width,
              const T *weight, float eps, float offset, T *out, int threads) {
  bool large = outer * inner * width > kSharedValues;
  skipjoin::share(large ? threads : 1, outer, inner > 1 ? 2 : 8, [&](int64_t i) {
    for (int64_t j = 0; j < inner; j++)
      norm_row(x + i * outer_stride + j * inner_stride, width, weight, eps, offset, out + (i * inner + j) * width);
  });
}

template <typename T> void prepare_heads(const Heads &c, int threads) {
  bool large = c.tokens * c.heads * c.dim > kSharedValues;
  skipjoin::share(large ? threads : 1, c.tokens, 2, [&](int64_t t) {
    for (int64_t h = 0; h < c.heads; h++) {
      T *head = (T *)c.x + t * c.token_stride + h * c.head_stride;
      if (c.weight) norm_row(head, c.dim, (const T *)c.weight, (float)c.eps, (float)c.offset, head);
      if (c.cos_sin) rotate_head(head, c.cos_sin + c.positions[t] * 2 * c.pairs, c.pairs);
    }
  });
}

} // namespace

// type: see `Type`. Strides are in elements.
extern "C" {

// Returns what the library runs, if this process may.
const char *skipjoin_path() {
  if (have_tiles()) return "amx";
#if defined(SKIPJOIN_BF16)
  return "avx512-bf16";
#elif defined(SKIPJOIN_AVX512)
  return "avx512";
#elif defined(SKIPJOIN_AVX2)
  return "avx2";
#elif defined(SKIPJOIN_NEON)
  return "neon";
#else
  return "generic";
#endif
}

int64_t skipjoin_has_float16() { return kHasHalf; }

// Returns whether products of this type have this implementation.
int64_t skipjoin_has_way(int64_t type, int64_t way) {
  bool has_pairs = type == kBfloat16 && kInputs<bfloat16> == 2;
  return way == kByVectors || (has_pairs && (way == kByFloats || have_tiles()));
}

int64_t skipjoin_floats_are_faster() { return floats_are_faster(); }

// Returns the number of columns of a panel.
int64_t skipjoin_panel() { return kPanel; }

int64_t skipjoin_scratch_bytes(int64_t type, int64_t m, int64_t k, int64_t threads) {
  Tiles tiles(m);
  int64_t rows = tiles.rows * tiles.count * (tiles.count <= kOwnTiles ? threads : 1), bytes = 0;
  with_type(type, [&](auto t) { bytes = rows * units_of<decltype(t)>(k) * kInputs<decltype(t)> * 4; }); // floats
#ifdef SKIPJOIN_TILES
  if (type == kBfloat16) bytes = std::max(bytes, tile_scratch(m, k));
#endif
  return std::max(bytes, skipjoin_grouped_scratch_bytes(m, k, threads));
}

int64_t skipjoin_packed_bytes(int64_t type, int64_t n, int64_t k, int64_t gated) {
  // Prefetching may pass the end, because a prefetch cannot fault.
  int64_t bytes = 0;
  with_type(type, [&](auto t) {
    using T = decltype(t);
    bytes = panels_of(n, gated) * kPanel * packed_units<T>(k) * kInputs<T> * sizeof(T);
  });
  return bytes;
}

// parts: matrices [counts[i], k] whose rows follow each other, n in all.
void skipjoin_pack_weights(int64_t type, const void *const *parts, const int64_t *counts, int64_t n, int64_t k,
                           int64_t gated, void *packed, int64_t threads) {
  with_type(type, [&](auto t) { pack_weights(Parts{parts, counts}, n, k, gated, (decltype(t) *)packed, threads); });
}

void skipjoin_panel_rows(int64_t type, const void *packed, int64_t k, const int64_t *ids, int64_t count, void *out,
                         int64_t threads) {
  with_type(type, [&](auto t) {
    panel_rows((const decltype(t) *)packed, k, ids, count, (decltype(t) *)out, threads);
  });
}

int64_t skipjoin_linear_bytes() { return sizeof(Linear); }

// Returns the bytes of a panel or strip of weights.
int64_t skipjoin_panel_bytes(int64_t type, const Linear *call) {
  if (call->groups) return call->groups->strip_bytes;
  int64_t bytes = 0;
  with_type(type, [&](auto t) {
    using T = decltype(t);
    bytes = kPanel * packed_units<T>(call->k) * kInputs<T> * sizeof(T);
  });
  return bytes;
}

// Multiplies without being measured, as part of a larger operation.
void skipjoin_multiply(int64_t type, const Linear *call) {
  if (call->groups) return skipjoin_grouped_linear(type, call);
#ifdef SKIPJOIN_TILES
  if (call->way == kByTiles) return linear_by_tiles(*call);
#endif
  with_type(type, [&](auto t) {
    using T = decltype(t);
    if (call->way == kByFloats)
      linear<T, float>(*call);
    else
      linear<T, Unit<T>>(*call);
  });
}

void skipjoin_linear(int64_t type, const Linear *call) {
  skipjoin::Timed timed(skipjoin::kProducts);
  skipjoin_multiply(type, call);
}

void skipjoin_rms_norm(int64_t type, const void *x, int64_t outer, int64_t outer_stride, int64_t inner,
                       int64_t inner_stride, int64_t width, const void *weight, float eps, float offset, void *out,
                       int64_t threads) {
  skipjoin::Timed timed(skipjoin::kNorms);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    rms_norm((const T *)x, outer, outer_stride, inner, inner_stride, width, (const T *)weight, eps, offset, (T *)out,
             threads);
  });
}

// x: [rows][width]; weight and bias: [width] or null; out: contiguous.
void skipjoin_layer_norm(int64_t type, const void *x, int64_t rows, int64_t stride, int64_t width, const void *weight,
                         const void *bias, float eps, void *out, int64_t threads) {
  skipjoin::Timed timed(skipjoin::kNorms);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    skipjoin::share(rows * width > kSharedValues ? threads : 1, rows, 8, [&](int64_t i) {
      center_row((const T *)x + i * stride, width, (const T *)weight, (const T *)bias, eps, (T *)out + i * width);
    });
  });
}

// Adds x to total.
void skipjoin_add(int64_t type, const void *x, void *total, int64_t count, int64_t threads) {
  skipjoin::Timed timed(skipjoin::kNorms);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    constexpr int64_t part = 1 << 12;
    skipjoin::share(count > 1 << 16 ? threads : 1, (count + part - 1) / part, 4, [&](int64_t p) {
      for (int64_t i = p * part; i < std::min(count, (p + 1) * part); i += kLanes) {
        T *to = (T *)total + i;
        store(to, load(to, count - i) + load((const T *)x + i, count - i), count - i);
      }
    });
  });
}

int64_t skipjoin_heads_bytes() { return sizeof(Heads); }

void skipjoin_prepare_heads(int64_t type, const Heads *call, int64_t threads) {
  skipjoin::Timed timed(skipjoin::kHeads);
  with_type(type, [&](auto t) { prepare_heads<decltype(t)>(*call, threads); });
}
}

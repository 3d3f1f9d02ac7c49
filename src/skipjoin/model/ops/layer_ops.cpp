// Layer operations for CPUs with AVX-512 BF16: matrix products for few rows, norms, rotation.
//
// Plain C entry points, so that building needs only a compiler. Types are bfloat16 (stored as uint16_t) and float. Sums
// are float32. The result of a row never depends on the other rows: each element's sum runs over k in order, for any
// number of rows.
#include "pool.inc.cpp"
#include "simd.inc.cpp"

#include <algorithm>
#include <atomic>

namespace {

constexpr int kPanel = 32;   // output columns computed together: two vectors
constexpr int kMaxRows = 12; // 12 x 2 accumulators, 2 of weights and 1 of inputs fit the 32 registers
constexpr int kRowBlock = 10 * kMaxRows; // rows per task: their inputs stay in the second-level cache
constexpr int kOwnTiles = 2; // up to this many tiles of inputs, each thread packs its own: faster than waiting
constexpr int kAhead = 4096; // bytes of weights fetched ahead of use: about one memory latency

// Inputs per step of the inner loop: bfloat16 products take pairs.
template <typename T> constexpr int kStep = sizeof(T) == 2 ? 2 : 1;

int64_t padded_inputs(int64_t k, int step) { return (k + step - 1) / step * step; }

// One tile: ROWS rows times one panel. inputs: [k / step][ROWS][step]; weights: [k / step][32][step].
template <typename T, int ROWS>
inline void multiply(const T *inputs, const T *weights, int64_t steps, __m512 (*sums)[2]) {
  constexpr int step = kStep<T>;
  __m512 acc[ROWS][2];
  for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int64_t s = 0; s < steps; s++) {
    const char *at = reinterpret_cast<const char *>(weights) + s * 128;
    _mm_prefetch(at + kAhead, _MM_HINT_T0);
    _mm_prefetch(at + kAhead + 64, _MM_HINT_T0);
    __m512 low = _mm512_loadu_ps(at), high = _mm512_loadu_ps(at + 64);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const T *in = inputs + (s * ROWS + r) * step;
      if constexpr (step == 2) {
        int pair;
        std::memcpy(&pair, in, 4);
        __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, (__m512bh)low);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, (__m512bh)high);
      } else {
        __m512 x = _mm512_set1_ps(*in);
        acc[r][0] = _mm512_fmadd_ps(x, low, acc[r][0]);
        acc[r][1] = _mm512_fmadd_ps(x, high, acc[r][1]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++) sums[r][0] = acc[r][0], sums[r][1] = acc[r][1];
}

template <typename T, int ROWS = kMaxRows>
void multiply_rows(int rows, const T *inputs, const T *weights, int64_t steps, __m512 (*sums)[2]) {
  if (rows == ROWS) return multiply<T, ROWS>(inputs, weights, steps, sums);
  if constexpr (ROWS > 1) multiply_rows<T, ROWS - 1>(rows, inputs, weights, steps, sums);
}

// Rows [first, first + rows) of x, zero-padded, in the order in which `multiply` reads them.
template <typename T>
void pack_inputs(const T *x, int64_t stride, int64_t m, int64_t k, int64_t first, int rows, T *packed) {
  constexpr int step = kStep<T>;
  int64_t steps = padded_inputs(k, step) / step;
  for (int r = 0; r < rows; r++) {
    const T *row = x + (first + r) * stride;
    bool exists = first + r < m;
    for (int64_t s = 0; s < steps; s++)
      for (int i = 0; i < step; i++) {
        int64_t at = s * step + i;
        packed[(s * rows + r) * step + i] = exists && at < k ? row[at] : T(0);
      }
  }
}

enum Activation { kNone, kRelu, kSilu, kGelu, kGeluTanh };

inline __m512 activated(int64_t activation, __m512 x) {
  switch (activation) {
  case kRelu: return relu(x);
  case kSilu: return silu(x);
  case kGelu: return gelu(x);
  case kGeluTanh: return gelu_tanh(x);
  default: return x;
  }
}

template <typename T> struct LinearCall {
  const T *x;
  int64_t x_stride, m;
  const T *weights;
  const float *bias; // [panels * 32] or null
  int64_t n, k;
  T *out; // [m, n], or [m, n / 2] if gated
  int64_t gated, add, activation;
};

// Sums of one tile -> output rows, with bias and gate, activation or addition.
template <typename T>
void finish(const LinearCall<T> &c, int64_t panel, int64_t first, int64_t rows, __m512 (*sums)[2]) {
  int64_t width = c.gated ? c.n / 2 : c.n;
  for (int64_t r = 0; r < rows; r++) {
    T *row = c.out + (first + r) * width;
    for (int half = 0; half < 2; half++)
      if (c.bias) sums[r][half] = _mm512_add_ps(sums[r][half], _mm512_loadu_ps(c.bias + panel * kPanel + half * 16));
    if (c.gated) {
      int64_t column = panel * 16;
      store(row + column, _mm512_mul_ps(silu(sums[r][0]), sums[r][1]), first_lanes(width - column));
      continue;
    }
    for (int half = 0; half < 2; half++) {
      int64_t column = panel * kPanel + half * 16;
      if (column >= width) break;
      __mmask16 lanes = first_lanes(width - column);
      __m512 value = activated(c.activation, sums[r][half]);
      if (c.add) value = _mm512_add_ps(value, load(row + column, lanes));
      store(row + column, value, lanes);
    }
  }
}

template <typename T> void linear(const LinearCall<T> &c, T *scratch, int threads) {
  int64_t steps = padded_inputs(c.k, kStep<T>) / kStep<T>;
  int64_t tiles = (c.m + kMaxRows - 1) / kMaxRows;
  int rows = (c.m + tiles - 1) / tiles;
  int64_t tile_size = steps * kStep<T> * rows;
  int64_t panels = (c.n + kPanel - 1) / kPanel, per_block = kRowBlock / kMaxRows;
  int64_t blocks = (tiles + per_block - 1) / per_block;
  bool each_packs = tiles <= kOwnTiles;
  auto pack = [&](int64_t t, T *to) { pack_inputs(c.x, c.x_stride, c.m, c.k, t * rows, rows, to + t * tile_size); };
  if (!each_packs) skipjoin::share(threads, tiles, 1, [&](int64_t t) { pack(t, scratch); });
  std::atomic<int64_t> counter{0};
  skipjoin::run_on_pool(threads, [&](int thread) {
    int64_t task = counter.fetch_add(1, std::memory_order_relaxed);
    if (task >= panels * blocks) return; // the others were faster
    T *packed = scratch;
    if (each_packs) {
      packed += thread * tiles * tile_size;
      for (int64_t t = 0; t < tiles; t++) pack(t, packed);
    }
    // One by one: a thread that loses its core for a while must not delay the others.
    for (; task < panels * blocks; task = counter.fetch_add(1, std::memory_order_relaxed)) {
      int64_t panel = task % panels, block = task / panels;
      const T *weights = c.weights + panel * steps * kPanel * kStep<T>;
      for (int64_t t = block * per_block; t < std::min(tiles, (block + 1) * per_block); t++) {
        __m512 sums[kMaxRows][2];
        multiply_rows(rows, packed + t * tile_size, weights, steps, sums);
        finish(c, panel, t * rows, std::min<int64_t>(rows, c.m - t * rows), sums);
      }
    }
  });
}

// [n, k] -> panels of 32 outputs, zero-padded. Gated: 16 rows of the first half next to 16 of the second.
template <typename T>
void pack_weights(const T *weights, int64_t n, int64_t k, int64_t gated, T *packed, int threads) {
  constexpr int step = kStep<T>;
  int64_t steps = padded_inputs(k, step) / step, width = gated ? n / 2 : n;
  int64_t per_panel = gated ? 16 : kPanel, panels = (width + per_panel - 1) / per_panel;
  skipjoin::share(threads, panels, 1, [&](int64_t p) {
    for (int column = 0; column < kPanel; column++) {
      int64_t row = gated ? p * 16 + column % 16 : p * kPanel + column;
      bool exists = row < width;
      if (column >= per_panel) row += width;
      for (int64_t s = 0; s < steps; s++)
        for (int i = 0; i < step; i++) {
          int64_t at = s * step + i;
          packed[((p * steps + s) * kPanel + column) * step + i] = exists && at < k ? weights[row * k + at] : T(0);
        }
    }
  });
}

// x: [outer][inner][width], strided in the first two; out: contiguous.
template <typename T>
void rms_norm(const T *x, int64_t outer, int64_t outer_stride, int64_t inner, int64_t inner_stride, int64_t width,
              const T *weight, float eps, T *out, int threads) {
  // Below this, sharing takes longer than the work.
  bool large = outer * inner * width > 1 << 16;
  skipjoin::share(large ? threads : 1, outer * inner, 16, [&](int64_t row) {
    const T *from = x + row / inner * outer_stride + row % inner * inner_stride;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
      __m512 value = load(from + i, first_lanes(width - i));
      squares = _mm512_fmadd_ps(value, value, squares);
    }
    __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / width + eps));
    for (int64_t i = 0; i < width; i += 16) {
      __mmask16 lanes = first_lanes(width - i);
      __m512 value = _mm512_mul_ps(_mm512_mul_ps(load(from + i, lanes), scale), load(weight + i, lanes));
      store(out + row * width + i, value, lanes);
    }
  });
}

// In place over [tokens][heads][...], the first 2 * pairs values of each head. cos_sin: [positions][2 * pairs].
template <typename T>
void rotate(T *x, int64_t tokens, int64_t token_stride, int64_t heads, int64_t head_stride, const int64_t *positions,
            const float *cos_sin, int64_t pairs, int threads) {
  bool large = tokens * heads * pairs > 1 << 15;
  skipjoin::share(large ? threads : 1, tokens, 8, [&](int64_t t) {
    const float *cosine = cos_sin + positions[t] * 2 * pairs, *sine = cosine + pairs;
    for (int64_t h = 0; h < heads; h++) {
      T *first = x + t * token_stride + h * head_stride, *second = first + pairs;
      for (int64_t i = 0; i < pairs; i += 16) {
        __mmask16 lanes = first_lanes(pairs - i);
        __m512 a = load(first + i, lanes), b = load(second + i, lanes);
        __m512 c = _mm512_maskz_loadu_ps(lanes, cosine + i), s = _mm512_maskz_loadu_ps(lanes, sine + i);
        store(first + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), lanes);
        store(second + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)), lanes);
      }
    }
  });
}

} // namespace

// bf16: 1 for bfloat16, 0 for float. Strides are in elements.
extern "C" {

int64_t skipjoin_scratch_bytes(int64_t bf16, int64_t m, int64_t k, int64_t threads) {
  int64_t tiles = (m + kMaxRows - 1) / kMaxRows;
  int64_t rows = (m + tiles - 1) / tiles * tiles;
  if (tiles <= kOwnTiles) rows *= threads;
  return bf16 ? rows * padded_inputs(k, 2) * 2 : rows * k * 4;
}

int64_t skipjoin_packed_bytes(int64_t bf16, int64_t n, int64_t k, int64_t gated) {
  int64_t panels = gated ? (n / 2 + 15) / 16 : (n + kPanel - 1) / kPanel;
  // Prefetching may pass the end: a hint cannot fault.
  return panels * kPanel * (bf16 ? padded_inputs(k, 2) * 2 : k * 4);
}

void skipjoin_pack_weights(int64_t bf16, const void *weights, int64_t n, int64_t k, int64_t gated, void *packed,
                           int64_t threads) {
  if (bf16)
    pack_weights((const bfloat16 *)weights, n, k, gated, (bfloat16 *)packed, threads);
  else
    pack_weights((const float *)weights, n, k, gated, (float *)packed, threads);
}

void skipjoin_linear(int64_t bf16, const void *x, int64_t x_stride, int64_t m, const void *weights, const float *bias,
                     int64_t n, int64_t k, void *out, int64_t gated, int64_t add, int64_t activation, void *scratch,
                     int64_t threads) {
  if (bf16)
    linear(LinearCall<bfloat16>{(const bfloat16 *)x, x_stride, m, (const bfloat16 *)weights, bias, n, k,
                                (bfloat16 *)out, gated, add, activation},
           (bfloat16 *)scratch, threads);
  else
    linear(LinearCall<float>{(const float *)x, x_stride, m, (const float *)weights, bias, n, k, (float *)out, gated,
                             add, activation},
           (float *)scratch, threads);
}

void skipjoin_rms_norm(int64_t bf16, const void *x, int64_t outer, int64_t outer_stride, int64_t inner,
                       int64_t inner_stride, int64_t width, const void *weight, float eps, void *out, int64_t threads) {
  if (bf16)
    rms_norm((const bfloat16 *)x, outer, outer_stride, inner, inner_stride, width, (const bfloat16 *)weight, eps, (bfloat16 *)out,
             threads);
  else
    rms_norm((const float *)x, outer, outer_stride, inner, inner_stride, width, (const float *)weight, eps, (float *)out,
             threads);
}

void skipjoin_rotate(int64_t bf16, void *x, int64_t tokens, int64_t token_stride, int64_t heads, int64_t head_stride,
                     const int64_t *positions, const float *cos_sin, int64_t pairs, int64_t threads) {
  if (bf16)
    rotate((bfloat16 *)x, tokens, token_stride, heads, head_stride, positions, cos_sin, pairs, threads);
  else
    rotate((float *)x, tokens, token_stride, heads, head_stride, positions, cos_sin, pairs, threads);
}
}

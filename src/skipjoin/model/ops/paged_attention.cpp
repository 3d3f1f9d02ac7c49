// Attention over the paged cache for CPUs with AVX-512 BF16.
//
// A task has up to four queries per key-value head (heads of one group, consecutive tokens, or both). It computes the
// scores of all their keys, then the exponentials, then the weighted values: contexts on CPUs are short enough for the
// scores to stay in the second-level cache.
#include "pool.inc.cpp"
#include "simd.inc.cpp"

#include <algorithm>
#include <atomic>
#include <vector>

namespace {

constexpr int kQueries = 4;

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

// Sums of 16 vectors as one vector: lane i is the sum of v[i].
inline __m512 sum_each(__m512 *v) {
  for (int i = 0; i < 8; i++) // lanes 2j, 2j + 1 of pair (2i, 2i + 1)
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    __m512d a = (__m512d)v[2 * i], b = (__m512d)v[2 * i + 1];
    v[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  // Each quarter of v[i] now holds partial sums of inputs 4i .. 4i + 3.
  __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
  __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88), _mm512_shuffle_f32x4(v[2], v[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

inline __m512 dot_step(__m512 sum, __m512 query, const bfloat16 *key) {
  return _mm512_dpbf16_ps(sum, (__m512bh)query, (__m512bh)_mm512_loadu_ps(key));
}

inline __m512 dot_step(__m512 sum, __m512 query, const float *key) {
  return _mm512_fmadd_ps(query, _mm512_loadu_ps(key), sum);
}

// The last values of a head whose size is no multiple of a vector: memory beyond them belongs to another token.
inline __m512 partial(const bfloat16 *from, int64_t count) {
  return (__m512)_mm512_maskz_loadu_epi16((1u << count) - 1, from);
}

inline __m512 partial(const float *from, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }

inline __m512 dot_step(__m512 sum, __m512 query, __m512 key, bfloat16) {
  return _mm512_dpbf16_ps(sum, (__m512bh)query, (__m512bh)key);
}

inline __m512 dot_step(__m512 sum, __m512 query, __m512 key, float) { return _mm512_fmadd_ps(query, key, sum); }

// Scores of 16 keys at the given offsets.
template <typename T>
inline __m512 score(const T *query, const T *keys, const int64_t *rows, int64_t dim, __m512 scale) {
  constexpr int width = 64 / sizeof(T);
  __m512 sums[16];
  for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
  int64_t d = 0;
  for (; d + width <= dim; d += width) {
    __m512 part = _mm512_loadu_ps(query + d);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sums[i] = dot_step(sums[i], part, keys + rows[i] + d);
  }
  if (d < dim) {
    __m512 part = partial(query + d, dim - d);
    for (int i = 0; i < 16; i++) sums[i] = dot_step(sums[i], part, partial(keys + rows[i] + d, dim - d), T());
  }
  return _mm512_mul_ps(sum_each(sums), scale);
}

// scores[from .. to) -> exponentials of their distance to the largest; returns their sum.
inline float exponentiate(float *scores, int64_t from, int64_t to) {
  __m512 top = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
  for (int64_t t = from; t < to; t += 16) {
    __mmask16 lanes = first_lanes(to - t);
    top = _mm512_mask_max_ps(top, lanes, top, _mm512_maskz_loadu_ps(lanes, scores + t));
  }
  top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  for (int64_t t = from; t < to; t += 16) {
    __mmask16 lanes = first_lanes(to - t);
    __m512 value = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, scores + t), top));
    _mm512_mask_storeu_ps(scores + t, lanes, value);
    total = _mm512_mask_add_ps(total, lanes, total, value);
  }
  return _mm512_reduce_add_ps(total);
}

// Adds the weighted values of `keys` tokens to the sums of COUNT queries, at columns [column, column + 64).
// weights: [COUNT][pitch]; sums: [COUNT][width].
template <typename T, int COUNT>
void gather(const T *values, const int64_t *rows, int64_t keys, int64_t column, int64_t dim, const float *weights,
            int64_t pitch, float *sums, int64_t width) {
  __m512 acc[COUNT][4];
  __mmask16 lanes[4];
  for (int c = 0; c < 4; c++) lanes[c] = first_lanes(std::max<int64_t>(dim - column - 16 * c, 0));
  for (int q = 0; q < COUNT; q++)
    for (int c = 0; c < 4; c++) acc[q][c] = _mm512_loadu_ps(sums + q * width + column + 16 * c);
  for (int64_t t = 0; t < keys; t++) {
    const T *row = values + rows[t] + column;
    __m512 v[4];
    for (int c = 0; c < 4; c++) v[c] = load(row + 16 * c, lanes[c]);
    for (int q = 0; q < COUNT; q++) {
      __m512 w = _mm512_set1_ps(weights[q * pitch + t]);
      for (int c = 0; c < 4; c++) acc[q][c] = _mm512_fmadd_ps(w, v[c], acc[q][c]);
    }
  }
  for (int q = 0; q < COUNT; q++)
    for (int c = 0; c < 4; c++) _mm512_storeu_ps(sums + q * width + column + 16 * c, acc[q][c]);
}

template <typename T, int COUNT = kQueries>
void gather_all(int count, const T *values, const int64_t *rows, int64_t keys, int64_t dim, const float *weights,
                int64_t pitch, float *sums, int64_t width) {
  if (count == COUNT) {
    for (int64_t column = 0; column < dim; column += 64)
      gather<T, COUNT>(values, rows, keys, column, dim, weights, pitch, sums, width);
  } else if constexpr (COUNT > 1) {
    gather_all<T, COUNT - 1>(count, values, rows, keys, dim, weights, pitch, sums, width);
  }
}

// Buffers that a thread reuses between tasks.
struct Scratch {
  int64_t segment = -1;
  std::vector<int64_t> rows;  // of one segment: offset of each key in the cache
  std::vector<float> scores;  // [head][query][pitch]
  std::vector<float> sums;    // [head][query][dim, rounded up to 64]
};

void locate(const Call &c, int64_t segment, Scratch &s) {
  if (s.segment == segment) return;
  const int64_t *table = c.tables + segment * c.table_width, context = c.context[segment];
  s.segment = segment;
  s.rows.resize(context + 15);
  int64_t skipped = c.offsets ? c.offsets[segment] : 0;
  bool down = c.reversed && c.reversed[segment];
  for (int64_t t = 0, slot = skipped; t < context; slot = 0) {
    int64_t base = table[(t + skipped) / c.block_size] * c.block_stride;
    for (; slot < c.block_size && t < context; slot++)
      s.rows[t++] = base + (down ? c.block_size - 1 - slot : slot) * c.slot_stride;
  }
  // Keys are scored 16 at a time: beyond the end the last key is read again.
  std::fill(s.rows.begin() + context, s.rows.end(), s.rows[context - 1]);
}

// Prefetch the rows of the next 16 keys of this head.
template <typename T> inline void fetch(const T *from, const int64_t *rows, int64_t dim) {
  for (int i = 0; i < 16; i++)
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) _mm_prefetch((const char *)(from + rows[i] + d), _MM_HINT_T1);
}

struct Task {
  int64_t segment, head, heads, first;
  int count;
};

// Queries [first, first + count) of a segment's length * group, for each of some key-value heads. Heads are the inner
// loop: those of one block are adjacent, and memory is fastest read in order.
template <typename T> void attend(const Call &c, const Task &task, Scratch &s) {
  locate(c, task.segment, s);
  int64_t group = c.heads / c.kv_heads, begin = c.query_start[task.segment], context = c.context[task.segment];
  int64_t length = c.query_start[task.segment + 1] - begin, start = context - length;
  int64_t pitch = (context + 31) / 16 * 16, width = (c.dim + 63) / 64 * 64;
  s.scores.resize(std::max<size_t>(s.scores.size(), task.heads * task.count * pitch));
  s.sums.assign(task.heads * task.count * width, 0.0f);
  const T *keys = (const T *)c.keys, *values = (const T *)c.values, *query[kQueries];
  int64_t from[kQueries], to[kQueries], lowest = INT64_MAX, highest = 0;
  for (int q = 0; q < task.count; q++) {
    int64_t token = (task.first + q) / group;
    to[q] = start + token + 1;
    from[q] = c.window ? std::max<int64_t>(0, to[q] - c.window) : 0;
    lowest = std::min(lowest, from[q]), highest = std::max(highest, to[q]);
    query[q] = (const T *)c.query + (begin + token) * c.query_token + (task.first + q) % group * c.query_head;
  }
  // With few queries the keys come from memory, and prefetching them is worth its instructions.
  bool from_memory = length * group <= kQueries;
  if (from_memory)
    for (int64_t h = 0; h < task.heads; h++) fetch(keys + (task.head + h) * c.head_stride, &s.rows[lowest], c.dim);
  __m512 scale = _mm512_set1_ps(c.scale);
  for (int64_t t = lowest; t < highest; t += 16)
    for (int64_t h = 0; h < task.heads; h++) {
      const T *head_keys = keys + (task.head + h) * c.head_stride;
      if (from_memory && t + 16 < highest) fetch(head_keys, &s.rows[t + 16], c.dim);
      for (int q = 0; q < task.count; q++) {
        const T *own = query[q] + (task.head + h) * group * c.query_head;
        _mm512_storeu_ps(&s.scores[(h * task.count + q) * pitch + t], score(own, head_keys, &s.rows[t], c.dim, scale));
      }
    }
  if (from_memory)
    for (int64_t h = 0; h < task.heads; h++) fetch(values + (task.head + h) * c.head_stride, &s.rows[lowest], c.dim);
  for (int64_t h = 0; h < task.heads; h++)
    for (int q = 0; q < task.count; q++) {
      float *weights = &s.scores[(h * task.count + q) * pitch];
      float factor = 1.0f / exponentiate(weights, from[q], to[q]);
      for (int64_t t = from[q]; t < to[q]; t++) weights[t] *= factor;
      std::fill(weights + lowest, weights + from[q], 0.0f);
      std::fill(weights + to[q], weights + highest, 0.0f);
    }
  for (int64_t t = lowest; t < highest; t += 16)
    for (int64_t h = 0; h < task.heads; h++) {
      const T *head_values = values + (task.head + h) * c.head_stride;
      if (from_memory && t + 16 < highest) fetch(head_values, &s.rows[t + 16], c.dim);
      gather_all<T>(task.count, head_values, &s.rows[t], std::min<int64_t>(16, highest - t), c.dim,
                    &s.scores[h * task.count * pitch + t], pitch, &s.sums[h * task.count * width], width);
    }
  for (int64_t h = 0; h < task.heads; h++)
    for (int q = 0; q < task.count; q++) {
      int64_t token = begin + (task.first + q) / group;
      T *out = (T *)c.out + (token * c.heads + (task.head + h) * group + (task.first + q) % group) * c.dim;
      const float *sums = &s.sums[(h * task.count + q) * width];
      for (int64_t d = 0; d < c.dim; d += 16) store(out + d, _mm512_loadu_ps(sums + d), first_lanes(c.dim - d));
    }
}

// Four queries and one head per task; several heads if a segment has no more queries than that.
std::vector<Task> make_tasks(const Call &c, int threads) {
  constexpr int kTasksPerThread = 4; // enough for balance
  std::vector<Task> tasks;
  int64_t group = c.heads / c.kv_heads;
  int64_t together = std::clamp<int64_t>(c.segments * c.kv_heads / (threads * kTasksPerThread), 1, c.kv_heads);
  for (int64_t i = 0; i < c.segments; i++) {
    int64_t queries = (c.query_start[i + 1] - c.query_start[i]) * group;
    int64_t heads = queries <= kQueries ? together : 1;
    for (int64_t head = 0; head < c.kv_heads; head += heads)
      for (int64_t first = 0; first < queries; first += kQueries)
        tasks.push_back({i, head, std::min(heads, c.kv_heads - head), first,
                         (int)std::min<int64_t>(kQueries, queries - first)});
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
    for (size_t i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) attend<T>(c, tasks[i], scratch);
  });
}

} // namespace

extern "C" {

int64_t skipjoin_attention_call_bytes() { return sizeof(Call); }

void skipjoin_paged_attention(int64_t bf16, const Call *call, int64_t threads) {
  if (bf16)
    paged_attention<bfloat16>(*call, threads);
  else
    paged_attention<float>(*call, threads);
}
}

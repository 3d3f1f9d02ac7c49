// The basic product: a few rows times one panel of columns. Included by the other sources.
//
// A column is a lane. An element's sum runs over the inputs in order in one lane, from 0 or from the present value. Its
// bits thus depend on its row and column only, not on other rows or on how a caller splits the inputs.
#pragma once

#include "simd.inc.cpp"

#include <type_traits>

namespace {

// Vectors per panel and rows per product, such that accumulators, a panel's vectors and one input fit the registers.
#if defined(SKIPJOIN_AVX512)
constexpr int kVectors = 2, kMaxRows = 12; // 32 registers
#elif defined(SKIPJOIN_NEON)
constexpr int kVectors = 4, kMaxRows = 6; // 32 registers
#elif defined(SKIPJOIN_AVX2)
constexpr int kVectors = 2, kMaxRows = 6; // 16 registers
#else
constexpr int kVectors = 4, kMaxRows = 2; // 16 registers
#endif
constexpr int kPanel = kVectors * kLanes;

// Type of an input in registers: bfloat16 is in pairs where there are instructions for them.
#ifdef SKIPJOIN_BF16
template <typename T> using Unit = std::conditional_t<std::is_same_v<T, bfloat16>, Pair, float>;
#else
template <typename T> using Unit = float;
#endif
template <typename T> constexpr int kInputs = std::is_same_v<Unit<T>, Pair> ? 2 : 1; // inputs per unit

template <typename T> int64_t units_of(int64_t inputs) { return (inputs + kInputs<T> - 1) / kInputs<T>; }

// Loads the bits of kLanes units.
template <typename T> SKIPJOIN_INLINE Words whole_units(const T *from) {
  Words units;
  if constexpr (kInputs<T> == 2)
    std::memcpy(&units, from, sizeof units);
  else
    units = (Words)load(from);
  return units;
}

// Loads kLanes units, of which `count` inputs exist.
template <typename T> SKIPJOIN_INLINE void load_units(const T *from, int64_t count, Unit<T> *to) {
  if constexpr (kInputs<T> == 2) {
    if (count >= 2 * kLanes) { // the most frequent case, kept free of calls
      std::memcpy(to, from, 4 * kLanes);
    } else {
      std::memset(to, 0, 4 * kLanes);
      std::memcpy(to, from, count * sizeof(T));
    }
  } else {
    store(to, load(from, count));
  }
}

// Loads one unit of weights into column lanes.
SKIPJOIN_INLINE Words lanes_of(const Pair *weights, int vector) {
  Words lanes;
  std::memcpy(&lanes, weights + vector * kLanes, sizeof lanes);
  return lanes;
}

template <typename W> SKIPJOIN_INLINE Floats lanes_of(const W *weights, int vector) {
  return load(weights + vector * kLanes);
}

// Returns the lanes of the first or second inputs of pairs.
SKIPJOIN_INLINE Floats one_of(Words pairs, int part) { return (Floats)(part == 0 ? pairs << 16 : pairs & 0xffff0000u); }

// Number of inputs of type In per unit of weights.
template <typename In, typename W> constexpr int kParts = std::is_same_v<In, float> && std::is_same_v<W, Pair> ? 2 : 1;

template <typename In, typename W> SKIPJOIN_INLINE auto operand(const W *weights, int vector, int part) {
  if constexpr (kParts<In, W> == 2)
    return one_of(lanes_of(weights, vector), part);
  else
    return lanes_of(weights, vector);
}

// Calls work(std::integral_constant<int, count>()) for a runtime `count` in [1, MOST], as template functions need.
template <int MOST, typename Work> SKIPJOIN_INLINE void with_count(int64_t count, Work &&work) {
  if (count == MOST) return work(std::integral_constant<int, MOST>());
  if constexpr (MOST > 1) with_count<MOST - 1>(count, work);
}

constexpr int kAhead = 4096; // prefetch distance of weights in bytes: about one memory latency

// What a product prefetches: nothing, its own weights kAhead bytes ahead of use and then the first ones of the next
// product, or weights of a later product, this many bytes per unit.
struct NothingSoon {};
struct OwnSoon {
  const void *next;
};
struct OthersSoon {
  const void *from;
  int64_t bytes;
};

// A function of its own, because within a larger one a value that is kept across the loop costs the compiler a register
// that the sums need: a sum in memory makes a product a third as fast.
//
// Computes sums[ROWS][kVectors] = inputs times panel, or += if IS_ADDED. The input of a row and unit is at
// row * row_step + unit * unit_step. With float inputs and paired weights, two units of inputs match one of weights.
template <int ROWS, bool IS_ADDED, typename In, typename W, typename Soon>
__attribute__((noinline)) void multiply(const In *inputs, int64_t row_step, int64_t unit_step, const W *weights,
                                        int64_t units, Floats (*sums)[kVectors], Soon soon) {
  constexpr int step = kPanel, bytes = step * sizeof(W), parts = kParts<In, W>;
  Floats acc[ROWS][kVectors] = {};
  if constexpr (IS_ADDED)
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) acc[r][v] = sums[r][v];
  for (int64_t u = 0; u < units; u++, weights += step) {
    if constexpr (std::is_same_v<Soon, OwnSoon>) {
      int64_t beyond = u + kAhead / bytes - units;
      const char *ahead = beyond < 0 ? (const char *)weights + kAhead : (const char *)soon.next + beyond * bytes;
#pragma GCC unroll 4
      for (int at = 0; at < bytes; at += 64) __builtin_prefetch(ahead + at, 0, 3);
    }
    if constexpr (std::is_same_v<Soon, OthersSoon>) __builtin_prefetch((const char *)soon.from + u * soon.bytes, 0, 2);
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
      decltype(operand<In>(weights, 0, 0)) columns[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) columns[v] = operand<In>(weights, v, part);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        auto input = splat(inputs[r * row_step + (u * parts + part) * unit_step]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) acc[r][v] = fma(input, columns[v], acc[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) sums[r][v] = acc[r][v];
}

} // namespace

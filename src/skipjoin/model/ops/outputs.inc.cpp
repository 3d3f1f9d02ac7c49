// Outputs of products. Included by the sources that multiply.
#pragma once

#include "calls.inc.cpp"
#include "simd.inc.cpp"

namespace {

enum Activation { kNone, kRelu, kSilu, kGelu, kGeluTanh, kRelu2, kClamped };

inline Floats activated(int64_t activation, Floats x) {
  switch (activation) {
  case kRelu: return relu(x);
  case kSilu: return silu(x);
  case kGelu: return gelu(x);
  case kGeluTanh: return gelu_tanh(x);
  case kRelu2: return relu(x) * relu(x);
  default: return x;
  }
}

// Returns what a gated product makes of a gate. kClamped: with the constants of gpt-oss.
SKIPJOIN_INLINE Floats gated_by(int64_t activation, Floats gate, Floats up) {
  if (activation != kClamped) return activated(activation, gate) * up;
  constexpr float kLimit = 7.0f, kSlope = 1.702f;
  Floats limit = splat(kLimit), held = limit < gate ? limit : gate;
  Floats bounded = limit < up ? limit : up < -limit ? -limit : up;
  return gated(held, held * kSlope) * (bounded + 1.0f);
}

// Adds the `count` values of `delta` from this row and output to sums.
template <typename T>
SKIPJOIN_INLINE void shift(const skipjoin::Linear &c, int64_t row, int64_t output, int64_t count, Floats &sums) {
  if (c.delta && count > 0) sums += load((const T *)c.delta + row * c.delta_stride + output, count);
}

// Writes the first `count` of these sums to outputs, gated, activated or added. up: what a gated product gates.
template <typename T>
SKIPJOIN_INLINE void put(const skipjoin::Linear &c, T *to, int64_t count, Floats sums, Floats up) {
  Floats value = c.gated ? gated_by(c.activation, sums, up) : activated(c.activation, sums);
  if (c.add) value += load(to, count);
  store(to, value, count);
}

enum Type { kFloat32, kBfloat16, kFloat16 };

// Calls work(T()) with the type of this number.
template <typename Work> void with_type(int64_t type, Work &&work) {
  if (type == kFloat32) work(float());
  if (type == kBfloat16) work(bfloat16());
  if constexpr (kHasHalf)
    if (type == kFloat16) work(half());
}

} // namespace

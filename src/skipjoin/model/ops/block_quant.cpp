// Quantizes KV blocks to 8 bits on their way to the CPU tier, and dequantizes them (ALISE section 3.2).
//
// A device block is [heads][tokens][dim] numbers; heads are those of keys and values of all layers. A block of the CPU
// tier is [heads][2][dim] bfloat16, the scale and the minimum of each channel over the block's tokens, followed by
// [heads][tokens][dim] codes. A number is minimum + scale * code. See block_quant.py for the rounding and the error
// bound.
#include "stream.inc.cpp"

#include <type_traits>
#include <vector>

namespace {

constexpr int kParts = 4;                // vectors of a head's channels processed at a time
constexpr int64_t kChannels = kParts * kLanes;
constexpr int64_t kAhead = 2048;         // prefetch distance in bytes: covers the memory latency
constexpr float kInfinite = 0x1p126f;    // numbers from here on count as infinite, so that sums stay finite
constexpr float kLeastScale = 0x1p-126f; // the minimum with a finite reciprocal

typedef uint8_t Codes __attribute__((vector_size(kLanes)));

// Clamps to the range of half, in which the maximum plus half a scale would be infinite.
template <typename T> Floats in_range(Floats value) {
  if constexpr (std::is_same_v<T, half>) value = smaller(larger(value, splat(-65504.0f)), splat(65504.0f));
  return value;
}

// Returns the nearest bfloat16 not above x (UP: not below), as a float.
template <bool UP> inline Floats cut(Floats x) {
  Words bits = (Words)x, cut = bits & 0xffff0000u;
  // Truncation rounds toward zero, which is right for one sign.
  Words is_negative = (Words)((Ints)bits >> 31), is_wrong = (Words)(bits != cut) & (UP ? ~is_negative : is_negative);
  return (Floats)(cut + (is_wrong & 0x10000));
}

// Returns the upper halves of floats that are exact bfloat16s.
inline void store_exact(bfloat16 *to, Floats value, int64_t count) {
  bfloat16 numbers[kLanes];
  Shorts bits = __builtin_convertvector((Words)value >> 16, Shorts);
  std::memcpy(numbers, &bits, sizeof bits);
  if (count > 0) std::memcpy(to, numbers, std::min<int64_t>(count, kLanes) * sizeof(bfloat16));
}

// Prefetches the lines kAhead after a row's part.
inline void fetch_ahead(const void *part, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch((const char *)part + at + kAhead, 0, 3);
}

// Quantizes some channels of a head's first `count` tokens.
template <typename T>
void quantize_channels(const T *from, int64_t count, int64_t dim, int64_t first, bfloat16 *scales, uint8_t *codes) {
  int64_t left = dim - first;
  Floats low[kParts], high[kParts], inverse[kParts];
  for (int v = 0; v < kParts; v++) low[v] = splat(INFINITY), high[v] = splat(-INFINITY);
  for (int64_t t = 0; t < count; t++) {
    fetch_ahead(from + t * dim + first, kChannels * sizeof(T));
#pragma GCC unroll 4
    for (int v = 0; v < kParts; v++) {
      Floats x = load(from + t * dim + first + v * kLanes, left - v * kLanes);
      Ints is_finite = magnitude(x) < kInfinite; // false for NaN
      low[v] = is_finite ? smaller(low[v], x) : low[v];
      high[v] = is_finite ? larger(high[v], x) : high[v];
    }
  }
  for (int v = 0; v < kParts; v++) {
    Ints has_any = low[v] <= high[v];
    low[v] = cut<false>(has_any ? low[v] : Floats{});
    high[v] = has_any ? high[v] : Floats{};
    Floats scale = larger(cut<true>((high[v] - low[v]) / 255.0f), splat(kLeastScale));
    inverse[v] = 1.0f / scale;
    store_exact(scales + first + v * kLanes, scale, left - v * kLanes);
    store_exact(scales + dim + first + v * kLanes, low[v], left - v * kLanes);
  }
  for (int64_t t = 0; t < count; t++) {
#pragma GCC unroll 4
    for (int v = 0; v < kParts; v++) {
      int64_t at = t * dim + first + v * kLanes, some = left - v * kLanes;
      if (some <= 0) break;
      // NaN becomes the minimum, because `larger` returns its second operand if the first is NaN.
      Floats x = larger(load(from + at, some), low[v]);
      // Adding a number whose last bit is worth 1 rounds to an integer.
      Floats code = (smaller(x, high[v]) - low[v]) * inverse[v] + splat(0x1.8p23f);
      Codes bytes = __builtin_convertvector((Words)code & 0xff, Codes);
      std::memcpy(codes + at, &bytes, std::min<int64_t>(some, kLanes));
    }
  }
}

template <typename T>
void dequantize_channels(const uint8_t *codes, const bfloat16 *scales, int64_t tokens, int64_t dim, int64_t first,
                         T *to) {
  int64_t left = dim - first;
  Floats scale[kParts], low[kParts];
  for (int v = 0; v < kParts; v++) {
    scale[v] = load(scales + first + v * kLanes, left - v * kLanes);
    low[v] = load(scales + dim + first + v * kLanes, left - v * kLanes);
  }
  for (int64_t t = 0; t < tokens; t++) {
    fetch_ahead(codes + t * dim + first, kChannels);
#pragma GCC unroll 4
    for (int v = 0; v < kParts; v++) {
      int64_t at = t * dim + first + v * kLanes, some = left - v * kLanes;
      if (some <= 0) break;
      Codes bytes{};
      std::memcpy(&bytes, codes + at, std::min<int64_t>(some, kLanes));
      Floats code = __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
      store(to + at, in_range<T>(fma(code, scale[v], low[v])), some);
    }
  }
}

// Shape of the pools. row_bytes: size of a block on the CPU tier.
struct Shape {
  int64_t heads, tokens, dim;
  int64_t numbers() const { return tokens * dim; } // per head
  int64_t scale_bytes() const { return heads * 2 * dim * sizeof(bfloat16); }
  int64_t row_bytes() const { return scale_bytes() + heads * numbers(); }
};

template <typename T> void quantize_block(const Shape &shape, const T *from, int64_t count, char *to) {
  // A head's codes are computed in the first-level cache and streamed from there. Codes after the last token stay 0.
  thread_local std::vector<uint8_t> codes;
  codes.assign(shape.numbers(), 0);
  for (int64_t h = 0; h < shape.heads; h++) {
    auto *scales = (bfloat16 *)to + h * 2 * shape.dim;
    for (int64_t first = 0; first < shape.dim; first += kChannels)
      quantize_channels(from + h * shape.numbers(), count, shape.dim, first, scales, codes.data());
    copy_bytes(to + shape.scale_bytes() + h * shape.numbers(), (const char *)codes.data(), shape.numbers());
  }
}

template <typename T> void dequantize_block(const Shape &shape, const char *from, T *to) {
  thread_local std::vector<T> made;
  made.resize(shape.numbers());
  for (int64_t h = 0; h < shape.heads; h++) {
    auto *scales = (const bfloat16 *)from + h * 2 * shape.dim;
    auto *codes = (const uint8_t *)from + shape.scale_bytes() + h * shape.numbers();
    for (int64_t first = 0; first < shape.dim; first += kChannels)
      dequantize_channels(codes, scales, shape.tokens, shape.dim, first, made.data());
    copy_bytes((char *)(to + h * shape.numbers()), (const char *)made.data(), shape.numbers() * sizeof(T));
  }
}

template <typename T>
void quantize(const Shape &shape, char *host, const T *device, const int64_t *target, const int64_t *source,
              int64_t count, int64_t last) {
  for (int64_t i = 0; i < count; i++)
    quantize_block(shape, device + source[i] * shape.heads * shape.numbers(), i + 1 < count ? shape.tokens : last,
                   host + target[i] * shape.row_bytes());
}

template <typename T>
void dequantize(const Shape &shape, T *device, const char *host, const int64_t *target, const int64_t *source,
                int64_t count) {
  for (int64_t i = 0; i < count; i++)
    dequantize_block(shape, host + source[i] * shape.row_bytes(), device + target[i] * shape.heads * shape.numbers());
}

enum Type { kFloat32, kBfloat16, kFloat16 };

} // namespace

extern "C" {

// Quantizes block source[i] of `device` to block target[i] of `host`, for all i < count. type: type of the numbers.
// last: number of tokens in the last of these blocks; the others are full.
void skipjoin_quantize_blocks(int64_t type, int64_t heads, int64_t tokens, int64_t dim, char *host, const void *device,
                              const int64_t *target, const int64_t *source, int64_t count, int64_t last) {
  Shape shape{heads, tokens, dim};
  if (type == kFloat32) quantize(shape, host, (const float *)device, target, source, count, last);
  if (type == kBfloat16) quantize(shape, host, (const bfloat16 *)device, target, source, count, last);
  if constexpr (kHasHalf)
    if (type == kFloat16) quantize(shape, host, (const half *)device, target, source, count, last);
  end_copies();
}

// Dequantizes block source[i] of `host` to block target[i] of `device`, for all i < count.
void skipjoin_dequantize_blocks(int64_t type, int64_t heads, int64_t tokens, int64_t dim, void *device,
                                const char *host, const int64_t *target, const int64_t *source, int64_t count) {
  Shape shape{heads, tokens, dim};
  if (type == kFloat32) dequantize(shape, (float *)device, host, target, source, count);
  if (type == kBfloat16) dequantize(shape, (bfloat16 *)device, host, target, source, count);
  if constexpr (kHasHalf)
    if (type == kFloat16) dequantize(shape, (half *)device, host, target, source, count);
  end_copies();
}
}

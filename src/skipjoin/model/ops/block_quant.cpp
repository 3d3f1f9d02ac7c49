// Quantises KV blocks to 8 bits on their way to the host, and back (ALISE section 3.2).
//
// A block on the device is [heads][tokens][dim] numbers; heads are those of keys and values of all layers. On the host
// it is [heads][2][dim] bfloat16, the scale and then the minimum of each channel over the block's tokens, followed by
// [heads][tokens][dim] codes: a number is minimum + scale * code. See block_quant.py for the rounding and the bound.
#include "stream.inc.cpp"

#include <vector>

namespace {

enum class half : uint16_t {};

constexpr int kVectors = 4;              // of a head's channels at a time: two lines of bfloat16
constexpr int64_t kAhead = 2048;         // bytes from what is read to what is fetched: memory answers in that time
constexpr float kInfinite = 0x1p126f;    // from here on a number counts as infinite, so that sums stay finite
constexpr float kLeastScale = 0x1p-126f; // the smallest whose reciprocal is finite

inline __m512 load(const half *from, __mmask16 lanes) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, from));
}

inline void store(half *to, __m512 value, __mmask16 lanes) {
  // Half a scale above the largest number is infinite in this type.
  value = _mm512_min_ps(_mm512_max_ps(value, _mm512_set1_ps(-65504.0f)), _mm512_set1_ps(65504.0f));
  _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The nearest bfloat16 that is not above x (UP: not below), in a float.
template <bool UP> inline __m512 to_bfloat16(__m512 x) {
  __m512i bits = (__m512i)x, cut = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff0000));
  // Cutting rounds towards zero, which is right for one sign.
  __mmask16 is_negative = _mm512_movepi32_mask(bits);
  __mmask16 is_wrong = _mm512_cmpneq_epi32_mask(bits, cut) & (UP ? ~is_negative : is_negative);
  return (__m512)_mm512_mask_add_epi32(cut, is_wrong, cut, _mm512_set1_epi32(0x10000));
}

// The bits of floats that are bfloat16s already.
inline void store_exact(bfloat16 *to, __m512 value, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)value, 16)));
}

// Lanes of the vectors from channel `first` on.
inline void lanes_from(int64_t first, int64_t dim, __mmask16 (&lanes)[kVectors]) {
  for (int v = 0; v < kVectors; v++) lanes[v] = first_lanes(std::max<int64_t>(0, dim - first - v * 16));
}

// Fetches what lies so far behind the lines of a row's part.
inline void fetch_ahead(const void *part, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) _mm_prefetch((const char *)part + at + kAhead, _MM_HINT_T0);
}

// Some channels of a head's first `count` tokens; see above.
template <typename T>
void quantize_channels(const T *from, int64_t count, int64_t dim, int64_t first, bfloat16 *scales, uint8_t *codes) {
  __mmask16 lanes[kVectors];
  lanes_from(first, dim, lanes);
  __m512 low[kVectors], high[kVectors], inverse[kVectors];
  for (int v = 0; v < kVectors; v++) {
    low[v] = _mm512_set1_ps(INFINITY);
    high[v] = _mm512_set1_ps(-INFINITY);
  }
  for (int64_t t = 0; t < count; t++) {
    fetch_ahead(from + t * dim + first, kVectors * 16 * sizeof(T));
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      __m512 x = load(from + t * dim + first + v * 16, lanes[v]);
      // False for NaN.
      __mmask16 is_finite = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(kInfinite), _CMP_LT_OQ);
      low[v] = _mm512_mask_min_ps(low[v], is_finite, low[v], x);
      high[v] = _mm512_mask_max_ps(high[v], is_finite, high[v], x);
    }
  }
  for (int v = 0; v < kVectors; v++) {
    __mmask16 has_any = _mm512_cmp_ps_mask(low[v], high[v], _CMP_LE_OQ);
    low[v] = to_bfloat16<false>(_mm512_maskz_mov_ps(has_any, low[v]));
    high[v] = _mm512_maskz_mov_ps(has_any, high[v]);
    __m512 range = _mm512_sub_ps(high[v], low[v]);
    __m512 scale = to_bfloat16<true>(_mm512_div_ps(range, _mm512_set1_ps(255.0f)));
    scale = _mm512_max_ps(scale, _mm512_set1_ps(kLeastScale));
    inverse[v] = _mm512_div_ps(_mm512_set1_ps(1.0f), scale);
    store_exact(scales + first + v * 16, scale, lanes[v]);
    store_exact(scales + dim + first + v * 16, low[v], lanes[v]);
  }
  for (int64_t t = 0; t < count; t++) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      // NaN becomes the minimum: the larger of two is the second where the first is no number.
      __m512 x = _mm512_max_ps(load(from + t * dim + first + v * 16, lanes[v]), low[v]);
      __m512 code = _mm512_mul_ps(_mm512_sub_ps(_mm512_min_ps(x, high[v]), low[v]), inverse[v]);
      __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(code));
      _mm_mask_storeu_epi8(codes + t * dim + first + v * 16, lanes[v], bytes);
    }
  }
}

template <typename T>
void dequantize_channels(const uint8_t *codes, const bfloat16 *scales, int64_t tokens, int64_t dim, int64_t first,
                         T *to) {
  __mmask16 lanes[kVectors];
  lanes_from(first, dim, lanes);
  __m512 scale[kVectors], low[kVectors];
  for (int v = 0; v < kVectors; v++) {
    scale[v] = load(scales + first + v * 16, lanes[v]);
    low[v] = load(scales + dim + first + v * 16, lanes[v]);
  }
  for (int64_t t = 0; t < tokens; t++) {
    fetch_ahead(codes + t * dim + first, kVectors * 16);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      int64_t at = t * dim + first + v * 16;
      __m512 code = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes[v], codes + at)));
      store(to + at, _mm512_fmadd_ps(code, scale[v], low[v]), lanes[v]);
    }
  }
}

// The pools' shape. row_bytes: of a block on the host.
struct Shape {
  int64_t heads, tokens, dim;
  int64_t numbers() const { return tokens * dim; } // of a head
  int64_t scale_bytes() const { return heads * 2 * dim * sizeof(bfloat16); }
  int64_t row_bytes() const { return scale_bytes() + heads * numbers(); }
};

template <typename T> void quantize_block(const Shape &shape, const T *from, int64_t count, char *to) {
  // A head's codes are made in the nearest cache and streamed from there. Those behind the last token stay 0.
  thread_local std::vector<uint8_t> codes;
  codes.assign(shape.numbers(), 0);
  for (int64_t h = 0; h < shape.heads; h++) {
    auto *scales = (bfloat16 *)to + h * 2 * shape.dim;
    for (int64_t first = 0; first < shape.dim; first += kVectors * 16)
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
    for (int64_t first = 0; first < shape.dim; first += kVectors * 16)
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

// Block source[i] of `device` to block target[i] of `host`, for all i < count. type: of the numbers. last: tokens in
// the last of these blocks; the others are full.
void skipjoin_quantize_blocks(int64_t type, int64_t heads, int64_t tokens, int64_t dim, char *host, const void *device,
                              const int64_t *target, const int64_t *source, int64_t count, int64_t last) {
  Shape shape{heads, tokens, dim};
  if (type == kFloat32) quantize(shape, host, (const float *)device, target, source, count, last);
  if (type == kBfloat16) quantize(shape, host, (const bfloat16 *)device, target, source, count, last);
  if (type == kFloat16) quantize(shape, host, (const half *)device, target, source, count, last);
  // See skipjoin_copy_blocks.
  _mm_sfence();
}

// Block source[i] of `host` to block target[i] of `device`, for all i < count.
void skipjoin_dequantize_blocks(int64_t type, int64_t heads, int64_t tokens, int64_t dim, void *device,
                                const char *host, const int64_t *target, const int64_t *source, int64_t count) {
  Shape shape{heads, tokens, dim};
  if (type == kFloat32) dequantize(shape, (float *)device, host, target, source, count);
  if (type == kBfloat16) dequantize(shape, (bfloat16 *)device, host, target, source, count);
  if (type == kFloat16) dequantize(shape, (half *)device, host, target, source, count);
  _mm_sfence();
}
}

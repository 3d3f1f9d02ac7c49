// Codes, scales and minimums of rows of weights, from the blocks of GGUF files and the words of safetensors.
#include "pool.inc.cpp"
#include "simd.inc.cpp"

#include <type_traits>

namespace {

// In the order of LAYOUTS in gguf/groups.py.
enum Kind { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kMXFP4, kKinds };

float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float half_at(const uint8_t *from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | rest << 13 | 0x7f800000); // infinity and NaN
  float size = as_float(rest << 13) * 0x1p112f; // with the exponent of a float, also of subnormal numbers
  return sign ? -size : size;
}

// Rounds to the nearest float16, the even one of two.
uint16_t to_half(float value) {
#if defined(SKIPJOIN_AVX512) || defined(SKIPJOIN_AVX2)
  return _cvtss_sh(value, 0);
#elif defined(SKIPJOIN_NEON)
  __fp16 rounded = value;
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00; // from halfway beyond the largest number
  if (bits < 0x38800000) { // below the smallest normal number: adding one whose last bit is worth 2^-24 rounds
    float sum = as_float(bits) + 0.5f;
    std::memcpy(&bits, &sum, 4);
    return sign | (bits - 0x3f000000);
  }
  bits += 0xfff + (bits >> 13 & 1);
  return sign | (bits >> 13) - (112 << 10);
#endif
}

// Where a block's parts go.
struct Parts {
  uint8_t *__restrict codes;
  uint16_t *scales, *minimums;
};

// Writes the lower and then the upper four bits of each WIDTH of `count` bytes.
template <int WIDTH> SKIPJOIN_INLINE void nibbles(const uint8_t *__restrict from, int count, uint8_t *__restrict to) {
  for (int at = 0; at < count; at += WIDTH, from += WIDTH, to += 2 * WIDTH)
    for (int i = 0; i < WIDTH; i++) to[i] = from[i] & 15, to[WIDTH + i] = from[i] >> 4;
}

// Adds the bits of each 32 bytes in pairs, from the lowest, as bits SHIFT and SHIFT + 1 of codes.
template <int SHIFT> SKIPJOIN_INLINE void add_twos(const uint8_t *__restrict from, int count, uint8_t *__restrict to) {
  for (int at = 0; at < count; at += 32, from += 32)
    for (int pair = 0; pair < 8; pair += 2, to += 32)
      for (int i = 0; i < 32; i++) to[i] |= (from[i] >> pair & 3) << SHIFT;
}

// Adds bit j of each 32 bytes as bit SHIFT of the codes from 32 * j on.
template <int SHIFT> SKIPJOIN_INLINE void add_bits(const uint8_t *__restrict from, uint8_t *__restrict to) {
  for (int j = 0; j < 8; j++, to += 32)
    for (int i = 0; i < 32; i++) to[i] |= (from[i] >> j & 1) << SHIFT;
}

// Adds 32 bits as bit 4 of codes.
void add_fifth(const uint8_t *from, uint8_t *to) {
  uint32_t bits;
  std::memcpy(&bits, from, 4);
  for (int i = 0; i < 32; i++) to[i] |= (bits >> i & 1) << 4;
}

// Scales and minimums of six bits in 12 bytes.
void scale_by_six(const uint8_t *packed, float scale, float minimum, const Parts &to) {
  for (int i = 0; i < 4; i++) {
    int first = packed[i], second = packed[4 + i], third = packed[8 + i];
    to.scales[i] = to_half(scale * (first & 63)), to.scales[4 + i] = to_half(scale * (third & 15 | first >> 6 << 4));
    to.minimums[i] = to_half(minimum * (second & 63)) ^ 0x8000;
    to.minimums[4 + i] = to_half(minimum * (third >> 4 | second >> 6 << 4)) ^ 0x8000;
  }
}

void copy_half(const uint8_t *from, uint16_t *to) { std::memcpy(to, from, 2); }

template <Kind KIND> SKIPJOIN_INLINE void unpack(const uint8_t *block, const Parts &to) {
  if constexpr (KIND == kQ4_0 || KIND == kIQ4_NL) {
    copy_half(block, to.scales), nibbles<16>(block + 2, 16, to.codes);
  } else if constexpr (KIND == kQ4_1) {
    copy_half(block, to.scales), copy_half(block + 2, to.minimums), nibbles<16>(block + 4, 16, to.codes);
  } else if constexpr (KIND == kQ5_0) {
    copy_half(block, to.scales), nibbles<16>(block + 6, 16, to.codes), add_fifth(block + 2, to.codes);
  } else if constexpr (KIND == kQ5_1) {
    copy_half(block, to.scales), copy_half(block + 2, to.minimums);
    nibbles<16>(block + 8, 16, to.codes), add_fifth(block + 4, to.codes);
  } else if constexpr (KIND == kQ8_0) {
    copy_half(block, to.scales), std::memcpy(to.codes, block + 2, 32);
  } else if constexpr (KIND == kQ2_K) {
    float scale = half_at(block + 80), minimum = half_at(block + 82);
    for (int i = 0; i < 16; i++) {
      to.scales[i] = to_half(scale * (block[i] & 15));
      to.minimums[i] = to_half(minimum * (block[i] >> 4)) ^ 0x8000;
    }
    std::memset(to.codes, 0, 256);
    add_twos<0>(block + 16, 64, to.codes);
  } else if constexpr (KIND == kQ3_K) {
    float scale = half_at(block + 108);
    for (int i = 0; i < 16; i++) {
      int low = i < 8 ? block[96 + i] & 15 : block[88 + i] >> 4, high = block[104 + i % 4] >> 2 * (i / 4) & 3;
      to.scales[i] = to_half(scale * ((low | high << 4) - 32));
    }
    std::memset(to.codes, 0, 256);
    add_twos<0>(block + 32, 64, to.codes), add_bits<2>(block, to.codes);
  } else if constexpr (KIND == kQ4_K) {
    scale_by_six(block + 4, half_at(block), half_at(block + 2), to);
    nibbles<32>(block + 16, 128, to.codes);
  } else if constexpr (KIND == kQ5_K) {
    scale_by_six(block + 4, half_at(block), half_at(block + 2), to);
    nibbles<32>(block + 48, 128, to.codes), add_bits<4>(block + 16, to.codes);
  } else if constexpr (KIND == kQ6_K) {
    float scale = half_at(block + 208);
    for (int i = 0; i < 16; i++) to.scales[i] = to_half(scale * (int8_t)block[192 + i]);
    nibbles<64>(block, 128, to.codes), add_twos<4>(block + 128, 64, to.codes);
  } else if constexpr (KIND == kIQ4_XS) {
    float scale = half_at(block);
    uint16_t upper;
    std::memcpy(&upper, block + 2, 2);
    for (int i = 0; i < 8; i++) {
      int low = block[4 + i / 2] >> 4 * (i % 2) & 15, high = upper >> 2 * i & 3;
      to.scales[i] = to_half(scale * ((low | high << 4) - 32));
    }
    nibbles<16>(block + 8, 128, to.codes);
  } else {
    float scale = std::ldexp(1.0f, block[0] - 128);
    std::memcpy(to.scales, &scale, 4);
    nibbles<16>(block + 1, 16, to.codes);
  }
}

// Bytes of a block, its numbers and their inputs per scale.
struct Sizes {
  int bytes, numbers, group;
};

constexpr Sizes kSizes[kKinds] = {
    {18, 32, 32},   {20, 32, 32},   {22, 32, 32},   {24, 32, 32},   {34, 32, 32}, {84, 256, 16},  {110, 256, 16},
    {144, 256, 32}, {176, 256, 32}, {210, 256, 16}, {18, 32, 32}, {136, 256, 32}, {17, 32, 32},
};

// Calls work(kind) with the constant of this number.
template <int AT = 0, typename Work> void with_kind(int64_t kind, Work &&work) {
  if constexpr (AT < kKinds) {
    if (kind == AT) return work(std::integral_constant<Kind, (Kind)AT>());
    with_kind<AT + 1>(kind, work);
  }
}

} // namespace

extern "C" {

// Unpacks these rows of blocks to codes [count][inputs], and scales and minimums [count][inputs / group].
void skipjoin_unpack_blocks(int64_t kind, const uint8_t *stored, int64_t row_bytes, const int64_t *rows, int64_t count,
                            int64_t inputs, uint8_t *codes, uint16_t *scales, uint16_t *minimums, int64_t threads) {
  with_kind(kind, [&](auto constant) {
    constexpr Kind of = constant;
    constexpr Sizes sizes = kSizes[of];
    constexpr int shorts = sizes.numbers / sizes.group * (of == kMXFP4 ? 2 : 1); // of a block's scales
    int64_t blocks = inputs / sizes.numbers;
    skipjoin::share(threads, count, 8, [&](int64_t i) {
      const uint8_t *block = stored + rows[i] * row_bytes;
      for (int64_t at = i * blocks; at < (i + 1) * blocks; at++, block += sizes.bytes)
        unpack<of>(block, {codes + at * sizes.numbers, scales + at * shorts, minimums + at * shorts});
    });
  });
}
}

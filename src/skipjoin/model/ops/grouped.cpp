// Products of weights in codes of 4, 6 or 8 bits with a scale, and perhaps a minimum, per group of inputs.
//
// Inputs are rounded to 8 bits with a scale per row and block of 32. Sums of a block are integers, and thus exact in
// any order; blocks are added in order, as floats, in the same way by all implementations. The bits of an output depend
// on its row and weights only.
//
// A strip has the weights of kLanes outputs: codes of blocks of 32 inputs, then scales, then minimums, [group][output].
// Lane i has four consecutive inputs of output i in a quad. A block has its eight quads one after the other, with 4
// bits in four quads, whose upper bits are codes of the last four. With 6 bits, the upper two bits of the first and of
// the last four quads follow, the lowest ones those of the first.
#include "outputs.inc.cpp"
#include "pool.inc.cpp"
#include "tiles.inc.cpp"

#include <algorithm>
#include <atomic>
#include <vector>

namespace {

using skipjoin::Groups;
using skipjoin::Linear;

constexpr int kBlock = 32, kQuads = kBlock / 4;
constexpr int kInputTile = 16; // rows of inputs whose scales are side by side
// With at most this many inputs, rounding them per thread beats waiting.
constexpr int64_t kOwnInputs = 1 << 14;
#if defined(SKIPJOIN_AVX512)
constexpr int kStripRows = 8;
#else
constexpr int kStripRows = 4;
#endif

int64_t blocks_of(int64_t inputs) { return (inputs + kBlock - 1) / kBlock; }

int64_t strips_of(int64_t outputs) { return (outputs + kLanes - 1) / kLanes; }

int64_t block_bytes(const Groups &g) { return kBlock * kLanes * g.bits / 8; }

// Offset of the scales in a strip.
int64_t codes_bytes(const Groups &g) { return blocks_of(g.inputs) * block_bytes(g); }

int64_t scales_bytes(const Groups &g) {
  int64_t span = std::max<int64_t>(g.group, kBlock); // groups of 16 fill blocks
  return (g.inputs + span - 1) / span * (span / g.group) * kLanes * g.scale_bytes;
}

int64_t strip_bytes(const Groups &g) {
  int64_t bytes = codes_bytes(g) + scales_bytes(g) * (1 + g.has_minimums);
  return (bytes + 63) / 64 * 64;
}

enum Codes { kNibbles, kValues, kSixes, kBytes };

// Returns whether weights are not signed, and below 128.
constexpr bool is_small(Codes codes) { return codes == kNibbles || codes == kSixes; }

// -- sums of four products per lane -----------------------------------------------------------------------------------

#if defined(SKIPJOIN_AVX512) && defined(__AVX512VNNI__) || defined(SKIPJOIN_AVX2) && defined(__AVXVNNI__)
// The instructions multiply unsigned weights, so 128 is added to signed ones, and subtracted from the sums.
constexpr int kAdded = 128;

template <Codes> constexpr int kShortQuads = 0;

template <Codes> SKIPJOIN_INLINE Ints add_quads(Ints sums, Words weights, Words inputs) {
#ifdef SKIPJOIN_AVX512
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
#else
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)inputs);
#endif
}
#else
constexpr int kAdded = 0;
// Number of quads whose sums of pairs of products fit 16 bits, or 0: of 4 bits 8, 16 * 15 * 127, of 6 bits 2, 4 * 63 *
// 127.
template <Codes CODES> constexpr int kShortQuads = kLanes < 8 || !is_small(CODES) ? 0 : CODES == kNibbles ? 8 : 2;

template <Codes CODES> SKIPJOIN_INLINE Ints add_quads(Ints sums, Words weights, Words inputs) {
#if defined(SKIPJOIN_AVX512)
  __m512i w = (__m512i)weights, x = (__m512i)inputs;
  if constexpr (!is_small(CODES)) {
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), __m512i{}, x);
    w = _mm512_abs_epi8(w);
  }
  __m512i pairs = _mm512_maddubs_epi16(w, x);
  if constexpr (kShortQuads<CODES>) return (Ints)_mm512_add_epi16((__m512i)sums, pairs);
  return sums + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(SKIPJOIN_AVX2)
  __m256i w = (__m256i)weights, x = (__m256i)inputs;
  if constexpr (!is_small(CODES)) x = _mm256_sign_epi8(x, w), w = _mm256_abs_epi8(w);
  __m256i pairs = _mm256_maddubs_epi16(w, x);
  if constexpr (kShortQuads<CODES>)
    sums = (Ints)_mm256_add_epi16((__m256i)sums, pairs);
  else
    sums += (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  asm("" : "+x"(sums)); // otherwise the compiler keeps products in memory and adds them later
  return sums;
#elif defined(SKIPJOIN_NEON) && defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)inputs);
#elif defined(SKIPJOIN_NEON)
  int8x16_t w = (int8x16_t)weights, x = (int8x16_t)inputs;
  int32x4_t first = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
  return sums + (Ints)vpaddq_s32(first, vpaddlq_s16(vmull_high_s8(w, x)));
#else
  Ints w = (Ints)weights, x = (Ints)inputs;
  for (int part = 0; part < 4; part++, w <<= 8, x <<= 8) sums += (w >> 24) * (x >> 24);
  return sums;
#endif
}
#endif

// Returns whether sums of this many quads leave no space for another one.
template <Codes CODES> constexpr bool fills(int quads) {
  if constexpr (kShortQuads<CODES> == 0) return false;
  return quads % std::max(kShortQuads<CODES>, 1) == 0;
}

// Returns the sums of `add_quads` per lane.
template <Codes CODES> SKIPJOIN_INLINE Ints whole(Ints sums) {
  if constexpr (kShortQuads<CODES>) {
#if defined(SKIPJOIN_AVX512)
    return (Ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(SKIPJOIN_AVX2)
    return (Ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#endif
  }
  return sums;
}

// -- codes ------------------------------------------------------------------------------------------------------------

SKIPJOIN_INLINE Words load_words(const void *from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

Codes codes_of(const Groups &g) {
  return g.bits == 8 ? kBytes : g.bits == 6 ? kSixes : g.values ? kValues : kNibbles;
}

// Returns the upper two of the six bits of quad q, of four.
SKIPJOIN_INLINE Words upper_bits(const uint8_t *from, int q) {
  Words bits = load_words(from);
  return (q < 2 ? bits << (4 - 2 * q) : bits >> (2 * q - 4)) & 0x30303030u;
}

// Values of codes below 16, in each 16 bytes of a vector.
SKIPJOIN_INLINE Words load_table(const int8_t *values, int added) {
  Words table;
  auto *bytes = (char *)&table;
  for (int i = 0; i < 4 * kLanes; i++) bytes[i] = values ? values[i % 16] + added : 0;
  return table;
}

SKIPJOIN_INLINE Words looked_up(Words table, Words codes) {
#if defined(SKIPJOIN_AVX512)
  return (Words)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(SKIPJOIN_AVX2)
  return (Words)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif defined(SKIPJOIN_NEON)
  return (Words)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
  auto *from = (const uint8_t *)&table;
  uint8_t found[4 * kLanes];
  std::memcpy(found, &codes, sizeof found);
  for (uint8_t &code : found) code = from[code];
  return load_words(found);
#endif
}

// Loads a quad of a block. flipped: bits to change in codes of 8 bits.
template <Codes CODES> SKIPJOIN_INLINE Words load_quad(const uint8_t *block, int quad, Words table, uint32_t flipped) {
  constexpr int64_t size = 4 * kLanes;
  if constexpr (CODES == kBytes) return load_words(block + quad * size) ^ flipped;
  Words both = load_words(block + quad % 4 * size), codes = (quad < 4 ? both : both >> 4) & 0x0f0f0f0fu;
  if constexpr (CODES == kValues) codes = looked_up(table, codes);
  if constexpr (CODES == kSixes) codes |= upper_bits(block + (4 + quad / 4) * size, quad % 4);
  return codes;
}

float half_to_float(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
  float size;
  if (rest >= 0x7c00) { // infinity and NaN
    uint32_t wide = rest << 13 | 0x7f800000;
    std::memcpy(&size, &wide, 4);
  } else { // with the exponent of a float, also of what is below the smallest normal number
    uint32_t wide = rest << 13;
    std::memcpy(&size, &wide, 4);
    size *= 0x1p112f;
  }
  return sign ? -size : size;
}

// Loads scales or minimums of a group.
SKIPJOIN_INLINE Floats load_scales(const uint8_t *from, bool are_floats) {
  if (are_floats) return load((const float *)from);
  if constexpr (kHasHalf) return load((const half *)from);
  Floats scales;
  for (int i = 0; i < kLanes; i++) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, 2);
    scales[i] = half_to_float(bits);
  }
  return scales;
}

// -- inputs -----------------------------------------------------------------------------------------------------------

// Rounded inputs. Of each block and row there are the codes, their scale, the sum of the inputs that they stand for,
// and the sums of the first and last 16 codes, all in tiles of kInputTile rows.
struct Inputs {
  int64_t rows, blocks;
  int8_t *codes;        // [tile][block][row][kBlock]
  float *scales, *sums; // [tile][block][row]
  int32_t *totals;      // [tile][block][2][row]

  static int64_t bytes(int64_t rows, int64_t inputs) { return padded(rows) * blocks_of(inputs) * (kBlock + 16) + 64; }

  Inputs(const Linear &c, int64_t copy) : rows(c.rows), blocks(blocks_of(c.k)) {
    int64_t count = padded(rows) * blocks;
    auto *at = (char *)(((uintptr_t)c.scratch + 63) & ~(uintptr_t)63) + copy * bytes(rows, c.k);
    codes = (int8_t *)at;
    scales = (float *)(at + count * kBlock), sums = scales + count, totals = (int32_t *)(sums + count);
  }

  int64_t width() const { return blocks * kBlock; }

  // Index of a row's first scale.
  int64_t at(int64_t row) const { return row / kInputTile * kInputTile * blocks + row % kInputTile; }

  template <typename T> void round_row(const Linear &c, int64_t row) {
    constexpr int vectors = kBlock / kLanes;
    const T *x = (const T *)c.x + row * c.x_stride;
    for (int64_t b = 0; b < blocks; b++, x += kBlock) {
      int64_t index = at(row) + b * kInputTile, pair = 2 * index - row % kInputTile;
      int8_t *to = codes + index * kBlock;
      Floats values[vectors], most{}, nothing{};
      int64_t count = c.k - b * kBlock;
      for (int v = 0; v < vectors; v++) {
        values[v] = count >= kBlock ? load(x + v * kLanes) : load(x + v * kLanes, count - v * kLanes);
        most = larger(magnitude(values[v]), most);
        nothing += values[v] * 0.0f; // NaN if a value is infinite or NaN
      }
      float top = largest(most), inverse = top > 1e-30f ? 127.0f / top : 0.0f;
      int32_t part[2] = {};
      Ints rounded[vectors];
      // Adding a number whose last bit is worth 1 rounds to an integer.
      for (int v = 0; v < vectors; v++)
        rounded[v] = (Ints)(values[v] * inverse + splat(0x1.8p23f)) - (Ints)splat(0x1.8p23f);
      store_block(to, rounded, part);
      float scale = top / 127.0f + sum_of(nothing);
      scales[index] = scale, sums[index] = scale * (float)(part[0] + part[1]);
      totals[pair] = part[0], totals[pair + kInputTile] = part[1];
    }
  }

private:
  static int64_t padded(int64_t rows) { return (rows + kInputTile - 1) / kInputTile * kInputTile; }

  // Stores the codes of a block, and the sums of the first and last 16.
  static SKIPJOIN_INLINE void store_block(int8_t *to, const Ints *values, int32_t *sums) {
#if defined(SKIPJOIN_AVX512)
    for (int part = 0; part < 2; part++) {
      _mm_storeu_si128((__m128i *)(to + 16 * part), _mm512_cvtepi32_epi8((__m512i)values[part]));
      sums[part] = _mm512_reduce_add_epi32((__m512i)values[part]);
    }
#elif defined(SKIPJOIN_AVX2)
    auto *v = (const __m256i *)values;
    __m256i codes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)to, codes);
    __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
    fours = _mm256_hadd_epi32(fours, fours), fours = _mm256_hadd_epi32(fours, fours);
    sums[0] = _mm256_extract_epi32(fours, 0), sums[1] = _mm256_extract_epi32(fours, 4);
#else
    for (int i = 0; i < kBlock; i++) {
      int32_t value = values[i / kLanes][i % kLanes];
      to[i] = value, sums[i / 16] += value;
    }
#endif
  }
};

// -- few rows ---------------------------------------------------------------------------------------------------------

// What to prefetch in each block.
struct Ahead {
  const char *from;
  int64_t lines;

  SKIPJOIN_INLINE void fetch() {
    for (int64_t i = 0; i < lines; i++, from += 64) __builtin_prefetch(from, 0, 2);
  }
};

// Sets what the sums of a group begin with: what the offset of the weights takes from them. Broadcasts from memory take
// none of the units that multiply. totals: sums of codes by row, for the first half of a block and the second.
template <Codes CODES, bool HALVES, bool HAS_OFFSET, int ROWS, int STRIPS>
SKIPJOIN_INLINE void begin_sums(const int32_t *totals, int32_t offset, Ints (&found)[ROWS][STRIPS],
                                Ints (&held)[ROWS][STRIPS]) {
  const bool has_offset = HAS_OFFSET && (ROWS > 1 || offset);
  int32_t shifts[ROWS] = {};
  if (has_offset) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) shifts[r] = -offset * (totals[r] + (HALVES ? 0 : totals[kInputTile + r]));
    asm("" : "+m"(shifts));
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int s = 0; s < STRIPS; s++) {
      Ints start = has_offset ? (Ints)splat((uint32_t)shifts[r]) : Ints{};
      found[r][s] = kShortQuads<CODES> ? Ints{} : start;
      held[r][s] = kShortQuads<CODES> ? start : Ints{};
    }
}

// Whether groups have minimums: none, all, or as `Groups` says.
enum Minimums { kWithout, kWith, kAsGiven };

// Computes sums of ROWS rows, which are in one tile of inputs, with STRIPS strips, 1 or 2, of matrices that are alike: an
// input is then loaded once for two products. HALVES: a block has two groups. Not inlined, like `multiply`.
//
// codes: of each strip, packed, or if ARE_UNPACKED one per byte, in which case minimums exclude an offset.
template <int ROWS, int STRIPS, Codes CODES, bool HALVES, Minimums MINIMUMS, bool ARE_UNPACKED>
__attribute__((noinline)) void multiply_rows(const Groups &g, const uint8_t *const *strips, const uint8_t *const *codes,
                                             const Inputs &in, int64_t row, Floats (*sums)[kInputTile], Ahead *ahead) {
  constexpr int parts = HALVES ? 2 : 1, quads = kQuads / parts;
  const Words table = load_table(g.values, kAdded);
  const uint32_t flipped = kAdded ? 0x80808080u : 0;
  const int32_t offset = g.offset + (is_small(CODES) ? 0 : kAdded);
  const bool are_floats = g.scale_bytes == 4;
  const bool has_minimums = MINIMUMS == kWith || MINIMUMS == kAsGiven && g.has_minimums;
  const int64_t bytes = ARE_UNPACKED ? kBlock * kLanes : block_bytes(g), step = kLanes * g.scale_bytes;
  const int64_t to_minimums = scales_bytes(g), per_scale = HALVES ? 1 : g.group / kBlock;
  const int8_t *x = in.codes + in.at(row) * kBlock;
  const float *x_scales = in.scales + in.at(row), *x_sums = in.sums + in.at(row);
  const int32_t *totals = in.totals + 2 * in.at(row) - row % kInputTile;
  const uint8_t *from[STRIPS], *scales[STRIPS];
  for (int s = 0; s < STRIPS; s++) from[s] = codes[s], scales[s] = strips[s] + codes_bytes(g);
  Floats acc[ROWS][STRIPS] = {};
  int64_t until = per_scale;
  for (int64_t b = 0; b < in.blocks; b++, x += kInputTile * kBlock) {
    for (int s = 0; s < STRIPS; s++) ahead[s].fetch();
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
      Ints found[ROWS][STRIPS], held[ROWS][STRIPS]; // held: what would not fit 16 bits
      begin_sums<CODES, HALVES, !(ARE_UNPACKED && MINIMUMS == kWith)>(totals + part * kInputTile, offset, found, held);
#pragma GCC unroll 8
      for (int q = 0; q < quads; q++) {
        const bool is_full = q < quads - 1 && fills<CODES>(q + 1);
        const int quad = part * quads + q;
        Words weights[STRIPS];
#pragma GCC unroll 2
        for (int s = 0; s < STRIPS; s++)
          weights[s] = ARE_UNPACKED ? load_words(from[s] + quad * sizeof(Words)) : load_quad<CODES>(from[s], quad, table, flipped);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          uint32_t inputs;
          std::memcpy(&inputs, x + r * kBlock + 4 * quad, 4);
#pragma GCC unroll 2
          for (int s = 0; s < STRIPS; s++) {
            found[r][s] = add_quads<CODES>(found[r][s], weights[s], splat(inputs));
            if (is_full) held[r][s] += whole<CODES>(found[r][s]), found[r][s] = Ints{};
          }
        }
      }
      Floats scale[STRIPS], minimum[STRIPS];
#pragma GCC unroll 2
      for (int s = 0; s < STRIPS; s++) {
        scale[s] = load_scales(scales[s], are_floats);
        if (has_minimums) minimum[s] = load_scales(scales[s] + to_minimums, are_floats);
      }
      auto sum_of = [&](int r) {
        return splat(HALVES ? x_scales[r] * (float)totals[part * kInputTile + r] : x_sums[r]);
      };
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        Floats x_scale = splat(x_scales[r]), x_sum{};
        if (MINIMUMS == kWith) x_sum = sum_of(r);
#pragma GCC unroll 2
        for (int s = 0; s < STRIPS; s++) {
          Ints sum = held[r][s] + whole<CODES>(found[r][s]);
          acc[r][s] = fma(__builtin_convertvector(sum, Floats), scale[s] * x_scale, acc[r][s]);
          if (MINIMUMS == kWith) acc[r][s] = fma(minimum[s], x_sum, acc[r][s]);
        }
      }
      if (MINIMUMS == kAsGiven && has_minimums)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
          for (int s = 0; s < STRIPS; s++) acc[r][s] = fma(minimum[s], sum_of(r), acc[r][s]);
      if (--until == 0) {
        until = per_scale;
        for (int s = 0; s < STRIPS; s++) scales[s] += step;
      }
    }
    for (int s = 0; s < STRIPS; s++) from[s] += bytes;
    x_scales += kInputTile, x_sums += kInputTile, totals += 2 * kInputTile;
  }
  for (int s = 0; s < STRIPS; s++)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sums[s][r] = acc[r][s];
}

// Calls work(codes, halves) with the constants of a matrix.
template <typename Work> void with_codes(const Groups &g, Work &&work) {
  auto with_halves = [&](auto codes) {
    if (g.group < kBlock)
      work(codes, std::true_type());
    else
      work(codes, std::false_type());
  };
  switch (codes_of(g)) {
  case kNibbles: return with_halves(std::integral_constant<Codes, kNibbles>());
  case kValues: return with_halves(std::integral_constant<Codes, kValues>());
  case kSixes: return with_halves(std::integral_constant<Codes, kSixes>());
  case kBytes: return with_halves(std::integral_constant<Codes, kBytes>());
  }
}

// Computes sums of `count` rows, of up to kStripRows, with one strip.
void multiply_strip(const Groups &g, const uint8_t *strip, const Inputs &in, int64_t row, int64_t count,
                    Floats (*sums)[kInputTile], Ahead ahead) {
  with_codes(g, [&](auto kind, auto halves) {
    with_count<kStripRows>(count, [&](auto rows) {
      multiply_rows<rows, 1, kind, halves, kAsGiven, false>(g, &strip, &strip, in, row, sums, &ahead);
    });
  });
}

// -- more rows, by pairs of strips ------------------------------------------------------------------------------------

// Elsewhere, no product was measured to gain by it. Where the number of instructions bounds products, codes are unpacked
// first, for all rows.
#if defined(SKIPJOIN_AVX512) && defined(__AVX512VNNI__)
#define SKIPJOIN_PAIRS 1
constexpr bool kUnpacksPairs = false;
#elif defined(SKIPJOIN_AVX2) && !defined(__AVXVNNI__)
#define SKIPJOIN_PAIRS 1
constexpr bool kUnpacksPairs = true;
#endif

#ifdef SKIPJOIN_PAIRS

constexpr int64_t kMinPairRows = 8; // with fewer, unpacking codes takes longer than it saves

// Returns whether the matrices have codes for `multiply_pair`.
bool are_pair(const Groups &g, const Groups &other) {
  bool are_alike = g.bits == other.bits && g.group == other.group && g.offset == other.offset && g.values == other.values &&
                   g.scale_bytes == other.scale_bytes && g.has_minimums == other.has_minimums;
  // Two groups per block and strip have more sums than there are registers.
  return are_alike && (kUnpacksPairs ? is_small(codes_of(g)) && !(g.has_minimums && g.offset) : g.group >= kBlock);
}

// Unpacks the codes of a strip to `to` if that is of use, and returns them.
const uint8_t *codes_of_pair(const Groups &g, const uint8_t *strip, uint8_t *to) {
  if constexpr (!kUnpacksPairs) return strip;
  with_codes(g, [&](auto kind, auto) {
    const uint8_t *from = strip;
    auto *quad = (Words *)to;
    for (int64_t b = 0; b < blocks_of(g.inputs); b++, from += block_bytes(g))
      for (int q = 0; q < kQuads; q++) *quad++ = load_quad<kind>(from, q, Words{}, 0);
  });
  return to;
}

// Computes sums of kStripRows rows with two strips.
void multiply_pair(const Groups &g, const uint8_t *const *strips, const uint8_t *const *codes, const Inputs &in,
                   int64_t row, Floats (*sums)[kInputTile], Ahead *ahead) {
  with_codes(g, [&](auto kind, auto halves) {
    auto multiply = [&](auto minimums) {
      if constexpr (kUnpacksPairs ? is_small(kind) : !halves)
        multiply_rows<kStripRows, 2, kind, halves, minimums, kUnpacksPairs>(g, strips, codes, in, row, sums, ahead);
    };
    if (g.has_minimums)
      multiply(std::integral_constant<Minimums, kWith>());
    else
      multiply(std::integral_constant<Minimums, kWithout>());
  });
}

#endif

// -- many rows, by tiles ----------------------------------------------------------------------------------------------

#ifdef SKIPJOIN_TILES

// Unpacks the codes of a strip to signed bytes.
template <Codes CODES> void unpack(const Groups &g, const uint8_t *strip, int8_t *to) {
  const Words table = load_table(g.values, 0);
  const __m512i offset = _mm512_set1_epi8(g.offset);
  for (int64_t b = 0; b < blocks_of(g.inputs); b++, strip += block_bytes(g), to += kBlock * kLanes)
    for (int q = 0; q < kQuads; q++)
      _mm512_storeu_si512(to + q * 64, _mm512_sub_epi8((__m512i)load_quad<CODES>(strip, q, table, 0), offset));
}

// Computes sums of a tile of inputs. codes: signed.
template <bool HALVES>
void multiply_tile(const Groups &g, const uint8_t *strip, const int8_t *codes, const Inputs &in, int64_t row,
                   Floats *sums, Ahead ahead) {
  constexpr int64_t depth = HALVES ? 16 : 32, tile = depth * kLanes;
  const bool are_floats = g.scale_bytes == 4;
  const int64_t step = kLanes * g.scale_bytes, count = in.width() / depth;
  const int64_t per_scale = HALVES ? 1 : g.group / kBlock;
  const int8_t *x = in.codes + in.at(row) * kBlock, *x_next = x + in.blocks * kInputTile * kBlock;
  const float *x_scales = in.scales + in.at(row), *x_sums = in.sums + in.at(row);
  const int32_t *totals = in.totals + 2 * in.at(row);
  const uint8_t *scales = strip + codes_bytes(g), *minimums = g.has_minimums ? scales + scales_bytes(g) : nullptr;
  // A buffer of 4 kB or more would have stores at the place in a page of each load, which then waits for them.
  alignas(64) int32_t products[2][kTile * kLanes];
  Floats acc[kTile] = {};
  auto inputs_of = [&](int64_t at) { return x + at * depth / kBlock * kInputTile * kBlock + at * depth % kBlock; };
  // The sums of the next group are computed while those of the last one are added.
  auto multiply = [&](int64_t at) {
    if (at % 2 == 0) {
      SKIPJOIN_ZERO_TILE(0);
      SKIPJOIN_LOAD_TILE(4, inputs_of(at), kBlock);
      SKIPJOIN_LOAD_TILE(5, codes + at * tile, 64);
      SKIPJOIN_MULTIPLY_BYTES(0, 4, 5);
      SKIPJOIN_STORE_TILE(0, products[0], 64);
    } else {
      SKIPJOIN_ZERO_TILE(1);
      SKIPJOIN_LOAD_TILE(6, inputs_of(at), kBlock);
      SKIPJOIN_LOAD_TILE(7, codes + at * tile, 64);
      SKIPJOIN_MULTIPLY_BYTES(1, 6, 7);
      SKIPJOIN_STORE_TILE(1, products[1], 64);
    }
  };
  multiply(0);
  int64_t until = per_scale;
  for (int64_t at = 0; at < count; at++) {
    if (at + 1 < count) multiply(at + 1);
    const int part = HALVES ? at % 2 : 0;
    if (part == 0) {
      ahead.fetch();
#pragma GCC unroll 8
      for (int i = 0; i < kInputTile * kBlock; i += 64) __builtin_prefetch(x_next + i, 0, 3);
      x_next += kInputTile * kBlock;
    }
    Floats scale = load_scales(scales, are_floats);
    const int32_t *from = products[at % 2];
#pragma GCC unroll 16
    for (int r = 0; r < kTile; r++) {
      Floats whole = __builtin_convertvector((Ints)load_words(from + r * kLanes), Floats);
      acc[r] = fma(whole, scale * x_scales[r], acc[r]);
    }
    if (minimums) {
      Floats minimum = load_scales(minimums, are_floats);
      alignas(64) float parts[kTile];
      const float *of = x_sums;
      if constexpr (HALVES) {
        store(parts, load(x_scales) * __builtin_convertvector((Ints)load_words(totals + part * kInputTile), Floats));
        of = parts;
      }
#pragma GCC unroll 16
      for (int r = 0; r < kTile; r++) acc[r] = fma(minimum, splat(of[r]), acc[r]);
      if (until == 1) minimums += step;
    }
    if (--until == 0) scales += step, until = per_scale;
    if (!HALVES || part == 1) x_scales += kInputTile, x_sums += kInputTile, totals += 2 * kInputTile;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++) sums[r] = acc[r];
}

constexpr int64_t kTileInputs = 640 << 10; // bytes of inputs per task, which fit the second-level cache
constexpr int64_t kMinTileRows = 9;        // fewer rows take less time without tiles

#endif

// -- products ---------------------------------------------------------------------------------------------------------

// One or two strips: of a gated product, the gate and what it gates.
struct Task {
  struct Part {
    const Groups *groups;
    const uint8_t *strip;
    int64_t index, output, count; // of the strip; its first output and the number of them
  };
  Part parts[2];
  int size;
};

Task::Part part_of(const Groups &g, int64_t index, int64_t output) {
  int64_t first = index * kLanes;
  return {&g, g.strips + index * g.strip_bytes, index, output + first, std::min<int64_t>(kLanes, g.outputs - first)};
}

// pairs: a product that is not gated has two strips in a task, if its matrix has them.
Task task_of(const Linear &c, int64_t index, bool pairs) {
  if (c.gated) return {{part_of(c.groups[0], index, 0), part_of(c.groups[1], index, 0)}, 2};
  const Groups *g = c.groups;
  int64_t output = 0;
  for (int64_t tasks; index >= (tasks = (strips_of(g->outputs) + pairs) / (1 + pairs)); g++)
    index -= tasks, output += g->outputs;
  int64_t strip = index * (1 + pairs);
  Task task{{part_of(*g, strip, output)}, 1};
  if (pairs && strip + 1 < strips_of(g->outputs)) task.parts[task.size++] = part_of(*g, strip + 1, output);
  return task;
}

int64_t tasks_of(const Linear &c, bool pairs) {
  int64_t count = 0;
  for (int64_t m = 0; m < (c.gated ? 1 : c.matrices); m++)
    count += c.gated ? strips_of(c.groups[m].outputs) : (strips_of(c.groups[m].outputs) + pairs) / (1 + pairs);
  return count;
}

template <typename T>
void finish(const Linear &c, const Task &task, int64_t row, int64_t rows, const Floats (*sums)[kInputTile]) {
  for (int64_t r = 0; r < rows; r++) {
    Floats found[2] = {sums[0][r], sums[1][r]};
    for (int s = 0; s < task.size; s++)
      if (auto *bias = task.parts[s].groups->bias) found[s] += load(bias + task.parts[s].index * kLanes);
    for (int s = 0; s < task.size; s++) {
      auto &part = task.parts[s];
      shift<T>(c, row + r, part.output + (s && c.gated ? c.n / 2 : 0), part.count, found[s]);
    }
    for (int s = 0; s < (c.gated ? 1 : task.size); s++) {
      auto &part = task.parts[s];
      put(c, (T *)c.out + (row + r) * c.out_stride + part.output, part.count, found[s], found[c.gated ? 1 : s]);
    }
  }
}

template <typename T> void linear(const Linear &c) {
  bool each_rounds = c.rows * c.k <= kOwnInputs;
  Inputs shared(c, 0);
  if (!each_rounds) skipjoin::share(c.threads, c.rows, 1, [&](int64_t r) { shared.round_row<T>(c, r); });
  int64_t blocks = shared.blocks, per_block = c.rows, row_blocks = 1;
  bool by_tiles = false;
#ifdef SKIPJOIN_TILES
  if (have_tiles() && c.rows >= kMinTileRows) {
    by_tiles = true;
    row_blocks = (c.rows * shared.width() + kTileInputs - 1) / kTileInputs;
    per_block = ((c.rows + row_blocks - 1) / row_blocks + kInputTile - 1) / kInputTile * kInputTile;
  }
#endif
  if (!by_tiles) per_block = std::min<int64_t>(c.rows, 8 * kInputTile);
  bool by_pairs = by_tiles;
#ifdef SKIPJOIN_PAIRS
  by_pairs = by_tiles || c.rows >= kMinPairRows;
#endif
  row_blocks = (c.rows + per_block - 1) / per_block;
  int64_t count = tasks_of(c, by_pairs), total = count * row_blocks;
  // Threads take as many tasks at once as write a cache line, so that none waits for the lines of another.
  const int64_t at_a_time = std::max<int64_t>(1, 64 / (kLanes * sizeof(T) * (by_pairs && !c.gated ? 2 : 1)));
  std::atomic<int64_t> counter{0};
  skipjoin::run_on_pool(c.threads, [&](int thread) {
    auto take = [&] { return counter.fetch_add(at_a_time, std::memory_order_relaxed); };
    int64_t index = take(), taken = index + at_a_time;
    if (index >= total) return; // other threads took all tasks
    Inputs in(c, each_rounds ? thread : 0);
    if (each_rounds)
      for (int64_t r = 0; r < c.rows; r++) in.round_row<T>(c, r);
#if defined(SKIPJOIN_TILES) || defined(SKIPJOIN_PAIRS)
    thread_local std::vector<uint8_t> memory;
    uint8_t *unpacked = nullptr;
    if (by_pairs) {
      memory.resize(std::max<size_t>(memory.size(), 2 * in.width() * kLanes + 64));
      unpacked = (uint8_t *)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    }
#endif
#ifdef SKIPJOIN_TILES
    int64_t depth = 0;
#endif
    for (int64_t next; index < total; index = next) {
      next = index + 1;
      if (next == taken) next = take(), taken = next + at_a_time;
      Task task = task_of(c, index % count, by_pairs);
      int64_t begin = index / count * per_block, end = std::min(c.rows, begin + per_block);
      // The strips of the next task are fetched in as many parts as there are passes over blocks.
      const char *later[2] = {};
      int64_t bytes[2] = {};
      if (next < total) {
        Task following = task_of(c, next % count, by_pairs);
        for (int s = 0; s < following.size; s++)
          later[s] = (const char *)following.parts[s].strip, bytes[s] = following.parts[s].groups->strip_bytes;
      } else if (c.then) {
        for (int s = 0; s < task.size; s++)
          later[s] = (const char *)c.then + (thread * task.size + s) * c.then_bytes, bytes[s] = c.then_bytes;
      }
      Floats sums[2][kInputTile];
      const uint8_t *codes[2] = {};
      int64_t at_once = by_tiles ? kInputTile : kStripRows, passes = (end - begin + at_once - 1) / at_once;
#ifdef SKIPJOIN_TILES
      if (by_tiles) {
        for (int s = 0; s < task.size; s++) {
          const Groups &g = *task.parts[s].groups;
          codes[s] = task.parts[s].strip;
          if (g.bits == 8 && g.offset == 0) continue;
          uint8_t *to = unpacked + s * in.width() * kLanes;
          with_codes(g, [&](auto kind, auto) { unpack<kind>(g, task.parts[s].strip, (int8_t *)to); });
          codes[s] = to;
        }
      }
#endif
#ifdef SKIPJOIN_PAIRS
      const uint8_t *strips[2] = {task.parts[0].strip, task.parts[1].strip};
      bool is_pair = by_pairs && !by_tiles && task.size == 2 && are_pair(*task.parts[0].groups, *task.parts[1].groups);
      for (int s = 0; is_pair && s < 2; s++)
        codes[s] = codes_of_pair(*task.parts[s].groups, strips[s], unpacked + s * in.width() * kLanes);
#endif
      for (int64_t row = begin; row < end; row += at_once) {
        int64_t rows = std::min(at_once, end - row), pass = (row - begin) / at_once;
        Ahead aheads[2];
        for (int s = 0; s < 2; s++) {
          int64_t lines = (bytes[s] / 64 + blocks * passes - 1) / (blocks * passes), at = pass * blocks * lines * 64;
          aheads[s] = {later[s] + at, at < bytes[s] ? lines : 0};
        }
#ifdef SKIPJOIN_PAIRS
        if (is_pair && rows == kStripRows) {
          multiply_pair(*task.parts[0].groups, strips, codes, in, row, sums, aheads);
          finish<T>(c, task, row, rows, sums);
          continue;
        }
#endif
        for (int s = 0; s < task.size; s++) {
          const Groups &g = *task.parts[s].groups;
          const uint8_t *strip = task.parts[s].strip;
          Ahead ahead = aheads[s];
#ifdef SKIPJOIN_TILES
          if (by_tiles) {
            int64_t wanted = g.group < kBlock ? 16 : 32;
            if (depth != wanted) shape_tiles(TileShapes::of_bytes(depth = wanted));
            if (depth == 16)
              multiply_tile<true>(g, strip, (const int8_t *)codes[s], in, row, sums[s], ahead);
            else
              multiply_tile<false>(g, strip, (const int8_t *)codes[s], in, row, sums[s], ahead);
            continue;
          }
#endif
          multiply_strip(g, strip, in, row, rows, sums + s, ahead);
        }
        finish<T>(c, task, row, rows, sums);
      }
    }
#ifdef SKIPJOIN_TILES
    if (by_tiles) release_tiles();
#endif
  });
}

} // namespace

extern "C" {

int64_t skipjoin_groups_bytes() { return sizeof(Groups); }

int64_t skipjoin_strip_lanes() { return kLanes; }

int64_t skipjoin_strip_bytes(const Groups *groups) { return strip_bytes(*groups); }

int64_t skipjoin_grouped_scratch_bytes(int64_t rows, int64_t inputs, int64_t threads) {
  return Inputs::bytes(rows, inputs) * (rows * inputs <= kOwnInputs ? threads : 1) + 64;
}

// Packs codes [outputs][inputs], one per byte, and scales and minimums [outputs][groups] into the strips from `first`.
void skipjoin_pack_groups(const Groups *groups, const uint8_t *codes, const uint8_t *scales, const uint8_t *minimums,
                          int64_t threads) {
  const Groups &g = *groups;
  const int64_t blocks = blocks_of(g.inputs), of_scales = (g.inputs + g.group - 1) / g.group;
  skipjoin::share(threads, strips_of(g.outputs), 1, [&](int64_t s) {
    auto *strip = (uint8_t *)g.strips + s * g.strip_bytes;
    std::memset(strip, 0, g.strip_bytes);
    const int64_t first = s * kLanes, lanes = std::min<int64_t>(kLanes, g.outputs - first);
    for (int64_t b = 0; b < blocks; b++) {
      Words quads[kQuads] = {};
      auto *to = (uint8_t *)quads;
      const uint8_t *from = codes + first * g.inputs + b * kBlock;
      int64_t count = g.inputs - b * kBlock;
      if (count >= kBlock && kLanes == kQuads && lanes == kLanes) {
        for (int lane = 0; lane < kQuads; lane++) quads[lane] = load_words(from + lane * g.inputs);
        transpose(quads);
      } else if (count >= kBlock) {
        for (int64_t lane = 0; lane < lanes; lane++)
          for (int q = 0; q < kQuads; q++)
            std::memcpy(to + (q * kLanes + lane) * 4, from + lane * g.inputs + 4 * q, 4);
      } else {
        for (int64_t lane = 0; lane < lanes; lane++)
          for (int64_t i = 0; i < count; i++)
            to[(i / 4 * kLanes + lane) * 4 + i % 4] = from[lane * g.inputs + i];
      }
      Words packed[kQuads], twos[2] = {};
      for (int q = 0; q < kQuads; q++) {
        packed[q] = g.bits == 8 ? quads[q] : (quads[q] & 0x0f0f0f0fu) | (quads[(q + 4) % kQuads] & 0x0f0f0f0fu) << 4;
        twos[q / 4] |= (quads[q] >> 4 & 0x03030303u) << 2 * (q % 4);
      }
      if (g.bits == 6) packed[4] = twos[0], packed[5] = twos[1];
      std::memcpy(strip + b * block_bytes(g), packed, block_bytes(g));
    }
    auto interleave = [&](const uint8_t *from, uint8_t *to) {
      auto copy = [&](auto size) { // a constant, for which the compiler needs no calls
        for (int64_t lane = 0; lane < lanes; lane++)
          for (int64_t i = 0; i < of_scales; i++)
            std::memcpy(to + (i * kLanes + lane) * size, from + ((first + lane) * of_scales + i) * size, size);
      };
      if (g.scale_bytes == 2)
        copy(std::integral_constant<int64_t, 2>());
      else
        copy(std::integral_constant<int64_t, 4>());
    };
    interleave(scales, strip + codes_bytes(g));
    if (minimums) interleave(minimums, strip + codes_bytes(g) + scales_bytes(g));
  });
}

// Writes the weights of these outputs to [count][inputs].
void skipjoin_group_rows(int64_t type, const Groups *groups, const int64_t *outputs, int64_t count, void *out,
                         int64_t threads) {
  const Groups &g = *groups;
  const bool are_floats = g.scale_bytes == 4;
  with_type(type, [&](auto t) {
    using T = decltype(t);
    skipjoin::share(count > 16 ? threads : 1, count, 4, [&](int64_t i) {
      int64_t lane = outputs[i] % kLanes, quads = g.bits == 8 ? kQuads : kQuads / 2;
      const uint8_t *strip = g.strips + outputs[i] / kLanes * g.strip_bytes, *scales = strip + codes_bytes(g);
      float scale = 0, minimum = 0, row[kBlock];
      for (int64_t k = 0; k < g.inputs; k++) {
        int64_t b = k / kBlock, within = k % kBlock;
        if (k % g.group == 0) {
          int64_t step = k / g.group * kLanes * g.scale_bytes;
          scale = load_scales(scales + step, are_floats)[lane];
          if (g.has_minimums) minimum = load_scales(scales + scales_bytes(g) + step, are_floats)[lane];
        }
        const uint8_t *from = strip + b * block_bytes(g) + 4 * lane + within % 4;
        int quad = within / 4, half = quad / 4, code = from[quad % quads * 4 * kLanes];
        if (g.bits < 8) code = code >> 4 * half & 15;
        if (g.bits == 6) code |= (from[(4 + half) * 4 * kLanes] >> 2 * (quad % 4) & 3) << 4;
        int value = g.values ? g.values[code] : (g.bits == 8 ? (int8_t)code : code) - g.offset;
        row[within] = scale * value + minimum;
        if (within == kBlock - 1 || k == g.inputs - 1)
          for (int64_t v = 0; v <= within; v += kLanes)
            store((T *)out + i * g.inputs + b * kBlock + v, load(row + v), within + 1 - v);
      }
    });
  });
}

void skipjoin_grouped_linear(int64_t type, const Linear *call) {
  if (call->rows) with_type(type, [&](auto t) { linear<decltype(t)>(*call); });
}
}

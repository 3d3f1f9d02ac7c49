// Matrix registers (AMX) for products of bfloat16, and of integers of 8 bits. Included by the other sources.
//
// A tile is at most 16 rows of 64 bytes. One instruction multiplies [rows][32 inputs] by [16 pairs of inputs][16
// columns] and adds the product to [rows][16 columns] of floats: it sums even and odd inputs separately, adds both
// sums, and then the present value. An element's sum thus depends on its row and column only, for any number of rows.
// Denormals are flushed to zero on input and output.
//
// SKIPJOIN_PLAIN_TILES replaces the instructions by plain arithmetic, for tests on processors without them.
#pragma once

#include "products.inc.cpp"

// The two spellings of the flag; the second is that of older versions of clang.
#if (defined(__AMX_TILE__) && defined(__AMX_BF16__)) || (defined(__AMXTILE__) && defined(__AMXBF16__))
#define SKIPJOIN_AMX 1
#endif

#if defined(SKIPJOIN_BF16) && (defined(SKIPJOIN_PLAIN_TILES) || defined(SKIPJOIN_AMX))
#define SKIPJOIN_TILES 1

#include <initializer_list>

#if !defined(SKIPJOIN_PLAIN_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kTile = 16;      // rows and columns
constexpr int kTilePairs = 16; // pairs per row of a tile

// Number of rows of each tile and their bytes, in the processor's format.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  // Tiles 0 to 3 hold sums and 4 and 5 inputs, with `count` rows; 6 and 7 hold weights.
  explicit TileShapes(int count) {
    for (int i = 0; i < 8; i++) bytes[i] = 64, rows[i] = i < 6 ? count : kTile;
  }

  // For products of integers: tiles 0 to 3 hold sums, 4 and 6 inputs of which `depth` are summed, 5 and 7 weights.
  static TileShapes of_bytes(int depth) {
    TileShapes shapes(kTile);
    for (int i : {4, 6}) shapes.bytes[i] = depth;
    for (int i : {5, 7}) shapes.rows[i] = depth / 4;
    return shapes;
  }
};

#if defined(SKIPJOIN_PLAIN_TILES)

struct PlainTile {
  char rows[kTile][64];
};
thread_local PlainTile plain_tiles[8];
thread_local TileShapes plain_shapes(0);

inline bool have_tiles() { return true; }

inline void shape_tiles(const TileShapes &shapes) {
  plain_shapes = shapes;
  std::memset(plain_tiles, 0, sizeof plain_tiles);
}

inline void release_tiles() { shape_tiles(TileShapes(0)); }

inline void zero_tile(int tile) { std::memset(&plain_tiles[tile], 0, sizeof(PlainTile)); }

inline void load_tile(int tile, const void *from, int64_t pitch) {
  zero_tile(tile);
  for (int r = 0; r < plain_shapes.rows[tile]; r++)
    std::memcpy(plain_tiles[tile].rows[r], (const char *)from + r * pitch, plain_shapes.bytes[tile]);
}

inline void store_tile(int tile, void *to, int64_t pitch) {
  for (int r = 0; r < plain_shapes.rows[tile]; r++)
    std::memcpy((char *)to + r * pitch, plain_tiles[tile].rows[r], plain_shapes.bytes[tile]);
}

// Not inlined, so that the compiler moves no arithmetic to code with another denormal mode.
__attribute__((noinline)) void add_plain_products(PlainTile &to, const PlainTile &inputs, const PlainTile &columns) {
  for (int r = 0; r < kTile; r++) {
    Floats even{}, odd{}, sums;
    for (int k = 0; k < kTilePairs; k++) {
      Pair input;
      Words weights;
      std::memcpy(&input, inputs.rows[r] + 4 * k, 4);
      std::memcpy(&weights, columns.rows[k], 64);
      even = fma((Floats)splat(input << 16), (Floats)(weights << 16), even);
      odd = fma((Floats)splat(input & 0xffff0000u), (Floats)(weights & 0xffff0000u), odd);
    }
    std::memcpy(&sums, to.rows[r], 64);
    sums += even + odd;
    std::memcpy(to.rows[r], &sums, 64);
  }
}

inline void multiply_tiles(int to, int inputs, int columns) {
  constexpr unsigned kNoDenormals = 0x8040; // flush to zero on input and output
  unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | kNoDenormals);
  add_plain_products(plain_tiles[to], plain_tiles[inputs], plain_tiles[columns]);
  _mm_setcsr(mode);
}

// [rows][inputs] times [inputs / 4][columns][4], signed, added to [rows][columns].
inline void multiply_bytes(int to, int inputs, int columns) {
  for (int r = 0; r < plain_shapes.rows[inputs]; r++)
    for (int k = 0; k < plain_shapes.bytes[inputs]; k++) {
      Ints sums;
      std::memcpy(&sums, plain_tiles[to].rows[r], 64);
      for (int c = 0; c < kTile; c++)
        sums[c] += (int8_t)plain_tiles[inputs].rows[r][k] * (int8_t)plain_tiles[columns].rows[k / 4][4 * c + k % 4];
      std::memcpy(plain_tiles[to].rows[r], &sums, 64);
    }
}

#define SKIPJOIN_MULTIPLY_BYTES multiply_bytes
#define SKIPJOIN_ZERO_TILE zero_tile
#define SKIPJOIN_LOAD_TILE load_tile
#define SKIPJOIN_STORE_TILE store_tile
#define SKIPJOIN_MULTIPLY_TILES multiply_tiles

#else

// Returns whether this process may use tiles. Asks the kernel once, which may refuse; the answer holds for all threads.
inline bool have_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

// Written as inline assembly, because GCC believes that its intrinsics read no memory (`_tile_loadd`) or too little of
// it (`_tile_loadconfig`), so that it may omit earlier writes.
inline void shape_tiles(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

// Other libraries of the process have tile shapes of their own.
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

// Tile numbers are part of the instruction, so they come from a macro instead of a template.
#define SKIPJOIN_ZERO_TILE(tile) asm volatile("tilezero %%tmm" #tile ::)
#define SKIPJOIN_LOAD_TILE(tile, from, pitch)                                                                         \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void *)(from)), "r"((int64_t)(pitch)) : "memory")
#define SKIPJOIN_STORE_TILE(tile, to, pitch)                                                                          \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(pitch)) : "memory")
#define SKIPJOIN_MULTIPLY_TILES(sums, inputs, weights)                                                                \
  asm volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #inputs ", %%tmm" #sums ::)
#define SKIPJOIN_MULTIPLY_BYTES(sums, inputs, weights)                                                                \
  asm volatile("tdpbssd %%tmm" #weights ", %%tmm" #inputs ", %%tmm" #sums ::)

#endif

// Adds the product of one or two (PAIR) tiles of inputs, with rows `pitch` bytes apart, and `steps` tiles of a panel to
// sums[2 * kTile][kPanel]. inputs, others: first rows of the tiles. ahead: weights to prefetch, `lines` cache lines per
// step.
template <bool PAIR>
inline void add_tiles(const void *inputs, const void *others, int64_t pitch, const Pair *weights, int64_t steps,
                      bool is_first, float *sums, const char *ahead = nullptr, int64_t lines = 0) {
  static_assert(kVectors == 2 && kLanes == kTile);
  constexpr int64_t row = 4 * kPanel;
  float *below = sums + kTile * kPanel;
  if (is_first) {
    SKIPJOIN_ZERO_TILE(0);
    SKIPJOIN_ZERO_TILE(1);
    if constexpr (PAIR) {
      SKIPJOIN_ZERO_TILE(2);
      SKIPJOIN_ZERO_TILE(3);
    }
  } else {
    SKIPJOIN_LOAD_TILE(0, sums, row);
    SKIPJOIN_LOAD_TILE(1, sums + kTile, row);
    if constexpr (PAIR) {
      SKIPJOIN_LOAD_TILE(2, below, row);
      SKIPJOIN_LOAD_TILE(3, below + kTile, row);
    }
  }
  for (int64_t s = 0; s < steps; s++, ahead += 64 * lines) {
    const Pair *at = weights + s * kTilePairs * kPanel;
    for (int64_t i = 0; i < lines; i++) __builtin_prefetch(ahead + 64 * i, 0, 2);
    SKIPJOIN_LOAD_TILE(4, (const Pair *)inputs + s * kTilePairs, pitch);
    SKIPJOIN_LOAD_TILE(6, at, row);
    SKIPJOIN_MULTIPLY_TILES(0, 4, 6);
    SKIPJOIN_LOAD_TILE(7, at + kTile, row);
    SKIPJOIN_MULTIPLY_TILES(1, 4, 7);
    if constexpr (PAIR) {
      SKIPJOIN_LOAD_TILE(5, (const Pair *)others + s * kTilePairs, pitch);
      SKIPJOIN_MULTIPLY_TILES(2, 5, 6);
      SKIPJOIN_MULTIPLY_TILES(3, 5, 7);
    }
  }
  SKIPJOIN_STORE_TILE(0, sums, row);
  SKIPJOIN_STORE_TILE(1, sums + kTile, row);
  if constexpr (PAIR) {
    SKIPJOIN_STORE_TILE(2, below, row);
    SKIPJOIN_STORE_TILE(3, below + kTile, row);
  }
}

} // namespace

#else

namespace {
constexpr int kTilePairs = 1;
inline bool have_tiles() { return false; }
} // namespace

#endif

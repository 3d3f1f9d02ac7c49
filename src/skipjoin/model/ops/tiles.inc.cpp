// Matrix registers (AMX) for products of bfloat16. Included by the other sources.
//
// A tile is at most 16 rows of 64 bytes. One instruction multiplies [rows][32 inputs] by [16 pairs of inputs][16 columns]
// and adds to [rows][16 columns] of floats: the sums of even and of odd inputs apart, then together, then to what was
// there. So an element's sum depends on its row and column alone, for any number of rows.
//
// SKIPJOIN_PLAIN_TILES puts plain arithmetic in place of the instructions: for tests on processors without them.
#pragma once

#include "products.inc.cpp"

#if defined(SKIPJOIN_BF16) && (defined(SKIPJOIN_PLAIN_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__)))
#define SKIPJOIN_TILES 1

#if !defined(SKIPJOIN_PLAIN_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kTile = 16;      // rows, and columns
constexpr int kTilePairs = 16; // in a row of a tile

#if defined(SKIPJOIN_PLAIN_TILES)

struct PlainTile {
  char rows[kTile][64];
};
thread_local PlainTile plain_tiles[8];
thread_local int plain_rows[8];

inline bool have_tiles() { return true; }

// Tiles 0 to 3 have sums and 4 and 5 inputs, of `rows` rows; 6 and 7 have weights.
inline void shape_tiles(int rows) {
  for (int i = 0; i < 8; i++) plain_rows[i] = i < 6 ? rows : kTile;
}

inline void release_tiles() {}

inline void zero_tile(int tile) { std::memset(&plain_tiles[tile], 0, sizeof(PlainTile)); }

inline void load_tile(int tile, const void *from, int64_t pitch) {
  for (int r = 0; r < plain_rows[tile]; r++) std::memcpy(plain_tiles[tile].rows[r], (const char *)from + r * pitch, 64);
}

inline void store_tile(int tile, void *to, int64_t pitch) {
  for (int r = 0; r < plain_rows[tile]; r++) std::memcpy((char *)to + r * pitch, plain_tiles[tile].rows[r], 64);
}

inline void multiply_tiles(int to, int inputs, int columns) {
  for (int r = 0; r < plain_rows[to]; r++) {
    Floats even{}, odd{}, sums;
    for (int k = 0; k < kTilePairs; k++) {
      Pair input;
      Words weights;
      std::memcpy(&input, plain_tiles[inputs].rows[r] + 4 * k, 4);
      std::memcpy(&weights, plain_tiles[columns].rows[k], 64);
      even = fma((Floats)splat(input << 16), (Floats)(weights << 16), even);
      odd = fma((Floats)splat(input & 0xffff0000u), (Floats)(weights & 0xffff0000u), odd);
    }
    std::memcpy(&sums, plain_tiles[to].rows[r], 64);
    sums += even + odd;
    std::memcpy(plain_tiles[to].rows[r], &sums, 64);
  }
}

#define SKIPJOIN_ZERO_TILE zero_tile
#define SKIPJOIN_LOAD_TILE load_tile
#define SKIPJOIN_STORE_TILE store_tile
#define SKIPJOIN_MULTIPLY_TILES multiply_tiles

#else

// Whether this process may use tiles: asks the kernel, once; it may refuse. Holds for all threads.
inline bool have_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void shape_tiles(int rows) {
  TileShapes shapes;
  for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = i < 6 ? rows : kTile; // as above
  // The compiler's intrinsic reads only eight bytes as far as some optimisers know.
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}

// Other libraries of the process have shapes of their own.
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

// Numbers of tiles are part of the instruction: a compiler takes them from a macro, not from a template.
#define SKIPJOIN_ZERO_TILE(tile) _tile_zero(tile)
#define SKIPJOIN_LOAD_TILE(tile, from, pitch) _tile_loadd(tile, from, pitch)
#define SKIPJOIN_STORE_TILE(tile, to, pitch) _tile_stored(tile, to, pitch)
#define SKIPJOIN_MULTIPLY_TILES(sums, inputs, weights) _tile_dpbf16ps(sums, inputs, weights)

#endif

} // namespace

#else

namespace {
constexpr int kTilePairs = 1;
inline bool have_tiles() { return false; }
} // namespace

#endif

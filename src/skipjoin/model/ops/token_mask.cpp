// Removes tokens from rows of logits.
#include "pool.inc.cpp"
#include "simd.inc.cpp"

#include <cmath>

namespace {

constexpr int kBits = 32; // tokens per word of a mask

void remove_tokens(float *logits, int64_t vocab, const uint32_t *mask) {
  const Words lanes = (Words)lane_numbers();
  const Floats removed = splat(-INFINITY);
  int64_t words = vocab / kBits;
  for (int64_t word = 0; word < words; word++, logits += kBits) {
    uint32_t bits = mask[word];
    if (bits == ~0u) continue;
    for (int i = 0; i < kBits; i += kLanes) {
      // Most words of a mask are empty, and their logits need not be read.
      Floats kept = removed;
      if (bits) kept = (((bits + Words{}) >> (lanes + (uint32_t)i)) & 1u) != 0u ? load(logits + i) : removed;
      std::memcpy(logits + i, &kept, sizeof kept);
    }
  }
  for (int64_t i = 0; i < vocab % kBits; i++)
    if (!(mask[words] >> i & 1)) logits[i] = -INFINITY;
}

} // namespace

// Sets the logits of tokens outside mask i to -inf in row rows[i], for all i < count. A mask has `words` words, whose
// bits are the allowed tokens.
extern "C" void skipjoin_remove_tokens(float *logits, int64_t vocab, const int64_t *rows, const uint32_t *masks,
                                       int64_t words, int64_t count, int64_t threads) {
  skipjoin::share(threads, count, 1, [&](int64_t i) { remove_tokens(logits + rows[i] * vocab, vocab, masks + i * words); });
}

// Removes tokens from rows of logits, and finds the best of those that remain.
#include "outputs.inc.cpp"
#include "pool.inc.cpp"

#include <cmath>

namespace {

constexpr int kBits = 32; // tokens per word of a mask
constexpr int64_t kBlock = 64; // words that are searched again for the largest logit

// Returns the logits of the tokens i to i + kLanes of a word, with -inf for those whose bits are not set.
SKIPJOIN_INLINE Floats kept_of(const float *logits, uint32_t bits, int i) {
  const Words lanes = (Words)lane_numbers();
  return (((bits + Words{}) >> (lanes + (uint32_t)i)) & 1u) != 0u ? load(logits + i) : splat(-INFINITY);
}

void remove_tokens(float *logits, int64_t vocab, const uint32_t *mask) {
  const Floats removed = splat(-INFINITY);
  int64_t words = vocab / kBits;
  for (int64_t word = 0; word < words; word++, logits += kBits) {
    uint32_t bits = mask[word];
    if (bits == ~0u) continue;
    for (int i = 0; i < kBits; i += kLanes) {
      // Most words of a mask are empty, and their logits need not be read.
      Floats kept = removed;
      if (bits) kept = kept_of(logits, bits, i);
      std::memcpy(logits + i, &kept, sizeof kept);
    }
  }
  for (int64_t i = 0; i < vocab % kBits; i++)
    if (!(mask[words] >> i & 1)) logits[i] = -INFINITY;
}

// Returns the first token of a mask, from word `from`, whose logit is `value`, or the first of all if that is -inf.
int64_t first_with(float value, const float *logits, int64_t vocab, const uint32_t *mask, int64_t from) {
  for (int64_t word = from; word * kBits < vocab; word++)
    for (uint32_t bits = mask[word]; bits; bits &= bits - 1) {
      const int64_t token = word * kBits + __builtin_ctz(bits);
      if (token < vocab && (value == -INFINITY || logits[token] == value)) return token;
    }
  return 0;
}

// Returns the first token of a mask with the largest logit. Reads only logits of words that have a bit.
int64_t best_allowed(const float *logits, int64_t vocab, const uint32_t *mask) {
  const int64_t words = vocab / kBits;
  float best = -INFINITY;
  int64_t from = 0;
  for (int64_t block = 0; block < words; block += kBlock) {
    Floats top = splat(-INFINITY);
    for (int64_t word = block; word < std::min(block + kBlock, words); word++)
      if (mask[word])
        for (int i = 0; i < kBits; i += kLanes) top = larger(kept_of(logits + word * kBits, mask[word], i), top);
    const float value = largest(top);
    if (value > best) best = value, from = block;
  }
  for (int64_t i = words * kBits; i < vocab; i++)
    if (mask[words] >> i % kBits & 1 && logits[i] > best) best = logits[i], from = words;
  return first_with(best, logits, vocab, mask, from);
}

// Returns the first token with the largest logit.
template <typename T> int64_t best_of(const T *logits, int64_t vocab) {
  constexpr int64_t block = kBlock * kBits;
  float best = -INFINITY;
  int64_t from = 0;
  for (int64_t at = 0; at < vocab; at += block) {
    const int64_t count = std::min(block, vocab - at), whole = count / kLanes * kLanes;
    Floats top = splat(-INFINITY);
    for (int64_t i = 0; i < whole; i += kLanes) top = larger(load(logits + at + i), top);
    float value = largest(top);
    for (int64_t i = whole; i < count; i++) value = std::max(value, load(logits + at + i, 1)[0]);
    if (value > best) best = value, from = at;
  }
  if (best == -INFINITY) return 0;
  while (load(logits + from, std::min<int64_t>(vocab - from, kLanes))[0] != best) from++;
  return from;
}

} // namespace

// Sets the logits of tokens outside mask i to -inf in row rows[i], for all i < count. A mask has `words` words, whose
// bits are the allowed tokens.
extern "C" void skipjoin_remove_tokens(float *logits, int64_t vocab, const int64_t *rows, const uint32_t *masks,
                                       int64_t words, int64_t count, int64_t threads) {
  skipjoin::share(threads, count, 1, [&](int64_t i) { remove_tokens(logits + rows[i] * vocab, vocab, masks + i * words); });
}

// Writes to best[i] the first token of mask i with the largest logit in row rows[i]. NaN is never the largest.
extern "C" void skipjoin_best_allowed(const float *logits, int64_t vocab, const int64_t *rows, const uint32_t *masks,
                                      int64_t words, int64_t count, int64_t *best, int64_t threads) {
  skipjoin::share(threads, count, 1, [&](int64_t i) { best[i] = best_allowed(logits + rows[i] * vocab, vocab, masks + i * words); });
}

// Writes the first token with the largest logit of each of `count` contiguous rows. NaN is never the largest. type: see
// `Type`.
extern "C" void skipjoin_best_tokens(int64_t type, const void *logits, int64_t vocab, int64_t count, int64_t *best,
                                     int64_t threads) {
  with_type(type, [&](auto t) {
    auto *rows = (const decltype(t) *)logits;
    skipjoin::share(threads, count, 1, [&](int64_t i) { best[i] = best_of(rows + i * vocab, vocab); });
  });
}

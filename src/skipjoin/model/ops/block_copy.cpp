// Copies KV blocks between two pools, bypassing the caches.
#include <cstring>

#include "stream.inc.cpp"

extern "C" {

// Copies block source[i] of `from` to block target[i] of `to`, for all i < count. Blocks that are consecutive on both
// sides are copied at once.
void skipjoin_copy_blocks(char *to, const char *from, int64_t block_bytes, const int64_t *target,
                          const int64_t *source, int64_t count) {
  for (int64_t i = 0, next; i < count; i = next) {
    for (next = i + 1; next < count; next++)
      if (source[next] != source[i] + next - i || target[next] != target[i] + next - i) break;
    copy_bytes(to + target[i] * block_bytes, from + source[i] * block_bytes, (next - i) * block_bytes);
  }
  end_copies();
}

// Copies slots first[i] to first[i] + slots[i] of block source[i] to the same slots of block target[i], for all i <
// count and all `heads` heads. A block has `size` slots of slot_bytes per head, head after head.
void skipjoin_copy_spans(char *to, const char *from, int64_t heads, int64_t size, int64_t slot_bytes,
                         const int64_t *target, const int64_t *source, const int64_t *first, const int64_t *slots,
                         int64_t count) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t head = 0; head < heads; head++) {
      char *there = to + ((target[i] * heads + head) * size + first[i]) * slot_bytes;
      std::memcpy(there, from + ((source[i] * heads + head) * size + first[i]) * slot_bytes, slots[i] * slot_bytes);
    }
}
}

// Copies KV blocks between two pools, past the caches.
#include "stream.inc.cpp"

extern "C" {

// Block source[i] of `from` to block target[i] of `to`, for all i < count. Consecutive blocks on both sides are one
// copy.
void skipjoin_copy_blocks(char *to, const char *from, int64_t block_bytes, const int64_t *target,
                          const int64_t *source, int64_t count) {
  for (int64_t i = 0, next; i < count; i = next) {
    for (next = i + 1; next < count; next++)
      if (source[next] != source[i] + next - i || target[next] != target[i] + next - i) break;
    copy_bytes(to + target[i] * block_bytes, from + source[i] * block_bytes, (next - i) * block_bytes);
  }
  // Streaming stores are unordered: a thread that learns that the copy is done must see all of it.
  _mm_sfence();
}
}

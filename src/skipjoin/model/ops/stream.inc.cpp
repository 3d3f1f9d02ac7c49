// Copies bytes past the caches: streaming stores write whole lines without reading them, and the weights and KV that
// the model reads meanwhile stay cached. Included by the sources that move KV.
#pragma once

#include "simd.inc.cpp"

#include <algorithm>

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;
constexpr int kStreams = 4; // pages copied in turn: a single one leaves memory idle between its lines
constexpr int kLines = 4;   // lines of a page per turn

template <int STREAMS> inline void stream(char *to, const char *from, int64_t step) {
  __m512i lines[kLines];
#pragma GCC unroll 4
  for (int s = 0; s < STREAMS; s++) {
    for (int i = 0; i < kLines; i++) lines[i] = _mm512_loadu_si512(from + s * step + i * kLine);
    for (int i = 0; i < kLines; i++) _mm512_stream_si512((__m512i *)(to + s * step + i * kLine), lines[i]);
  }
}

void copy_bytes(char *to, const char *from, int64_t bytes) {
  // Streaming stores need whole lines.
  int64_t head = std::min<int64_t>(-(intptr_t)to & (kLine - 1), bytes);
  std::memcpy(to, from, head);
  int64_t at = head;
  for (; at + kStreams * kPage <= bytes; at += kStreams * kPage)
    for (int64_t i = at; i < at + kPage; i += kLines * kLine) stream<kStreams>(to + i, from + i, kPage);
  for (; at + kLines * kLine <= bytes; at += kLines * kLine) stream<1>(to + at, from + at, 0);
  std::memcpy(to + at, from + at, bytes - at);
}

} // namespace

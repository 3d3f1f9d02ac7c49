// Copies bytes bypassing the caches: streaming stores write whole lines without reading them, and the weights and KV
// that the model uses meanwhile stay cached. Other processors than x86 copy plainly. Included by the sources that move
// KV.
#pragma once

#include "simd.inc.cpp"

#include <algorithm>

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;
constexpr int kStreams = 4; // pages copied alternately; a single one leaves memory idle between its lines
constexpr int kLines = 4;   // lines of a page per turn

#if defined(SKIPJOIN_AVX512) || defined(SKIPJOIN_AVX2)

#if defined(SKIPJOIN_AVX512)
using Piece = __m512i;
inline Piece load_piece(const char *from) { return _mm512_loadu_si512(from); }
inline void stream_piece(char *to, Piece piece) { _mm512_stream_si512((Piece *)to, piece); }
#else
using Piece = __m256i;
inline Piece load_piece(const char *from) { return _mm256_loadu_si256((const Piece *)from); }
inline void stream_piece(char *to, Piece piece) { _mm256_stream_si256((Piece *)to, piece); }
#endif

template <int STREAMS> inline void stream(char *to, const char *from, int64_t step) {
  constexpr int count = kLines * kLine / sizeof(Piece);
  Piece pieces[count];
#pragma GCC unroll 4
  for (int s = 0; s < STREAMS; s++) {
    for (int i = 0; i < count; i++) pieces[i] = load_piece(from + s * step + i * sizeof(Piece));
    for (int i = 0; i < count; i++) stream_piece(to + s * step + i * sizeof(Piece), pieces[i]);
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

// Streaming stores are unordered, so a fence makes them visible to threads that learn of the copy's completion.
inline void end_copies() { _mm_sfence(); }

#else

inline void copy_bytes(char *to, const char *from, int64_t bytes) { std::memcpy(to, from, bytes); }

inline void end_copies() {}

#endif

} // namespace

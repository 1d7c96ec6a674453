#include "blake2b.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace triptych {
namespace {

constexpr size_t kBlockBytes = 128;
constexpr int kRounds = 12;

constexpr uint64_t kInitial[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                  0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                  0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr uint8_t kSigma[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

inline uint64_t RotateRight(uint64_t x, int bits) { return (x >> bits) | (x << (64 - bits)); }

inline void Mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x;
  d = RotateRight(d ^ a, 32);
  c += d;
  b = RotateRight(b ^ c, 24);
  a += b + y;
  d = RotateRight(d ^ a, 16);
  c += d;
  b = RotateRight(b ^ c, 63);
}

// A template, so that the compiler knows which words meet: three times as fast as a look-up.
template <int kRound>
inline void MixRound(uint64_t (&v)[16], const uint64_t (&m)[16]) {
  constexpr const uint8_t (&s)[16] = kSigma[kRound % 10];
  Mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
  Mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
  Mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
  Mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
  Mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
  Mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
  Mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
  Mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

template <int... kRound>
inline void MixRounds(uint64_t (&v)[16], const uint64_t (&m)[16],
                      std::integer_sequence<int, kRound...>) {
  (MixRound<kRound>(v, m), ...);
}

// `hashed`: bytes of the text up to the end of this block.
void Compress(uint64_t (&state)[8], const uint8_t* block, uint64_t hashed, bool last) {
  uint64_t m[16];
  std::memcpy(m, block, sizeof(m));  // little-endian machines only, as the step layout
  uint64_t v[16];
  std::copy(state, state + 8, v);
  std::copy(kInitial, kInitial + 8, v + 8);
  v[12] ^= hashed;
  if (last) v[14] = ~v[14];
  MixRounds(v, m, std::make_integer_sequence<int, kRounds>());
  for (int i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

Digest Blake2b128(const void* first, size_t first_bytes, const void* second, size_t second_bytes) {
  uint64_t state[8];
  std::copy(kInitial, kInitial + 8, state);
  state[0] ^= 0x01010000 ^ kDigestBytes;  // parameter block: fanout 1, depth 1, no key

  const auto* parts = static_cast<const uint8_t*>(first);
  const auto* rest = static_cast<const uint8_t*>(second);
  const size_t total = first_bytes + second_bytes;
  for (size_t at = 0;;) {
    const size_t size = std::min(kBlockBytes, total - at);
    uint8_t block[kBlockBytes] = {};
    const size_t of_first = at < first_bytes ? std::min(size, first_bytes - at) : 0;
    if (of_first > 0) std::memcpy(block, parts + at, of_first);
    if (size > of_first) {
      std::memcpy(block + of_first, rest + (at + of_first - first_bytes), size - of_first);
    }
    at += size;
    Compress(state, block, at, at == total);
    if (at == total) break;
  }
  Digest digest;
  std::memcpy(digest.data(), state, kDigestBytes);
  return digest;
}

}  // namespace triptych

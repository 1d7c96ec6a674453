// What matmul_int8_tile.h is written in besides matmul_lanes_avx2.h, which comes first.
namespace triptych {
namespace {

constexpr int kByteOffset = 0;  // what is added to 8-bit codes: they stay signed
constexpr int direct_byte_rows(int /*bits*/) { return 2; }
constexpr int wide_byte_rows(int bits) { return bits == 4 ? 4 : 2; }
constexpr int byte_chains_of_row(int /*rows*/) { return 1; }

using Bytes = Words;   // four of each row
using Quad = __m256i;  // four activation codes, the same for all rows

TRIPTYCH_INLINE Bytes with_byte_offset(Bytes codes) { return codes; }

TRIPTYCH_INLINE Quad broadcast_quad(const int8_t* from) {
  int32_t quad;
  __builtin_memcpy(&quad, from, sizeof quad);
  return _mm256_set1_epi32(quad);
}

TRIPTYCH_INLINE __m256i byte_nibble(__m256i words, int index) {
  return _mm256_and_si256(index == 0 ? words : _mm256_srli_epi16(words, 4), _mm256_set1_epi8(15));
}
// The low (0) or high (1) nibble of each byte.
TRIPTYCH_INLINE Bytes byte_nibble(Words words, int index) {
  return {byte_nibble(words.low, index), byte_nibble(words.high, index)};
}

// `words` shifted so that bit `from` is bit `to`.
TRIPTYCH_INLINE __m256i move_bit(__m256i words, int from, int to) {
  return from < to ? _mm256_slli_epi16(words, to - from) : _mm256_srli_epi16(words, from - to);
}
TRIPTYCH_INLINE __m256i with_fifth_bits(__m256i codes, __m256i plane, int pair) {
  const __m256i low = _mm256_and_si256(move_bit(plane, pair, 4), _mm256_set1_epi16(16));
  const __m256i high = _mm256_and_si256(move_bit(plane, pair + 2, 12), _mm256_set1_epi16(4096));
  return _mm256_or_si256(codes, _mm256_or_si256(low, high));
}
// `codes` with bit `pair` of `plane` as the fifth of each word's low byte, and bit pair + 2 as that
// of the high one.
TRIPTYCH_INLINE Bytes with_fifth_bits(Bytes codes, Words plane, int pair) {
  return {with_fifth_bits(codes.low, plane.low, pair),
          with_fifth_bits(codes.high, plane.high, pair)};
}

// 8-bit codes of four pairs of columns -> two quads: of pairs 0 and 2, of pairs 1 and 3.
TRIPTYCH_INLINE void quads_of_bytes(const uint8_t* from, Bytes to[2]) {
  for (int i = 0; i < 2; ++i, from += 32) {
    // unpack works in 128-bit lanes; 0xD8 puts the quarters so that the rows come out in order.
    const __m256i even = _mm256_permute4x64_epi64(load256(from), 0xD8);
    const __m256i odd = _mm256_permute4x64_epi64(load256(from + 64), 0xD8);
    to[i] = {_mm256_unpacklo_epi8(even, odd), _mm256_unpackhi_epi8(even, odd)};
  }
}

TRIPTYCH_INLINE __m256i multiply_pairs(__m256i codes, Quad quad, int bits) {
  // Unsigned bytes by signed ones; the sum of two products saturates unless one side is small:
  // 8-bit codes, at most 128 in magnitude, give their signs away.
  if (bits == 8) return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(quad, codes));
  return _mm256_maddubs_epi16(codes, quad);
}

// Sums of products of a row, by lanes; pairs of products are added in 16 bits while they fit.
template <int kBits>
struct ByteSums {
  static constexpr int kNarrow = kBits == 4 ? 8 : kBits == 5 ? 4 : 1;  // 8 * 2 * 15 * 127 < 2^15
  Sums sums;
  Words narrow;

  TRIPTYCH_INLINE void start(int32_t value) { sums = all_sums(value); }
  // The `index`th addition since the start, of a multiple of kNarrow.
  TRIPTYCH_INLINE void add(Bytes codes, Quad quad, int index) {
    const Words products{multiply_pairs(codes.low, quad, kBits),
                         multiply_pairs(codes.high, quad, kBits)};
    if (index % kNarrow == 0)
      narrow = products;
    else
      narrow = {_mm256_add_epi16(narrow.low, products.low),
                _mm256_add_epi16(narrow.high, products.high)};
    asm("" : "+x"(narrow.low), "+x"(narrow.high));  // keeps the order of additions, see dot()
    if (index % kNarrow == kNarrow - 1) {
      const Pair ones = _mm256_set1_epi16(1);
      sums = dot(sums, narrow, ones);
    }
  }
  TRIPTYCH_INLINE Sums total() const { return sums; }
};

// Codes of x * factor (all 0 unless `finite`), rounded to even, in the order of byte_column; the
// sums of both halves.
TRIPTYCH_INLINE void store_byte_codes(const float* x, float factor, bool finite, int8_t* codes,
                                      int32_t sums[2]) {
  const __m256 factors = _mm256_set1_ps(factor);
  const __m256i kept = _mm256_set1_epi32(finite ? -1 : 0);
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  for (int half = 0; half < 2; ++half, x += 16, codes += 16) {
    const __m256i low =
        _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), factors)), kept);
    const __m256i high =
        _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), factors)), kept);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm_shuffle_epi8(bytes, order));
    sums[half] = total(_mm256_add_epi32(low, high));
  }
}

}  // namespace
}  // namespace triptych

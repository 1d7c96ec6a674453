// What matmul_int8_tile.h is written in besides matmul_lanes_avx512.h, which comes first.
namespace triptych {
namespace {

using Bytes = __m512i;  // four of each row
using Quad = __m512i;   // four activation codes, the same for all rows

TRIPTYCH_INLINE Quad broadcast_quad(const int8_t* from) {
  int32_t quad;
  __builtin_memcpy(&quad, from, sizeof quad);
  return _mm512_set1_epi32(quad);
}

// The low (0) or high (1) nibble of each byte.
TRIPTYCH_INLINE Bytes byte_nibble(Words words, int index) {
  const Words kept = _mm512_set1_epi8(15);
  return _mm512_and_si512(index == 0 ? words : _mm512_srli_epi16(words, 4), kept);
}

// `words` shifted so that bit `from` is bit `to`.
TRIPTYCH_INLINE Words move_bit(Words words, int from, int to) {
  return from < to ? _mm512_slli_epi16(words, static_cast<unsigned>(to - from))
                   : _mm512_srli_epi16(words, static_cast<unsigned>(from - to));
}

// `codes` with bit `pair` of `plane` as the fifth of each word's low byte, and bit pair + 2 as that
// of the high one.
TRIPTYCH_INLINE Bytes with_fifth_bits(Bytes codes, Words plane, int pair) {
  constexpr int kOrAnd = 0xF8;  // a | (b & c)
  codes = _mm512_ternarylogic_epi32(codes, move_bit(plane, pair, 4), _mm512_set1_epi16(16), kOrAnd);
  return _mm512_ternarylogic_epi32(codes, move_bit(plane, pair + 2, 12), _mm512_set1_epi16(4096),
                                   kOrAnd);
}

// 8-bit codes of four pairs of columns -> two quads: of pairs 0 and 2, of pairs 1 and 3.
TRIPTYCH_INLINE void quads_of_bytes(const uint8_t* from, Bytes to[2]) {
  const Words order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3,
                                        7);  // unpack works in 128-bit lanes
  const Words even = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from));
  const Words odd = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + 64));
  to[0] = _mm512_unpacklo_epi8(even, odd);
  to[1] = _mm512_unpackhi_epi8(even, odd);
}

// Codes of x * factor (all 0 unless `finite`), rounded to even, in the order of byte_column; the
// sums of both halves.
TRIPTYCH_INLINE void store_byte_codes(const float* x, float factor, bool finite, int8_t* codes,
                                      int32_t sums[2]) {
  const __mmask16 kept = finite ? 0xFFFF : 0;
  const __m512 factors = _mm512_set1_ps(factor);
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  for (int half = 0; half < 2; ++half) {
    const __m512i wide =
        _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(_mm512_loadu_ps(x + 16 * half), factors));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16 * half),
                     _mm_shuffle_epi8(_mm512_cvtepi32_epi8(wide), order));
    sums[half] = _mm512_reduce_add_epi32(wide);
  }
}

}  // namespace
}  // namespace triptych

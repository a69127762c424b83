/* Vectors of 16 integers of 32 bits on AVX-512 with VNNI; see integers_portable.h. */
typedef __m512i i16;

INLINE i16 i_set1(int32_t a) { return _mm512_set1_epi32(a); }
INLINE i16 i_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE i16 i_low(i16 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE i16 i_high(i16 a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
INLINE i16 i_with_bit(i16 a, const uint8_t *bits, int bit) {
    uint64_t mask;
    memcpy(&mask, bits, sizeof mask);
    return _mm512_mask_add_epi8(a, _cvtu64_mask64(mask), a, _mm512_set1_epi8((char)bit));
}
INLINE i16 i_load_bytes(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE i16 i_load_signed_bytes(const uint8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE v16 v_from_i(i16 a) { return _mm512_cvtepi32_ps(a); }
/* In assembly, since a compiler copies the sums of the intrinsic twice in every step, and runs out of registers. */
INLINE i16 i_dot(const int BITS, i16 sum, i16 codes, i16 x) {
    (void)BITS;
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    return sum;
}
INLINE i16 i_add_product(i16 sum, i16 a, i16 b) { return _mm512_dpwssd_epi32(sum, a, b); }
INLINE v16 v_load_f16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE int32_t i_largest_magnitude(v16 a, v16 b) {
    __m512i mask = _mm512_set1_epi32(0x7FFFFFFF);
    return _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), mask),
                                                    _mm512_and_si512(_mm512_castps_si512(b), mask)));
}
INLINE float v_total_of_integers(v16 a) { return _mm512_reduce_add_ps(a); }
INLINE void i_store_codes(int8_t *p, v16 shifted) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_castps_si512(shifted)));
}

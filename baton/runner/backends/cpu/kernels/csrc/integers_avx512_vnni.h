/* Vectors of 16 integers of 32 bits on AVX-512 with VNNI; see integers_portable.h. */
typedef __m512i i16;

INLINE i16 i_set1(int32_t a) { return _mm512_set1_epi32(a); }
INLINE i16 i_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE i16 i_low(i16 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE i16 i_high(i16 a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
INLINE i16 i_load_further(const int BITS, const uint8_t *p) {
    if (BITS == 5) return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
}
/* The bits are rotated to the place above the fourth; what comes from another byte is masked out. */
INLINE i16 i_with_further(const int BITS, const int PANEL, i16 codes, i16 further) {
    const int more = BITS - 4, first = 4 - 4 * PANEL, second = first - 1, half = first - 2;
    const __m128i a = _mm_set1_epi32(first), b = _mm_set1_epi32(more == 1 ? second : first);
    const __m128i c = _mm_set1_epi32(half), d = _mm_set1_epi32(more == 1 ? half - 1 : half);
    const __m512i counts = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(b, a)), _mm256_set_m128i(d, c), 1);
    const __m512i mask = _mm512_set1_epi8((char)(more == 1 ? 0x10 : 0x30));
    return _mm512_ternarylogic_epi32(codes, _mm512_rolv_epi32(further, counts), mask, 0xF8);
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

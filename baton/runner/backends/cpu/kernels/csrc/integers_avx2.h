/* Vectors of 16 integers of 32 bits on AVX2 with F16C, in two registers each; see integers_portable.h. AVX_VNNI: whether products
 * are computed by vpdpbusd of AVX-VNNI. */
typedef struct {
    __m256i a, b;
} i16;

#define EACH(x, y) ((i16){(x), (y)})
INLINE i16 i_set1(int32_t a) { return EACH(_mm256_set1_epi32(a), _mm256_set1_epi32(a)); }
INLINE i16 i_load(const uint8_t *p) {
    return EACH(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32)));
}
INLINE i16 i_low(i16 x) { return EACH(_mm256_and_si256(x.a, _mm256_set1_epi8(15)), _mm256_and_si256(x.b, _mm256_set1_epi8(15))); }
INLINE i16 i_high(i16 x) { return i_low(EACH(_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4))); }
INLINE i16 i_load_further(const int BITS, const uint8_t *p) {
    const __m256i all = BITS == 5 ? _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p))
                                  : _mm256_loadu_si256((const __m256i *)p);
    return EACH(all, all);
}
/* The bits are shifted to the place above the fourth, by `low` in the lower half and `high` in the upper one: to the left in the
 * first panel, and to the right in the second. What comes from another byte is masked out. */
INLINE __m256i with_further_8(const int MORE, const int PANEL, __m256i codes, __m256i further, int low, int high) {
    const __m256i counts = _mm256_set_m128i(_mm_set1_epi32(high), _mm_set1_epi32(low));
    const __m256i moved = PANEL == 0 ? _mm256_sllv_epi32(further, counts) : _mm256_srlv_epi32(further, counts);
    return _mm256_or_si256(codes, _mm256_and_si256(moved, _mm256_set1_epi8(MORE == 1 ? 0x10 : 0x30)));
}
INLINE i16 i_with_further(const int BITS, const int PANEL, i16 x, i16 further) {
    const int more = BITS - 4, step = more == 1 ? 1 : 0;
    if (PANEL == 0)
        return EACH(with_further_8(more, 0, x.a, further.a, 4, 4 - step), with_further_8(more, 0, x.b, further.b, 2, 2 - step));
    return EACH(with_further_8(more, 1, x.a, further.a, 0, step), with_further_8(more, 1, x.b, further.b, 2, 2 + step));
}
INLINE __m128i load_8_bytes(const uint8_t *p) { return _mm_loadl_epi64((const __m128i *)p); }
INLINE i16 i_load_bytes(const uint8_t *p) {
    return EACH(_mm256_cvtepu8_epi32(load_8_bytes(p)), _mm256_cvtepu8_epi32(load_8_bytes(p + 8)));
}
INLINE i16 i_load_signed_bytes(const uint8_t *p) {
    return EACH(_mm256_cvtepi8_epi32(load_8_bytes(p)), _mm256_cvtepi8_epi32(load_8_bytes(p + 8)));
}
INLINE v16 v_from_i(i16 x) { return (v16){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

#ifdef AVX_VNNI /* in assembly, as in integers_avx512_vnni.h; the prefix keeps the assembler from encoding it for AVX-512 */
INLINE __m256i dot_8(const int BITS, __m256i sum, __m256i codes, __m256i x) {
    (void)BITS;
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(x));
    return sum;
}
#else
/* Products of 4 to 6 bits fit into the 16-bit sums of vpmaddubsw. Those of 8 bits do not, so they are widened first. */
INLINE __m256i dot_8(const int BITS, __m256i sum, __m256i codes, __m256i x) {
    if (BITS < 8) return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
#endif
INLINE i16 i_dot(const int BITS, i16 sum, i16 codes, i16 x) {
    return EACH(dot_8(BITS, sum.a, codes.a, x.a), dot_8(BITS, sum.b, codes.b, x.b));
}
INLINE i16 i_add_product(i16 sum, i16 x, i16 y) {
    return EACH(_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b)));
}
INLINE v16 v_load_f16(const uint8_t *p) {
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)))};
}
INLINE __m256i magnitudes_8(v16 x) {
    __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
    return _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask));
}
INLINE int32_t i_largest_magnitude(v16 x, v16 y) {
    __m256i m = _mm256_max_epi32(magnitudes_8(x), magnitudes_8(y));
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(h, _mm_shuffle_epi32(h, 0xB1)));
}
INLINE float v_total_of_integers(v16 x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
INLINE void i_store_codes(int8_t *p, v16 shifted) {
    __m256i base = _mm256_set1_epi32(0x4B400000);
    __m256i halves = _mm256_packs_epi32(_mm256_sub_epi32(_mm256_castps_si256(shifted.a), base),
                                        _mm256_sub_epi32(_mm256_castps_si256(shifted.b), base));
    halves = _mm256_permute4x64_epi64(halves, 0xD8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
#undef EACH

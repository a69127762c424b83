/* Vectors of 16 floats on AVX-512. The includer defines TARGET, the target attribute of every function. */
#include "float8.h"

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline)) TARGET

typedef __m512 v16;

INLINE v16 v_zero(void) { return _mm512_setzero_ps(); }
INLINE v16 v_set1(float a) { return _mm512_set1_ps(a); }
INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
INLINE v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
INLINE v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
INLINE v16 v_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
INLINE int v_any_above(v16 a, float bound) { return _mm512_cmp_ps_mask(a, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0; }
INLINE float v_largest(v16 a) { return _mm512_reduce_max_ps(a); }

/* a where x < bound, else b; b where x is NaN */
INLINE v16 v_where_less(v16 x, v16 bound, v16 a, v16 b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), b, a);
}

/* p * 2^n for an integer n, which is also in the low bits of shifted = n + ROUND_SHIFT; zero where x < bound */
INLINE v16 v_scaled(v16 p, v16 n, v16 shifted, v16 x, v16 bound) {
    (void)shifted;
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), p, n);
}

INLINE v16 v_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

INLINE v16 v_load_int8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* 16 float8 (e4m3fn, none of them NaN). Sign, exponent and mantissa are placed as those of a float16, whose exponent counts from -15
 * instead of -7. */
INLINE v16 v_load_e4m3(const uint8_t *p) {
    __m256i codes = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    __m256i halves = _mm256_and_si256(codes, _mm256_set1_epi16((short)0xBF80));
    return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(0x1p8f));
}

/* Widens 64 float8 (e4m3fn, none of them NaN), of which the first 32 and the last 32 take turns, 8 at a time (float8.h), to bfloat16
 * by the tables that float8.h explains. */
#ifdef VBMI
INLINE __m512i look_up_128(const uint8_t table[128], __m512i index) { /* the index's upper bit is ignored */
    return _mm512_permutex2var_epi8(_mm512_loadu_si512(table), index, _mm512_loadu_si512(table + 64));
}
INLINE void widen_e4m3(__m512i codes, __m512i wide[2]) {
    __m512i upper = look_up_128(E4M3_ALL_UPPER_BYTES, codes), lower = look_up_128(E4M3_ALL_LOWER_BYTES, codes);
    upper = _mm512_or_si512(upper, _mm512_and_si512(codes, _mm512_set1_epi8(-0x80)));
    wide[0] = _mm512_unpacklo_epi8(lower, upper);
    wide[1] = _mm512_unpackhi_epi8(lower, upper);
}
#else
/* A table of 16 bytes in each quarter of a register, as _mm512_shuffle_epi8 takes it. */
INLINE __m512i table_of(const int8_t bytes[16]) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)bytes)); }
INLINE void widen_e4m3(__m512i codes, __m512i wide[2]) {
    const __m512i upper_bytes = table_of(E4M3_UPPER_BYTES), upper_excess = table_of(E4M3_UPPER_EXCESS);
    const __m512i lower_difference = table_of(E4M3_LOWER_DIFFERENCE);
    const __m512i half = _mm512_set1_epi8(0x0F);
    __m512i upper = _mm512_shuffle_epi8(upper_bytes, _mm512_and_si512(_mm512_srli_epi16(codes, 4), half));
    __m512i lower = _mm512_andnot_si512(half, _mm512_slli_epi16(codes, 4));
    /* Below 16 the code's lower half selects from a table; others saturate to a negative index, which selects zero. */
    __m512i index = _mm512_adds_epu8(_mm512_and_si512(codes, _mm512_set1_epi8(0x7F)), _mm512_set1_epi8(0x70));
    upper = _mm512_sub_epi8(upper, _mm512_shuffle_epi8(upper_excess, index));
    lower = _mm512_xor_si512(lower, _mm512_shuffle_epi8(lower_difference, index));
    wide[0] = _mm512_unpacklo_epi8(lower, upper);
    wide[1] = _mm512_unpackhi_epi8(lower, upper);
}
#endif
INLINE void v_widen_e4m3(uint16_t *to, const uint8_t *from) {
    __m512i wide[2];
    widen_e4m3(_mm512_loadu_si512(from), wide);
    _mm512_storeu_si512(to, wide[0]);
    _mm512_storeu_si512(to + 32, wide[1]);
}

#ifdef ROUND_BF16 /* by an instruction, which differs only in the payload of NaN */
INLINE void v_store_bf16(uint16_t *p, v16 a) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a)); }
#else
/* The bits of a rounded to bfloat16 are the upper halves. */
INLINE __m512i rounded_bf16_16(v16 a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7FC00000));
}
INLINE void v_store_bf16(uint16_t *p, v16 a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bf16_16(a), 16)));
}
/* Stores a rounded to bfloat16 as floats, the odd element of each pair first. */
INLINE void v_store_rounded_pairs(float *p, v16 a) {
    __m512i upper = _mm512_and_si512(rounded_bf16_16(a), _mm512_set1_epi32((int)0xFFFF0000u));
    _mm512_storeu_si512(p, _mm512_shuffle_epi32(upper, _MM_PERM_CDAB));
}
#endif

/* The same for numbers that only products read, in which the payload of NaN makes no difference. */
#if defined(ROUND_BF16) || defined(DPBF16)
INLINE void v_store_factors(uint16_t *p, v16 a) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a)); }
INLINE void v_store_two_factors(uint16_t *p, v16 a, v16 b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a)); }
#else
#define v_store_two_factors(p, a, b) (v_store_bf16((p), (a)), v_store_bf16((p) + 16, (b)))
#endif

/* the odd and the even elements of 16 bfloat16 pairs */
INLINE v16 odd_16(__m512i pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000u))); }
INLINE v16 even_16(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
INLINE v16 v_load_odd(const uint16_t *p) { return odd_16(_mm512_loadu_si512(p)); }
INLINE v16 v_load_even(const uint16_t *p) { return even_16(_mm512_loadu_si512(p)); }

/* The odd and the even elements of the bfloat16 pairs that 64 float8 are, 32 in each of two panels. */
INLINE void v_widen_e4m3_pairs(const uint8_t *from, v16 odd[2], v16 even[2]) {
    __m512i wide[2];
    widen_e4m3(_mm512_loadu_si512(from), wide);
    for (int i = 0; i < 2; i++) {
        odd[i] = odd_16(wide[i]);
        even[i] = even_16(wide[i]);
    }
}

#ifdef VBMI
/* Writes factor * number for 64 float8 in a row. They are put in that order in which the even elements of the first 32 widened numbers
 * are the first 16, and the odd ones the next 16. */
INLINE void v_store_e4m3_times(uint16_t *to, const uint8_t *from, v16 factor) {
#define QUARTER(i)                                                                                                             \
    (i), (i) + 16, (i) + 1, (i) + 17, (i) + 2, (i) + 18, (i) + 3, (i) + 19, (i) + 32, (i) + 48, (i) + 33, (i) + 49, (i) + 34, \
        (i) + 50, (i) + 35, (i) + 51
    static const uint8_t order[64] = {QUARTER(0), QUARTER(4), QUARTER(8), QUARTER(12)};
#undef QUARTER
    __m512i wide[2];
    widen_e4m3(_mm512_permutexvar_epi8(_mm512_loadu_si512(order), _mm512_loadu_si512(from)), wide);
    v_store_two_factors(to, v_mul(even_16(wide[0]), factor), v_mul(odd_16(wide[0]), factor));
    v_store_two_factors(to + 32, v_mul(even_16(wide[1]), factor), v_mul(odd_16(wide[1]), factor));
}
#endif

/* words[i][16] from the 32-bit words w + i of 16 rows. The loads put four rows' words side by side in the quarters of a register,
 * so that only the four words within a quarter are left to exchange. */
INLINE void transpose_four_words(const uint32_t *const rows[16], size_t w, __m512i words[4]) {
    __m512i r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[i] + w)));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x00F0, _mm_loadu_si128((const __m128i *)(rows[i + 4] + w)));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x0F00, _mm_loadu_si128((const __m128i *)(rows[i + 8] + w)));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0xF000, _mm_loadu_si128((const __m128i *)(rows[i + 12] + w)));
    }
    __m512i low01 = _mm512_unpacklo_epi32(r[0], r[1]), high01 = _mm512_unpackhi_epi32(r[0], r[1]);
    __m512i low23 = _mm512_unpacklo_epi32(r[2], r[3]), high23 = _mm512_unpackhi_epi32(r[2], r[3]);
    words[0] = _mm512_unpacklo_epi64(low01, low23);
    words[1] = _mm512_unpackhi_epi64(low01, low23);
    words[2] = _mm512_unpacklo_epi64(high01, high23);
    words[3] = _mm512_unpackhi_epi64(high01, high23);
}

/* words[i][16] from the eight words w + i of 16 rows, with half the loads of twice four words. */
INLINE void transpose_eight_words(const uint32_t *const rows[16], size_t w, __m512i words[8]) {
    __m512i quarters[8]; /* [i] and [4 + i]: word i of four rows, their word i + 4, and both of the next four rows */
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m512i r[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const uint32_t *row = rows[8 * half + i] + w, *fourth = rows[8 * half + i + 4] + w;
            r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)row)),
                                      _mm256_loadu_si256((const __m256i *)fourth), 1);
        }
        __m512i low01 = _mm512_unpacklo_epi32(r[0], r[1]), high01 = _mm512_unpackhi_epi32(r[0], r[1]);
        __m512i low23 = _mm512_unpacklo_epi32(r[2], r[3]), high23 = _mm512_unpackhi_epi32(r[2], r[3]);
        quarters[4 * half] = _mm512_unpacklo_epi64(low01, low23);
        quarters[4 * half + 1] = _mm512_unpackhi_epi64(low01, low23);
        quarters[4 * half + 2] = _mm512_unpacklo_epi64(high01, high23);
        quarters[4 * half + 3] = _mm512_unpackhi_epi64(high01, high23);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        words[i] = _mm512_shuffle_i32x4(quarters[i], quarters[4 + i], 0x88);
        words[4 + i] = _mm512_shuffle_i32x4(quarters[i], quarters[4 + i], 0xDD);
    }
}

/* panel[word][16] from 16 rows of `words` 32-bit words, which are a multiple of 4. */
INLINE void transpose_rows(const uint32_t *const rows[16], size_t words, uint32_t *panel) {
    for (size_t w = 0; w < words; w += 4) {
        __m512i transposed[4];
        transpose_four_words(rows, w, transposed);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) _mm512_storeu_si512(panel + (w + (size_t)i) * 16, transposed[i]);
    }
}

/* Interleaves 32 elements of two rows as pairs. */
INLINE void interleave_32(const uint16_t *even, const uint16_t *odd, __m512i pairs[2]) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                           4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i low = _mm512_loadu_si512(even), high = _mm512_loadu_si512(odd);
    pairs[0] = _mm512_permutex2var_epi16(low, first, high);
    pairs[1] = _mm512_permutex2var_epi16(low, _mm512_add_epi16(first, _mm512_set1_epi16(16)), high);
}

/* Interleaves two rows as pairs, 16 of them in each panel. */
INLINE void interleave_rows(uint16_t *to, size_t panel_stride, const uint16_t *even, const uint16_t *odd, size_t dim) {
    size_t d = 0;
    for (; d + 32 <= dim; d += 32, to += 2 * panel_stride) {
        __m512i pairs[2];
        interleave_32(even + d, odd + d, pairs);
        _mm512_storeu_si512(to, pairs[0]);
        _mm512_storeu_si512(to + panel_stride, pairs[1]);
    }
    for (; d < dim; d += 16, to += panel_stride) {
        __mmask16 mask = dim - d < 16 ? 0xFF : 0xFFFF; /* dim is a multiple of 8 */
        __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even + d));
        __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd + d));
        _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

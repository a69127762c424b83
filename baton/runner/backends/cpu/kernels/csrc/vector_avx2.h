/* Vectors of 16 floats on AVX2 with FMA, in two registers each. The includer defines TARGET, see vector_avx512.h. */
#include "float8.h"

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline)) TARGET

typedef struct {
    __m256 a, b;
} v16;

#define EACH(x, y) ((v16){(x), (y)})
INLINE v16 v_zero(void) { return EACH(_mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINE v16 v_set1(float f) { return EACH(_mm256_set1_ps(f), _mm256_set1_ps(f)); }
INLINE v16 v_load(const float *p) { return EACH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void v_store(float *p, v16 v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
INLINE v16 v_fma(v16 x, v16 y, v16 z) { return EACH(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
INLINE v16 v_add(v16 x, v16 y) { return EACH(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
INLINE v16 v_sub(v16 x, v16 y) { return EACH(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
INLINE v16 v_mul(v16 x, v16 y) { return EACH(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
INLINE v16 v_div(v16 x, v16 y) { return EACH(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
INLINE v16 v_max(v16 x, v16 y) { return EACH(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
INLINE v16 v_min(v16 x, v16 y) { return EACH(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }

INLINE float v_largest(v16 x) {
    __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    h = _mm_max_ss(h, _mm_movehdup_ps(h));
    return _mm_cvtss_f32(h);
}
INLINE int v_any_above(v16 a, float bound) { return v_largest(a) > bound; }

/* a where x < bound, else b; b where x is NaN */
INLINE v16 v_where_less(v16 x, v16 bound, v16 a, v16 b) {
    return EACH(_mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, bound.a, _CMP_LT_OQ)),
                _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, bound.b, _CMP_LT_OQ)));
}

INLINE __m256 power_of_two_8(__m256 shifted) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127 - 0x4B400000)), 23));
}

/* 2^n for an integer n, which is in the low bits of shifted = n + ROUND_SHIFT */
INLINE v16 v_power_of_two(v16 shifted) { return EACH(power_of_two_8(shifted.a), power_of_two_8(shifted.b)); }

/* p * 2^n for such an n; zero where x < bound */
INLINE v16 v_scaled(v16 p, v16 n, v16 shifted, v16 x, v16 bound) {
    (void)n;
    return v_where_less(x, bound, v_zero(), v_mul(p, v_power_of_two(shifted)));
}

INLINE __m256 load_bf16_8(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE v16 v_load_bf16(const uint16_t *p) { return EACH(load_bf16_8(p), load_bf16_8(p + 8)); }

INLINE __m256 load_int8_8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE v16 v_load_int8(const uint8_t *p) { return EACH(load_int8_8(p), load_int8_8(p + 8)); }

/* float8 (e4m3fn, none of them NaN), as in vector_avx512.h */
INLINE __m256 load_e4m3_8(const uint8_t *p) {
    __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), low = _mm256_and_si256(codes, _mm256_set1_epi32(0x7F));
    __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(low, 20), _mm256_set1_epi32(120 << 23));
    __m256 subnormal = _mm256_mul_ps(_mm256_cvtepi32_ps(low), _mm256_set1_ps(0x1p-9f));
    __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), low);
    __m256i size = _mm256_blendv_epi8(normal, _mm256_castps_si256(subnormal), small);
    return _mm256_castsi256_ps(_mm256_or_si256(size, _mm256_slli_epi32(_mm256_srli_epi32(codes, 7), 31)));
}
INLINE v16 v_load_e4m3(const uint8_t *p) { return EACH(load_e4m3_8(p), load_e4m3_8(p + 8)); }

/* A table of 16 bytes in each half of a register, as _mm256_shuffle_epi8 takes it. */
INLINE __m256i table_of(const int8_t bytes[16]) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)bytes)); }

/* Widens 32 float8 to bfloat16, 16 of the first half and 16 of the second, as in vector_avx512.h. */
INLINE void widen_e4m3(__m256i codes, __m256i wide[2]) {
    const __m256i upper_bytes = table_of(E4M3_UPPER_BYTES), upper_excess = table_of(E4M3_UPPER_EXCESS);
    const __m256i lower_difference = table_of(E4M3_LOWER_DIFFERENCE);
    const __m256i half = _mm256_set1_epi8(0x0F);
    __m256i upper = _mm256_shuffle_epi8(upper_bytes, _mm256_and_si256(_mm256_srli_epi16(codes, 4), half));
    __m256i lower = _mm256_andnot_si256(half, _mm256_slli_epi16(codes, 4));
    __m256i index = _mm256_adds_epu8(_mm256_and_si256(codes, _mm256_set1_epi8(0x7F)), _mm256_set1_epi8(0x70));
    upper = _mm256_sub_epi8(upper, _mm256_shuffle_epi8(upper_excess, index));
    lower = _mm256_xor_si256(lower, _mm256_shuffle_epi8(lower_difference, index));
    wide[0] = _mm256_unpacklo_epi8(lower, upper);
    wide[1] = _mm256_unpackhi_epi8(lower, upper);
}
INLINE void v_widen_e4m3(uint16_t *to, const uint8_t *from) {
    for (int i = 0; i < 2; i++) {
        __m256i wide[2];
        widen_e4m3(_mm256_loadu_si256((const __m256i *)(from + 32 * i)), wide);
        _mm256_storeu_si256((__m256i *)(to + 16 * i), wide[0]);
        _mm256_storeu_si256((__m256i *)(to + 32 + 16 * i), wide[1]);
    }
}

INLINE __m256i round_bf16_8(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC00000), _mm256_castps_si256(nan));
    return _mm256_srli_epi32(rounded, 16);
}
INLINE void v_store_bf16(uint16_t *p, v16 x) {
    __m256i packed = _mm256_packus_epi32(round_bf16_8(x.a), round_bf16_8(x.b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xD8));
}

/* Stores x rounded to bfloat16 as floats, the odd element of each pair first. */
INLINE __m256i rounded_pairs_8(__m256 x) { return _mm256_shuffle_epi32(_mm256_slli_epi32(round_bf16_8(x), 16), 0xB1); }
INLINE void v_store_rounded_pairs(float *p, v16 x) {
    _mm256_storeu_si256((__m256i *)p, rounded_pairs_8(x.a));
    _mm256_storeu_si256((__m256i *)(p + 8), rounded_pairs_8(x.b));
}

#define v_store_two_factors(p, a, b) (v_store_bf16((p), (a)), v_store_bf16((p) + 16, (b)))

/* the odd and the even elements of 16 bfloat16 pairs */
INLINE __m256i load_8(const uint16_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE __m256 odd_8(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xFFFF0000u))); }
INLINE __m256 even_8(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
INLINE v16 v_load_odd(const uint16_t *p) { return EACH(odd_8(load_8(p)), odd_8(load_8(p + 16))); }
INLINE v16 v_load_even(const uint16_t *p) { return EACH(even_8(load_8(p)), even_8(load_8(p + 16))); }

/* The odd and the even elements of the bfloat16 pairs that 64 float8 are, 32 in each of two panels. */
INLINE void v_widen_e4m3_pairs(const uint8_t *from, v16 odd[2], v16 even[2]) {
    __m256i low[2], high[2];
    widen_e4m3(_mm256_loadu_si256((const __m256i *)from), low);
    widen_e4m3(_mm256_loadu_si256((const __m256i *)(from + 32)), high);
    for (int i = 0; i < 2; i++) {
        odd[i] = EACH(odd_8(low[i]), odd_8(high[i]));
        even[i] = EACH(even_8(low[i]), even_8(high[i]));
    }
}
#undef EACH

/* panel[word][16] from 16 rows of `words` 32-bit words */
INLINE void transpose_rows(const uint32_t *const rows[16], size_t words, uint32_t *panel) {
    for (size_t i = 0; i < 16; i++)
        for (size_t w = 0; w < words; w++) panel[w * 16 + i] = rows[i][w];
}

/* Interleaves two rows as pairs, 16 of them in each panel. */
INLINE void interleave_rows(uint16_t *to, size_t panel_stride, const uint16_t *even, const uint16_t *odd, size_t dim) {
    for (size_t d = 0; d < dim; d++) {
        uint16_t *pair = to + d / 16 * panel_stride + d % 16 * 2;
        pair[0] = even[d];
        pair[1] = odd[d];
    }
}

/* Vectors of 16 floats on AVX-512. The includer defines TARGET, the target attribute of every function. */
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
INLINE float v_largest(v16 a) { return _mm512_reduce_max_ps(a); }

/* a where x < bound, else b; b where x is NaN */
INLINE v16 v_where_less(v16 x, v16 bound, v16 a, v16 b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), b, a);
}

/* p * 2^n for an integer n that stands in the low bits of shifted = n + ROUND_SHIFT too; zero where x < bound */
INLINE v16 v_scaled(v16 p, v16 n, v16 shifted, v16 x, v16 bound) {
    (void)shifted;
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), p, n);
}

INLINE v16 v_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

#ifdef ROUND_BF16 /* by instruction; only the payload of not-a-number differs */
INLINE void v_store_bf16(uint16_t *p, v16 a) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a)); }
#else
INLINE void v_store_bf16(uint16_t *p, v16 a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    rounded = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7FC00000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

/* the odd and the even elements of 16 bfloat16 pairs */
INLINE v16 v_load_odd(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xFFFF0000u)));
}
INLINE v16 v_load_even(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}

INLINE void transpose_16x16(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

/* panel[word][16] from 16 rows of words 32-bit words */
INLINE void transpose_rows(const uint32_t *const rows[16], size_t words, uint32_t *panel) {
    for (size_t w = 0; w < words; w += 16) {
        size_t count = words - w < 16 ? words - w : 16;
        __mmask16 mask = (__mmask16)((1u << count) - 1u);
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + w);
        transpose_16x16(r);
        if (count == 16) {
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + (w + (size_t)i) * 16, r[i]);
        } else {
            for (size_t i = 0; i < count; i++) _mm512_storeu_si512(panel + (w + i) * 16, r[i]);
        }
    }
}

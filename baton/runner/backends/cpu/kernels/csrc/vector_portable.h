/* Vectors of 16 floats in plain C. fmaf is one instruction on aarch64 and a library call on the oldest x86, which is slow but gives
 * the same bits. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
/* Each operation on vectors is a loop here: inlined everywhere, functions of many of them take minutes to compile. */
#define LONG_FUNCTION static __attribute__((noinline))
#if defined(__FP_FAST_FMAF) || defined(__aarch64__)
#define FMA_FUNCTION INLINE
#else
#define FMA_FUNCTION LONG_FUNCTION /* sixteen calls of fmaf */
#endif

typedef struct {
    float f[16];
} v16;

#define EACH(expression)                          \
    v16 r;                                        \
    for (int i = 0; i < 16; i++) r.f[i] = (expression); \
    return r

INLINE float from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
INLINE uint32_t to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

INLINE v16 v_zero(void) { EACH(0.0f); }
INLINE v16 v_set1(float a) { EACH(a); }
INLINE v16 v_load(const float *p) { EACH(p[i]); }
INLINE void v_store(float *p, v16 a) { memcpy(p, a.f, sizeof a.f); }
FMA_FUNCTION v16 v_fma(v16 a, v16 b, v16 c) { EACH(fmaf(a.f[i], b.f[i], c.f[i])); }
INLINE v16 v_add(v16 a, v16 b) { EACH(a.f[i] + b.f[i]); }
INLINE v16 v_sub(v16 a, v16 b) { EACH(a.f[i] - b.f[i]); }
INLINE v16 v_mul(v16 a, v16 b) { EACH(a.f[i] * b.f[i]); }
INLINE v16 v_div(v16 a, v16 b) { EACH(a.f[i] / b.f[i]); }
INLINE v16 v_max(v16 a, v16 b) { EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
INLINE v16 v_min(v16 a, v16 b) { EACH(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }

INLINE float v_largest(v16 a) {
    float largest = a.f[0];
    for (int i = 1; i < 16; i++) largest = largest > a.f[i] ? largest : a.f[i];
    return largest;
}
INLINE int v_any_above(v16 a, float bound) { return v_largest(a) > bound; }

/* a where x < bound, else b; b where x is NaN */
INLINE v16 v_where_less(v16 x, v16 bound, v16 a, v16 b) { EACH(x.f[i] < bound.f[i] ? a.f[i] : b.f[i]); }

/* 2^n for an integer n, which is in the low bits of shifted = n + ROUND_SHIFT */
INLINE v16 v_power_of_two(v16 shifted) { EACH(from_bits((to_bits(shifted.f[i]) + 127u - 0x4B400000u) << 23)); }

/* p * 2^n for such an n; zero where x < bound */
INLINE v16 v_scaled(v16 p, v16 n, v16 shifted, v16 x, v16 bound) {
    (void)n;
    return v_where_less(x, bound, v_zero(), v_mul(p, v_power_of_two(shifted)));
}

INLINE v16 v_load_bf16(const uint16_t *p) { EACH(from_bits((uint32_t)p[i] << 16)); }

INLINE v16 v_load_int8(const uint8_t *p) { EACH((float)(int8_t)p[i]); }

/* 16 float8 (e4m3fn, none of them NaN), as in vector_avx512.h */
INLINE float of_e4m3(uint8_t code) {
    uint32_t low = code & 0x7Fu, sign = (uint32_t)(code >> 7) << 31;
    return from_bits(sign | (low < 8 ? to_bits((float)low * 0x1p-9f) : (low << 20) + (120u << 23)));
}
INLINE v16 v_load_e4m3(const uint8_t *p) { EACH(of_e4m3(p[i])); }

/* Widens 64 float8 to bfloat16, as in vector_avx512.h. */
INLINE void v_widen_e4m3(uint16_t *to, const uint8_t *from) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i++) to[32 * half + i] = (uint16_t)(to_bits(of_e4m3(from[i / 8 * 16 + 8 * half + i % 8])) >> 16);
}

INLINE uint16_t rounded_bf16(float a) {
    uint32_t bits = to_bits(a);
    bits = a != a ? 0x7FC00000u : bits + 0x7FFFu + ((bits >> 16) & 1u);
    return (uint16_t)(bits >> 16);
}
INLINE void v_store_bf16(uint16_t *p, v16 a) {
    for (int i = 0; i < 16; i++) p[i] = rounded_bf16(a.f[i]);
}
/* Stores a rounded to bfloat16 as floats, the odd element of each pair first. */
INLINE void v_store_rounded_pairs(float *p, v16 a) {
    for (int i = 0; i < 16; i++) p[i ^ 1] = from_bits((uint32_t)rounded_bf16(a.f[i]) << 16);
}

#define v_store_two_factors(p, a, b) (v_store_bf16((p), (a)), v_store_bf16((p) + 16, (b)))

/* the odd and the even elements of 16 bfloat16 pairs */
INLINE v16 v_load_odd(const uint16_t *p) { EACH(from_bits((uint32_t)p[2 * i + 1] << 16)); }
INLINE v16 v_load_even(const uint16_t *p) { EACH(from_bits((uint32_t)p[2 * i] << 16)); }
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

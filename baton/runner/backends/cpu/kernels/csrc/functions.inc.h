/* Functions on vectors that products and attention share. Included once for each instruction set, before the other files. */
#include "kernels.h"

#include <math.h>
#include <string.h>

/* Precedes functions of many operations on vectors, which vector_portable.h keeps from being inlined. */
#ifndef LONG_FUNCTION
#define LONG_FUNCTION INLINE
#endif

#define ROUND_SHIFT 12582912.0f /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */

/* (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2; Cephes' polynomial */
INLINE v16 v_exp_polynomial(v16 r) {
    v16 p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    return v_fma(p, r, v_set1(5.0000001201e-1f));
}

/* e^x for x <= 88, zero below -87.3 */
LONG_FUNCTION v16 v_exp(v16 x) {
    v16 shifted = v_fma(x, v_set1(1.44269504f), v_set1(ROUND_SHIFT));
    v16 n = v_sub(shifted, v_set1(ROUND_SHIFT));
    v16 r = v_fma(n, v_set1(-0.693359375f), x);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    v16 p = v_add(v_fma(v_exp_polynomial(r), v_mul(r, r), r), v_set1(1.0f));
    return v_scaled(p, n, shifted, x, v_set1(-87.3f));
}

/* 2^x for x < 127, zero below -126; within 2e-7 */
LONG_FUNCTION v16 v_exp2(v16 x) {
    v16 shifted = v_add(x, v_set1(ROUND_SHIFT));
    v16 n = v_sub(shifted, v_set1(ROUND_SHIFT));
    v16 r = v_sub(x, n);
    v16 p = v_set1(1.3264727e-3f);
    p = v_fma(p, r, v_set1(9.6715130e-3f));
    p = v_fma(p, r, v_set1(5.5507336e-2f));
    p = v_fma(p, r, v_set1(2.4022242e-1f));
    p = v_fma(p, r, v_set1(6.9314700e-1f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_scaled(p, n, shifted, x, v_set1(-126.0f));
}

/* cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1) */
LONG_FUNCTION v16 v_softcap(v16 x, float cap) {
    v16 y = v_div(x, v_set1(cap));
    y = v_max(v_min(y, v_set1(20.0f)), v_set1(-20.0f));
    v16 e = v_exp(v_add(y, y));
    v16 tanh = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(e, v_set1(1.0f))));
    return v_mul(tanh, v_set1(cap));
}

/* tanh(x). Of a small x the polynomial gives e^2x - 1 without taking nearly equal numbers from one another. */
LONG_FUNCTION v16 v_tanh(v16 x) {
    const v16 y = v_max(v_set1(-20.0f), v_min(v_set1(20.0f), x)), twice = v_add(y, y); /* NaN passes */
    const v16 far = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(v_exp(twice), v_set1(1.0f))));
    const v16 less_1 = v_fma(v_exp_polynomial(twice), v_mul(twice, twice), twice);
    const v16 small = v_div(less_1, v_add(less_1, v_set1(2.0f)));
    return v_where_less(v_max(twice, v_sub(v_zero(), twice)), v_set1(0.34f), small, far);
}

/* x / (1 + e^-y). The bound is the first argument of v_min, so that NaN passes: the vectors return the second one for NaN. */
LONG_FUNCTION v16 v_times_sigmoid(v16 x, v16 y) {
    v16 e = v_exp(v_min(v_set1(88.0f), v_sub(v_zero(), y)));
    return v_div(x, v_add(v_set1(1.0f), e));
}

/* ln(1 + e^x), with ln(1 + y) = 2 artanh(y / (2 + y)) for y = e^-|x|; within 2e-7 of itself. The bound is the first argument of
 * v_max, so that NaN passes. */
LONG_FUNCTION v16 v_softplus(v16 x) {
    v16 y = v_exp(v_sub(v_zero(), v_max(x, v_sub(v_zero(), x))));
    v16 s = v_div(y, v_add(v_set1(2.0f), y)), square = v_mul(s, s);
    v16 p = v_set1(2.0f / 15.0f);
    p = v_fma(p, square, v_set1(2.0f / 13.0f));
    p = v_fma(p, square, v_set1(2.0f / 11.0f));
    p = v_fma(p, square, v_set1(2.0f / 9.0f));
    p = v_fma(p, square, v_set1(2.0f / 7.0f));
    p = v_fma(p, square, v_set1(2.0f / 5.0f));
    p = v_fma(p, square, v_set1(2.0f / 3.0f));
    p = v_fma(p, square, v_set1(2.0f));
    return v_fma(p, s, v_max(v_zero(), x));
}

/* x * (1 + erf(x / sqrt 2)) / 2; Abramowitz and Stegun 7.1.26 */
LONG_FUNCTION v16 v_gelu(v16 x) {
    v16 z = v_mul(v_max(x, v_sub(v_zero(), x)), v_set1(0.70710678f));
    v16 t = v_div(v_set1(1.0f), v_fma(z, v_set1(0.3275911f), v_set1(1.0f)));
    v16 p = v_set1(1.061405429f);
    p = v_fma(p, t, v_set1(-1.453152027f));
    p = v_fma(p, t, v_set1(1.421413741f));
    p = v_fma(p, t, v_set1(-0.284496736f));
    p = v_fma(p, t, v_set1(0.254829592f));
    v16 tail = v_mul(v_mul(p, t), v_mul(v_set1(0.5f), v_exp(v_sub(v_zero(), v_mul(z, z)))));
    return v_mul(x, v_where_less(x, v_zero(), tail, v_sub(v_set1(1.0f), tail)));
}

LONG_FUNCTION v16 v_activate(enum activation activation, v16 x) {
    if (activation == ACTIVATION_SILU) return v_times_sigmoid(x, x);
    if (activation == ACTIVATION_GELU) return v_gelu(x);
    if (activation == ACTIVATION_RELU) return v_max(v_zero(), x);
    if (activation == ACTIVATION_RELU_SQUARED) return v_mul(v_max(v_zero(), x), v_max(v_zero(), x));
    v16 inner = v_mul(x, v_fma(v_mul(x, x), v_set1(0.0713548163f), v_set1(1.5957691216f))); /* tanh(u) = 2 sigmoid(2u) - 1 */
    return v_times_sigmoid(x, inner);
}

/* xIELU (arXiv 2411.13010): positive * x^2 + linear * x above 0, and negative * (e^min(x, near) - 1 - x) + linear * x elsewhere. Of a
 * small x the polynomial gives e^x - 1 - x without taking nearly equal numbers from one another. */
LONG_FUNCTION v16 v_xielu(v16 x, v16 positive, v16 negative, v16 linear, v16 near) {
    const v16 low = v_min(near, x); /* NaN passes */
    const v16 far = v_sub(v_sub(v_exp(low), v_set1(1.0f)), low);
    const v16 small = v_mul(v_exp_polynomial(low), v_mul(low, low));
    const v16 bent = v_add(v_where_less(low, v_set1(-0.34f), far, small), v_sub(low, x));
    return v_fma(linear, x, v_where_less(v_zero(), x, v_mul(v_mul(positive, x), x), v_mul(negative, bent)));
}

/* Loads up to 16 elements from an index on; the other lanes are zero. */
LONG_FUNCTION v16 load_lanes(const enum dtype dtype, const void *from, size_t index, size_t count) {
    uint32_t part[LANES] = {0};
    if (dtype == DTYPE_FLOAT32) {
        const float *p = (const float *)from + index;
        if (count < LANES) p = memcpy(part, p, count * sizeof(float));
        return v_load(p);
    }
    const uint16_t *p = (const uint16_t *)from + index;
    if (count < LANES) p = memcpy(part, p, count * sizeof(uint16_t));
    return v_load_bf16(p);
}

LONG_FUNCTION void store_lanes(const enum dtype dtype, void *to, size_t index, size_t count, v16 v) {
    if (dtype == DTYPE_FLOAT32) {
        float part[LANES], *p = (float *)to + index;
        v_store(count < LANES ? part : p, v);
        if (count < LANES) memcpy(p, part, count * sizeof(float));
    } else {
        uint16_t part[LANES], *p = (uint16_t *)to + index;
        v_store_bf16(count < LANES ? part : p, v);
        if (count < LANES) memcpy(p, part, count * sizeof(uint16_t));
    }
}

/* v rounded to the dtype. */
INLINE v16 v_rounded(const enum dtype dtype, v16 v) {
    uint16_t part[LANES];
    if (dtype == DTYPE_FLOAT32) return v;
    v_store_bf16(part, v);
    return v_load_bf16(part);
}

INLINE size_t lanes_left(size_t index, size_t end) { return end - index < LANES ? end - index : LANES; }

/* The sum of 16 lanes, always added in the same order. */
LONG_FUNCTION float v_total(v16 v) {
    float lanes[LANES];
    v_store(lanes, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] + lanes[i + width];
    return lanes[0];
}

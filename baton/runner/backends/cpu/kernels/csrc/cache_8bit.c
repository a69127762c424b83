/* Keys and values in 8 bits: how they are written. attention_tiles.inc.h reads them. */
#include "kernels.h"

#include <math.h>
#include <string.h>

/* Below this, a scale is written as zero, since the numbers could not be divided by it. */
#define SMALLEST_SCALE 0x1p-120f
/* Added to a float of less than 2^22, it leaves the nearest integer (ties to even) in the low bits of the sum. */
#define ROUND_TO_INTEGER 12582912.0f

static float of_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t bits_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static uint16_t bfloat16_of(float f) {
    uint32_t bits = bits_of(f);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* The nearest float8 (ties to even) to a number of at most 448. */
static uint8_t e4m3_of(float x) {
    uint32_t sign = bits_of(x) >> 24 & 0x80, bits = bits_of(fabsf(x));
    uint32_t normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3); /* exponents are biased by 7 instead of 127 */
    uint32_t subnormal = bits_of(fabsf(x) * 512.0f + ROUND_TO_INTEGER) & 0xF;   /* multiples of 2^-9; 8 of them are 2^-6 */
    return (uint8_t)(sign | (fabsf(x) < 0x1p-6f ? subnormal : normal));
}

static int8_t int8_of(float x) { return (int8_t)(bits_of(x + ROUND_TO_INTEGER) & 0xFF); }

void store_8bit(enum cache_format format, enum dtype dtype, const void *numbers, size_t dim, uint8_t *codes, uint16_t *scale) {
    const float most = format == CACHE_INT8 ? 127.0f : 448.0f;
    float x[MAX_HEAD_DIM], largest = 0.0f, sum = 0.0f;
    for (size_t d = 0; d < dim; d++)
        x[d] = dtype == DTYPE_FLOAT32 ? ((const float *)numbers)[d] : of_bits((uint32_t)((const uint16_t *)numbers)[d] << 16);
    for (size_t d = 0; d < dim; d++) {
        float size = fabsf(x[d]);
        largest = size > largest ? size : largest;
        sum += size * 0.0f; /* NaN if one number is NaN or infinite */
    }
    if (sum != 0.0f) { /* what is read is NaN, as the number that could not be written */
        *scale = 0x7FC0;
        memset(codes, 0, dim);
        return;
    }
    *scale = bfloat16_of(largest / most);
    float step = of_bits((uint32_t)*scale << 16);
    if (step < SMALLEST_SCALE) {
        *scale = 0;
        memset(codes, 0, dim);
        return;
    }
    for (size_t d = 0; d < dim; d++) { /* rounding the scale down may have left the largest number above `most` */
        float quotient = x[d] / step;
        x[d] = quotient > most ? most : quotient < -most ? -most : quotient;
    }
    if (format == CACHE_INT8)
        for (size_t d = 0; d < dim; d++) codes[d] = (uint8_t)int8_of(x[d]);
    else
        for (size_t d = 0; d < dim; d++) codes[d] = e4m3_of(x[d]);
}

/* Vectors of 16 integers of 32 bits in plain C, for products with quantized weights. A vector of codes has 4 bytes in each lane,
 * and a vector of x 4 signed bytes. */
typedef struct {
    int32_t i[16];
} i16;

#define EACH(expression)                                \
    i16 r;                                              \
    for (int i = 0; i < 16; i++) r.i[i] = (expression); \
    return r

INLINE i16 i_set1(int32_t a) { EACH(a); }
INLINE i16 i_load(const uint8_t *p) {
    i16 r;
    memcpy(r.i, p, sizeof r.i);
    return r;
}
/* The low or the high halves of all bytes. */
INLINE i16 i_low(i16 a) { EACH(a.i[i] & 0x0F0F0F0F); }
INLINE i16 i_high(i16 a) { EACH((int32_t)((uint32_t)a.i[i] >> 4) & 0x0F0F0F0F); }
/* The 16 bytes, or 32 for 6 bits, with the bits above the fourth of a pair of panels, repeated; and the codes of one of its panels
 * with their own of these bits. */
INLINE i16 i_load_further(const int BITS, const uint8_t *p) {
    i16 r;
    const size_t bytes = 16 * (size_t)(BITS - 4);
    for (size_t at = 0; at < sizeof r.i; at += bytes) memcpy((char *)r.i + at, p, bytes);
    return r;
}
INLINE i16 i_with_further(const int BITS, const int PANEL, i16 codes, i16 further) {
    const int more = BITS - 4, lanes = 4 * more, mask = (1 << more) - 1;
    EACH((int32_t)((uint32_t)codes.i[i] |
                   ((uint32_t)further.i[i] >> (4 * PANEL + i / lanes * more) & (uint32_t)mask * 0x01010101) << 4));
}
/* 16 bytes, one in each lane. */
INLINE i16 i_load_bytes(const uint8_t *p) { EACH(p[i]); }
INLINE i16 i_load_signed_bytes(const uint8_t *p) { EACH((int8_t)p[i]); }
INLINE v16 v_from_i(i16 a) {
    v16 r;
    for (int i = 0; i < 16; i++) r.f[i] = (float)a.i[i];
    return r;
}
/* sum + the products of the 4 bytes of each lane; codes are below 2^BITS. */
INLINE i16 i_dot(const int BITS, i16 sum, i16 codes, i16 x) {
    (void)BITS;
    for (int shift = 0; shift < 32; shift += 8) /* in lanes of 32 bits, which compilers make vectors of */
        for (int i = 0; i < 16; i++) {
            int32_t code = (int32_t)((uint32_t)codes.i[i] >> shift & 0xFF);
            int32_t element = (int32_t)((uint32_t)x.i[i] << (24 - shift)) >> 24;
            sum.i[i] += code * element;
        }
    return sum;
}
/* sum + a * b; a is below 2^15 and not negative, and b fits into 16 bits. */
INLINE i16 i_add_product(i16 sum, i16 a, i16 b) { EACH(sum.i[i] + a.i[i] * b.i[i]); }
INLINE float float_from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return from_bits(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + (112u << 23)));
    float subnormal = (float)rest * (1.0f / 16777216.0f);
    return from_bits(sign | to_bits(subnormal));
}
INLINE v16 v_load_f16(const uint8_t *p) {
    v16 r;
    uint16_t halves[16];
    memcpy(halves, p, sizeof halves);
    for (int i = 0; i < 16; i++) r.f[i] = float_from_half(halves[i]);
    return r;
}
/* The bits of the largest magnitude in both; those of NaN are the largest of all. */
INLINE int32_t i_largest_magnitude(v16 a, v16 b) {
    int32_t largest = 0;
    for (int i = 0; i < 16; i++) {
        int32_t one = (int32_t)(to_bits(a.f[i]) & 0x7FFFFFFF), other = (int32_t)(to_bits(b.f[i]) & 0x7FFFFFFF);
        largest = one > largest ? one : largest;
        largest = other > largest ? other : largest;
    }
    return largest;
}
/* The sum of 16 small integers, which is exact in any order. */
INLINE float v_total_of_integers(v16 a) {
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += a.f[i];
    return sum;
}
/* Stores the integers that are in the low bits of n + ROUND_SHIFT, as bytes. */
INLINE void i_store_codes(int8_t *p, v16 shifted) {
    for (int i = 0; i < 16; i++) p[i] = (int8_t)(to_bits(shifted.f[i]) & 0xFF);
}
#undef EACH

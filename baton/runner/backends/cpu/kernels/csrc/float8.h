/* Products with weights in float8: numbers with 4 bits of exponent and 3 of mantissa (e4m3fn of the OCP's "8-bit Floating Point
 * Specification"), with scales in float32.
 *
 * Each column has a scale for every scale_group elements of k. Every number in float8 is exact in bfloat16 and in float32. So the
 * weights of a scale group are widened to x's dtype, a piece at a time, and multiplied as weights of that dtype are, by the chain
 * of operations that kernels.h describes, which begins at zero for each scale group. Then, in the order of k:
 *     total = fma(scale, sum of the scale group, total)
 * So a row does not depend on its batch, and all paths except AMX give the same bits; AMX's differ in bfloat16 alone.
 *
 * Packed weights: groups of 64 columns, as in kernels.h, with k padded to a multiple of 32. The scale groups of 64 columns follow
 * each other along k, so that a task reads memory in order; the last may be shorter than the others. Of each there are
 *     the scales: float32 [64]
 *     the codes in the order of packed bfloat16 elements, but of each 64 codes the first and the second half take turns, 8 codes at
 *     a time. An instruction that interleaves the halves of two registers then leaves the widened numbers in order.
 */
#ifndef BATON_FLOAT8_H
#define BATON_FLOAT8_H

#include "kernels.h"

enum { CODES_AT_A_TIME = 64, FLOAT8_SCALE_BYTES = GROUP_COLUMNS * sizeof(float) };

/* How vectors widen a code s eeee mmm to bfloat16. Its number, unless that is subnormal, is s (120 + e) mmm 0000 there: the upper byte
 * is a function of the code's upper half, and the lower byte is the code's lower half, shifted. A subnormal number of float8 is a
 * normal one in bfloat16, so for codes of 0 to 7 the upper bytes are too large by an excess, and bits of the lower bytes differ. */
static const int8_t E4M3_UPPER_BYTES[16] = {60, 61, 62, 63, 64, 65, 66, 67, -68, -67, -66, -65, -64, -63, -62, -61};
static const int8_t E4M3_UPPER_EXCESS[16] = {60, 1, 1, 1};
static const int8_t E4M3_LOWER_DIFFERENCE[16] = {0, 0x10, -0x60, -0x10, 0x40, 0x70, 0x20, 0x10};

/* VBMI instructions look up 128 bytes: both bytes of the bfloat16 of each code without its sign. */
#define BFLOAT16_OF_E4M3(c) \
    ((c) > 7 ? 0x3C00 + ((c) << 4) : (c) > 3 ? 0x3C00 + (((c) - 4) << 5) : (c) > 1 ? 0x3B80 + (((c) - 2) << 6) : (c) * 0x3B00)
#define UPPER_BYTE(c) BFLOAT16_OF_E4M3(c) >> 8
#define LOWER_BYTE(c) BFLOAT16_OF_E4M3(c) & 0xFF
#define OF_EIGHT(F, c) F((c)), F((c) + 1), F((c) + 2), F((c) + 3), F((c) + 4), F((c) + 5), F((c) + 6), F((c) + 7)
#define OF_32(F, c) OF_EIGHT(F, (c)), OF_EIGHT(F, (c) + 8), OF_EIGHT(F, (c) + 16), OF_EIGHT(F, (c) + 24)
#define OF_ALL_CODES(F) OF_32(F, 0), OF_32(F, 32), OF_32(F, 64), OF_32(F, 96)
static const uint8_t E4M3_ALL_UPPER_BYTES[128] = {OF_ALL_CODES(UPPER_BYTE)};
static const uint8_t E4M3_ALL_LOWER_BYTES[128] = {OF_ALL_CODES(LOWER_BYTE)};
#undef UPPER_BYTE
#undef LOWER_BYTE

/* The room for a piece of widened weights. With few rows it stays in the first-level cache, also beside the prefetched codes of the
 * next piece; with many rows it stays in the second-level cache. */
enum { FEW_WIDENED_BYTES = 16 << 10, MANY_WIDENED_BYTES = 64 << 10 };

/* Sizes in bytes, for all 64 columns. k is padded; scale_group is a multiple of BF16_K_MULTIPLE, or at least k. */
static inline size_t float8_codes_bytes(size_t elements) { return elements * GROUP_COLUMNS; }
static inline size_t float8_columns_bytes(size_t scale_group, size_t k) {
    return (k + scale_group - 1) / scale_group * FLOAT8_SCALE_BYTES + float8_codes_bytes(k);
}

/* Where the scales of a scale group are; its codes are FLOAT8_SCALE_BYTES further. */
static inline size_t float8_group_offset(size_t scale_group, size_t index) {
    return index * (FLOAT8_SCALE_BYTES + float8_codes_bytes(scale_group));
}

#endif

/* Kernels for AVX2 with FMA: the same chains of operations on vectors of two halves. */
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma")))
#include "vector_avx2.h"
#include "quantized.h"

#define WIDE_PANELS 4
#define WIDE_ROWS 1
#define WIDE_CASES(F) F(1)
#define MIDDLE_PANELS 2
#define MIDDLE_ROWS 2
#define MIDDLE_CASES(F) F(2)
#define TALL_PANELS 1
#define TALL_ROWS 6
#define TALL_CASES(F) F(1) F(2) F(3) F(4) F(5) F(6)
#define PAIR_ROWS 5 /* six rows' sums, a pair of weights and a mask need more than 16 registers */
#include "functions.inc.h"
#include "rows.inc.h"
#include "streams.inc.h"
#include "mixture.inc.h"
#include "states.inc.h"
#include "product_float32.inc.h"
#include "product_bfloat16.inc.h"
#include "adapters.inc.h"
#include "linear_float32.inc.h"
#include "linear_bfloat16.inc.h"
#define FLOAT8_FEW_ROWS 2
#define FLOAT8_WIDE_CASES(F)
#define FLOAT8_TALL_CASES(F) F(1) F(2)
#define FLOAT8_BLOCK_ROWS FLOAT8_FEW_ROWS
#include "linear_float8.inc.h"
#include "attention.inc.h"

static int supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

/* Two sets of kernels that differ in the products with quantized weights alone. */
#define KERNELS(name, supported, quantized)                                                                                  \
    {name, supported, {linear_float32, linear_bfloat16}, {linear_float8_float32, linear_float8_bfloat16},                    \
     {attention_float32, attention_bfloat16}, {shared_attention_float32, shared_attention_bfloat16}, \
     {select_keys_float32, select_keys_bfloat16},                         \
     {rms_norm_float32, rms_norm_bfloat16}, {rotate_float32, rotate_bfloat16}, {shrink_float32, shrink_bfloat16}, \
     {convolve_float32, convolve_bfloat16}, {recur_float32, recur_bfloat16}, {gate_float32, gate_bfloat16}, {multiply_float32, multiply_bfloat16}, \
     {route_float32, route_bfloat16}, {sum_experts_float32, sum_experts_bfloat16}, {clamped_gate_float32, clamped_gate_bfloat16},                                            \
     {activate_float32, activate_bfloat16}, {add_float32, add_bfloat16}, {streams_float32, streams_bfloat16}, \
     {resize_float32, resize_bfloat16}, {sparse_gate_float32, sparse_gate_bfloat16}, \
     1, TALL_ROWS, 512, 0, quantized}

static int supports_vnni(void) { return quantized_avx2_vnni.supported(); }

const struct isa isa_avx2_vnni = KERNELS("avx2_vnni", supports_vnni, &quantized_avx2_vnni);
const struct isa isa_avx2 = KERNELS("avx2", supported, &quantized_avx2);

#undef TARGET
#define TARGET __attribute__((target("f16c,avx2,fma")))
#define QUANTIZED_UNROLLED 0
#define QUANTIZED_WIDE_ROWS 1
#define QUANTIZED_WIDE_CASES(F) F(1)
#define QUANTIZED_TALL_ROWS 2
#define QUANTIZED_TALL_CASES(F) F(2)
#include "integers_avx2.h"
#include "product_quantized.inc.h"

static int supports_half(void) { return supported() && __builtin_cpu_supports("f16c"); }

const struct quantized_kernels quantized_avx2 = {
    supports_half, &quantized_portable, {quantized_linear_float32, quantized_linear_bfloat16},
    {quantize_float32, quantize_bfloat16}, QUANTIZED_TALL_ROWS};
#endif

/* Kernels for AVX-512 with vdpbf16ps, which multiplies a pair: odd element first, both sums rounded, subnormals as zero. Float8 is
 * widened with VBMI, which all processors have that have vdpbf16ps, except Intel's third generation of Xeon for four sockets;
 * those compute on plain AVX-512, as baton_default_isa has every processor of Intel do. */
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx512vbmi,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define DPBF16
#define VBMI
#include "vector_avx512.h"
#include "quantized.h"

#define WIDE_PANELS 4
#define WIDE_ROWS 6
#define WIDE_CASES(F) F(1) F(2) F(3) F(4) F(5) F(6)
#define TALL_PANELS 2
#define TALL_ROWS 12
#define TALL_CASES(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12)
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
#define FLOAT8_FEW_ROWS FEW_ROWS
#define FLOAT8_WIDE_CASES(F) F(1) F(2) F(3) F(4)
#define FLOAT8_TALL_CASES(F) F(5) F(6) F(7) F(8) F(9) F(10)
#define FLOAT8_BLOCK_ROWS 10
#include "linear_float8.inc.h"
#define FEW_SCORES "few_rows_avx512.inc.h"
#define FEW_VALUES
#include "attention.inc.h"

static int supported(void) {
    return isa_avx512.supported() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}

const struct isa isa_avx512_bf16 = {
    "avx512_bf16", supported, {linear_float32, linear_bfloat16}, {linear_float8_float32, linear_float8_bfloat16},
    {attention_float32, attention_bfloat16}, {shared_attention_float32, shared_attention_bfloat16},
    {select_keys_float32, select_keys_bfloat16},
    {rms_norm_float32, rms_norm_bfloat16}, {rotate_float32, rotate_bfloat16}, {shrink_float32, shrink_bfloat16},
    {convolve_float32, convolve_bfloat16}, {recur_float32, recur_bfloat16}, {gate_float32, gate_bfloat16}, {multiply_float32, multiply_bfloat16},
    {route_float32, route_bfloat16}, {sum_experts_float32, sum_experts_bfloat16}, {clamped_gate_float32, clamped_gate_bfloat16},
    {activate_float32, activate_bfloat16}, {add_float32, add_bfloat16}, {streams_float32, streams_bfloat16},
    {resize_float32, resize_bfloat16}, {sparse_gate_float32, sparse_gate_bfloat16}, 1, TALL_ROWS, 512, 0, &quantized_avx512_vnni};
#endif

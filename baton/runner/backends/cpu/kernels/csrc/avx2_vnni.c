/* Products with quantized weights for AVX2 with AVX-VNNI, which processors for desktops have instead of AVX-512. All other kernels
 * are those of AVX2. */
#if defined(__x86_64__)
#define TARGET __attribute__((target("f16c,avx2,fma")))
#include "vector_avx2.h"
#include "quantized.h"

#include <cpuid.h>

#define WIDE_PANELS 4
#define WIDE_ROWS 1
#define WIDE_CASES(F) F(1)
#define TALL_PANELS 1
#define TALL_ROWS 1
#define TALL_CASES(F) F(1)
#include "functions.inc.h"
#include "product_float32.inc.h"
#include "adapters.inc.h"
#include "linear_float32.inc.h"
#define QUANTIZED_UNROLLED 0
#define QUANTIZED_WIDE_ROWS 1
#define QUANTIZED_WIDE_CASES(F) F(1)
#define QUANTIZED_TALL_ROWS 2
#define QUANTIZED_TALL_CASES(F) F(2)
#define AVX_VNNI
#include "integers_avx2.h"
#include "product_quantized.inc.h"

/* Asked at each product; a virtual machine takes 10 microseconds to execute cpuid, so its answer is kept. */
static int supported(void) {
    enum { UNKNOWN, NO, YES };
    static atomic_int known = UNKNOWN;
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == UNKNOWN) {
        unsigned a, b, c, d;
        answer = quantized_avx2.supported() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1) ? YES : NO; /* AVX-VNNI */
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == YES;
}

const struct quantized_kernels quantized_avx2_vnni = {
    supported, &quantized_avx2, {quantized_linear_float32, quantized_linear_bfloat16}, {quantize_float32, quantize_bfloat16},
    QUANTIZED_TALL_ROWS};
#endif

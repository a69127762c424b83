/* The library's entry points for products, norms and rotations. Python validates every argument before it calls. */
#include "kernels.h"

const struct isa *const isas[] = {
#if defined(__x86_64__) && defined(__linux__)
    &isa_amx_bf16,
#endif
#if defined(__x86_64__)
    &isa_avx512_bf16, &isa_avx512, &isa_avx2,
#endif
    &isa_portable,
};
enum { NUM_ISAS = sizeof isas / sizeof isas[0] };

int baton_num_isas(void) { return NUM_ISAS; }
const char *baton_isa_name(int isa) { return isas[isa]->name; }
int baton_isa_supported(int isa) { return isas[isa]->supported(); }

/* The fastest. Intel's vdpbf16ps has half the rate of its plain products, which give the same bits; AMD's has twice. */
int baton_default_isa(void) {
    int isa = 0;
#if defined(__x86_64__)
    while (!isas[isa]->supported() || (isas[isa] == &isa_avx512_bf16 && __builtin_cpu_is("intel"))) isa++;
#endif
    return isa;
}

/* Columns are split first; rows so that they stay in a cache, and to keep every thread busy. */
static size_t rows_per_task(const struct linear_call *call, const struct isa *isa, int dtype, int n_threads) {
    size_t groups = column_groups(call), wanted = 4 * (size_t)n_threads, rows = call->m, step = isa->linear_rows;
    if (dtype == DTYPE_BFLOAT16 && isa->linear_bytes > 0) {
        size_t cached = isa->linear_bytes / (call->k * 2 + 1) / step * step;
        if (cached < step) cached = step;
        if (rows > cached) { /* of equal size */
            size_t parts = (rows + cached - 1) / cached;
            rows = ((rows + parts - 1) / parts + step - 1) / step * step;
        }
    }
    size_t tasks = groups * ((call->m + rows - 1) / rows);
    if (n_threads > 1 && tasks < wanted) {
        size_t parts = (wanted + groups - 1) / groups, blocks = (call->m + step - 1) / step;
        rows = (blocks + parts - 1) / parts * step;
    }
    return rows < call->m ? rows : call->m;
}

/* activation: enum activation; n counts the columns of out, k is padded, x_stride counts elements */
int baton_linear(int isa_index, int dtype, const void *x, const void *packed, const void *bias, void *out, size_t m, size_t n,
                 size_t k, size_t x_stride, int activation, int n_threads) {
    const struct isa *isa = isas[isa_index];
    struct linear_call call = {.x = x, .packed = packed, .bias = bias, .out = out, .m = m, .n = n, .k = k,
                               .x_stride = x_stride, .activation = (enum activation)activation};
    if (m == 0 || n == 0) return STATUS_OK;
    if (n_threads < 1 || (double)m * (double)n * (double)k < 1 << 18) n_threads = 1; /* a fork costs more than this work */
    call.rows_per_task = rows_per_task(&call, isa, dtype, n_threads);
    size_t parts = (m + call.rows_per_task - 1) / call.rows_per_task, sums = isa->linear_rows;
    if (isa->linear_bytes > 0 && call.rows_per_task > sums) sums = call.rows_per_task;
    size_t scratch = (sums * GROUP_COLUMNS + isa->linear_rows * k) * sizeof(float);
    return run_tasks(isa->linear[dtype], &call, column_groups(&call) * parts, n_threads, scratch);
}

/* Rows of a task so that it is worth a fork. */
static size_t worthwhile(size_t elements) {
    size_t rows = (16 << 10) / (elements + 1);
    return rows < 1 ? 1 : rows;
}

int baton_rms_norm(int isa, int dtype, const void *x, const void *weight, const void *residual, void *sum, void *out, size_t rows,
                   size_t columns, size_t n, size_t row_stride, size_t column_stride, float eps, int plus_one, int n_threads) {
    struct norm_call call = {.x = x, .weight = weight, .residual = residual, .sum = sum, .out = out, .rows = rows,
                             .columns = columns, .n = n, .stride = {row_stride, column_stride}, .eps = eps, .plus_one = plus_one};
    if (rows * columns * n == 0) return STATUS_OK;
    call.rows_per_task = worthwhile(columns * n);
    size_t tasks = (rows + call.rows_per_task - 1) / call.rows_per_task;
    return run_tasks(isas[isa]->rms_norm[dtype], &call, tasks, n_threads, 0);
}

int baton_rotate(int isa, int dtype, void *x, const void *cos, const void *sin, size_t tokens, size_t heads, size_t half,
                 size_t token_stride, size_t head_stride, size_t angle_stride, int n_threads) {
    struct rotate_call call = {.x = x, .cos = cos, .sin = sin, .tokens = tokens, .heads = heads, .half = half,
                               .token_stride = token_stride, .head_stride = head_stride, .angle_stride = angle_stride};
    if (tokens * heads * half == 0) return STATUS_OK;
    call.tokens_per_task = worthwhile(heads * half * 2);
    size_t tasks = (tokens + call.tokens_per_task - 1) / call.tokens_per_task;
    return run_tasks(isas[isa]->rotate[dtype], &call, tasks, n_threads, 0);
}

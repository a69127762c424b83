/* The library's entry points for products, norms and rotations. Python validates every argument before it calls. */
#include "float8.h"
#include "kernels.h"
#include "quantized.h"

#include <unistd.h>

const struct isa *const isas[] = {
#if defined(__x86_64__) && defined(__linux__)
    &isa_amx_bf16,
#endif
#if defined(__x86_64__)
    &isa_avx512_bf16, &isa_avx512, &isa_avx2_vnni, &isa_avx2,
#endif
    &isa_portable,
};
enum { NUM_ISAS = sizeof isas / sizeof isas[0] };

int baton_num_isas(void) { return NUM_ISAS; }
const char *baton_isa_name(int isa) { return isas[isa]->name; }
int baton_isa_supported(int isa) { return isas[isa]->supported(); }

/* The fastest instruction set. On Intel vdpbf16ps has half the rate of plain products, which give the same bits; on AMD it has
 * twice their rate. */
int baton_default_isa(void) {
    int isa = 0;
#if defined(__x86_64__)
    while (!isas[isa]->supported() || (isas[isa] == &isa_avx512_bf16 && __builtin_cpu_is("intel"))) isa++;
#endif
    return isa;
}

size_t few_piece_bytes = 16 << 10;

/* Asked once, when the library is loaded: in a virtual machine each answer costs an exit to the host. Caches of 32 KB, which may
 * belong to two threads of a core, lose a piece of 16 KB before its last rows are computed. */
__attribute__((constructor)) static void choose_few_piece_bytes(void) {
#ifdef _SC_LEVEL1_DCACHE_SIZE
    long cache = sysconf(_SC_LEVEL1_DCACHE_SIZE);
    if (cache > 0 && cache < 48 << 10) few_piece_bytes = 8 << 10;
#endif
}

/* How much of the second-level cache the sums of one task may fill; the piece of x that they share fills as much again. */
enum { SUMS_BYTES = 512 << 10 };
/* With at least this many groups, a thread's share of a product of few rows is cut, since threads may be unequally fast. */
enum { LONG_GROUPS = 64 };

/* Cuts a product into tasks. Rows are cut into equal parts, few enough that a task can keep their sums, and so many that every
 * thread has a task. Columns are cut into groups, several of which are one task where there are enough of them. */
static void plan_linear(struct linear_call *call, size_t step, size_t rows_of_sums, int groups_take_turns, size_t n_threads) {
    size_t groups = column_groups(call), wanted = n_threads > 1 ? 4 * n_threads : 1, parts = 1;
    int keeps_sums = rows_of_sums > 0;
    if (keeps_sums) parts = (call->m + rows_of_sums - 1) / rows_of_sums;
    if (groups * parts < wanted) parts = (wanted + groups - 1) / groups;
    size_t rows = ((call->m + parts - 1) / parts + step - 1) / step * step;
    call->rows_per_task = rows < call->m ? rows : call->m;
    call->groups_per_task = 1;
    parts = (call->m + call->rows_per_task - 1) / call->rows_per_task;
    if (!keeps_sums) return;
    if (call->m <= FEW_ROWS && !groups_take_turns) {
        /* Neighbouring groups are one task, so that a thread itself uses the weights that it prefetches. */
        size_t shares = n_threads * (groups < LONG_GROUPS ? 1 : 4);
        call->groups_per_task = (groups + shares - 1) / shares;
        return;
    }
    if (call->m <= step) return;
    size_t together = SUMS_BYTES / (call->rows_per_task * GROUP_COLUMNS * sizeof(float)), most = groups * parts / wanted;
    if (together > most) together = most;
    if (together > 4) together = 4;
    if (together > 1) call->groups_per_task = together;
}

/* How an instruction set computes a product. */
struct linear_way {
    task_function function;
    size_t step, rows_of_sums;
    int groups_take_turns;
};

static struct linear_way linear_way(const struct linear_call *call, const struct isa *isa, enum dtype dtype) {
    if (call->format != NULL) {
        const struct quantized_kernels *quantized = quantized_kernels(isa);
        return (struct linear_way){quantized->linear[dtype], quantized->linear_rows, QUANTIZED_ROWS_OF_SUMS, 0};
    }
    if (call->scale_group > 0) return (struct linear_way){isa->linear_float8[dtype], isa->linear_rows, isa->rows_of_sums, 0};
    return (struct linear_way){isa->linear[dtype], isa->linear_rows, dtype == DTYPE_BFLOAT16 ? isa->rows_of_sums : 0,
                               isa->groups_take_turns};
}

/* sums: the most rows of sums, of one group of columns each, that a task has at a time. */
static size_t scratch_of_sums(const struct linear_call *call, const struct linear_way *way, size_t sums) {
    if (sums < way->step) sums = way->step;
    size_t bytes = (sums * GROUP_COLUMNS + way->step * (call->format == NULL ? call->k : 0)) * sizeof(float);
    if (call->scale_group > 0) bytes += sums * GROUP_COLUMNS * sizeof(float) + MANY_WIDENED_BYTES; /* sums beside the totals */
    return bytes;
}

struct work linear_work(struct linear_call *call, const struct isa *isa, enum dtype dtype, int n_threads) {
    const struct linear_way way = linear_way(call, isa, dtype);
    struct work work = {.function = way.function, .job = call};
    if (call->m == 0 || call->n == 0) return work;
    plan_linear(call, way.step, way.rows_of_sums, way.groups_take_turns, n_threads < 1 ? 1 : (size_t)n_threads);
    size_t across = (column_groups(call) + call->groups_per_task - 1) / call->groups_per_task;
    work.n_tasks = across * ((call->m + call->rows_per_task - 1) / call->rows_per_task);
    work.scratch_bytes = scratch_of_sums(call, &way, call->rows_per_task * (way.groups_take_turns ? call->groups_per_task : 1));
    return work;
}

size_t linear_scratch_bytes(const struct linear_call *call, size_t rows, const struct isa *isa, enum dtype dtype) {
    const struct linear_way way = linear_way(call, isa, dtype);
    if (way.rows_of_sums > 0 && rows > way.rows_of_sums) rows = way.rows_of_sums;
    rows = (rows + way.step - 1) / way.step * way.step;
    size_t together = SUMS_BYTES / (GROUP_COLUMNS * sizeof(float));
    return scratch_of_sums(call, &way, way.groups_take_turns && rows < together ? together : rows);
}

static void multiply_heads(const void *job, size_t task, void *scratch) {
    const struct heads_call *call = job;
    size_t head = task / call->tasks_of_head;
    struct linear_call one = call->linear;
    one.x = (const char *)one.x + head * call->x_apart;
    one.packed = (const char *)one.packed + head * call->packed_apart;
    one.out = (char *)one.out + head * call->out_apart;
    call->function(&one, task % call->tasks_of_head, scratch);
}

struct work heads_work(struct heads_call *call, const struct isa *isa, enum dtype dtype) {
    struct work of_head = linear_work(&call->linear, isa, dtype, 1); /* there are enough heads for all threads */
    call->function = of_head.function;
    call->tasks_of_head = of_head.n_tasks;
    return (struct work){.function = multiply_heads, .job = call, .n_tasks = call->heads * of_head.n_tasks,
                         .scratch_bytes = of_head.scratch_bytes};
}

const struct quantized_kernels *quantized_kernels(const struct isa *isa) {
    const struct quantized_kernels *kernels = isa->quantized;
    while (!kernels->supported()) kernels = kernels->otherwise;
    return kernels;
}

/* How many rows a task must have to be worth a fork of threads. */
static size_t worthwhile(size_t elements) {
    size_t rows = (4 << 10) / (elements + 1);
    return rows < 1 ? 1 : rows;
}

struct work norm_work(struct norm_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->rms_norm[dtype], .job = call};
    call->rows_per_task = worthwhile(call->columns * call->n);
    if (call->columns * call->n > 0) work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

struct work gate_work(struct gate_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->gate[dtype], .job = call};
    call->rows_per_task = worthwhile(call->columns);
    if (call->columns > 0) work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

struct work route_work(struct route_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->route[dtype], .job = call};
    call->rows_per_task = worthwhile(call->experts * (call->most + 1));
    work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    work.scratch_bytes = (3 * padded_lanes(call->experts) + padded_lanes(call->most) + call->groups) * sizeof(float) + call->experts + call->groups;
    return work;
}

struct work clamp_work(struct clamp_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->clamped_gate[dtype], .job = call};
    call->rows_per_task = worthwhile(2 * call->columns);
    work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

struct work sum_work(struct sum_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->sum_experts[dtype], .job = call};
    call->rows_per_task = worthwhile(call->n * call->most);
    work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

struct work multiply_work(struct multiply_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->multiply[dtype], .job = call};
    call->rows_per_task = worthwhile(call->columns);
    if (call->columns > 0) work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

struct work activate_work(struct activate_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->activate[dtype], .job = call};
    call->rows_per_task = worthwhile(call->columns);
    if (call->columns > 0) work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

struct work add_work(struct add_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->add[dtype], .job = call};
    call->rows_per_task = worthwhile(call->columns);
    if (call->columns > 0) work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

struct work streams_work(struct streams_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->streams[dtype], .job = call};
    call->rows_per_task = worthwhile(call->streams * call->columns);
    work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

struct work resize_work(struct resize_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->resize[dtype], .job = call};
    call->rows_per_task = worthwhile(call->columns);
    work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

struct work sparse_gate_work(struct sparse_gate_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->sparse_gate[dtype], .job = call};
    call->rows_per_task = worthwhile(call->columns);
    work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

/* Cut into tasks of so many ranks as adapters.inc.h computes together. */
enum { SHRINK_RANKS = 8 };

struct work shrink_work(struct shrink_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->shrink[dtype], .job = call};
    size_t rank = 0;
    for (size_t slot = 0; slot < call->adapters->num_slots; slot++) {
        const struct adapter_weights *weights = call->adapters->weights[slot];
        if (weights != NULL && weights->rank > rank) rank = weights->rank;
    }
    call->parts = rank / SHRINK_RANKS;
    call->rows_per_task = call->rows <= FEW_ROWS ? 1 : 8;
    work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task * call->parts;
    return work;
}

struct work rotate_work(struct rotate_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = isa->rotate[dtype], .job = call};
    call->tokens_per_task = worthwhile(call->heads * call->half * 2);
    if (call->heads * call->half > 0) work.n_tasks = (call->tokens + call->tokens_per_task - 1) / call->tokens_per_task;
    return work;
}

struct work quantize_work(struct quantize_call *call, const struct isa *isa, enum dtype dtype) {
    struct work work = {.function = quantized_kernels(isa)->quantize[dtype], .job = call};
    call->rows_per_task = worthwhile(call->k);
    if (call->k > 0) work.n_tasks = (call->rows + call->rows_per_task - 1) / call->rows_per_task;
    return work;
}

/* The number of threads for a product; one where a fork would take longer than the product. */
static int worthwhile_threads(size_t m, size_t n, size_t k, int n_threads) {
    return (double)m * (double)n * (double)k < 1 << 18 ? 1 : n_threads;
}

/* Appends the work of the adapters to works, if any changes the product; returns how many works there are then. */
static size_t append_shrink(struct work *works, size_t n_works, struct shrink_call *shrink, struct linear_call *call,
                            const struct isa *isa, enum dtype dtype) {
    if (shrink->adapters == NULL) return n_works;
    struct work work = shrink_work(shrink, isa, dtype);
    if (work.n_tasks == 0) return n_works;
    call->adapters = shrink->adapters;
    works[n_works] = work;
    return n_works + 1;
}

/* n: columns of out; k: padded columns of x; scale_group: of a weight in float8, or 0; strides: elements from row to row;
 * activation: an enum activation; out_dtype: float32, or dtype; adapters: NULL, or those of the rows */
int baton_linear(int isa_index, int dtype, const void *x, const void *packed, const void *bias, void *out, size_t m, size_t n,
                 size_t k, size_t scale_group, size_t x_stride, size_t out_stride, int activation, int out_dtype, int n_threads,
                 const struct adapter_rows *adapters) {
    const struct isa *isa = isas[isa_index];
    struct linear_call call = {.x = x, .packed = packed, .bias = bias, .out = out, .m = m, .n = n, .k = k,
                               .scale_group = scale_group, .x_stride = x_stride, .out_stride = out_stride,
                               .activation = (enum activation)activation, .out_dtype = (enum dtype)out_dtype};
    struct shrink_call shrink = {.x = x, .adapters = adapters, .rows = m, .x_stride = x_stride};
    struct work works[2];
    n_threads = worthwhile_threads(m, n, k, n_threads);
    size_t n_works = append_shrink(works, 0, &shrink, &call, isa, (enum dtype)dtype);
    works[n_works++] = linear_work(&call, isa, (enum dtype)dtype, n_threads);
    return run_works(works, n_works, n_threads, NULL);
}

/* The products of the rows of several heads with weights of their own in x's dtype; *_apart: elements from head to head. */
int baton_linear_of_heads(int isa_index, int dtype, const void *x, const void *packed, void *out, size_t heads, size_t m, size_t n,
                          size_t k, size_t x_stride, size_t out_stride, size_t x_apart, size_t packed_apart, size_t out_apart,
                          int n_threads) {
    size_t size = dtype == DTYPE_FLOAT32 ? 4 : 2;
    struct heads_call call = {.linear = {.x = x, .packed = packed, .out = out, .m = m, .n = n, .k = k, .x_stride = x_stride,
                                         .out_stride = out_stride, .out_dtype = (enum dtype)dtype},
                              .heads = heads, .x_apart = x_apart * size, .packed_apart = packed_apart * size,
                              .out_apart = out_apart * size};
    struct work work = heads_work(&call, isas[isa_index], (enum dtype)dtype);
    return run_works(&work, 1, worthwhile_threads(heads * m, n, k, n_threads), NULL);
}

/* The product with a quantized weight. room: m rows of quantized x (baton_quantized_row_bytes) */
int baton_quantized_linear(int isa_index, int dtype, const struct quantized_format *format, const void *x, const void *packed,
                           const void *bias, void *out, void *room, size_t m, size_t n, size_t k, size_t x_stride,
                           size_t out_stride, int activation, int out_dtype, int n_threads, const struct adapter_rows *adapters) {
    const struct isa *isa = isas[isa_index];
    struct quantize_call quantize = {.x = x, .out = room, .format = format, .rows = m, .k = k, .x_stride = x_stride};
    struct linear_call call = {.x = room, .packed = packed, .bias = bias, .out = out, .format = format, .m = m, .n = n, .k = k,
                               .x_stride = quantized_row_bytes(format, k), .out_stride = out_stride,
                               .activation = (enum activation)activation, .out_dtype = (enum dtype)out_dtype};
    struct shrink_call shrink = {.x = x, .adapters = adapters, .rows = m, .x_stride = x_stride};
    n_threads = worthwhile_threads(m, n, k, n_threads);
    struct work works[3] = {quantize_work(&quantize, isa, (enum dtype)dtype)};
    size_t n_works = append_shrink(works, 1, &shrink, &call, isa, (enum dtype)dtype);
    works[n_works++] = linear_work(&call, isa, (enum dtype)dtype, n_threads);
    return run_works(works, n_works, n_threads, NULL);
}

int baton_rotate(int isa, int dtype, void *x, const void *cos, const void *sin, size_t tokens, size_t heads, size_t half,
                 size_t token_stride, size_t head_stride, size_t angle_stride, int angle_dtype, int in_pairs, int n_threads) {
    struct rotate_call call = {.x = x, .cos = cos, .sin = sin, .tokens = tokens, .heads = heads, .half = half,
                               .token_stride = token_stride, .head_stride = head_stride, .angle_stride = angle_stride,
                               .angle_dtype = (enum dtype)angle_dtype, .in_pairs = in_pairs};
    struct work work = rotate_work(&call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_norm(int isa, int dtype, struct norm_call *call, int n_threads) {
    struct work work = norm_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_gate(int isa, int dtype, struct gate_call *call, int n_threads) {
    struct work work = gate_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_route(int isa, int dtype, struct route_call *call, int n_threads) {
    struct work work = route_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_clamped_gate(int isa, int dtype, struct clamp_call *call, int n_threads) {
    struct work work = clamp_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_sum_experts(int isa, int dtype, struct sum_call *call, int n_threads) {
    struct work work = sum_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_mixture(int isa, int dtype, struct mixture_call *call, int n_threads) {
    struct mixture_job job;
    struct work works[MIXTURE_WORKS];
    int status = plan_mixture(&job, call, isas[isa], (enum dtype)dtype, n_threads);
    if (status == STATUS_OK) status = run_works(works, mixture_works(&job, works), n_threads, NULL);
    free_mixture_plan(&job);
    return status;
}

int baton_multiply(int isa, int dtype, struct multiply_call *call, int n_threads) {
    struct work work = multiply_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_activate(int isa, int dtype, struct activate_call *call, int n_threads) {
    struct work work = activate_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_streams(int isa, int dtype, struct streams_call *call, int n_threads) {
    struct work work = streams_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_resize(int isa, int dtype, struct resize_call *call, int n_threads) {
    struct work work = resize_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_sparse_gate(int isa, int dtype, struct sparse_gate_call *call, int n_threads) {
    struct work work = sparse_gate_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

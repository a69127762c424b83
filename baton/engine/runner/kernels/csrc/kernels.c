/* The library's entry points. Python validates every argument before it calls. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

static const struct isa *const isas[] = {
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

/* k as packed; the rows of x are padded with zeros to it as well */
size_t baton_padded_k(int dtype, size_t k) {
    return dtype == DTYPE_FLOAT32 ? k : (k + BF16_K_MULTIPLE - 1) / BF16_K_MULTIPLE * BF16_K_MULTIPLE;
}

/* elements of a packed [n, k] weight */
size_t baton_packed_size(int dtype, size_t n, size_t k) {
    return (n + GROUP_COLUMNS - 1) / GROUP_COLUMNS * GROUP_COLUMNS * baton_padded_k(dtype, k);
}

void baton_pack(int dtype, const void *weight, void *packed, size_t n, size_t k) {
    size_t padded = baton_padded_k(dtype, k), columns = (n + GROUP_COLUMNS - 1) / GROUP_COLUMNS * GROUP_COLUMNS;
    for (size_t first = 0; first < columns; first += LANES) {
        size_t used = first >= n ? 0 : n - first < LANES ? n - first : LANES; /* written in order, read in 16 streams */
        if (dtype == DTYPE_FLOAT32) {
            const float *from = (const float *)weight + first * k;
            float *to = (float *)packed + first * padded;
            for (size_t i = 0; i < padded; i++, to += LANES)
                for (size_t lane = 0; lane < LANES; lane++) to[lane] = lane < used ? from[lane * k + i] : 0.0f;
        } else {
            const uint16_t *from = (const uint16_t *)weight + first * k;
            uint16_t *to = (uint16_t *)packed + first * padded;
            for (size_t i = 0; i < padded; i += 2, to += 2 * LANES)
                for (size_t lane = 0; lane < LANES; lane++) {
                    to[2 * lane] = lane < used && i < k ? from[lane * k + i] : 0;
                    to[2 * lane + 1] = lane < used && i + 1 < k ? from[lane * k + i + 1] : 0;
                }
        }
    }
}

/* Columns are split first; rows too when there are more threads than column groups to keep them busy. */
static size_t rows_per_task(const struct linear_call *call, const struct isa *isa, int n_threads) {
    size_t groups = (call->n + GROUP_COLUMNS - 1) / GROUP_COLUMNS, wanted = 4 * (size_t)(n_threads > 1 ? n_threads : 1);
    if (n_threads <= 1 || groups >= wanted || call->m == 0) return call->m;
    size_t parts = (wanted + groups - 1) / groups, blocks = (call->m + isa->linear_rows - 1) / isa->linear_rows;
    return (blocks + parts - 1) / parts * isa->linear_rows;
}

/* k as padded */
int baton_linear(int isa_index, int dtype, const void *x, const void *packed, const void *bias, void *out, size_t m, size_t n,
                 size_t k, int n_threads) {
    const struct isa *isa = isas[isa_index];
    struct linear_call call = {.x = x, .packed = packed, .bias = bias, .out = out, .m = m, .n = n, .k = k};
    if (m == 0 || n == 0) return STATUS_OK;
    if ((double)m * (double)n * (double)k < 1 << 18) n_threads = 1; /* a fork costs more than this work */
    call.rows_per_task = rows_per_task(&call, isa, n_threads);
    size_t groups = (n + GROUP_COLUMNS - 1) / GROUP_COLUMNS, parts = (m + call.rows_per_task - 1) / call.rows_per_task;
    size_t scratch = isa->linear_rows * (GROUP_COLUMNS + k) * sizeof(float);
    return run_tasks(isa->linear[dtype], &call, groups * parts, n_threads, scratch);
}

static size_t attention_scratch(const struct attention_call *call) {
    size_t out_stride = attention_out_stride(call->head_dim);
    size_t rows = ATTENTION_ROWS * (KEY_TILE + out_stride + LANES + 1 + KEY_TILE + out_stride);
    return sizeof(float) * (rows + KEY_TILE * out_stride * 5 / 2); /* values, their pairs, keys */
}

/* Appends the tasks of one request, or only counts them when tasks is NULL. */
static size_t plan_request(const struct attention_call *call, int64_t seq, struct attention_task *tasks) {
    int64_t tokens = call->query_start[seq + 1] - call->query_start[seq], group = call->heads / call->kv_heads;
    int64_t heads = group < ATTENTION_ROWS ? group : ATTENTION_ROWS, step = ATTENTION_ROWS / heads;
    size_t count = 0;
    for (int64_t token = 0; token < tokens; token += step)
        for (int64_t kv_head = 0; kv_head < call->kv_heads; kv_head++)
            for (int64_t head = 0; head < group; head += heads, count++) {
                if (tasks == NULL) continue;
                tasks[count] = (struct attention_task){
                    .seq = (int32_t)seq,
                    .kv_head = (int32_t)kv_head,
                    .head_start = (int32_t)(kv_head * group + head),
                    .head_count = (int32_t)(group - head < heads ? group - head : heads),
                    .token_start = (int32_t)token,
                    .token_count = (int32_t)(tokens - token < step ? tokens - token : step),
                };
            }
    return count;
}

/* Everything that would read outside the tensors if it were wrong; blocks that no query row sees may hold any number. */
static int check_attention(const struct attention_call *call) {
    if (call->query_start[0] != 0 || call->query_start[call->num_seqs] > call->rows) return STATUS_BAD_QUERY_START;
    for (int64_t seq = 0; seq < call->num_seqs; seq++) {
        int64_t tokens = (int64_t)call->query_start[seq + 1] - call->query_start[seq], length = call->seq_lens[seq];
        if (tokens < 0) return STATUS_BAD_QUERY_START;
        if (tokens == 0) continue;
        if (length < tokens || length > call->table_width * call->block_size) return STATUS_BAD_SEQ_LEN;
        int64_t first_position = length - tokens;
        int64_t first_key = call->window > 0 && first_position + 1 > call->window ? first_position + 1 - call->window : 0;
        const int32_t *table = call->block_tables + seq * call->table_width;
        for (int64_t block = first_key / call->block_size; block <= (length - 1) / call->block_size; block++)
            if (table[block] < 0 || table[block] >= call->num_blocks) return STATUS_BAD_BLOCK;
    }
    return STATUS_OK;
}

int baton_attention(int isa_index, int dtype, const struct attention_call *call, int n_threads) {
    int checked = check_attention(call);
    if (checked != STATUS_OK) return checked;
    size_t row_bytes = (size_t)(call->heads * call->head_dim) * (dtype == DTYPE_FLOAT32 ? 4 : 2);
    size_t used = (size_t)call->query_start[call->num_seqs], count = 0;
    memset((char *)call->out + used * row_bytes, 0, ((size_t)call->rows - used) * row_bytes);
    for (int64_t seq = 0; seq < call->num_seqs; seq++) count += plan_request(call, seq, NULL);
    if (count == 0) return STATUS_OK;
    struct attention_task *tasks = malloc(count * sizeof *tasks);
    if (tasks == NULL) return STATUS_NO_MEMORY;
    size_t planned = 0;
    for (int64_t seq = 0; seq < call->num_seqs; seq++) planned += plan_request(call, seq, tasks + planned);
    struct attention_job job = {.call = call, .tasks = tasks};
    int status = run_tasks(isas[isa_index]->attention[dtype], &job, count, n_threads, attention_scratch(call));
    free(tasks);
    return status;
}

/* cache points at the layer's first key; strides and row in bytes */
int baton_store_kv(const void *key, const void *value, void *cache, const int64_t *slots, int64_t tokens, int64_t kv_heads,
                   int64_t num_blocks, int64_t block_size, int64_t row, int64_t block_stride, int64_t value_offset,
                   int64_t head_stride) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] >= num_blocks * block_size) return STATUS_BAD_SLOT;
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        char *to = (char *)cache + slots[t] / block_size * block_stride + slots[t] % block_size * row;
        for (int64_t head = 0; head < kv_heads; head++) {
            memcpy(to + head * head_stride, (const char *)key + (t * kv_heads + head) * row, (size_t)row);
            memcpy(to + head * head_stride + value_offset, (const char *)value + (t * kv_heads + head) * row, (size_t)row);
        }
    }
    return STATUS_OK;
}

/* The library's entry points for the paged cache: they check arguments and cut attention into tasks. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

static size_t attention_scratch(const struct attention_call *call) {
    size_t key = padded_columns(call->key_dim), value = padded_columns(call->value_dim);
    size_t rows = ATTENTION_ROWS * (value + LANES + 1 + key), scores = SCORE_ROWS * 2 * KEY_TILE;
    size_t widened = call->format == CACHE_AS_IT_IS ? 0 : KEY_TILE * (key + value);
    return sizeof(float) * (rows + scores + KEY_TILE * value * 3 / 2 + KEY_TILE * key + widened); /* values, their pairs, keys */
}

/* The number of keys that a request's own tasks attend to, at least one. */
static int64_t own_keys(const struct attention_job *job, int64_t seq) {
    int64_t shared = job->sharing == NULL ? 0 : (int64_t)job->sharing->tiles[seq] * KEY_TILE, length = job->call->seq_lens[seq];
    return length > shared ? length - shared : 1;
}

/* How many KV heads a task of one token computes: longer pieces of memory are read faster, but all threads need tasks.
 * work: the number of keys times KV heads, of all requests. */
static int64_t kv_heads_together(const struct attention_job *job, int64_t seq, int64_t work, int n_threads) {
    const struct attention_call *call = job->call;
    int64_t group = call->heads / call->kv_heads, most = work / (2 * n_threads * own_keys(job, seq));
    if (most > TASK_KV_HEADS) most = TASK_KV_HEADS;
    if (most > ATTENTION_ROWS / group) most = ATTENTION_ROWS / group;
    while (most > 1 && call->kv_heads % most != 0) most--;
    return most > 1 ? most : 1;
}

/* How many heads of a group a task computes. Of a request with few rows they are divided, if there are fewer KV heads than threads;
 * each task reads the keys anew. */
static int64_t heads_together(const struct attention_job *job, int64_t seq, int64_t work, int n_threads) {
    enum { FEWEST_HEADS = 16 };
    const struct attention_call *call = job->call;
    int64_t group = call->heads / call->kv_heads, heads = group < ATTENTION_ROWS ? group : ATTENTION_ROWS;
    int64_t tokens = call->query_start[seq + 1] - call->query_start[seq];
    if (tokens * group > ATTENTION_ROWS || group < 2 * FEWEST_HEADS) return heads;
    /* As many tasks as are its share of those that keep all threads busy. */
    int64_t parts = n_threads * own_keys(job, seq) / (work > 0 ? work : 1);
    if (parts > group / FEWEST_HEADS) parts = group / FEWEST_HEADS;
    return parts > 1 ? (group + parts - 1) / parts : heads;
}

/* Appends the tasks of one request, or only counts them when tasks is NULL. */
static size_t plan_request(const struct attention_job *job, int64_t seq, int64_t work, int n_threads, struct attention_task *tasks) {
    const struct attention_call *call = job->call;
    int64_t tokens = call->query_start[seq + 1] - call->query_start[seq], group = call->heads / call->kv_heads;
    int64_t heads = heads_together(job, seq, work, n_threads), step = ATTENTION_ROWS / heads;
    int64_t together = tokens == 1 && heads == group ? kv_heads_together(job, seq, work, n_threads) : 1;
    size_t count = 0;
    for (int64_t token = 0; token < tokens; token += step)
        for (int64_t kv_head = 0; kv_head < call->kv_heads; kv_head += together)
            for (int64_t head = 0; head < group; head += heads, count++) {
                if (tasks == NULL) continue;
                tasks[count] = (struct attention_task){
                    .seq = (int32_t)seq,
                    .kv_head = (int32_t)kv_head,
                    .kv_count = (int32_t)together,
                    .head_start = (int32_t)(kv_head * group + head),
                    .head_count = (int32_t)(group - head < heads ? group - head : heads),
                    .token_start = (int32_t)token,
                    .token_count = (int32_t)(tokens - token < step ? tokens - token : step),
                };
            }
    return count;
}

/* Entries of a block table that no query row attends to are not checked. */
int check_attention(const struct attention_call *call) {
    if (call->ahead < 0) return STATUS_BAD_SEQ_LEN;
    if (call->query_start[0] != 0 || call->query_start[call->num_seqs] > call->rows) return STATUS_BAD_QUERY_START;
    for (int64_t seq = 0; seq < call->num_seqs; seq++) {
        int64_t tokens = (int64_t)call->query_start[seq + 1] - call->query_start[seq], length = call->seq_lens[seq];
        if (tokens < 0) return STATUS_BAD_QUERY_START;
        if (tokens == 0) continue;
        if (length < tokens || length > call->table_width * call->block_size) return STATUS_BAD_SEQ_LEN;
        int64_t first_position = length - tokens;
        const int32_t *table = call->block_tables + seq * call->table_stride;
        for (int64_t block = first_key(call, first_position) / call->block_size; block <= (length - 1) / call->block_size; block++)
            if (table[block] < 0 || table[block] >= call->num_blocks) return STATUS_BAD_BLOCK;
    }
    return STATUS_OK;
}

void clear_unused_rows(const struct attention_call *call, enum dtype dtype) {
    size_t size = dtype == DTYPE_FLOAT32 ? 4 : 2, row_bytes = (size_t)(call->heads * call->value_dim) * size;
    for (int64_t row = call->query_start[call->num_seqs]; row < call->rows; row++)
        memset((char *)call->out + (size_t)(row * call->out_stride) * size, 0, row_bytes);
}

int plan_attention(struct attention_job *job, const struct attention_call *call, int n_threads) {
    int64_t work = 0;
    *job = (struct attention_job){.call = call};
    if (n_threads < 1) n_threads = 1;
    int status = find_sharing(&job->sharing, call, n_threads);
    if (status != STATUS_OK) return status;
    for (int64_t seq = 0; seq < call->num_seqs; seq++)
        if (call->query_start[seq + 1] > call->query_start[seq]) work += own_keys(job, seq) * call->kv_heads;
    for (int64_t seq = 0; seq < call->num_seqs; seq++) job->count += plan_request(job, seq, work, n_threads, NULL);
    if (job->count == 0) return STATUS_OK;
    job->tasks = malloc(job->count * sizeof *job->tasks);
    if (job->tasks == NULL) return STATUS_NO_MEMORY;
    size_t planned = 0;
    for (int64_t seq = 0; seq < call->num_seqs; seq++) planned += plan_request(job, seq, work, n_threads, job->tasks + planned);
    return STATUS_OK;
}

void free_attention_plan(struct attention_job *job) {
    free(job->tasks);
    free_sharing(job->sharing);
}

size_t attention_works(const struct attention_job *job, const struct isa *isa, enum dtype dtype, struct work works[2]) {
    size_t count = 0, scratch = attention_scratch(job->call);
    if (job->sharing != NULL)
        works[count++] = (struct work){.function = isa->shared_attention[dtype], .job = job, .n_tasks = job->sharing->count,
                                       .scratch_bytes = scratch};
    works[count++] = (struct work){.function = isa->attention[dtype], .job = job, .n_tasks = job->count, .scratch_bytes = scratch};
    return count;
}

int baton_attention(int isa, int dtype, const struct attention_call *call, int n_threads) {
    int status = check_attention(call);
    if (status != STATUS_OK) return status;
    clear_unused_rows(call, (enum dtype)dtype);
    struct attention_job job;
    status = plan_attention(&job, call, n_threads);
    if (status == STATUS_OK) {
        struct work works[2];
        size_t count = attention_works(&job, isas[isa], (enum dtype)dtype, works);
        status = run_works(works, count, n_threads, NULL);
    }
    free_attention_plan(&job);
    return status;
}

int check_store(const struct store_call *call) {
    for (int64_t t = 0; t < call->tokens; t++)
        if (call->slots[t] >= call->num_blocks * call->block_size) return STATUS_BAD_SLOT;
    return STATUS_OK;
}

static void store_token_8bit(const struct store_call *call, const char *key, const char *value, char *block, int64_t offset) {
    int64_t size = call->dtype == DTYPE_FLOAT32 ? 4 : 2;
    uint16_t *scales = (uint16_t *)(block + call->scale_offset), *value_scales = scales + call->scales_apart;
    for (int64_t head = 0; head < call->kv_heads; head++) {
        int64_t place = head * call->block_size + offset;
        store_8bit((enum cache_format)call->format, (enum dtype)call->dtype, key + head * call->key_size * size, (size_t)call->key_size,
                   (uint8_t *)block + call->key_offset + place * call->key_size, scales + place);
        if (call->value_size == 0) continue;
        store_8bit((enum cache_format)call->format, (enum dtype)call->dtype, value + head * call->value_size * size,
                   (size_t)call->value_size, (uint8_t *)block + call->value_offset + place * call->value_size, value_scales + place);
    }
}

static void store_tokens(const void *job, size_t task, void *scratch) {
    const struct store_call *call = job;
    int64_t token = (int64_t)task * call->tokens_per_task;
    int64_t end = token + call->tokens_per_task < call->tokens ? token + call->tokens_per_task : call->tokens;
    (void)scratch;
    for (; token < end; token++) {
        int64_t slot = call->slots[token], offset = slot % call->block_size;
        if (slot < 0) continue;
        const char *key = (const char *)call->key + token * call->key_stride;
        const char *value = (const char *)call->value + token * call->value_stride;
        char *block = (char *)call->cache + slot / call->block_size * call->block_stride;
        if (call->format != CACHE_AS_IT_IS) {
            store_token_8bit(call, key, value, block, offset);
            continue;
        }
        for (int64_t head = 0; head < call->kv_heads; head++) {
            int64_t place = head * call->block_size + offset;
            memcpy(block + call->key_offset + place * call->key_size, key + head * call->key_size, (size_t)call->key_size);
            if (call->value_size == 0) continue;
            memcpy(block + call->value_offset + place * call->value_size, value + head * call->value_size,
                   (size_t)call->value_size);
        }
    }
}

struct work store_work(struct store_call *call) {
    enum { TOKENS = 32 };
    call->tokens_per_task = TOKENS;
    return (struct work){.function = store_tokens, .job = call, .n_tasks = (size_t)(call->tokens + TOKENS - 1) / TOKENS};
}

int baton_store_kv(struct store_call *call) {
    int status = check_store(call);
    if (status != STATUS_OK) return status;
    struct work work = store_work(call);
    return run_works(&work, 1, 1, NULL);
}

/* How many tokens' rows a task of a selection has at most. */
static int64_t selecting_tokens(const struct selection_call *call) { return ATTENTION_ROWS / call->keys.heads; }

/* There are at most ATTENTION_ROWS heads, of one key. */
int check_selection(const struct selection_call *call) {
    return call->keys.heads < 1 || call->keys.heads > ATTENTION_ROWS ? STATUS_BAD_INDEX : check_attention(&call->keys);
}

int plan_selection(struct selection_job *job, const struct selection_call *call) {
    const struct attention_call *keys = &call->keys;
    const int64_t step = selecting_tokens(call);
    *job = (struct selection_job){.call = call, .scratch_bytes = attention_scratch(keys)};
    for (int64_t seq = 0; seq < keys->num_seqs; seq++)
        job->count += (size_t)((keys->query_start[seq + 1] - keys->query_start[seq] + step - 1) / step);
    if (job->count == 0) return STATUS_OK;
    job->tasks = malloc(job->count * sizeof *job->tasks);
    if (job->tasks == NULL) return STATUS_NO_MEMORY;
    struct attention_task *task = job->tasks;
    for (int64_t seq = 0; seq < keys->num_seqs; seq++) {
        int64_t tokens = keys->query_start[seq + 1] - keys->query_start[seq];
        for (int64_t token = 0; token < tokens; token += step)
            *task++ = (struct attention_task){
                .seq = (int32_t)seq,
                .kv_count = 1,
                .head_count = (int32_t)keys->heads,
                .token_start = (int32_t)token,
                .token_count = (int32_t)(tokens - token < step ? tokens - token : step),
            };
    }
    return STATUS_OK;
}

struct work selection_work(const struct selection_job *job, const struct isa *isa, enum dtype dtype) {
    size_t sums = (size_t)(selecting_tokens(job->call) * job->call->words) * KEY_TILE * sizeof(float);
    return (struct work){.function = isa->select_keys[dtype], .job = job, .n_tasks = job->count,
                         .scratch_bytes = job->scratch_bytes + sums};
}

int baton_select_keys(int isa, int dtype, const struct selection_call *call, int n_threads) {
    struct selection_job job;
    int status = check_selection(call);
    if (status != STATUS_OK) return status;
    status = plan_selection(&job, call);
    if (status == STATUS_OK) {
        struct work work = selection_work(&job, isas[isa], (enum dtype)dtype);
        status = run_works(&work, 1, n_threads, NULL);
    }
    free(job.tasks);
    return status;
}

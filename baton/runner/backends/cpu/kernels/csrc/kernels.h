/* What the files of this folder know of each other.
 *
 * The rule they keep: an output element is one chain of fused multiply-adds over k in one fixed order, so it does not depend
 * on how many rows share the call, where the row stands, or how many threads run. Threads split rows and columns, never k;
 * where k is cut to fit a cache, the chain goes on from the float32 sums it had. Every file is compiled with
 * -ffp-contract=off, so that a chain is what is written and not what a compiler fuses.
 *
 * Packed weights: groups of 64 columns in 4 panels of 16, side by side, so that one task reads one stream. Missing columns are zero.
 *   float32:  [group][k][panel][16]
 *   bfloat16: [group][step][panel][pair][16][2], k padded with zeros to a multiple of 32. A step is a pair of k, so that a task
 *             reads line after line; on AMX it is 16 pairs, a tile.
 * A gated weight has gate and up in turn: panels 0 and 2 of a group hold the gates of 32 outputs, 1 and 3 what they gate.
 * A bfloat16 pair is accumulated odd element first, as the vdpbf16ps instruction does; the paths without that instruction
 * follow it, so all paths but AMX give the same bits. Subnormal inputs and results count as zero (FTZ and DAZ).
 */
#ifndef BATON_KERNELS_H
#define BATON_KERNELS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { LANES = 16, GROUP_PANELS = 4, GROUP_COLUMNS = LANES * GROUP_PANELS, BF16_K_MULTIPLE = 32, KEY_TILE = 64, MAX_HEAD_DIM = 256 };
enum dtype { DTYPE_FLOAT32 = 0, DTYPE_BFLOAT16 = 1 };
/* product.py has the same numbers */
enum activation { NOT_GATED = 0, GATE_SILU = 1, GATE_GELU_TANH = 2, GATE_GELU = 3 };
/* library.py has the sentence for each of these */
enum status {
    STATUS_OK = 0,
    STATUS_NO_MEMORY = 1,
    STATUS_BAD_QUERY_START = 2,
    STATUS_BAD_SEQ_LEN = 3,
    STATUS_BAD_BLOCK = 4,
    STATUS_BAD_SLOT = 5,
    STATUS_BAD_INDEX = 6,
};

/* call_structs.py has the calls for ctypes. */
struct linear_call {
    const void *x, *packed, *bias; /* bias may be NULL */
    void *out;
    size_t m, n, k, x_stride; /* n counts the columns of out, k is padded; the stride counts elements */
    size_t rows_per_task, groups_per_task;
    enum activation activation;
};

static inline size_t group_outputs(const struct linear_call *call) {
    return call->activation == NOT_GATED ? GROUP_COLUMNS : GROUP_COLUMNS / 2;
}

static inline size_t column_groups(const struct linear_call *call) {
    return (call->n + group_outputs(call) - 1) / group_outputs(call);
}

/* One unit of a product's work: some rows, some groups of columns. */
struct linear_task {
    size_t group, group_end, row, end;
};

static inline struct linear_task linear_task(const struct linear_call *call, size_t task) {
    size_t groups = column_groups(call), across = (groups + call->groups_per_task - 1) / call->groups_per_task;
    size_t row = task / across * call->rows_per_task, group = task % across * call->groups_per_task;
    size_t end = row + call->rows_per_task < call->m ? row + call->rows_per_task : call->m;
    size_t group_end = group + call->groups_per_task < groups ? group + call->groups_per_task : groups;
    return (struct linear_task){group, group_end, row, end};
}

/* Rows of x lie at row * stride[0] + column * stride[1] for row < rows and column < columns; strides count elements. */
struct norm_call {
    const void *x, *weight;
    void *out; /* contiguous */
    const void *residual; /* NULL, or what is added to x first; contiguous as sum and out */
    void *sum;
    size_t rows, columns, n, stride[2], rows_per_task;
    float eps;
    int plus_one;
};

struct rotate_call {
    void *x; /* [tokens, heads, ..], rotated in place */
    const void *cos, *sin; /* [tokens, 2 * half]; the first halves are read */
    size_t tokens, heads, half, token_stride, head_stride, angle_stride, tokens_per_task;
};

/* Sizes and strides in bytes; a slot's key lies at key_offset of its block, its value at value_offset, each head's tokens side by
 * side. */
struct store_call {
    const void *key, *value; /* [tokens, kv_heads, ..] */
    void *cache;
    const int64_t *slots;
    int64_t tokens, kv_heads, num_blocks, block_size, key_size, value_size, key_stride, value_stride;
    int64_t block_stride, key_offset, value_offset, tokens_per_task;
};

struct attention_call {
    const void *query; /* [rows, heads, key_dim], rows query_stride elements apart */
    void *out;         /* [rows, heads, value_dim] */
    const void *cache;
    const int32_t *query_start, *seq_lens, *block_tables;
    const float *sinks; /* [heads] or NULL */
    int64_t block_stride, key_offset, value_offset;
    int64_t rows, query_stride, num_seqs, table_width, table_stride, num_blocks;
    int64_t heads, kv_heads, key_dim, value_dim, block_size;
    int64_t window;  /* 0: none */
    float scale, softcap; /* softcap 0: none */
};

/* One unit of attention work: some query tokens of one request, some query heads of one KV head; or one token and all query
 * heads of some KV heads, whose keys lie side by side. */
struct attention_task {
    int32_t seq, kv_head, kv_count, head_start, head_count, token_start, token_count; /* head_count: of each KV head */
};

struct attention_job {
    const struct attention_call *call;
    struct attention_task *tasks;
    size_t count;
};

/* Up to so many rows memory is slower than their products. */
enum { FEW_ROWS = 48 };

typedef void (*task_function)(const void *job, size_t task, void *scratch);

/* One instruction set: its kernels, indexed by enum dtype, and how they like their rows. */
struct isa {
    const char *name;
    int (*supported)(void);
    task_function linear[2];
    task_function attention[2];
    task_function rms_norm[2];
    task_function rotate[2];
    size_t step_pairs;   /* of packed bfloat16 weights */
    size_t linear_rows;  /* rows of x in scratch at once, for the vectors */
    size_t rows_of_sums; /* the most rows of a bfloat16 task, which keeps all their sums in scratch */
    int groups_take_turns; /* a bfloat16 task goes through all its groups with one piece of k after the other */
};

extern const struct isa isa_amx_bf16, isa_avx512_bf16, isa_avx512, isa_avx2, isa_portable;
extern const struct isa *const isas[];

/* Floats in one output row of attention: the value's dimension padded to whole groups of panels. */
static inline size_t padded_columns(int64_t columns) {
    return ((size_t)columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS * GROUP_COLUMNS;
}

/* Rows (query tokens x query heads) of one attention task at most, which share a tile of keys; and of these, how many have
 * scores at a time, so that a tile and what is made of it stay in the first cache. */
enum { ATTENTION_ROWS = 128, SCORE_ROWS = 32, TASK_KV_HEADS = 8 };

/* Tasks that may run in any order on any threads: which thread runs a task has no influence on its result. */
struct work {
    task_function function;
    const void *job;
    size_t n_tasks, scratch_bytes;
    _Alignas(64) atomic_size_t next; /* the first task that nobody has taken */
    _Alignas(64) atomic_size_t done;
};

/* Runs every task exactly once on at most n_threads threads, each work's after all of those before it. times: NULL, or
 * [n_works + 1]: the monotonic nanoseconds at the start, and when each work was done. */
int run_works(struct work *works, size_t n_works, int n_threads, int64_t *times);

/* How calls are cut into tasks. */
struct work linear_work(struct linear_call *call, const struct isa *isa, enum dtype dtype, int n_threads);
struct work norm_work(struct norm_call *call, const struct isa *isa, enum dtype dtype);
struct work rotate_work(struct rotate_call *call, const struct isa *isa, enum dtype dtype);
struct work store_work(struct store_call *call);
struct work attention_work(const struct attention_job *job, const struct isa *isa, enum dtype dtype);

/* Everything that would read or write outside the tensors if it were wrong. */
int check_store(const struct store_call *call);
int check_attention(const struct attention_call *call);
/* The tasks of a checked call, which the caller frees. */
int plan_attention(struct attention_job *job, const struct attention_call *call, int n_threads);
/* Rows of no request come out zero. */
void clear_unused_rows(const struct attention_call *call, enum dtype dtype);

#endif

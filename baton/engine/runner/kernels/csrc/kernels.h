/* What the files of this folder know of each other.
 *
 * The rule they keep: an output element is one chain of fused multiply-adds over k in one fixed order, so it does not depend
 * on how many rows share the call, where the row stands, or how many threads run. Threads and blocks split rows and columns,
 * never k. Every file is compiled with -ffp-contract=off, so that a chain is what is written and not what a compiler fuses.
 *
 * Packed weights: panels of 16 columns, the number of panels padded to a multiple of 4 with zeros.
 *   float32:  [panel][k][16]
 *   bfloat16: [panel][pair][16][2], pairs of k, k padded with zeros to a multiple of 32.
 * A bfloat16 pair is accumulated odd element first, as the vdpbf16ps instruction does; the paths without that instruction
 * follow it, so all paths but AMX give the same bits. Subnormal inputs and results count as zero (FTZ and DAZ).
 */
#ifndef BATON_KERNELS_H
#define BATON_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { LANES = 16, GROUP_PANELS = 4, GROUP_COLUMNS = LANES * GROUP_PANELS, BF16_K_MULTIPLE = 32, KEY_TILE = 64, MAX_HEAD_DIM = 256 };
enum dtype { DTYPE_FLOAT32 = 0, DTYPE_BFLOAT16 = 1 };
/* library.py has the sentence for each of these */
enum status {
    STATUS_OK = 0,
    STATUS_NO_MEMORY = 1,
    STATUS_BAD_QUERY_START = 2,
    STATUS_BAD_SEQ_LEN = 3,
    STATUS_BAD_BLOCK = 4,
    STATUS_BAD_SLOT = 5,
};

struct linear_call {
    const void *x, *packed, *bias; /* bias may be NULL */
    void *out;
    size_t m, n, k; /* k as padded */
    size_t rows_per_task;
};

/* One unit of a product's work: some rows, one group of columns. */
struct linear_task {
    size_t column, row, end;
};

static inline struct linear_task linear_task(const struct linear_call *call, size_t task) {
    size_t groups = (call->n + GROUP_COLUMNS - 1) / GROUP_COLUMNS, row = task / groups * call->rows_per_task;
    size_t end = row + call->rows_per_task < call->m ? row + call->rows_per_task : call->m;
    return (struct linear_task){task % groups * GROUP_COLUMNS, row, end};
}

/* attention.py has the same structure for ctypes */
struct attention_call {
    const void *query; /* [rows, heads, head_dim] */
    void *out;
    const void *cache; /* the layer's first key; strides in elements */
    int64_t block_stride, value_offset, head_stride;
    const int32_t *query_start, *seq_lens, *block_tables;
    int64_t rows, num_seqs, table_width, num_blocks, heads, kv_heads, head_dim, block_size;
    int64_t window;  /* 0: none */
    float scale, softcap; /* softcap 0: none */
};

/* One unit of attention work: some query tokens of one request, some query heads of one KV head. */
struct attention_task {
    int32_t seq, kv_head, head_start, head_count, token_start, token_count;
};

struct attention_job {
    const struct attention_call *call;
    const struct attention_task *tasks;
};

typedef void (*task_function)(const void *job, size_t task, void *scratch);

/* One instruction set: its kernels, indexed by enum dtype, and the scratch one thread needs for them. */
struct isa {
    const char *name;
    int (*supported)(void);
    task_function linear[2];
    task_function attention[2];
    size_t linear_rows; /* rows of x held in scratch at once */
};

extern const struct isa isa_amx_bf16, isa_avx512_bf16, isa_avx512, isa_avx2, isa_portable;

/* Floats in one output row of attention: the head dimension padded to whole groups of panels. */
static inline size_t attention_out_stride(int64_t head_dim) {
    return ((size_t)head_dim + GROUP_COLUMNS - 1) / GROUP_COLUMNS * GROUP_COLUMNS;
}

/* Upper bound of rows (query tokens x query heads) in one attention task. */
enum { ATTENTION_ROWS = 64 };

/* Runs every task exactly once on at most n_threads threads; which thread runs a task has no influence on its result. */
int run_tasks(task_function function, const void *job, size_t n_tasks, int n_threads, size_t scratch_bytes);

#endif

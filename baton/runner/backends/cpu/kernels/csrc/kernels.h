/* Declarations that the files of this folder share.
 *
 * The rule of all products: an output element is one chain of fused multiply-adds over k in one fixed order, so it does not
 * depend on how many rows share the call, on the row's index, or on how many threads run. Threads split rows and columns,
 * never k; where k is cut to fit a cache, the chain continues from the float32 sums that it had. Every file is compiled with
 * -ffp-contract=off, so that the compiler fuses nothing that is not written as a fused operation.
 *
 * Packed weights: groups of 64 columns in 4 panels of 16, side by side, so that one task reads memory in order. Missing columns
 * are zero.
 *   float32:  [group][k][panel][16]
 *   bfloat16: [group][step][panel][pair][16][2], k padded with zeros to a multiple of 32. A step is one pair of k, so that a
 *             task reads one cache line after the other; on AMX a step is 16 pairs, a tile.
 * A gated weight alternates gate and up: panels 0 and 2 of a group have the gate columns of 32 outputs, and panels 1 and 3 their
 * up columns.
 * A bfloat16 pair is accumulated odd element first, as the vdpbf16ps instruction does. The paths without that instruction do the
 * same, so all paths except AMX give the same bits. Subnormal inputs and results count as zero (FTZ and DAZ).
 * quantized.h has the layout of weights in integers with scales, and the rule of their products; float8.h those of float8.
 */
#ifndef BATON_KERNELS_H
#define BATON_KERNELS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, GROUP_PANELS = 4, GROUP_COLUMNS = LANES * GROUP_PANELS, BF16_K_MULTIPLE = 32, KEY_TILE = 64, MAX_HEAD_DIM = 704 };
enum dtype { DTYPE_FLOAT32 = 0, DTYPE_BFLOAT16 = 1 };
/* product.py has the same numbers. */
enum activation {
    NOT_GATED = 0,
    ACTIVATION_SILU = 1,
    ACTIVATION_GELU_TANH = 2,
    ACTIVATION_GELU = 3,
    ACTIVATION_RELU = 4,
    ACTIVATION_RELU_SQUARED = 5,
    ACTIVATION_CLAMP = 6, /* this one and those below: of activate_call alone */
    ACTIVATION_SCALE = 7,
    ACTIVATION_DIVIDE = 8,
    ACTIVATION_XIELU = 9,
    ACTIVATION_TANH = 10,
};
/* library.py has the error message for each status. */
enum status {
    STATUS_OK = 0,
    STATUS_NO_MEMORY = 1,
    STATUS_BAD_QUERY_START = 2,
    STATUS_BAD_SEQ_LEN = 3,
    STATUS_BAD_BLOCK = 4,
    STATUS_BAD_SLOT = 5,
    STATUS_BAD_INDEX = 6,
    STATUS_RANK_LOST = 7,
    STATUS_WAITING = 8, /* of barrier.c, as the next one */
    STATUS_RANKS_DIFFER = 9,
    STATUS_NO_STATE = 10,
};

struct quantized_format;

/* 16 columns of a product with an adapter: to them are added `count` terms, an even number, with t from `first` on and B from
 * pair `offset` on: [count][16]; in bfloat16 [pair][16][2], of which the first of a pair is the odd element. The structure is
 * small, since those of all adapters of a step are read from memory beside B. */
struct adapter_panel {
    uint32_t offset; /* in pairs of ranks, of 16 columns */
    uint16_t first, count;
};
enum { PAIR_ELEMENTS = 2 * LANES };

/* What one adapter adds to one product (adapters.inc.h), in x's dtype. */
struct adapter_weights {
    const void *a; /* [rank / 8][k / 32, rounded up][8][32], padded with zeros */
    const void *b;
    const float *factors, *constants;   /* [rank]: t = factor * (A x) + constant */
    const struct adapter_panel *panels; /* in the order of the packed weight's panels, of whole groups */
    size_t rank, k;                     /* k: columns of x */
};

/* Which adapter each row of a product has. */
struct adapter_rows {
    const int32_t *slots;                          /* [rows]: the adapter's number, or -1 */
    const struct adapter_weights *const *weights;  /* [num_slots]; NULL for one that does not change this product */
    float *t;                                      /* [rows][t_stride] */
    size_t num_slots, t_stride;
};

static inline const struct adapter_weights *weights_of_row(const struct adapter_rows *adapters, size_t row) {
    int32_t slot = adapters->slots[row];
    return slot < 0 ? NULL : adapters->weights[slot];
}

static inline size_t padded_pairs(size_t columns) { return (columns + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

/* The computation of t for all rows of a product. */
struct shrink_call {
    const void *x;
    const struct adapter_rows *adapters;
    size_t rows, x_stride, rows_per_task, parts; /* parts: into how many tasks the ranks of a row are cut */
};

/* call_structs.py has the same structures for ctypes. */
struct linear_call {
    const void *x, *packed, *bias; /* bias may be NULL */
    void *out;
    const struct quantized_format *format; /* of packed; NULL: the weight is in x's dtype, or in float8 */
    const struct adapter_rows *adapters;   /* NULL: no row has an adapter that changes this product */
    size_t m, n, k; /* n counts the weight's columns of out, k is padded */
    size_t scale_group; /* of a weight in float8: how many elements of k share a scale (float8.h); 0: packed is in another format */
    size_t x_stride, out_stride; /* in elements, from row to row; of rows of quantized x, which format says, in bytes */
    size_t rows_per_task, groups_per_task;
    enum activation activation;
    enum dtype out_dtype; /* of out: x's dtype, or float32, which keeps the sums as they are */
};

/* Products of the rows of several heads, each with a weight of its own. The heads follow each other at equal distances, in bytes. */
struct heads_call {
    struct linear_call linear; /* of the first head */
    size_t heads, tasks_of_head, x_apart, packed_apart, out_apart;
    void (*function)(const void *job, size_t task, void *scratch);
};

static inline size_t group_outputs(const struct linear_call *call) {
    return call->activation == NOT_GATED ? GROUP_COLUMNS : GROUP_COLUMNS / 2;
}

static inline size_t column_groups(const struct linear_call *call) {
    return (call->n + group_outputs(call) - 1) / group_outputs(call);
}

/* One task of a product: some rows and some groups of columns. */
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

/* The rows of x begin at row * stride[0] + column * stride[1], for row < rows and column < columns; strides count elements. */
struct norm_call {
    const void *x;
    const void *weight; /* of column c from c * weight_stride on; 0: one for all columns */
    void *out; /* contiguous */
    const void *residual; /* added to x first; contiguous, as sum and out are; NULL: nothing is added */
    void *sum;            /* x + residual */
    const void *gate;     /* NULL, or what gates the norm, which is then rounded once; it begins as x, with its own strides */
    const void *bias;     /* [n] or NULL; only around the mean */
    size_t rows, columns, n, stride[2], gate_stride[2];
    size_t weight_stride; /* elements from a column's weight to that of the next one; 0: all columns have the same */
    size_t rows_per_task;
    float eps;
    int plus_one, has_sigmoid_gate; /* has_sigmoid_gate: the gate's sigmoid, instead of its silu */
    int gate_first;                 /* x is gated, and then normed */
    int around_mean;                /* the row's mean is subtracted first; the norm is rounded once */
};

/* Gates in float32: factor * function((x + bias) * scale), where the function's values are kept within limits. The functions
 * are ln(1 + e^x), 1 / (1 + e^-x) and x itself, which changes the dtype alone, as GATE_NARROWED does the other way: then x is
 * float32 and out has the dtype of the call, and nothing else is looked at. */
enum gate_function { GATE_SOFTPLUS, GATE_SIGMOID, GATE_PLAIN, GATE_NARROWED };
struct gate_call {
    const void *x;              /* [rows, columns]; x_stride: elements from row to row */
    void *out;                  /* [rows, columns], float32 but for GATE_NARROWED; out_stride: elements from row to row */
    const float *bias, *scale, *factor; /* [columns] or NULL */
    size_t rows, columns, x_stride, out_stride, rows_per_task;
    float low, high;
    int function; /* enum gate_function */
};

/* What x is multiplied with: by itself, or a function of it. */
enum multiplier { MULTIPLIER_PLAIN, MULTIPLIER_SIGMOID, MULTIPLIER_SOFTPLUS };

/* x * multiplier(by), rounded once. */
struct multiply_call {
    const void *x;  /* [rows, columns]; x_stride, by_stride: elements from row to row */
    const void *by; /* [rows, columns / width]: one number for `width` columns of x, which follow each other; stride 0: one row for all */
    void *out;      /* contiguous */
    size_t rows, columns, width, x_stride, by_stride, rows_per_task;
    int multiplier; /* enum multiplier */
};

/* How a router chooses the experts of each row, the best first, from scores that are functions of the row's logits. */
/* The last two: the logits. Weights are the softmax of the chosen ones; or each of them that of those left that are near it. */
enum routing_scores { SCORES_SOFTMAX, SCORES_SIGMOID, SCORES_SOFTMAX_OF_CHOSEN, SCORES_SOFTMAX_OF_NEAR };
struct route_call {
    const void *logits;       /* [rows, experts] of the kernel's dtype */
    const float *choice_bias; /* [experts], added to the scores for the choice alone; NULL: nothing is */
    const float *expert_factors; /* [experts], with which the weights are multiplied behind the factor; NULL: they are not */
    int32_t *chosen;          /* [rows, most] */
    float *weights;           /* [rows, most] */
    size_t rows, experts, most, logits_stride, rows_per_task;
    size_t groups, most_groups;     /* only experts of the most_groups best groups of neighbours are chosen; groups 1: of all */
    int scores;                     /* enum routing_scores */
    int groups_by_two, normalised;  /* a group counts as the sum of its two best experts, otherwise as its best; weights / (sum + eps) */
    float eps, factor;              /* what the sum of weights is divided with, too; and what they are multiplied with */
    float near;                     /* of SOFTMAX_OF_NEAR: the largest (best - logit) / max(|logit|, best) of a logit that is near the best */
    enum dtype weights_dtype;       /* to which they are rounded */
};

/* The weighted sum of each row's experts, in float32 and in the order of `chosen`; then rounded, times the factor, and rounded. */
struct sum_call {
    const void *outs;      /* [places, n]: what the experts gave */
    const int32_t *places; /* [rows, most]: in which row of outs an expert's result is; -1: there is none */
    const float *weights;  /* [rows, most] */
    const void *rest;      /* [rows, n]: what there is in place of each result that there is not; NULL: nothing */
    const void *shared;    /* [rows, n], or one row for all, added to the sum; NULL: nothing is */
    const void *gate;      /* [rows]: shared is multiplied with its sigmoid first, each rounded; NULL: it is not */
    void *out;             /* [rows, n] */
    size_t rows, most, n, rows_per_task;
    size_t shared_stride, rest_stride; /* elements from row to row; of shared 0: there is one row */
    float factor;
    int are_weighted;      /* whether outs have been multiplied with their weights */
};

/* The gate of gpt-oss, (u + 1) * g * sigmoid(alpha * g), where g is the first of two neighbours and at most the limit, and u the second
 * and within it. */
struct clamp_call {
    const void *x; /* [rows, 2 * columns], contiguous */
    void *out;     /* [rows, columns], contiguous */
    size_t rows, columns, rows_per_task;
    float limit, alpha;
};

/* activation(x), rounded once. */
struct activate_call {
    const void *x; /* [rows, columns]; x_stride: elements from row to row */
    void *out;     /* contiguous */
    size_t rows, columns, x_stride, rows_per_task;
    int activation; /* enum activation */
    float bound;    /* with ACTIVATION_CLAMP: numbers above it become it, and those below its opposite that */
    float factor;   /* what numbers are multiplied with, or with ACTIVATION_DIVIDE divided by */
    float positive, negative, linear, near; /* of ACTIVATION_XIELU (v_xielu) */
};

/* The experts of a mixture, MLPs that are all packed alike, and the rows that they compute (mixture.c).
 *
 * With downs NULL each expert has one product, up, and `sum` is of what that gives, n is up.n; with sum.weights NULL, too, there is no
 * sum: sum.out [rows, most * up.n] has what the experts of a row give side by side, zeros for an expert beyond the last one. */
struct mixture_call {
    struct linear_call up, down;            /* of one expert, without what depends on the step */
    const void *const *ups, *const *downs;  /* [experts]: the packed weights */
    const void *up_biases, *down_biases;    /* [experts, n] or NULL */
    struct clamp_call clamp;                /* what is computed of up's result, and x is room as the others; columns 0: nothing */
    struct activate_call activate;          /* the same in place; with both columns 0 up is gated */
    const void *x;                          /* [rows, up.k]; x_stride: elements from row to row */
    const int32_t *chosen;                  /* [rows, sum.most]: an expert beyond the last one computes nothing, or gives its row */
    void *gathered, *inner, *quantized;     /* room for each chosen expert's row: of x, of up's result and, for a quantized down, of that */
    const void *rest;                       /* of experts with one product: what experts beyond the last one give */
    size_t experts, x_stride;
    size_t x_apart;      /* elements from the row of one expert to that of the next one in a row of x; 0: they compute the same row */
    struct sum_call sum; /* outs: room as the others */
    int weighs_inputs;   /* an expert's row is multiplied with its weight, and rounded, before it computes it, not what it gives */
    int passes_rest;     /* experts beyond the last one give their rows, with x_stride up.k */
    int are_weighted;    /* rows were multiplied with their weights before */
    int are_apart;       /* what the experts of a row give is not summed but side by side, which takes experts with one product */
};

/* one + other * factor; the product is rounded, and then the sum. */
struct add_call {
    const void *one;   /* [rows, columns]; strides: elements from row to row */
    const void *other; /* [rows, width], which is added to each `width` columns of one */
    void *out;         /* [rows, columns], which may be one of them */
    size_t rows, columns, width, one_stride, other_stride, out_stride, rows_per_task;
    float factor;
};

/* What is computed of rows in several streams, which are side by side (streams.inc.h). */
enum streams_kind { STREAMS_MIXED, STREAMS_CORRECTED, STREAMS_AVERAGED };
struct streams_call {
    const void *x;       /* [rows, streams * columns]; strides: elements from row to row */
    const void *factors; /* of STREAMS_MIXED [rows, streams, streams], of STREAMS_CORRECTED [rows, streams] */
    const void *result;  /* of STREAMS_CORRECTED: [rows, columns], what there is in place of the active stream */
    void *out;           /* contiguous: [rows, streams * columns], of STREAMS_AVERAGED [rows, columns] */
    size_t rows, streams, columns, active, x_stride, factors_stride, result_stride, rows_per_task;
    int kind; /* enum streams_kind */
};

/* x * size(like) / size(x), each step rounded, where the size of a row is the root of its mean square. */
struct resize_call {
    const void *x, *like; /* [rows, columns]; strides: elements from row to row. like NULL: out has the mean of each row, [rows, 1] */
    void *out;            /* [rows, columns] */
    size_t rows, columns, x_stride, like_stride, out_stride, rows_per_task;
    float least; /* what the mean square of x is at least */
};

/* activation(max(0, g - cutoff)) * u, rounded once, of rows with g beside u. The cutoff is the mean of a row's g plus a multiple of their
 * standard deviation. */
struct sparse_gate_call {
    const void *x; /* [rows, 2 * columns]; x_stride: elements from row to row */
    void *out;     /* [rows, columns], contiguous */
    size_t rows, columns, x_stride, rows_per_task;
    int activation; /* enum activation, up to ACTIVATION_RELU_SQUARED */
    float deviations;
};

struct rotate_call {
    void *x; /* [tokens, heads, ..], rotated in place */
    const void *cos, *sin; /* [tokens, 2 * half] of angle_dtype; only their first halves are read */
    size_t tokens, heads, half, token_stride, head_stride, angle_stride, tokens_per_task;
    enum dtype angle_dtype; /* x's dtype, or float32 */
    int in_pairs;           /* each two neighbours of x belong together, and not the two halves */
};

/* Stores a number in the dtype, rounded half to even. */
static inline void store_number(enum dtype dtype, void *to, size_t index, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (dtype == DTYPE_FLOAT32)
        ((float *)to)[index] = value;
    else
        ((uint16_t *)to)[index] = (uint16_t)(value != value ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* What the cache holds: keys and values as they are, or 8 bits for each number and a bfloat16 scale for each key and each value of
 * a head. A number is scale * code, where the code is an int8 or a float8 with 4 bits of exponent and 3 of mantissa (e4m3fn of the
 * OCP's "8-bit Floating Point Specification"). A scale depends on its own key or value alone, so the bits in the cache do not
 * depend on the chunk in which a token was computed. */
enum cache_format { CACHE_AS_IT_IS, CACHE_INT8, CACHE_E4M3 };

/* Sizes, strides and offsets in bytes. In a block, the keys are at key_offset and the values at value_offset, both
 * [kv_heads, block_size, ..]; with 8 bits the scales of the keys and then those of the values are at scale_offset, both
 * [kv_heads, block_size]. key_size, value_size: of a head's key and value in the cache; value_size is 0 where values are read of
 * the keys, and then they have no scales either. */
struct store_call {
    const void *key, *value; /* [tokens, kv_heads, ..] of dtype */
    void *cache;
    const int64_t *slots;
    int64_t tokens, kv_heads, num_blocks, block_size, key_size, value_size, key_stride, value_stride;
    int64_t block_stride, key_offset, value_offset, scale_offset, scales_apart, tokens_per_task;
    int format, dtype; /* enum cache_format, enum dtype */
};

struct attention_call {
    const void *query; /* [rows, heads, key_dim]; query_stride: elements from row to row */
    void *out;         /* [rows, heads, value_dim]; out_stride: elements from row to row */
    const void *cache;
    const int32_t *query_start, *seq_lens, *block_tables;
    const float *sinks; /* [heads] or NULL */
    const uint64_t *selected; /* [rows, selected_words], or NULL: bit j of word w of a row is set if it sees the key at 64 w + j, too */
    const float *distance_bias; /* [heads, num_distances], or NULL: added to scaled scores, see Operations.paged_attention */
    int64_t block_stride, key_offset, value_offset, scale_offset; /* in elements of the cache; scale_offset only with 8 bits */
    int64_t scales_apart; /* with 8 bits: how many scales the scale of a value is behind that of its key */
    int64_t key_stride; /* elements from key to key, of which a query takes the first key_dim */
    int64_t values_in_keys; /* 1: a value is the first value_dim numbers of its key, and value_offset is that of the keys */
    int64_t rows, query_stride, out_stride, num_seqs, table_width, table_stride, num_blocks;
    int64_t heads, kv_heads, key_dim, value_dim, block_size;
    int64_t window;  /* the most keys that a query attends to up to its own; 0: all */
    int64_t ahead;   /* how many keys behind its own it attends to, as far as its request has them; 0: causal attention */
    int64_t in_chunks; /* 1: of the window only keys of the query's own chunk, of those of `window` tokens each from 0 on */
    int64_t selected_words; /* selected is only without distance_bias, sinks and softcap */
    int64_t num_distances; /* at least 1 with distance_bias, which is only without ahead and softcap */
    float scale, softcap; /* softcap 0: none */
    int format;           /* enum cache_format */
};

/* Selects, for each row, the keys with the largest scores: sums over heads of weight * max(0, scale * query * key). */
struct selection_call {
    struct attention_call keys; /* of whose fields those of values and of outputs mean nothing */
    const float *weights;       /* [rows, heads] */
    uint64_t *selected;         /* [rows, words], written for the rows of sequences; the bits as those of attention_call.selected */
    int64_t weights_stride, words, most; /* most: how many keys a row may have */
};

/* The position of the first key that a query attends to. It grows with the query's position. */
static inline int64_t first_key(const struct attention_call *call, int64_t position) {
    if (call->in_chunks) return position - position % call->window;
    return call->window > 0 && position + 1 > call->window ? position + 1 - call->window : 0;
}

/* The states of one layer, or a part of each, and the rows of a step; baton/runner/backends/state_calls.py has the rules. Offsets and
 * strides count floats. */
struct states {
    float *memory;
    const int32_t *query_start, *seq_lens, *block_tables;
    const int32_t *kept_lens; /* NULL: seq_lens */
    int64_t num_blocks, block_stride, offset, block_size, rows, num_seqs, table_width, table_stride;
};

/* The first token of a sequence that leaves no trace in its states. */
static inline int64_t states_end(const struct states *states, int64_t seq) {
    int64_t length = states->seq_lens[seq];
    return states->kept_lens != NULL && states->kept_lens[seq] < length ? states->kept_lens[seq] : length;
}

static inline float *state_of_block(const struct states *states, int64_t seq, int64_t position) {
    int32_t block = states->block_tables[seq * states->table_stride + position / states->block_size];
    return block == 0 ? NULL : states->memory + block * states->block_stride + states->offset;
}

/* The state behind the token before a position; NULL: zero. */
static inline float *state_before(const struct states *states, int64_t seq, int64_t position) {
    return position == 0 ? NULL : state_of_block(states, seq, position - 1);
}

/* Where the state behind the token at a position is written; NULL: nowhere. */
static inline float *state_after(const struct states *states, int64_t seq, int64_t position) {
    int64_t end = states_end(states, seq), behind = position + 1;
    if (behind > end || (behind < end && behind % states->block_size != 0)) return NULL;
    return state_of_block(states, seq, position);
}

/* A convolution of each column over tokens. */
struct convolution_call {
    struct states states;
    const void *x;                    /* [rows, columns]; x_stride: elements from row to row */
    void *out;                        /* [rows, columns]; out_stride: elements from row to row */
    const float *weight, *bias;       /* [taps, columns], the oldest token's first, and [columns] or NULL */
    int64_t columns, taps, x_stride, out_stride, columns_per_task;
    int64_t state_stride; /* numbers from row to row of a state, which may have other columns besides */
    int has_silu;
};

/* How many columns of a convolution are computed together, and how many tokens' rows are widened at a time. */
enum { WINDOW_COLUMNS = 64, WINDOW_TOKENS = 32 };

/* A recurrence of the states [heads, key_dim, value_dim] over tokens. Strides: elements from row to row. */
struct recurrence_call {
    struct states states;
    const void *query, *key; /* [rows, groups, key_dim] */
    const void *value;       /* [rows, heads, value_dim] */
    void *out;               /* [rows, heads, value_dim] */
    const float *decay;      /* [rows, heads], or [rows, heads, key_dim] with decay_per_key */
    const float *beta;       /* [rows, heads], what values are multiplied by, or NULL */
    const float *skip;       /* [heads], how much of the values is added to out, or NULL */
    const float *rates;      /* [key_dim, heads], what decay [rows, heads] is multiplied by for each row of a state; or NULL. With rates
                              * value_dim and groups are 1, and neither has_norm nor has_delta_rule is set */
    int64_t query_stride, key_stride, value_stride, out_stride, decay_stride, beta_stride;
    int64_t heads, groups, key_dim, value_dim;
    int64_t columns_per_task; /* of a head's value_dim; a multiple of LANES */
    float scale, norm_eps;    /* norm_eps: only with has_norm */
    int decay_per_key, has_norm;
    int has_delta_rule; /* what the state has of the key is subtracted from values before they are multiplied by beta */
};

/* How many tokens' queries and keys are prepared at a time, for all slices of a task; and the columns of a slice, whose state stays in the
 * first-level cache while it walks over them. */
enum { RECURRENCE_TOKENS = 32, TOKENS_AHEAD = 6, SLICE_VECTORS = 4, SLICE_COLUMNS = SLICE_VECTORS * LANES };

static inline size_t padded_lanes(size_t columns) { return (columns + LANES - 1) / LANES * LANES; }

/* Into how many tasks the columns of a head are cut. */
static inline size_t recurrence_parts(const struct recurrence_call *call) {
    return ((size_t)call->value_dim + (size_t)call->columns_per_task - 1) / (size_t)call->columns_per_task;
}

/* How many heads of states with one column are a task, and how many such tasks a sequence has. */
enum { CHANNELS_PER_TASK = 8 * LANES };
static inline size_t channel_tasks(const struct recurrence_call *call) {
    return ((size_t)call->heads + CHANNELS_PER_TASK - 1) / CHANNELS_PER_TASK;
}

/* Sets some columns of the rows that belong to no sequence to zero. */
static inline void clear_columns(enum dtype dtype, const struct states *states, void *rows, size_t stride, size_t first, size_t count) {
    size_t size = dtype == DTYPE_FLOAT32 ? 4 : 2;
    for (int64_t row = states->query_start[states->num_seqs]; row < states->rows; row++)
        memset((char *)rows + ((size_t)row * stride + first) * size, 0, count * size);
}

/* One task of attention: some query tokens of one request and some query heads of one KV head; or one query token and all query
 * heads of several KV heads, whose keys are side by side in the cache. */
struct attention_task {
    int32_t seq, kv_head, kv_count, head_start, head_count, token_start, token_count; /* head_count: of each KV head */
};

/* A request that shares tiles with others: its block table begins with the same blocks as theirs. */
struct sharing_member {
    int32_t seq, tokens; /* tokens: its query tokens, few enough that two such requests fit into a task */
    int32_t tiles;       /* how many tiles it shares with the next member of the task; of the last one 0 */
};

/* One task of shared attention: members whose query rows attend together to the tiles that they share, for one KV head. */
struct sharing_task {
    int32_t member, member_end, kv_head;
};

/* Which requests of a call share tiles, and what their rows have after these: the state with which each row goes on alone. */
struct sharing {
    struct sharing_task *tasks;
    size_t count;
    struct sharing_member *members; /* neighbours share the most */
    int32_t *tiles;                 /* [num_seqs]: how many tiles of a request are attended to in shared tasks */
    int32_t *place;                 /* [num_seqs]: where its first query row is in states */
    float *states;                  /* [rows, heads, state_floats(value_dim)]: a row's output, sum and reference */
};

/* The tasks of a call, and before them those of shared attention. */
struct attention_job {
    const struct attention_call *call;
    struct attention_task *tasks;
    size_t count;
    struct sharing *sharing; /* NULL: no request shares tiles with another */
};

/* The tasks of a selection: some query tokens of one request each. */
struct selection_job {
    const struct selection_call *call;
    struct attention_task *tasks;
    size_t count, scratch_bytes; /* of attention; behind it are the sums [tokens of a task][words * KEY_TILE] */
};

struct quantized_kernels;

/* With at most this many rows, reading the weights from memory takes longer than computing the products. */
enum { FEW_ROWS = 48 };

/* The length of a piece of quantized weights that stays in the first-level cache, with room for the next piece and for x. */
extern size_t few_piece_bytes;

typedef void (*task_function)(const void *job, size_t task, void *scratch);

/* One instruction set: its kernels, indexed by enum dtype, and the sizes of tasks that suit them. */
struct isa {
    const char *name;
    int (*supported)(void);
    task_function linear[2];
    task_function linear_float8[2]; /* with weights in float8 */
    task_function attention[2];
    task_function shared_attention[2];
    task_function select_keys[2];
    task_function rms_norm[2];
    task_function rotate[2];
    task_function shrink[2];
    task_function convolve[2];
    task_function recur[2];
    task_function gate[2];
    task_function multiply[2];
    task_function route[2];
    task_function sum_experts[2];
    task_function clamped_gate[2];
    task_function activate[2];
    task_function add[2];
    task_function streams[2];
    task_function resize[2];
    task_function sparse_gate[2];
    size_t step_pairs;   /* pairs of k in a step of packed bfloat16 weights */
    size_t linear_rows;  /* rows of x that a vector kernel has in scratch at a time */
    size_t rows_of_sums; /* the most rows of a bfloat16 task, which has the sums of all its rows in scratch */
    int groups_take_turns; /* whether a bfloat16 task computes a piece of k for all its groups before the next piece */
    const struct quantized_kernels *quantized; /* quantized.h; others take their place where the processor lacks instructions */
};

extern const struct isa isa_amx_bf16, isa_avx512_bf16, isa_avx512, isa_avx2_vnni, isa_avx2, isa_portable;
extern const struct isa *const isas[];

/* The number of floats in an output row of attention: the values' width, padded to whole groups of panels. */
static inline size_t padded_columns(int64_t columns) {
    return ((size_t)columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS * GROUP_COLUMNS;
}

/* The number of floats of a row's state between shared attention and its own: output, sum and reference, in whole cache lines. */
static inline size_t state_floats(int64_t value_dim) { return padded_columns(value_dim) + 2 * LANES; }

/* ATTENTION_ROWS: the most rows (query tokens x query heads) of an attention task, which share tiles of keys. SCORE_ROWS: for how
 * many of them scores are computed at a time, so that a tile and its scores stay in the first-level cache. TASK_KV_HEADS: the
 * most KV heads of a task. */
enum { ATTENTION_ROWS = 128, SCORE_ROWS = 32, TASK_KV_HEADS = 8 };

/* Tells the processor that a loop waits. */
static inline void pause_briefly(void) {
#if defined(__SSE__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Independent tasks: they may run in any order on any threads, and their results are the same. */
struct work {
    task_function function;
    const void *job;
    size_t n_tasks, scratch_bytes;
    _Alignas(64) atomic_size_t next; /* the first task that no thread has taken */
    _Alignas(64) atomic_size_t done; /* number of tasks that are computed */
};

/* Runs every task exactly once on at most n_threads threads; the tasks of a work run after those of all works before it.
 * times: NULL, or [n_works + 1] nanoseconds of the monotonic clock: at the start, and when each work was done. */
int run_works(struct work *works, size_t n_works, int n_threads, int64_t *times);

/* The monotonic clock, in nanoseconds. */
int64_t monotonic_ns(void);

/* A barrier of ranks (barrier.c), in memory that they share. */
struct barrier;
/* Waits until all `ranks` have come, for what `tag` says; returns an enum status. */
int baton_barrier(struct barrier *barrier, uint32_t ranks, uint32_t tag);
int baton_barrier_aborted(struct barrier *barrier);

/* Cut calls into tasks. */
struct work linear_work(struct linear_call *call, const struct isa *isa, enum dtype dtype, int n_threads);
struct work heads_work(struct heads_call *call, const struct isa *isa, enum dtype dtype);
struct work norm_work(struct norm_call *call, const struct isa *isa, enum dtype dtype);
/* n_tasks 0: no adapter changes this product. */
struct work shrink_work(struct shrink_call *call, const struct isa *isa, enum dtype dtype);
struct work gate_work(struct gate_call *call, const struct isa *isa, enum dtype dtype);
struct work multiply_work(struct multiply_call *call, const struct isa *isa, enum dtype dtype);
struct work route_work(struct route_call *call, const struct isa *isa, enum dtype dtype);
struct work clamp_work(struct clamp_call *call, const struct isa *isa, enum dtype dtype);
struct work sum_work(struct sum_call *call, const struct isa *isa, enum dtype dtype);
/* How much scratch any product of at most `rows` rows needs, however it is cut into tasks. */
size_t linear_scratch_bytes(const struct linear_call *call, size_t rows, const struct isa *isa, enum dtype dtype);
/* Which expert computes which rows of a step, and memory for it; the caller frees it, also after an error. */
enum { MIXTURE_WORKS = 7 };
struct mixture_job {
    struct mixture_call *call;
    struct mixture_plan *plan;
    const struct isa *isa;
    enum dtype dtype;
    int n_threads;
};
int plan_mixture(struct mixture_job *job, struct mixture_call *call, const struct isa *isa, enum dtype dtype, int n_threads);
void free_mixture_plan(struct mixture_job *job);
/* Writes the works of a planned mixture; returns how many. */
size_t mixture_works(struct mixture_job *job, struct work works[MIXTURE_WORKS]);
struct work activate_work(struct activate_call *call, const struct isa *isa, enum dtype dtype);
struct work add_work(struct add_call *call, const struct isa *isa, enum dtype dtype);
struct work streams_work(struct streams_call *call, const struct isa *isa, enum dtype dtype);
struct work resize_work(struct resize_call *call, const struct isa *isa, enum dtype dtype);
struct work sparse_gate_work(struct sparse_gate_call *call, const struct isa *isa, enum dtype dtype);
struct work rotate_work(struct rotate_call *call, const struct isa *isa, enum dtype dtype);
struct work store_work(struct store_call *call);
/* Appends one work or, where requests share tiles, two; returns how many. */
size_t attention_works(const struct attention_job *job, const struct isa *isa, enum dtype dtype, struct work works[2]);

struct work convolution_work(struct convolution_call *call, const struct isa *isa, enum dtype dtype);
struct work recurrence_work(struct recurrence_call *call, const struct isa *isa, enum dtype dtype, int n_threads);

/* Writes dim numbers to the cache in 8 bits, and their scale. */
void store_8bit(enum cache_format format, enum dtype dtype, const void *numbers, size_t dim, uint8_t *codes, uint16_t *scale);

/* Check everything that could make a kernel read or write outside of the tensors. They return an enum status. */
int check_store(const struct store_call *call);
int check_attention(const struct attention_call *call);
int check_states(const struct states *states);
/* Plans the tasks of a checked call. The caller frees the plan, also after an error. */
int plan_attention(struct attention_job *job, const struct attention_call *call, int n_threads);
void free_attention_plan(struct attention_job *job);
/* The same of a selection, for which one work is enough. */
int check_selection(const struct selection_call *call);
int plan_selection(struct selection_job *job, const struct selection_call *call);
struct work selection_work(const struct selection_job *job, const struct isa *isa, enum dtype dtype);
/* Finds the requests of a checked call that share tiles; *found is NULL if there are none. */
int find_sharing(struct sharing **found, const struct attention_call *call, int n_threads);
void free_sharing(struct sharing *sharing);
/* Sets the output rows that belong to no request to zero. */
void clear_unused_rows(const struct attention_call *call, enum dtype dtype);

#endif

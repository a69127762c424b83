/* The library's entry points for layers that keep a state: they check arguments and cut calls into tasks. */
#include "kernels.h"

/* Entries of a block table whose states are neither read nor written are not checked. */
int check_states(const struct states *states) {
    if (states->query_start[0] != 0 || states->query_start[states->num_seqs] > states->rows) return STATUS_BAD_QUERY_START;
    for (int64_t seq = 0; seq < states->num_seqs; seq++) {
        int64_t tokens = (int64_t)states->query_start[seq + 1] - states->query_start[seq], length = states->seq_lens[seq];
        if (tokens < 0) return STATUS_BAD_QUERY_START;
        if (tokens == 0) continue;
        const int64_t start = length - tokens, kept = states_end(states, seq), end = kept > start ? kept : start;
        if (start < 0 || end > states->table_width * states->block_size) return STATUS_BAD_SEQ_LEN;
        const int32_t *table = states->block_tables + seq * states->table_stride;
        for (int64_t stripe = start > 0 ? (start - 1) / states->block_size : 0; stripe * states->block_size < end; stripe++)
            if (table[stripe] < 0 || table[stripe] >= states->num_blocks) return STATUS_BAD_BLOCK;
        if (start > 0 && state_before(states, seq, start) == NULL) return STATUS_NO_STATE;
    }
    return STATUS_OK;
}

struct work convolution_work(struct convolution_call *call, const struct isa *isa, enum dtype dtype) {
    enum { FEW_NUMBERS = 4 << 10 }; /* fewer are not worth a fork of threads */
    struct work work = {.function = isa->convolve[dtype], .job = call};
    if (call->states.rows == 0) return work;
    int64_t together = FEW_NUMBERS / (WINDOW_COLUMNS * call->states.rows);
    call->columns_per_task = WINDOW_COLUMNS * (together > 1 ? together : 1);
    work.n_tasks = (size_t)((call->columns + call->columns_per_task - 1) / call->columns_per_task);
    work.scratch_bytes = (size_t)(2 * call->taps + WINDOW_TOKENS) * WINDOW_COLUMNS * sizeof(float); /* weights, bias, window */
    return work;
}

struct work recurrence_work(struct recurrence_call *call, const struct isa *isa, enum dtype dtype, int n_threads) {
    const int64_t heads = call->states.num_seqs * call->heads, columns = (int64_t)padded_lanes((size_t)call->value_dim);
    struct work work = {.function = isa->recur[dtype], .job = call};
    const int has_padding = call->states.query_start[call->states.num_seqs] < call->states.rows;
    if (call->rates != NULL) {
        work.n_tasks = (size_t)call->states.num_seqs * channel_tasks(call) + has_padding;
        work.scratch_bytes = (CHANNELS_PER_TASK * (size_t)call->key_dim + 2 * RECURRENCE_TOKENS * padded_lanes((size_t)call->key_dim)) *
                             sizeof(float); /* states; queries, keys */
        return work;
    }
    int64_t parts = 1;
    /* A task prepares queries and keys for all of its columns, but all threads need tasks. */
    if (heads > 0 && n_threads > 1 && heads < 4 * n_threads) parts = (4 * n_threads + heads - 1) / heads;
    call->columns_per_task = (columns / parts + SLICE_COLUMNS - 1) / SLICE_COLUMNS * SLICE_COLUMNS;
    if (call->columns_per_task > columns || call->columns_per_task == 0) call->columns_per_task = columns;
    work.n_tasks = (size_t)heads * recurrence_parts(call) + has_padding;
    work.scratch_bytes = ((size_t)(call->columns_per_task * call->key_dim) + 4 * RECURRENCE_TOKENS * padded_lanes((size_t)call->key_dim)) *
                         sizeof(float); /* states; queries, keys twice, factors */
    return work;
}

int baton_convolve(int isa, int dtype, struct convolution_call *call, int n_threads) {
    int status = check_states(&call->states);
    if (status != STATUS_OK) return status;
    struct work work = convolution_work(call, isas[isa], (enum dtype)dtype);
    return run_works(&work, 1, n_threads, NULL);
}

int baton_recur(int isa, int dtype, struct recurrence_call *call, int n_threads) {
    int status = check_states(&call->states);
    if (status != STATUS_OK) return status;
    struct work work = recurrence_work(call, isas[isa], (enum dtype)dtype, n_threads);
    return run_works(&work, 1, n_threads, NULL);
}

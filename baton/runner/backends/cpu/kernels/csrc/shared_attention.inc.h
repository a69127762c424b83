/* Attention of the rows of several requests to the tiles that they share (sharing.c), each tile read and converted once for all of
 * them. Included by attention.inc.h. */

/* Some members of a task, which attend to a tile together. */
struct shared_tile {
    int64_t tile; /* its number */
    int64_t member, member_end;
};

/* The next members that share a tile, after those of `at`: of the same tile or a later one; member_end 0 behind the last. */
INLINE struct shared_tile next_shared(const struct sharing_member *members, int64_t count, struct shared_tile at) {
    for (int found = 1; found; at.tile++, at.member_end = 0) {
        int64_t member = at.member_end;
        while (member < count && members[member].tiles <= at.tile) member++;
        found = at.member_end > 0;
        if (member < count) {
            int64_t end = member + 1;
            while (members[end - 1].tiles > at.tile) end++;
            return (struct shared_tile){at.tile, member, end};
        }
    }
    return (struct shared_tile){0, 0, 0};
}

/* The member's query rows of a KV head, as a task. */
INLINE struct attention_task rows_of_member(const struct attention_call *call, const struct sharing_member *member, int32_t kv_head) {
    const int32_t group = (int32_t)(call->heads / call->kv_heads);
    return (struct attention_task){.seq = member->seq, .kv_head = kv_head, .kv_count = 1, .head_start = kv_head * group,
                                   .head_count = group, .token_count = member->tokens};
}

INLINE void find_shared_rows(const enum dtype dtype, const struct attention_call *call, const struct sharing_member *members,
                             int32_t kv_head, struct shared_tile at, struct tile_rows *rows) {
    if (at.member_end == 0) {
        rows->start = rows->end = 0;
        return;
    }
    const struct attention_task task = rows_of_member(call, &members[at.member], kv_head);
    find_rows(dtype, call, &task, rows, kv_head, call->seq_lens[task.seq] - task.token_count, at.tile * KEY_TILE);
}

INLINE void attend_shared(const enum dtype dtype, const struct attention_job *job, size_t index, void *scratch) {
    const struct attention_call *call = job->call;
    const struct sharing_task *shared = &job->sharing->tasks[index];
    const struct sharing_member *members = job->sharing->members + shared->member;
    const int64_t count = shared->member_end - shared->member;
    size_t first_row[ATTENTION_ROWS + 1]; /* of each member, and the number of all rows */
    struct attention_state state = state_in_scratch(dtype, call, scratch);
    first_row[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const struct attention_task task = rows_of_member(call, &members[i], shared->kv_head);
        first_row[i + 1] = first_row[i] + prepare_queries(dtype, call, &task, &state, first_row[i]);
    }
    start_rows(dtype, call, &state, first_row[count]);

    struct shared_tile at = next_shared(members, count, (struct shared_tile){0, 0, 0});
    find_shared_rows(dtype, call, members, shared->kv_head, at, &state.rows[state.here]);
    while (at.member_end > 0) {
        struct shared_tile next = next_shared(members, count, at);
        find_shared_rows(dtype, call, members, shared->kv_head, next, &state.rows[1 - state.here]);
        state.asked = 0;
        widen_tile(dtype, call, &state);
        load_tile(dtype, call, &state, dtype == DTYPE_FLOAT32, dtype == DTYPE_BFLOAT16, 1);
        size_t end = first_row[at.member_end];
        for (size_t row = first_row[at.member]; row < end; row += SCORE_ROWS)
            attend_rows(dtype, call, &state, 0, row, end - row < SCORE_ROWS ? end - row : SCORE_ROWS, (struct key_range){0, KEY_TILE},
                        at.tile * KEY_TILE);
        ask_ahead(&state, KEY_TILE);
        state.here = 1 - state.here;
        at = next;
    }
    for (int64_t i = 0; i < count; i++) {
        const struct attention_task task = rows_of_member(call, &members[i], shared->kv_head);
        exchange_states(job, &task, &state, first_row[i], 1);
    }
}

/* Linear layers in bfloat16 on vectors, for the instruction sets without AMX. */
enum { STEP_PAIRS = 1 }; /* in packed bfloat16 weights */
/* How many bytes of weights are prefetched at most while adapters are added: a part of the second-level cache. */
enum { MOST_AHEAD = 64 << 10 };

/* sums[rows][64] (+)= a piece of x times a piece of k of one group's weights; room: for PAIR_TILE_ROWS rows of x as bf16_row. */
INLINE void multiply_pairs(size_t rows, const uint16_t *x, size_t x_stride, const uint16_t *w, size_t pairs, float *sums,
                           bf16_row *room, int accumulate) {
    for (size_t row = 0, block; row < rows; row += block) {
        block = block_rows(rows - row, PAIR_TILE_ROWS);
        size_t ldx;
        const bf16_row *items = row_items(x + row * x_stride, x_stride, block, pairs, room, &ldx);
        product_bfloat16(block, GROUP_PANELS, items, ldx, w, 2 * LANES, 2 * GROUP_COLUMNS, pairs, sums + row * GROUP_COLUMNS,
                         GROUP_COLUMNS, accumulate);
    }
}

TARGET static void linear_bfloat16(const void *job, size_t task, void *scratch) {
    const struct linear_call *call = job;
    struct linear_task part = linear_task(call, task);
    size_t rows = part.end - part.row, all = call->k / 2, most = rows <= FEW_ROWS ? FEW_PAIRS : MANY_PAIRS;
    size_t pieces = (all + most - 1) / most, depth = pieces > 0 ? (all + pieces - 1) / pieces : 0;
    const uint16_t *packed = (const uint16_t *)call->packed, *x = (const uint16_t *)call->x + part.row * call->x_stride;
    float *sums = scratch;
    bf16_row *room = (bf16_row *)(sums + rows * GROUP_COLUMNS);
    for (size_t group = part.group; group < part.group_end; group++) {
        struct epilogue epilogue;
        open_epilogue(&epilogue, call, DTYPE_BFLOAT16, group);
        size_t from = 0;
        do {
            size_t pairs = all - from < depth ? all - from : depth;
            prefetch_adapters(DTYPE_BFLOAT16, call, group, part, from / depth, pieces);
            const uint16_t *w = packed + (group * all + from) * 2 * GROUP_COLUMNS;
            multiply_pairs(rows, x + 2 * from, call->x_stride, w, pairs, sums, room, from > 0);
            from += depth;
        } while (from < all);
        struct weights_ahead ahead = {NULL, NULL};
        if (rows <= FEW_ROWS && group + 1 < part.group_end) {
            /* The products have asked for the first AHEAD_BYTES already. */
            const char *next = (const char *)(packed + (group + 1) * all * 2 * GROUP_COLUMNS);
            size_t bytes = all * 2 * GROUP_COLUMNS * sizeof(uint16_t);
            if (bytes > AHEAD_BYTES + MOST_AHEAD) bytes = AHEAD_BYTES + MOST_AHEAD;
            ahead = (struct weights_ahead){next + AHEAD_BYTES, next + bytes};
        }
        add_adapters_ahead(DTYPE_BFLOAT16, call, group, part.row, rows, sums, ahead);
        store_sums(&epilogue, call->out, part.row, rows, sums);
    }
}

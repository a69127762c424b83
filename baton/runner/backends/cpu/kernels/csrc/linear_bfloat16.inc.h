/* Linear layers in bfloat16 on vectors, for the instruction sets without AMX. */
TARGET static void linear_bfloat16(const void *job, size_t task, void *scratch) {
    const struct linear_call *call = job;
    struct linear_task part = linear_task(call, task);
    size_t rows = part.end - part.row, all = call->k / 2, most = rows <= FEW_ROWS ? FEW_PAIRS : MANY_PAIRS;
    size_t pieces = (all + most - 1) / most, depth = pieces > 0 ? (all + pieces - 1) / pieces : 0;
    const uint16_t *packed = (const uint16_t *)call->packed;
    float *sums = scratch;
    bf16_row *widened = (bf16_row *)(sums + rows * GROUP_COLUMNS);
    for (size_t group = part.group; group < part.group_end; group++) {
        struct epilogue epilogue;
        open_epilogue(&epilogue, call, DTYPE_BFLOAT16, group);
        size_t from = 0;
        do {
            size_t pairs = all - from < depth ? all - from : depth;
            const uint16_t *w = packed + (group * all + from) * 2 * GROUP_COLUMNS;
            for (size_t row = 0, block; row < rows; row += block) {
                const uint16_t *x = (const uint16_t *)call->x + (part.row + row) * call->x_stride + 2 * from;
                block = block_rows(rows - row, PAIR_TILE_ROWS);
                size_t ldx;
                const bf16_row *items = row_items(x, call->x_stride, block, pairs, widened, &ldx);
                product_bfloat16(block, GROUP_PANELS, items, ldx, w, 2 * LANES, 2 * GROUP_COLUMNS, pairs, sums + row * GROUP_COLUMNS,
                                 GROUP_COLUMNS, from > 0);
            }
            from += depth;
        } while (from < all);
        store_sums(&epilogue, call->out, part.row, rows, sums);
    }
}

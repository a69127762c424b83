/* Linear layers in bfloat16 on vectors. */
TARGET static void linear_bfloat16(const void *job, size_t task, void *scratch) {
    const struct linear_call *call = job;
    struct linear_task part = linear_task(call, task);
    size_t pairs = call->k / 2, items = pairs * ROW_ITEMS_PER_PAIR;
    float *c = scratch;
    bf16_row *rows = (bf16_row *)(c + TALL_ROWS * GROUP_COLUMNS);
    for (size_t group = part.group; group < part.group_end; group++) {
        const uint16_t *w = (const uint16_t *)call->packed + group * GROUP_COLUMNS * call->k;
        struct epilogue epilogue;
        open_epilogue(&epilogue, call, DTYPE_BFLOAT16, group);
        for (size_t row = part.row, block; row < part.end; row += block) {
            const uint16_t *x = (const uint16_t *)call->x + row * call->x_stride;
            block = block_rows(part.end - row);
            for (size_t m = 0; m < block; m++) widen_row(rows + m * items, x + m * call->x_stride, call->k);
            product_bfloat16(block, GROUP_PANELS, rows, items, w, PANEL_ELEMENTS, STEP_ELEMENTS, pairs, c, GROUP_COLUMNS);
            store_rows(DTYPE_BFLOAT16, &epilogue, call->out, row, block, c);
        }
    }
}

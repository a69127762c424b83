/* Linear layers in bfloat16 on vectors. */
TARGET static void linear_bfloat16(const void *job, size_t task, void *scratch) {
    const struct linear_call *call = job;
    struct linear_task part = linear_task(call, task);
    size_t pairs = call->k / 2, items = pairs * ROW_ITEMS_PER_PAIR;
    const uint16_t *w = (const uint16_t *)call->packed + part.column * call->k;
    float *c = scratch;
    struct epilogue epilogue;
    open_epilogue(&epilogue, call, DTYPE_BFLOAT16, part.column);
    for (size_t row = part.row, block; row < part.end; row += block) {
        const uint16_t *x = (const uint16_t *)call->x + row * call->k;
        block = block_rows(part.end - row);
#ifdef DPBF16
        const bf16_row *rows = (const bf16_row *)x;
#else
        bf16_row *rows = (bf16_row *)(c + TALL_ROWS * GROUP_COLUMNS);
        for (size_t m = 0; m < block; m++) widen_row(rows + m * items, x + m * call->k, call->k);
#endif
        product_bfloat16(block, GROUP_PANELS, rows, items, w, call->k * LANES, pairs, c, GROUP_COLUMNS);
        store_bfloat16(&epilogue, (uint16_t *)call->out + row * call->n + part.column, call->n, block, c);
    }
}

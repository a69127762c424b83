/* Linear layers in float32, and the epilogue that both dtypes share: the bias is added to the float32 sums, or the gate is applied
 * to them, and then they are rounded to the output's dtype, which is float32 or x's. */
struct epilogue {
    float bias[GROUP_COLUMNS];
    size_t column, columns, stride; /* the group's first output, its number of outputs, the length of out's rows */
    enum activation activation;
    enum dtype out_dtype;
    int has_bias;
};

INLINE void open_epilogue(struct epilogue *e, const struct linear_call *call, const enum dtype dtype, size_t group) {
    e->column = group * group_outputs(call);
    e->columns = call->n - e->column < group_outputs(call) ? call->n - e->column : group_outputs(call);
    e->stride = call->out_stride;
    e->activation = call->activation;
    e->out_dtype = call->out_dtype;
    e->has_bias = call->bias != NULL;
    for (size_t i = 0; e->has_bias && i < e->columns; i += LANES)
        v_store(e->bias + i, load_lanes(dtype, call->bias, e->column + i, lanes_left(i, e->columns)));
}

/* Stores rows of out, from a row on, from the sums c[rows][GROUP_COLUMNS]; dtype: of out. */
INLINE void store_rows(const enum dtype dtype, const struct epilogue *e, void *out, size_t row, size_t rows, const float *c) {
    for (size_t m = 0; m < rows; m++, c += GROUP_COLUMNS) {
        size_t to = (row + m) * e->stride + e->column;
        for (size_t i = 0; i < e->columns; i += LANES) {
            v16 result;
            if (e->activation == NOT_GATED) {
                result = v_load(c + i);
                if (e->has_bias) result = v_add(result, v_load(e->bias + i));
            } else {
                result = v_mul(v_activate(e->activation, v_load(c + 2 * i)), v_load(c + 2 * i + LANES));
            }
            store_lanes(dtype, out, to + i, lanes_left(i, e->columns), result);
        }
    }
}

/* Stores rows of out in its own dtype, which bfloat16 products may leave float32. */
INLINE void store_sums(const struct epilogue *e, void *out, size_t row, size_t rows, const float *c) {
    if (e->out_dtype == DTYPE_FLOAT32)
        store_rows(DTYPE_FLOAT32, e, out, row, rows, c);
    else
        store_rows(DTYPE_BFLOAT16, e, out, row, rows, c);
}

TARGET static void linear_float32(const void *job, size_t task, void *scratch) {
    const struct linear_call *call = job;
    struct linear_task part = linear_task(call, task);
    float *c = scratch;
    for (size_t group = part.group; group < part.group_end; group++) {
        const float *w = (const float *)call->packed + group * GROUP_COLUMNS * call->k;
        struct epilogue epilogue;
        open_epilogue(&epilogue, call, DTYPE_FLOAT32, group);
        for (size_t row = part.row, block; row < part.end; row += block) {
            const float *x = (const float *)call->x + row * call->x_stride;
            block = block_rows(part.end - row, TALL_ROWS);
            product_float32(block, GROUP_PANELS, x, call->x_stride, w, LANES, GROUP_COLUMNS, call->k, c, GROUP_COLUMNS, 0);
            add_adapters(DTYPE_FLOAT32, call, group, row, block, c);
            store_rows(DTYPE_FLOAT32, &epilogue, call->out, row, block, c);
        }
    }
}

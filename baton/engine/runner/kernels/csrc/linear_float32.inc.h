/* Linear layers in float32, and the end that both dtypes share: the bias is added to the float32 sums, then they are rounded to the output's dtype. */
struct epilogue {
    float bias[GROUP_COLUMNS];
    size_t columns; /* of this group, without the padding */
    int has_bias;
};

INLINE void open_epilogue(struct epilogue *e, const struct linear_call *call, enum dtype dtype, size_t column) {
    e->columns = call->n - column < GROUP_COLUMNS ? call->n - column : GROUP_COLUMNS;
    e->has_bias = call->bias != NULL;
    memset(e->bias, 0, sizeof e->bias);
    if (!e->has_bias) return;
    if (dtype == DTYPE_FLOAT32) {
        memcpy(e->bias, (const float *)call->bias + column, e->columns * sizeof(float));
    } else {
        for (size_t i = 0; i < e->columns; i++) {
            uint32_t bits = (uint32_t)((const uint16_t *)call->bias)[column + i] << 16;
            memcpy(e->bias + i, &bits, 4);
        }
    }
}

INLINE v16 finished_lanes(const struct epilogue *e, const float *c, size_t lane) {
    v16 sums = v_load(c + lane);
    return e->has_bias ? v_add(sums, v_load(e->bias + lane)) : sums;
}

INLINE void store_float32(const struct epilogue *e, float *out, size_t stride, size_t rows, const float *c) {
    for (size_t m = 0; m < rows; m++, out += stride, c += GROUP_COLUMNS) {
        size_t lane = 0;
        for (; lane + LANES <= e->columns; lane += LANES) v_store(out + lane, finished_lanes(e, c, lane));
        if (lane < e->columns) {
            float last[LANES];
            v_store(last, finished_lanes(e, c, lane));
            memcpy(out + lane, last, (e->columns - lane) * sizeof(float));
        }
    }
}

INLINE void store_bfloat16(const struct epilogue *e, uint16_t *out, size_t stride, size_t rows, const float *c) {
    for (size_t m = 0; m < rows; m++, out += stride, c += GROUP_COLUMNS) {
        size_t lane = 0;
        for (; lane + LANES <= e->columns; lane += LANES) v_store_bf16(out + lane, finished_lanes(e, c, lane));
        if (lane < e->columns) {
            uint16_t last[LANES];
            v_store_bf16(last, finished_lanes(e, c, lane));
            memcpy(out + lane, last, (e->columns - lane) * sizeof(uint16_t));
        }
    }
}

TARGET static void linear_float32(const void *job, size_t task, void *scratch) {
    const struct linear_call *call = job;
    struct linear_task part = linear_task(call, task);
    const float *w = (const float *)call->packed + part.column * call->k;
    float *c = scratch;
    struct epilogue epilogue;
    open_epilogue(&epilogue, call, DTYPE_FLOAT32, part.column);
    for (size_t row = part.row, block; row < part.end; row += block) {
        block = block_rows(part.end - row);
        product_float32(block, GROUP_PANELS, (const float *)call->x + row * call->k, call->k, w, call->k * LANES, call->k, c,
                        GROUP_COLUMNS, 0);
        store_float32(&epilogue, (float *)call->out + row * call->n + part.column, call->n, block, c);
    }
}

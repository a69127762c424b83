/* Low-rank adapters: to the float32 sums of a product is added B t, where t = factor * A x + constant, of the adapter of each row.
 * It is added before the bias, the gate and the rounding, each output's terms in one fixed order of the ranks. So a
 * row's bits depend on its own adapter alone, and those of a row without one are what they are without adapters.
 * Included once for each instruction set, after functions.inc.h. */

/* How many ranks a task of A x computes: as many sums as hide the latency of an addition. */
enum { RANKS_PER_TASK = 8 };

/* Two times 16 numbers of x's dtype: of bfloat16 the odd elements, then the even ones. */
struct two { v16 first, second; };

INLINE struct two load_two(const enum dtype dtype, const void *from, size_t index) {
    if (dtype == DTYPE_FLOAT32) {
        const float *p = (const float *)from + index;
        return (struct two){v_load(p), v_load(p + LANES)};
    }
    const uint16_t *p = (const uint16_t *)from + index;
    return (struct two){v_load_odd(p), v_load_even(p)};
}

/* As load_two, of fewer than 32 numbers, with zeros behind them. */
INLINE struct two load_some(const enum dtype dtype, const void *from, size_t index, size_t count) {
    uint32_t part[2 * LANES] = {0};
    const size_t item = dtype == DTYPE_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    memcpy(part, (const char *)from + index * item, count * item);
    return load_two(dtype, part, 0);
}

INLINE void add_ranks(const enum dtype dtype, const void *a, size_t index, struct two x, v16 sums[RANKS_PER_TASK]) {
#pragma GCC unroll 8
    for (int r = 0; r < RANKS_PER_TASK; r++) {
        struct two numbers = load_two(dtype, a, index + (size_t)r * 2 * LANES);
        __builtin_prefetch((const char *)a + (index + (size_t)r * 2 * LANES) * sizeof(uint16_t) + PREFETCH_BYTES);
        sums[r] = v_fma(numbers.second, x.second, v_fma(numbers.first, x.first, sums[r]));
    }
}

/* Computes t of some ranks for one row, which begins at x + from. */
INLINE void multiply_ranks(const enum dtype dtype, const struct adapter_weights *w, const void *x, size_t from, size_t first, float *t) {
    enum { STEP = 2 * LANES };
    size_t a = first * padded_pairs(w->k), k = 0;
    v16 sums[RANKS_PER_TASK];
#pragma GCC unroll 8
    for (int r = 0; r < RANKS_PER_TASK; r++) sums[r] = v_zero();
    for (; k + STEP <= w->k; k += STEP, a += STEP * RANKS_PER_TASK) add_ranks(dtype, w->a, a, load_two(dtype, x, from + k), sums);
    if (k < w->k) add_ranks(dtype, w->a, a, load_some(dtype, x, from + k, w->k - k), sums);
    for (int r = 0; r < RANKS_PER_TASK; r++) t[r] = w->factors[first + (size_t)r] * v_total(sums[r]) + w->constants[first + (size_t)r];
}

INLINE void shrink_rows(const enum dtype dtype, const struct shrink_call *call, size_t task) {
    const struct adapter_rows *adapters = call->adapters;
    size_t row = task / call->parts * call->rows_per_task, first = task % call->parts * RANKS_PER_TASK;
    size_t end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++) {
        const struct adapter_weights *w = weights_of_row(adapters, row);
        if (w != NULL && first < w->rank)
            multiply_ranks(dtype, w, call->x, row * call->x_stride, first, adapters->t + row * adapters->t_stride + first);
    }
}

TARGET static void shrink_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    shrink_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void shrink_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    shrink_rows(DTYPE_BFLOAT16, job, task);
}

/* The weights of a product that are read next. They are prefetched while B t is added, one line for each line of B: otherwise nothing
 * would be on its way from memory meanwhile. */
struct weights_ahead {
    const char *from, *end;
};

/* Prefetches as many lines as a pair of ranks has in a group. */
INLINE void prefetch_ahead(struct weights_ahead *ahead) {
    enum { LINE = PAIR_ELEMENTS * sizeof(uint16_t) };
    if (ahead->from >= ahead->end) return;
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_PANELS; i++) __builtin_prefetch(ahead->from + i * LINE, 0, 2);
    ahead->from += GROUP_PANELS * LINE;
}

/* c[NU * 16] += the terms of neighbouring panels, which have equally many: those of even ranks in one sum, which goes on from c,
 * those of odd ranks in another one. */
INLINE void expand_panels(const enum dtype dtype, const int NU, const struct adapter_weights *w, const struct adapter_panel *panels,
                          const float *t, float *c, struct weights_ahead *ahead) {
    v16 even[GROUP_PANELS], odd[GROUP_PANELS];
#pragma GCC unroll 4
    for (int u = 0; u < NU; u++) {
        even[u] = v_load(c + u * LANES);
        odd[u] = v_zero();
    }
    for (size_t r = 0; r < panels->count; r += 2) {
        prefetch_ahead(ahead);
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) {
            const float *own = t + panels[u].first + r;
            struct two numbers = load_two(dtype, w->b, (size_t)panels[u].offset * PAIR_ELEMENTS + r * LANES);
            even[u] = v_fma(numbers.first, v_set1(own[0]), even[u]);
            odd[u] = v_fma(numbers.second, v_set1(own[1]), odd[u]);
        }
    }
#pragma GCC unroll 4
    for (int u = 0; u < NU; u++) v_store(c + u * LANES, v_add(even[u], odd[u]));
}

/* c[ROWS][64] += the terms of rows that have the same adapter, of a group whose panels have equally many. */
INLINE void expand_alike(const enum dtype dtype, const int ROWS, const struct adapter_weights *w, const struct adapter_panel *panels,
                         const float *t, size_t t_stride, float *c, struct weights_ahead *ahead) {
    for (int u = 0; u < GROUP_PANELS; u += 2) {
        v16 even[4][2], odd[4][2];
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                even[m][v] = v_load(c + m * GROUP_COLUMNS + (u + v) * LANES);
                odd[m][v] = v_zero();
            }
        for (size_t r = 0; r < panels->count; r += 2) {
            prefetch_ahead(ahead);
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                struct two numbers = load_two(dtype, w->b, (size_t)panels[u + v].offset * PAIR_ELEMENTS + r * LANES);
                const float *own = t + panels[u + v].first + r;
#pragma GCC unroll 4
                for (int m = 0; m < ROWS; m++) {
                    even[m][v] = v_fma(numbers.first, v_set1(own[(size_t)m * t_stride]), even[m][v]);
                    odd[m][v] = v_fma(numbers.second, v_set1(own[(size_t)m * t_stride + 1]), odd[m][v]);
                }
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) v_store(c + m * GROUP_COLUMNS + (u + v) * LANES, v_add(even[m][v], odd[m][v]));
    }
}

INLINE void expand_rows(const enum dtype dtype, const struct adapter_rows *adapters, size_t group, size_t row, size_t rows, float *sums,
                        struct weights_ahead ahead) {
    const size_t stride = adapters->t_stride;
    for (size_t m = 0, alike; m < rows; m += alike, sums += alike * GROUP_COLUMNS) {
        const struct adapter_weights *w = weights_of_row(adapters, row + m);
        for (alike = 1; alike < 4 && m + alike < rows && weights_of_row(adapters, row + m + alike) == w;) alike++;
        if (w == NULL) continue;
        const struct adapter_panel *panels = w->panels + group * GROUP_PANELS;
        const float *t = adapters->t + (row + m) * stride;
        if (panels[0].count != panels[1].count || panels[0].count != panels[2].count || panels[0].count != panels[3].count) {
            for (size_t i = 0; i < alike; i++)
                for (int u = 0; u < GROUP_PANELS; u++)
                    expand_panels(dtype, 1, w, panels + u, t + i * stride, sums + i * GROUP_COLUMNS + u * LANES, &ahead);
        } else if (alike == 4) {
            expand_alike(dtype, 4, w, panels, t, stride, sums, &ahead);
        } else {
            for (size_t i = 0; i < alike; i++) expand_panels(dtype, GROUP_PANELS, w, panels, t + i * stride, sums + i * GROUP_COLUMNS, &ahead);
        }
    }
}

TARGET __attribute__((noinline, unused)) static void expand_float32(const struct adapter_rows *adapters, size_t group, size_t row, size_t rows,
                                                                    float *sums, struct weights_ahead ahead) {
    expand_rows(DTYPE_FLOAT32, adapters, group, row, rows, sums, ahead);
}
TARGET __attribute__((noinline, unused)) static void expand_bfloat16(const struct adapter_rows *adapters, size_t group, size_t row, size_t rows,
                                                                     float *sums, struct weights_ahead ahead) {
    expand_rows(DTYPE_BFLOAT16, adapters, group, row, rows, sums, ahead);
}

/* Adds to the sums[rows][64] of one group of columns, of rows from a row on, what their adapters add; prefetches weights meanwhile. */
INLINE void add_adapters_ahead(const enum dtype dtype, const struct linear_call *call, size_t group, size_t row, size_t rows, float *sums,
                               struct weights_ahead ahead) {
    if (call->adapters == NULL) return;
    if (dtype == DTYPE_FLOAT32)
        expand_float32(call->adapters, group, row, rows, sums, ahead);
    else
        expand_bfloat16(call->adapters, group, row, rows, sums, ahead);
}

/* The same without prefetching weights. */
INLINE void add_adapters(const enum dtype dtype, const struct linear_call *call, size_t group, size_t row, size_t rows, float *sums) {
    add_adapters_ahead(dtype, call, group, row, rows, sums, (struct weights_ahead){NULL, NULL});
}

/* Requests from memory what one of several parts of few rows adds to a group of columns: all parts together would occupy all
 * buffers for lines that are on their way, and the product waits for its weights. */
INLINE void prefetch_adapters(const enum dtype dtype, const struct linear_call *call, size_t group, struct linear_task task, size_t part,
                              size_t parts) {
    const size_t rows = task.end - task.row, item = dtype == DTYPE_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    if (call->adapters == NULL || rows > FEW_ROWS) return;
    for (size_t m = task.row + rows * part / parts; m < task.row + rows * (part + 1) / parts; m++) {
        const struct adapter_weights *w = weights_of_row(call->adapters, m);
        if (w == NULL || (m > task.row && w == weights_of_row(call->adapters, m - 1))) continue;
        const struct adapter_panel *panel = w->panels + group * GROUP_PANELS, *last = panel + GROUP_PANELS - 1;
        const char *b = (const char *)w->b + (size_t)panel->offset * PAIR_ELEMENTS * item;
        const char *end = (const char *)w->b + ((size_t)last->offset * PAIR_ELEMENTS + last->count * LANES) * item;
        __builtin_prefetch(panel + 2 * GROUP_PANELS, 0, 2);
        for (; b < end; b += 64) __builtin_prefetch(b, 0, 2);
    }
}

/* Products with quantized weights (quantized.h). Included once for each instruction set, after linear_float32.inc.h and the
 * vectors of integers; the includer defines the register tiles:
 * QUANTIZED_WIDE_ROWS rows by 4 panels, and QUANTIZED_TALL_ROWS rows by 2 panels, with their CASES; and QUANTIZED_UNROLLED, whether
 * there is code without a loop for a block of MAX_BLOCK elements, which takes long to compile. */
#include "quantized.h"

#include "tiles_quantized.inc.h"

/* Quantizes a block of x; BLOCK: its length where the compiler knows it, else 0. */
INLINE void quantize_block(const enum dtype dtype, const size_t BLOCK, const struct quantized_format *f, const void *x, size_t index,
                           struct quantized_block *to) {
    const size_t block = BLOCK > 0 ? BLOCK : f->block, first = block < LANES ? block : LANES, second = block - first;
    v16 low = load_lanes(dtype, x, index, first), high = second > 0 ? load_lanes(dtype, x, index + first, second) : v_zero();
    int32_t bits = i_largest_magnitude(low, high);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    float scale = largest / 127.0f, sum = 0;
    int8_t codes[MAX_BLOCK] = {0};
    if (bits >= 0x7F800000) {
        scale = NAN; /* an infinity or NaN in x makes the whole row of the product NaN */
    } else if (scale > 0) {
        v16 shift = v_set1(ROUND_SHIFT);
        low = v_add(v_div(low, v_set1(scale)), shift);
        high = v_add(v_div(high, v_set1(scale)), shift);
        sum = v_total_of_integers(v_add(v_sub(low, shift), v_sub(high, shift)));
        i_store_codes(codes, low);
        i_store_codes(codes + LANES, high);
    }
    memcpy(to->codes, codes, block);
    to->scale = scale;
    to->weighted_sum = scale * sum;
    to->start = -f->zero * (int32_t)sum;
    to->minus_sum = -(int32_t)sum;
}

INLINE void quantize_rows(const enum dtype dtype, const struct quantize_call *call, size_t task) {
    const struct quantized_format *f = call->format;
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    char *to = (char *)call->out + row * quantized_row_bytes(f, call->k);
    for (; row < end; row++)
        for (size_t i = 0; i < call->k; i += f->block, to += quantized_block_bytes(f)) {
            struct quantized_block *block = (struct quantized_block *)to;
            if (f->block == MAX_BLOCK)
                quantize_block(dtype, MAX_BLOCK, f, call->x, row * call->x_stride + i, block);
            else
                quantize_block(dtype, 0, f, call->x, row * call->x_stride + i, block);
        }
}

TARGET static void quantize_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    quantize_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void quantize_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    quantize_rows(DTYPE_BFLOAT16, job, task);
}

INLINE void multiply_quantized(const enum dtype dtype, const struct linear_call *call, size_t task, float *sums) {
    const struct quantized_format *f = call->format;
    struct linear_task part = linear_task(call, task);
    size_t rows = part.end - part.row, blocks = call->k / f->block;
    size_t most = (rows <= FEW_ROWS ? few_piece_bytes : MANY_PIECE_BYTES) / codes_bytes(f, f->block);
    if (most > PIECE_BLOCKS) most = PIECE_BLOCKS;
    size_t pieces = (blocks + most - 1) / most, depth = pieces > 0 ? (blocks + pieces - 1) / pieces : 0;
    const char *x = (const char *)call->x + part.row * call->x_stride;
    enum numbers numbers;
    const piece_function multiply = piece_function_of(f, &numbers);
    struct piece piece;
    for (size_t group = part.group; group < part.group_end; group++) {
        const uint8_t *columns = (const uint8_t *)call->packed + group * quantized_columns_bytes(f, call->k);
        struct epilogue epilogue;
        open_epilogue(&epilogue, call, dtype, group);
        memset(sums, 0, rows * GROUP_COLUMNS * sizeof *sums);
        for (size_t from = 0, to; from < blocks; from = to) {
            to = blocks - from < depth ? blocks : from + depth;
            open_piece(f, numbers, columns, from, to, &piece);
            multiply(rows, f->block, x + from * quantized_block_bytes(f), call->x_stride, &piece, sums);
        }
        add_adapters(dtype, call, group, part.row, rows, sums);
        store_sums(&epilogue, call->out, part.row, rows, sums);
    }
}

TARGET static void quantized_linear_float32(const void *job, size_t task, void *scratch) {
    multiply_quantized(DTYPE_FLOAT32, job, task, scratch);
}
TARGET static void quantized_linear_bfloat16(const void *job, size_t task, void *scratch) {
    multiply_quantized(DTYPE_BFLOAT16, job, task, scratch);
}

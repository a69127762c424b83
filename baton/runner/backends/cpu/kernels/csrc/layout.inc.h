/* The memory layout of the structures that Python fills; call_structs.py compares its own with it when the library is loaded. */
#include <stddef.h>

struct layout_entry {
    const char *structure, *field; /* field: empty for the whole structure */
    size_t offset, size;
};

#define WHOLE(kind, name) {name, "", 0, sizeof(kind)}
#define NAMED(kind, member, name) {#kind, name, offsetof(struct kind, member), sizeof(((struct kind *)0)->member)}
#define FIELD(kind, member) NAMED(kind, member, #member)
#define VALUE(kind, name, value) {kind, name, (size_t)(value), 0}

static const struct layout_entry layout[] = {
    WHOLE(struct linear_call, "linear_call"),
    FIELD(linear_call, x), FIELD(linear_call, packed), FIELD(linear_call, bias), FIELD(linear_call, out),
    FIELD(linear_call, format), FIELD(linear_call, adapters), FIELD(linear_call, m), FIELD(linear_call, n), FIELD(linear_call, k),
    FIELD(linear_call, scale_group), FIELD(linear_call, x_stride), FIELD(linear_call, out_stride), FIELD(linear_call, rows_per_task),
    FIELD(linear_call, groups_per_task), FIELD(linear_call, activation), FIELD(linear_call, out_dtype),

    WHOLE(struct adapter_panel, "adapter_panel"),
    FIELD(adapter_panel, offset), FIELD(adapter_panel, first), FIELD(adapter_panel, count),

    WHOLE(struct adapter_weights, "adapter_weights"),
    FIELD(adapter_weights, a), FIELD(adapter_weights, b), FIELD(adapter_weights, factors), FIELD(adapter_weights, constants),
    FIELD(adapter_weights, panels), FIELD(adapter_weights, rank), FIELD(adapter_weights, k),

    WHOLE(struct adapter_rows, "adapter_rows"),
    FIELD(adapter_rows, slots), FIELD(adapter_rows, weights), FIELD(adapter_rows, t), FIELD(adapter_rows, num_slots),
    FIELD(adapter_rows, t_stride),

    WHOLE(struct quantized_format, "quantized_format"),
    FIELD(quantized_format, bits), FIELD(quantized_format, group), FIELD(quantized_format, block),
    FIELD(quantized_format, groups_per_record), FIELD(quantized_format, zero), FIELD(quantized_format, has_zeros),
    FIELD(quantized_format, scales), FIELD(quantized_format, offsets),

    WHOLE(struct quantized_parts, "quantized_parts"),
    FIELD(quantized_parts, codes), FIELD(quantized_parts, scales), FIELD(quantized_parts, scale_factors),
    FIELD(quantized_parts, offsets), FIELD(quantized_parts, offset_factors), FIELD(quantized_parts, zeros),

    WHOLE(struct quantize_call, "quantize_call"),
    FIELD(quantize_call, x), FIELD(quantize_call, out), FIELD(quantize_call, format), FIELD(quantize_call, rows),
    FIELD(quantize_call, k), FIELD(quantize_call, x_stride), FIELD(quantize_call, rows_per_task),

    WHOLE(struct norm_call, "norm_call"),
    FIELD(norm_call, x), FIELD(norm_call, weight), FIELD(norm_call, out), FIELD(norm_call, residual), FIELD(norm_call, sum),
    FIELD(norm_call, rows), FIELD(norm_call, columns), FIELD(norm_call, n), FIELD(norm_call, gate), FIELD(norm_call, bias), NAMED(norm_call, gate_stride[0], "gate_row_stride"),
    NAMED(norm_call, gate_stride[1], "gate_column_stride"), FIELD(norm_call, has_sigmoid_gate),
    NAMED(norm_call, stride[0], "row_stride"),
    NAMED(norm_call, stride[1], "column_stride"), FIELD(norm_call, rows_per_task), FIELD(norm_call, eps),
    FIELD(norm_call, plus_one), FIELD(norm_call, weight_stride), FIELD(norm_call, gate_first), FIELD(norm_call, around_mean),

    WHOLE(struct gate_call, "gate_call"),
    FIELD(gate_call, x), FIELD(gate_call, out), FIELD(gate_call, bias), FIELD(gate_call, scale), FIELD(gate_call, factor), FIELD(gate_call, rows),
    FIELD(gate_call, columns), FIELD(gate_call, x_stride), FIELD(gate_call, out_stride), FIELD(gate_call, rows_per_task),
    FIELD(gate_call, low), FIELD(gate_call, high), FIELD(gate_call, function),

    WHOLE(struct multiply_call, "multiply_call"),
    FIELD(multiply_call, x), FIELD(multiply_call, by), FIELD(multiply_call, out), FIELD(multiply_call, rows),
    FIELD(multiply_call, columns), FIELD(multiply_call, x_stride), FIELD(multiply_call, by_stride),
    FIELD(multiply_call, width), FIELD(multiply_call, rows_per_task), FIELD(multiply_call, multiplier),

    WHOLE(struct activate_call, "activate_call"),
    FIELD(activate_call, x), FIELD(activate_call, out), FIELD(activate_call, rows), FIELD(activate_call, columns),
    FIELD(activate_call, x_stride), FIELD(activate_call, rows_per_task), FIELD(activate_call, activation), FIELD(activate_call, bound), FIELD(activate_call, factor),
    FIELD(activate_call, positive), FIELD(activate_call, negative), FIELD(activate_call, linear), FIELD(activate_call, near),

    WHOLE(struct add_call, "add_call"),
    FIELD(add_call, one), FIELD(add_call, other), FIELD(add_call, out), FIELD(add_call, rows), FIELD(add_call, columns),
    FIELD(add_call, width), FIELD(add_call, one_stride), FIELD(add_call, other_stride), FIELD(add_call, out_stride),
    FIELD(add_call, rows_per_task), FIELD(add_call, factor),

    WHOLE(struct streams_call, "streams_call"),
    FIELD(streams_call, x), FIELD(streams_call, factors), FIELD(streams_call, result), FIELD(streams_call, out),
    FIELD(streams_call, rows), FIELD(streams_call, streams), FIELD(streams_call, columns), FIELD(streams_call, active),
    FIELD(streams_call, x_stride), FIELD(streams_call, factors_stride), FIELD(streams_call, result_stride),
    FIELD(streams_call, rows_per_task), FIELD(streams_call, kind),

    WHOLE(struct resize_call, "resize_call"),
    FIELD(resize_call, x), FIELD(resize_call, like), FIELD(resize_call, out), FIELD(resize_call, rows),
    FIELD(resize_call, columns), FIELD(resize_call, x_stride), FIELD(resize_call, like_stride),
    FIELD(resize_call, out_stride), FIELD(resize_call, rows_per_task), FIELD(resize_call, least),

    WHOLE(struct sparse_gate_call, "sparse_gate_call"),
    FIELD(sparse_gate_call, x), FIELD(sparse_gate_call, out), FIELD(sparse_gate_call, rows),
    FIELD(sparse_gate_call, columns), FIELD(sparse_gate_call, x_stride), FIELD(sparse_gate_call, rows_per_task),
    FIELD(sparse_gate_call, activation), FIELD(sparse_gate_call, deviations),

    WHOLE(struct route_call, "route_call"),
    FIELD(route_call, logits), FIELD(route_call, choice_bias), FIELD(route_call, expert_factors),
    FIELD(route_call, chosen), FIELD(route_call, weights),
    FIELD(route_call, rows), FIELD(route_call, experts), FIELD(route_call, most), FIELD(route_call, logits_stride),
    FIELD(route_call, rows_per_task), FIELD(route_call, groups), FIELD(route_call, most_groups), FIELD(route_call, scores),
    FIELD(route_call, groups_by_two), FIELD(route_call, normalised), FIELD(route_call, eps), FIELD(route_call, factor),
    FIELD(route_call, near), FIELD(route_call, weights_dtype),

    WHOLE(struct sum_call, "sum_call"),
    FIELD(sum_call, outs), FIELD(sum_call, places), FIELD(sum_call, weights), FIELD(sum_call, shared), FIELD(sum_call, gate),
    FIELD(sum_call, out), FIELD(sum_call, rows), FIELD(sum_call, most), FIELD(sum_call, n), FIELD(sum_call, rows_per_task),
    FIELD(sum_call, factor), FIELD(sum_call, rest), FIELD(sum_call, are_weighted), FIELD(sum_call, shared_stride),
    FIELD(sum_call, rest_stride),

    WHOLE(struct clamp_call, "clamp_call"),
    FIELD(clamp_call, x), FIELD(clamp_call, out), FIELD(clamp_call, rows), FIELD(clamp_call, columns),
    FIELD(clamp_call, rows_per_task), FIELD(clamp_call, limit), FIELD(clamp_call, alpha),

    WHOLE(struct mixture_call, "mixture_call"),
    FIELD(mixture_call, up), FIELD(mixture_call, down), FIELD(mixture_call, ups), FIELD(mixture_call, downs), FIELD(mixture_call, x),
    FIELD(mixture_call, up_biases), FIELD(mixture_call, down_biases), FIELD(mixture_call, clamp), FIELD(mixture_call, activate),
    FIELD(mixture_call, chosen), FIELD(mixture_call, gathered), FIELD(mixture_call, inner), FIELD(mixture_call, quantized),
    FIELD(mixture_call, experts), FIELD(mixture_call, x_stride), FIELD(mixture_call, x_apart), FIELD(mixture_call, sum),
    FIELD(mixture_call, weighs_inputs), FIELD(mixture_call, passes_rest), FIELD(mixture_call, rest),
    FIELD(mixture_call, are_weighted), FIELD(mixture_call, are_apart),

    WHOLE(struct rotate_call, "rotate_call"),
    FIELD(rotate_call, x), FIELD(rotate_call, cos), FIELD(rotate_call, sin), FIELD(rotate_call, tokens),
    FIELD(rotate_call, heads), FIELD(rotate_call, half), FIELD(rotate_call, token_stride), FIELD(rotate_call, head_stride),
    FIELD(rotate_call, angle_stride), FIELD(rotate_call, tokens_per_task),
    FIELD(rotate_call, angle_dtype), FIELD(rotate_call, in_pairs),

    WHOLE(struct store_call, "store_call"),
    FIELD(store_call, key), FIELD(store_call, value), FIELD(store_call, cache), FIELD(store_call, slots),
    FIELD(store_call, tokens), FIELD(store_call, kv_heads), FIELD(store_call, num_blocks), FIELD(store_call, block_size),
    FIELD(store_call, key_size), FIELD(store_call, value_size), FIELD(store_call, key_stride),
    FIELD(store_call, value_stride), FIELD(store_call, block_stride), FIELD(store_call, key_offset),
    FIELD(store_call, value_offset), FIELD(store_call, scale_offset), FIELD(store_call, scales_apart),
    FIELD(store_call, tokens_per_task),
    FIELD(store_call, format), FIELD(store_call, dtype),

    WHOLE(struct attention_call, "attention_call"),
    FIELD(attention_call, query), FIELD(attention_call, out), FIELD(attention_call, cache),
    FIELD(attention_call, query_start), FIELD(attention_call, seq_lens), FIELD(attention_call, block_tables),
    FIELD(attention_call, sinks), FIELD(attention_call, selected), FIELD(attention_call, distance_bias), FIELD(attention_call, block_stride),
    FIELD(attention_call, key_offset),
    FIELD(attention_call, value_offset), FIELD(attention_call, scale_offset), FIELD(attention_call, scales_apart), FIELD(attention_call, key_stride), FIELD(attention_call, values_in_keys),
    FIELD(attention_call, rows),
    FIELD(attention_call, query_stride), FIELD(attention_call, out_stride), FIELD(attention_call, num_seqs), FIELD(attention_call, table_width), FIELD(attention_call, table_stride),
    FIELD(attention_call, num_blocks), FIELD(attention_call, heads), FIELD(attention_call, kv_heads),
    FIELD(attention_call, key_dim), FIELD(attention_call, value_dim), FIELD(attention_call, block_size),
    FIELD(attention_call, window), FIELD(attention_call, ahead), FIELD(attention_call, in_chunks), FIELD(attention_call, selected_words), FIELD(attention_call, num_distances),
    FIELD(attention_call, scale), FIELD(attention_call, softcap), FIELD(attention_call, format),

    WHOLE(struct selection_call, "selection_call"),
    FIELD(selection_call, keys), FIELD(selection_call, weights), FIELD(selection_call, selected),
    FIELD(selection_call, weights_stride), FIELD(selection_call, words), FIELD(selection_call, most),

    WHOLE(struct states, "states"),
    FIELD(states, memory), FIELD(states, query_start), FIELD(states, seq_lens), FIELD(states, block_tables),
    FIELD(states, kept_lens), FIELD(states, num_blocks), FIELD(states, block_stride), FIELD(states, offset),
    FIELD(states, block_size), FIELD(states, rows), FIELD(states, num_seqs), FIELD(states, table_width),
    FIELD(states, table_stride),

    WHOLE(struct convolution_call, "convolution_call"),
    FIELD(convolution_call, states), FIELD(convolution_call, x), FIELD(convolution_call, out),
    FIELD(convolution_call, weight), FIELD(convolution_call, bias), FIELD(convolution_call, columns),
    FIELD(convolution_call, taps), FIELD(convolution_call, x_stride), FIELD(convolution_call, out_stride),
    FIELD(convolution_call, columns_per_task), FIELD(convolution_call, state_stride), FIELD(convolution_call, has_silu),

    WHOLE(struct recurrence_call, "recurrence_call"),
    FIELD(recurrence_call, states), FIELD(recurrence_call, query), FIELD(recurrence_call, key),
    FIELD(recurrence_call, value), FIELD(recurrence_call, out), FIELD(recurrence_call, decay), FIELD(recurrence_call, beta),
    FIELD(recurrence_call, query_stride), FIELD(recurrence_call, key_stride), FIELD(recurrence_call, value_stride),
    FIELD(recurrence_call, out_stride), FIELD(recurrence_call, decay_stride), FIELD(recurrence_call, beta_stride),
    FIELD(recurrence_call, heads), FIELD(recurrence_call, groups), FIELD(recurrence_call, key_dim),
    FIELD(recurrence_call, value_dim), FIELD(recurrence_call, columns_per_task), FIELD(recurrence_call, scale),
    FIELD(recurrence_call, norm_eps), FIELD(recurrence_call, decay_per_key), FIELD(recurrence_call, has_norm),
    FIELD(recurrence_call, skip), FIELD(recurrence_call, rates), FIELD(recurrence_call, has_delta_rule),

    WHOLE(struct take_rows_call, "take_rows_call"),
    FIELD(take_rows_call, x), FIELD(take_rows_call, out), FIELD(take_rows_call, index), FIELD(take_rows_call, rows),
    FIELD(take_rows_call, row_bytes), FIELD(take_rows_call, x_stride),

    WHOLE(struct copy_call, "copy_call"),
    FIELD(copy_call, x), FIELD(copy_call, out), FIELD(copy_call, rows), FIELD(copy_call, pieces), FIELD(copy_call, piece_bytes),
    FIELD(copy_call, x_stride), FIELD(copy_call, x_apart), FIELD(copy_call, out_stride), FIELD(copy_call, out_apart),
    FIELD(copy_call, zero_bytes),

    WHOLE(struct heads_call, "heads_call"),
    FIELD(heads_call, linear), FIELD(heads_call, heads), FIELD(heads_call, tasks_of_head), FIELD(heads_call, x_apart),
    FIELD(heads_call, packed_apart), FIELD(heads_call, out_apart), FIELD(heads_call, function),

    WHOLE(struct barrier_call, "barrier_call"),
    FIELD(barrier_call, barrier), FIELD(barrier_call, ranks), FIELD(barrier_call, tag),

    WHOLE(union call, "call"),

    WHOLE(struct place, "place"),
    FIELD(place, buffer), FIELD(place, offset),

    WHOLE(struct operation, "operation"),
    FIELD(operation, kind), FIELD(operation, which_rows), FIELD(operation, group),
    FIELD(operation, dtype), FIELD(operation, product), FIELD(operation, second_stride), FIELD(operation, x),
    FIELD(operation, out), FIELD(operation, second), FIELD(operation, third), FIELD(operation, fourth), FIELD(operation, fifth),
    FIELD(operation, room), FIELD(operation, call),

    WHOLE(struct step_group, "step_group"),
    FIELD(step_group, slots), FIELD(step_group, block_tables), FIELD(step_group, table_width),
    FIELD(step_group, table_stride),

    WHOLE(struct step, "step"),
    FIELD(step, buffers), FIELD(step, sampled), FIELD(step, query_start), FIELD(step, sample_start), FIELD(step, seq_lens),
    FIELD(step, kept_lens), FIELD(step, groups), FIELD(step, rows), FIELD(step, num_sampled), FIELD(step, num_seqs), FIELD(step, adapter_slots),
    FIELD(step, sampled_slots), FIELD(step, adapter_weights), FIELD(step, t), FIELD(step, num_slots), FIELD(step, t_stride),
    FIELD(step, selection_words),

    VALUE("operation_kind", "LINEAR", OP_LINEAR), VALUE("operation_kind", "NORM", OP_NORM),
    VALUE("operation_kind", "ROTATE", OP_ROTATE), VALUE("operation_kind", "STORE_KV", OP_STORE_KV),
    VALUE("operation_kind", "ATTENTION", OP_ATTENTION), VALUE("operation_kind", "TAKE_ROWS", OP_TAKE_ROWS),
    VALUE("operation_kind", "QUANTIZE", OP_QUANTIZE), VALUE("operation_kind", "BARRIER", OP_BARRIER),
    VALUE("operation_kind", "CONVOLVE", OP_CONVOLVE), VALUE("operation_kind", "RECUR", OP_RECUR),
    VALUE("operation_kind", "GATE", OP_GATE), VALUE("operation_kind", "MULTIPLY", OP_MULTIPLY),
    VALUE("operation_kind", "ROUTE", OP_ROUTE), VALUE("operation_kind", "MIXTURE", OP_MIXTURE),

    VALUE("gate_function", "SOFTPLUS", GATE_SOFTPLUS), VALUE("gate_function", "SIGMOID", GATE_SIGMOID),
    VALUE("gate_function", "PLAIN", GATE_PLAIN),
    VALUE("gate_function", "NARROWED", GATE_NARROWED),

    VALUE("routing_scores", "SOFTMAX", SCORES_SOFTMAX), VALUE("routing_scores", "SIGMOID", SCORES_SIGMOID),
    VALUE("routing_scores", "SOFTMAX_OF_CHOSEN", SCORES_SOFTMAX_OF_CHOSEN),
    VALUE("routing_scores", "SOFTMAX_OF_NEAR", SCORES_SOFTMAX_OF_NEAR),
    VALUE("operation_kind", "ACTIVATE", OP_ACTIVATE), VALUE("operation_kind", "ADD", OP_ADD),
    VALUE("operation_kind", "COPY", OP_COPY), VALUE("operation_kind", "HEADS", OP_HEADS), VALUE("operation_kind", "SELECT", OP_SELECT),
    VALUE("operation_kind", "STREAMS", OP_STREAMS), VALUE("operation_kind", "RESIZE", OP_RESIZE),
    VALUE("operation_kind", "SPARSE_GATE", OP_SPARSE_GATE),

    VALUE("streams_kind", "MIXED", STREAMS_MIXED), VALUE("streams_kind", "CORRECTED", STREAMS_CORRECTED),
    VALUE("streams_kind", "AVERAGED", STREAMS_AVERAGED),

    VALUE("multiplier", "PLAIN", MULTIPLIER_PLAIN), VALUE("multiplier", "SIGMOID", MULTIPLIER_SIGMOID),
    VALUE("multiplier", "SOFTPLUS", MULTIPLIER_SOFTPLUS),

    VALUE("cache_format", "AS_IT_IS", CACHE_AS_IT_IS), VALUE("cache_format", "INT8", CACHE_INT8),
    VALUE("cache_format", "E4M3", CACHE_E4M3),

    VALUE("number", "NONE", NUMBER_NONE), VALUE("number", "FLOAT32", NUMBER_FLOAT32),
    VALUE("number", "BFLOAT16", NUMBER_BFLOAT16), VALUE("number", "FLOAT16", NUMBER_FLOAT16),
    VALUE("number", "INT8", NUMBER_INT8), VALUE("number", "UINT8", NUMBER_UINT8),
};

/* The entry at an index; NULL behind the last entry. */
const struct layout_entry *baton_layout(size_t index) {
    return index < sizeof layout / sizeof *layout ? &layout[index] : NULL;
}

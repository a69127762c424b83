/* A program: all operations of a step's layers, computed one after the other in one call. The team of threads stays the same from
 * the first operation to the last, and no Python runs in between. Everything that changes from step to step is in struct step,
 * and nothing is computed before all of it has been checked. */
#include "kernels.h"
#include "quantized.h"

#include <stdlib.h>
#include <string.h>

/* call_structs.py has the same numbers and structures, and compares them with layout.inc.h. */
enum operation_kind {
    OP_LINEAR,
    OP_NORM,
    OP_ROTATE,
    OP_STORE_KV,
    OP_ATTENTION,
    OP_TAKE_ROWS,
    OP_QUANTIZE,
    OP_BARRIER,
    OP_CONVOLVE,
    OP_RECUR,
    OP_GATE,
    OP_MULTIPLY,
    OP_ROUTE,
    OP_MIXTURE,
    OP_ACTIVATE,
    OP_ADD,
    OP_COPY,
    OP_HEADS,
    OP_SELECT,
    OP_STREAMS,
    OP_RESIZE,
    OP_SPARSE_GATE,
};
enum which_rows { ALL_ROWS, SAMPLED_ROWS };

/* Copies row index[i] of x to row i of out; sizes and strides in bytes. Row_bytes 0: the rows are a selection's, as wide as the step says. */
struct take_rows_call {
    const void *x;
    void *out;
    const int64_t *index;
    int64_t rows, row_bytes, x_stride;
};

/* Copies pieces of each row, such as some columns of each head; sizes and strides in bytes. */
struct copy_call {
    const void *x;
    void *out;
    int64_t rows, pieces, piece_bytes, x_stride, x_apart, out_stride, out_apart; /* apart: from piece to piece of a row */
    int64_t zero_bytes; /* so many behind each piece of out are set to zero */
};

/* A barrier of ranks: what each has written to shared buffers before, all of them read behind it. */
struct barrier_call {
    struct barrier *barrier;
    int64_t ranks, tag;
};

union call {
    struct linear_call linear;
    struct norm_call norm;
    struct rotate_call rotate;
    struct store_call store;
    struct attention_call attention;
    struct selection_call selection;
    struct take_rows_call take;
    struct quantize_call quantize;
    struct barrier_call barrier;
    struct convolution_call convolution;
    struct recurrence_call recurrence;
    struct gate_call gate;
    struct multiply_call multiply;
    struct route_call route;
    struct mixture_call mixture;
    struct activate_call activate;
    struct add_call add;
    struct copy_call copy;
    struct heads_call heads;
    struct streams_call streams;
    struct resize_call resize;
    struct sparse_gate_call sparse_gate;
};

/* A place in a buffer of rows: the buffer's number, and an offset in bytes; buffer -1: the operation has no such operand. */
struct place {
    int64_t buffer, offset;
};

/* Most operations have at most two operands beside x and out: a norm's residual and sum, a rotation's cosines and sines, the values
 * that are stored with the keys, or what x is multiplied with or added to. A product's second operand is x before it is quantized, from
 * which adapters compute. A recurrence has four: beside its queries the keys, values, decays and betas. The fourth of a norm is its gate.
 * An attention to selected keys has these as its second, and a selection the weights of its scores.
 * Streams have the factors as their second, and the result with which they are corrected as their third.
 * A route writes the chosen experts to its second; a mixture has these, their weights, the shared rows and their gates, and its room. One
 * of single products may have no weights. */
struct operation {
    int64_t kind, which_rows, group; /* group: of layers, which share block tables and slots */
    int64_t dtype;                   /* of x: an enum dtype */
    int64_t product, second_stride;  /* of a product that adapters may change, its number; -1: none does */
    struct place x, out, second, third, fourth, fifth;
    struct place room[5]; /* of a mixture: gathered, inner, quantized, outs, and rows that are clamped */
    union call call; /* without the fields that depend on the step */
};

struct step_group {
    const int64_t *slots;        /* [rows] */
    const int32_t *block_tables; /* [seqs, table_width]; table_stride: elements from row to row */
    int64_t table_width, table_stride;
};

struct step {
    char *const *buffers;
    const int64_t *sampled; /* [num_sampled]: the indices of the rows that sample */
    const int32_t *query_start, *sample_start, *seq_lens;
    const int32_t *kept_lens; /* NULL: seq_lens */
    const struct step_group *groups;
    int64_t rows, num_sampled, num_seqs;
    const int32_t *adapter_slots, *sampled_slots;         /* [rows] and [num_sampled]; NULL: no row has an adapter */
    const struct adapter_weights *const *adapter_weights; /* [products][num_slots] */
    float *t;                                             /* for the larger number of rows, [t_stride] each */
    int64_t num_slots, t_stride;
    int64_t selection_words; /* of a row's selection */
};

struct prepared {
    union call call;
    struct adapter_rows adapters;
    struct shrink_call shrink;
    struct attention_job job;
    struct selection_job selection;
    struct mixture_job mixture;
    const struct prepared *earlier; /* of an attention that owns its plan: the one before it that does */
    int owns_plan;
    size_t end; /* the number of works up to the operation's end */
};

static void *at(const struct step *step, struct place place) {
    return place.buffer < 0 ? NULL : step->buffers[place.buffer] + place.offset;
}

static void take_all_rows(const void *job, size_t task, void *scratch) {
    const struct take_rows_call *call = job;
    (void)task, (void)scratch;
    for (int64_t row = 0; row < call->rows; row++)
        memcpy((char *)call->out + row * call->row_bytes, (const char *)call->x + call->index[row] * call->x_stride,
               (size_t)call->row_bytes);
}

/* How many bytes a task copies at least, where there are so many. */
enum { COPIED_BYTES = 16 << 10 };

static int64_t rows_of_copy(const struct copy_call *call) {
    int64_t rows = COPIED_BYTES / (call->pieces * call->piece_bytes + 1);
    return rows < 1 ? 1 : rows;
}

static void copy_pieces(const void *job, size_t task, void *scratch) {
    const struct copy_call *call = job;
    const int64_t rows = rows_of_copy(call), first = (int64_t)task * rows, end = first + rows < call->rows ? first + rows : call->rows;
    (void)scratch;
    for (int64_t row = first; row < end; row++)
        for (int64_t piece = 0; piece < call->pieces; piece++) {
            char *out = (char *)call->out + row * call->out_stride + piece * call->out_apart;
            memcpy(out, (const char *)call->x + row * call->x_stride + piece * call->x_apart, (size_t)call->piece_bytes);
            memset(out + call->piece_bytes, 0, (size_t)call->zero_bytes);
        }
}

/* Once a rank is lost, the other operations compute numbers that nobody uses: baton_run_program says that they are void. */
static void wait_for_ranks(const void *job, size_t task, void *scratch) {
    const struct barrier_call *call = job;
    (void)task, (void)scratch;
    baton_barrier(call->barrier, (uint32_t)call->ranks, (uint32_t)call->tag);
}

/* Whether a plan for one call is the plan for another one of the same step. */
static int plans_alike(const struct attention_call *one, const struct attention_call *other) {
    return one->query_start == other->query_start && one->block_tables == other->block_tables && one->window == other->window && one->ahead == other->ahead && one->in_chunks == other->in_chunks &&
           one->heads == other->heads && one->kv_heads == other->kv_heads && one->block_size == other->block_size &&
           one->value_dim == other->value_dim;
}

/* plans: the last attention that owns its plan. Layers take their turns, so they can use one another's room for states, too. */
static int prepare_attention(struct prepared *to, const struct prepared **plans, int n_threads) {
    const struct attention_call *call = &to->call.attention;
    int status = check_attention(call);
    if (status != STATUS_OK) return status;
    for (const struct prepared *other = *plans; other != NULL; other = other->earlier)
        if (plans_alike(&other->call.attention, call)) {
            to->job = other->job;
            to->job.call = call;
            return STATUS_OK;
        }
    to->earlier = *plans;
    to->owns_plan = 1;
    *plans = to;
    return plan_attention(&to->job, call, n_threads);
}

/* Writes the work of a product's adapters, if rows of the step have any; returns whether there is one. */
static int prepare_adapters(struct prepared *to, struct work *work, const struct operation *op, const struct step *step, int64_t rows,
                            const struct isa *isa, enum dtype dtype) {
    if (step->adapter_slots == NULL || op->product < 0) return 0;
    to->adapters = (struct adapter_rows){
        .slots = op->which_rows == SAMPLED_ROWS ? step->sampled_slots : step->adapter_slots,
        .weights = step->adapter_weights + op->product * step->num_slots,
        .t = step->t,
        .num_slots = (size_t)step->num_slots,
        .t_stride = (size_t)step->t_stride,
    };
    to->shrink = (struct shrink_call){
        .x = at(step, op->second), .adapters = &to->adapters, .rows = (size_t)rows, .x_stride = (size_t)op->second_stride};
    *work = shrink_work(&to->shrink, isa, dtype);
    if (work->n_tasks == 0) return 0;
    to->call.linear.adapters = &to->adapters;
    return 1;
}

/* Fills in the rows and blocks of a step; returns an enum status. */
static int complete_states(struct states *states, const struct operation *op, const struct step *step) {
    const struct step_group *group = &step->groups[op->group];
    states->query_start = step->query_start;
    states->seq_lens = step->seq_lens;
    states->kept_lens = step->kept_lens;
    states->num_seqs = step->num_seqs;
    states->rows = step->rows;
    states->block_tables = group->block_tables;
    states->table_width = group->table_width;
    states->table_stride = group->table_stride;
    return check_states(states);
}

/* Fills in the rows and blocks of a step, but for the query and out. */
static void complete_attention(struct attention_call *call, const struct operation *op, const struct step *step, int64_t rows) {
    const struct step_group *group = &step->groups[op->group];
    call->query_start = op->which_rows == SAMPLED_ROWS ? step->sample_start : step->query_start;
    call->seq_lens = step->seq_lens;
    call->num_seqs = step->num_seqs;
    call->rows = rows;
    call->block_tables = group->block_tables;
    call->table_width = group->table_width;
    call->table_stride = group->table_stride;
}

/* The most works of an operation. */
static size_t most_works(const struct operation *op) { return op->kind == OP_MIXTURE ? MIXTURE_WORKS : 2; }

/* Completes an operation's call with the fields of the step, and appends its works. */
static int prepare(struct prepared *to, struct work *works, size_t *n_works, const struct operation *op, const struct step *step,
                   const struct prepared **plans, const struct isa *isa, int n_threads) {
    const enum dtype dtype = (enum dtype)op->dtype;
    int sampled = op->which_rows == SAMPLED_ROWS;
    int64_t rows = sampled ? step->num_sampled : step->rows;
    union call *call = &to->call;
    struct work *work = &works[*n_works];
    int status;
    *to = (struct prepared){.call = op->call};
    switch ((enum operation_kind)op->kind) {
    case OP_LINEAR:
        call->linear.x = at(step, op->x);
        call->linear.out = at(step, op->out);
        call->linear.m = (size_t)rows;
        if (prepare_adapters(to, work, op, step, rows, isa, dtype)) work = &works[++*n_works];
        *work = linear_work(&call->linear, isa, dtype, n_threads);
        break;
    case OP_NORM:
        call->norm.x = at(step, op->x);
        call->norm.out = at(step, op->out);
        call->norm.residual = at(step, op->second);
        call->norm.sum = at(step, op->third);
        call->norm.gate = at(step, op->fourth);
        call->norm.rows = (size_t)rows;
        *work = norm_work(&call->norm, isa, dtype);
        break;
    case OP_ROTATE:
        call->rotate.x = at(step, op->x);
        call->rotate.cos = at(step, op->second);
        call->rotate.sin = at(step, op->third);
        call->rotate.tokens = (size_t)rows;
        *work = rotate_work(&call->rotate, isa, dtype);
        break;
    case OP_STORE_KV:
        call->store.key = at(step, op->x);
        call->store.value = at(step, op->second);
        call->store.slots = step->groups[op->group].slots;
        call->store.tokens = rows;
        status = check_store(&call->store);
        if (status != STATUS_OK) return status;
        *work = store_work(&call->store);
        break;
    case OP_ATTENTION:
        call->attention.query = at(step, op->x);
        call->attention.out = at(step, op->out);
        call->attention.selected = at(step, op->second);
        call->attention.selected_words = step->selection_words;
        complete_attention(&call->attention, op, step, rows);
        status = prepare_attention(to, plans, n_threads);
        if (status != STATUS_OK) return status;
        /* Rows of no request, which a program of several ranks does not have: the others may have begun already. */
        clear_unused_rows(&call->attention, dtype);
        *n_works += attention_works(&to->job, isa, dtype, work);
        return STATUS_OK;
    case OP_SELECT:
        call->selection.keys.query = at(step, op->x);
        call->selection.weights = at(step, op->second);
        call->selection.selected = at(step, op->out);
        call->selection.words = step->selection_words;
        complete_attention(&call->selection.keys, op, step, rows);
        status = check_selection(&call->selection);
        if (status == STATUS_OK) status = plan_selection(&to->selection, &call->selection);
        if (status != STATUS_OK) return status;
        *work = selection_work(&to->selection, isa, dtype);
        break;
    case OP_TAKE_ROWS:
        call->take.x = at(step, op->x);
        call->take.out = at(step, op->out);
        call->take.index = step->sampled;
        call->take.rows = rows;
        if (call->take.row_bytes == 0) call->take.row_bytes = call->take.x_stride = step->selection_words * (int64_t)sizeof(uint64_t);
        *work = (struct work){.function = take_all_rows, .job = &call->take, .n_tasks = rows > 0};
        break;
    case OP_QUANTIZE:
        call->quantize.x = at(step, op->x);
        call->quantize.out = at(step, op->out);
        call->quantize.rows = (size_t)rows;
        *work = quantize_work(&call->quantize, isa, dtype);
        break;
    case OP_CONVOLVE:
        call->convolution.x = at(step, op->x);
        call->convolution.out = at(step, op->out);
        status = complete_states(&call->convolution.states, op, step);
        if (status != STATUS_OK) return status;
        *work = convolution_work(&call->convolution, isa, dtype);
        break;
    case OP_RECUR:
        call->recurrence.query = at(step, op->x);
        call->recurrence.key = at(step, op->second);
        call->recurrence.value = at(step, op->third);
        call->recurrence.decay = at(step, op->fourth);
        call->recurrence.beta = at(step, op->fifth);
        call->recurrence.out = at(step, op->out);
        status = complete_states(&call->recurrence.states, op, step);
        if (status != STATUS_OK) return status;
        *work = recurrence_work(&call->recurrence, isa, dtype, n_threads);
        break;
    case OP_GATE:
        call->gate.x = at(step, op->x);
        call->gate.out = at(step, op->out);
        call->gate.rows = (size_t)rows;
        *work = gate_work(&call->gate, isa, dtype);
        break;
    case OP_MULTIPLY:
        call->multiply.x = at(step, op->x);
        if (op->second.buffer >= 0) call->multiply.by = at(step, op->second); /* otherwise the call has one row for all */
        call->multiply.out = at(step, op->out);
        call->multiply.rows = (size_t)rows;
        *work = multiply_work(&call->multiply, isa, dtype);
        break;
    case OP_ROUTE:
        call->route.logits = at(step, op->x);
        call->route.weights = at(step, op->out);
        call->route.chosen = at(step, op->second);
        call->route.rows = (size_t)rows;
        *work = route_work(&call->route, isa, dtype);
        break;
    case OP_MIXTURE:
        call->mixture.x = at(step, op->x);
        call->mixture.chosen = at(step, op->second);
        call->mixture.gathered = at(step, op->room[0]);
        call->mixture.inner = at(step, op->room[1]);
        call->mixture.rest = at(step, op->room[1]); /* of experts with one product, which have no inner rows */
        call->mixture.quantized = at(step, op->room[2]);
        call->mixture.sum.outs = at(step, op->room[3]);
        call->mixture.clamp.x = at(step, op->room[4]);
        call->mixture.sum.weights = at(step, op->third);
        if (op->fourth.buffer >= 0) call->mixture.sum.shared = at(step, op->fourth); /* otherwise the call has one row, or none */
        call->mixture.sum.gate = at(step, op->fifth);
        call->mixture.sum.out = at(step, op->out);
        call->mixture.sum.rows = (size_t)rows;
        status = plan_mixture(&to->mixture, &call->mixture, isa, dtype, n_threads);
        if (status != STATUS_OK) return status;
        *n_works += mixture_works(&to->mixture, work);
        return STATUS_OK;
    case OP_ACTIVATE:
        call->activate.x = at(step, op->x);
        call->activate.out = at(step, op->out);
        call->activate.rows = (size_t)rows;
        *work = activate_work(&call->activate, isa, dtype);
        break;
    case OP_ADD:
        call->add.one = at(step, op->x);
        call->add.other = at(step, op->second);
        call->add.out = at(step, op->out);
        call->add.rows = (size_t)rows;
        *work = add_work(&call->add, isa, dtype);
        break;
    case OP_COPY:
        call->copy.x = at(step, op->x);
        call->copy.out = at(step, op->out);
        call->copy.rows = rows;
        *work = (struct work){.function = copy_pieces, .job = &call->copy};
        work->n_tasks = (size_t)((rows + rows_of_copy(&call->copy) - 1) / rows_of_copy(&call->copy));
        break;
    case OP_HEADS:
        call->heads.linear.x = at(step, op->x);
        call->heads.linear.out = at(step, op->out);
        call->heads.linear.m = (size_t)rows;
        *work = heads_work(&call->heads, isa, dtype);
        break;
    case OP_STREAMS:
        call->streams.x = at(step, op->x);
        call->streams.factors = at(step, op->second);
        call->streams.result = at(step, op->third);
        call->streams.out = at(step, op->out);
        call->streams.rows = (size_t)rows;
        *work = streams_work(&call->streams, isa, dtype);
        break;
    case OP_RESIZE:
        call->resize.x = at(step, op->x);
        call->resize.like = at(step, op->second);
        call->resize.out = at(step, op->out);
        call->resize.rows = (size_t)rows;
        *work = resize_work(&call->resize, isa, dtype);
        break;
    case OP_SPARSE_GATE:
        call->sparse_gate.x = at(step, op->x);
        call->sparse_gate.out = at(step, op->out);
        call->sparse_gate.rows = (size_t)rows;
        *work = sparse_gate_work(&call->sparse_gate, isa, dtype);
        break;
    case OP_BARRIER: *work = (struct work){.function = wait_for_ranks, .job = &call->barrier, .n_tasks = 1}; break;
    }
    ++*n_works;
    return STATUS_OK;
}

/* Computes a step; returns an enum status. times: NULL, or [count + 1] nanoseconds of the monotonic clock: at the start, and when
 * each operation was done. */
int baton_run_program(int isa, const struct operation *operations, size_t count, const struct step *step, int n_threads, int64_t *times) {
    size_t n_works = 0, room = 0;
    for (size_t i = 0; i < count; i++) room += most_works(&operations[i]);
    struct prepared *prepared = calloc(count, sizeof *prepared);
    struct work *works = aligned_alloc(_Alignof(struct work), room * sizeof *works);
    int64_t *work_times = times == NULL ? NULL : malloc((room + 1) * sizeof *work_times);
    const struct prepared *plans = NULL;
    int ready = prepared != NULL && works != NULL && (times == NULL) == (work_times == NULL);
    int status = ready ? STATUS_OK : STATUS_NO_MEMORY;
    for (int64_t i = 0; i < step->num_sampled && status == STATUS_OK; i++)
        if (step->sampled[i] < 0 || step->sampled[i] >= step->rows) status = STATUS_BAD_INDEX;
    for (size_t i = 0; i < count && status == STATUS_OK; i++) {
        status = prepare(&prepared[i], works, &n_works, &operations[i], step, &plans, isas[isa], n_threads);
        prepared[i].end = n_works;
    }
    if (status == STATUS_OK) status = run_works(works, n_works, n_threads, work_times);
    for (size_t i = 0; i < count && status == STATUS_OK; i++)
        if (operations[i].kind == OP_BARRIER && baton_barrier_aborted(operations[i].call.barrier.barrier)) status = STATUS_RANK_LOST;
    if (times != NULL && status == STATUS_OK) {
        times[0] = work_times[0];
        for (size_t i = 0; i < count; i++) times[i + 1] = work_times[prepared[i].end];
    }
    for (size_t i = 0; prepared != NULL && i < count; i++) {
        if (prepared[i].owns_plan) free_attention_plan(&prepared[i].job);
        free_mixture_plan(&prepared[i].mixture);
        free(prepared[i].selection.tasks);
    }
    free(work_times);
    free(works);
    free(prepared);
    return status;
}

#include "layout.inc.h"

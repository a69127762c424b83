/* Mixtures of experts: the rows that chose an expert are gathered, so that its weights are read once for all of them.
 *
 * The works of a mixture follow each other: one task finds out which rows each expert computes, and cuts its products into tasks; then
 * rows are gathered, go through the experts, and are summed. How many tasks the products have is known only behind the first work, so
 * their works have a task for each thread, which takes products from a counter until none is left. Experts may have one product alone. */
#include "kernels.h"
#include "quantized.h"

#include <stdlib.h>

/* An expert that rows have chosen. */
struct expert {
    int32_t number, first, end;       /* its rows among those that are gathered */
    size_t up_end, down_end;          /* how many tasks its products and those of the experts before it have */
    struct linear_call up, down;
    task_function up_function, down_function;
};

struct mixture_plan {
    struct expert *experts; /* [active] */
    int32_t *counts;        /* [experts]: how many rows have chosen each; later where its next row goes to */
    int32_t *places;        /* [rows, most], as in sum_call */
    int32_t *choices;       /* [places]: which number of `chosen` each gathered row is for */
    size_t active, num_places;
    atomic_size_t next_up, next_down; /* the first task that no thread has taken */
};

/* A thread's share of a product is cut, since threads may be unequally fast. */
enum { TASKS_OF_THREAD = 8 };

static size_t item_size(enum dtype dtype) { return dtype == DTYPE_FLOAT32 ? 4 : 2; }

/* The bytes of a gathered row: of x, or of quantized x. */
static size_t row_bytes(const struct linear_call *call, enum dtype dtype) {
    return call->format == NULL ? call->k * item_size(dtype) : quantized_row_bytes(call->format, call->k);
}

int plan_mixture(struct mixture_job *job, struct mixture_call *call, const struct isa *isa, enum dtype dtype, int n_threads) {
    const size_t most_places = call->sum.rows * call->sum.most;
    const size_t active = most_places < call->experts ? most_places : call->experts;
    *job = (struct mixture_job){.call = call, .isa = isa, .dtype = dtype, .n_threads = n_threads < 1 ? 1 : n_threads};
    if (most_places > INT32_MAX) return STATUS_NO_MEMORY;
    struct mixture_plan *plan = job->plan = calloc(1, sizeof *plan + active * sizeof *plan->experts + (call->experts + 2 * most_places) * sizeof(int32_t));
    if (plan == NULL) return STATUS_NO_MEMORY;
    plan->experts = (struct expert *)(plan + 1);
    plan->counts = (int32_t *)(plan->experts + active);
    plan->places = plan->counts + call->experts;
    plan->choices = plan->places + most_places;
    const int is_one = call->downs == NULL;
    call->sum.places = plan->places;
    call->sum.rest = !call->passes_rest ? NULL : is_one ? call->rest : call->x;
    call->sum.are_weighted = call->weighs_inputs || call->are_weighted;
    call->clamp.out = is_one ? (void *)(uintptr_t)call->sum.outs : call->inner;
    return STATUS_OK;
}

void free_mixture_plan(struct mixture_job *job) { free(job->plan); }

static int has_one_product(const struct mixture_call *call) { return call->downs == NULL; }

static int is_clamped(const struct mixture_call *call) { return call->clamp.columns > 0; }

static const void *bias_of(const void *biases, int32_t expert, size_t n, enum dtype dtype) {
    return biases == NULL ? NULL : (const char *)biases + (size_t)expert * n * item_size(dtype);
}

/* Cuts the product of an expert's rows into tasks; returns how many there are. */
static size_t cut(struct linear_call *call, task_function *function, const struct mixture_job *job, const struct expert *expert) {
    const size_t wanted = TASKS_OF_THREAD * (size_t)job->n_threads;
    call->m = (size_t)(expert->end - expert->first);
    const struct work work = linear_work(call, job->isa, job->dtype, (int)((wanted + job->plan->active - 1) / job->plan->active));
    *function = work.function;
    return work.n_tasks;
}

static void divide_rows(const void *given, size_t task, void *scratch) {
    const struct mixture_job *job = given;
    const struct mixture_call *call = job->call;
    struct mixture_plan *plan = job->plan;
    const size_t chosen = call->sum.rows * call->sum.most;
    int32_t first = 0;
    (void)task, (void)scratch;
    for (size_t i = 0; i < chosen; i++)
        if (call->chosen[i] >= 0 && (size_t)call->chosen[i] < call->experts) plan->counts[call->chosen[i]]++;
    for (size_t number = 0; number < call->experts; number++) {
        if (plan->counts[number] == 0) continue;
        struct expert *expert = &plan->experts[plan->active++];
        *expert = (struct expert){.number = (int32_t)number, .first = first, .end = first + plan->counts[number]};
        plan->counts[number] = first;
        first = expert->end;
    }
    plan->num_places = (size_t)first;
    for (size_t i = 0; i < chosen; i++) {
        const int is_expert = call->chosen[i] >= 0 && (size_t)call->chosen[i] < call->experts;
        plan->places[i] = is_expert ? plan->counts[call->chosen[i]]++ : -1;
        if (is_expert) plan->choices[plan->places[i]] = (int32_t)i;
    }
    size_t up_end = 0, down_end = 0;
    for (size_t i = 0; i < plan->active; i++) {
        struct expert *expert = &plan->experts[i];
        const size_t at = (size_t)expert->first;
        expert->up = call->up;
        expert->up.packed = call->ups[expert->number];
        expert->up.x = (char *)call->gathered + at * row_bytes(&call->up, job->dtype);
        const void *outs = is_clamped(call) ? call->clamp.x : has_one_product(call) ? call->sum.outs : call->inner;
        expert->up.out = (char *)(uintptr_t)outs + at * call->up.n * item_size(job->dtype);
        expert->up.bias = bias_of(call->up_biases, expert->number, call->up.n, job->dtype);
        expert->up_end = up_end += cut(&expert->up, &expert->up_function, job, expert);
        if (has_one_product(call)) continue;
        expert->down = call->down;
        expert->down.packed = call->downs[expert->number];
        expert->down.x = (const char *)(call->down.format == NULL ? call->inner : call->quantized) + at * row_bytes(&call->down, job->dtype);
        expert->down.bias = bias_of(call->down_biases, expert->number, call->down.n, job->dtype);
        expert->down.out = (char *)(uintptr_t)call->sum.outs + at * call->down.n * item_size(job->dtype);
        expert->down_end = down_end += cut(&expert->down, &expert->down_function, job, expert);
    }
}

/* How many rows a task gathers. */
enum { GATHERED_ROWS = 16 };

/* Quantizes one row, or copies it. */
static void take_row(const struct linear_call *to, const struct mixture_job *job, const void *x, void *out) {
    if (to->format == NULL) {
        memcpy(out, x, row_bytes(to, job->dtype));
        return;
    }
    const struct quantize_call call = {.x = x, .out = out, .format = to->format, .rows = 1, .k = to->k, .x_stride = to->k, .rows_per_task = 1};
    quantized_kernels(job->isa)->quantize[job->dtype](&call, 0, NULL);
}

/* Multiplies one row with its weight, and quantizes it; `scratch` has room for a row that is quantized. */
static void take_weighted_row(const struct linear_call *to, const struct mixture_job *job, const void *x, float weight, void *out, void *scratch) {
    float by[1];
    store_number(job->dtype, by, 0, weight);
    const struct multiply_call call = {.x = x, .by = by, .out = to->format == NULL ? out : scratch, .rows = 1, .columns = to->k, .width = to->k,
                                       .rows_per_task = 1, .multiplier = MULTIPLIER_PLAIN};
    job->isa->multiply[job->dtype](&call, 0, NULL);
    if (to->format != NULL) take_row(to, job, scratch, out);
}

static void gather_rows(const void *given, size_t task, void *scratch) {
    const struct mixture_job *job = given;
    const struct mixture_call *call = job->call;
    const size_t begin = task * GATHERED_ROWS, bytes = row_bytes(&call->up, job->dtype), stride = call->x_stride * item_size(job->dtype);
    const size_t apart = call->x_apart * item_size(job->dtype);
    for (size_t i = begin; i < begin + GATHERED_ROWS && i < job->plan->num_places; i++) {
        const size_t choice = (size_t)job->plan->choices[i];
        const char *x = (const char *)call->x + choice / call->sum.most * stride + choice % call->sum.most * apart;
        char *gathered = (char *)call->gathered + i * bytes;
        if (call->weighs_inputs)
            take_weighted_row(&call->up, job, x, call->sum.weights[choice], gathered, scratch);
        else
            take_row(&call->up, job, x, gathered);
    }
}

static void gate_inner(const void *given, size_t task, void *scratch) {
    const struct mixture_job *job = given;
    struct clamp_call call = job->call->clamp;
    call.rows = job->plan->num_places;
    call.rows_per_task = GATHERED_ROWS;
    if (task * GATHERED_ROWS < call.rows) job->isa->clamped_gate[job->dtype](&call, task, scratch);
}

static void activate_inner(const void *given, size_t task, void *scratch) {
    const struct mixture_job *job = given;
    struct activate_call call = job->call->activate;
    call.x = call.out = has_one_product(job->call) ? (void *)(uintptr_t)job->call->sum.outs : job->call->inner;
    call.rows = job->plan->num_places;
    call.rows_per_task = GATHERED_ROWS;
    if (task * GATHERED_ROWS < call.rows) job->isa->activate[job->dtype](&call, task, scratch);
}

static void quantize_inner(const void *given, size_t task, void *scratch) {
    const struct mixture_job *job = given;
    const struct mixture_call *call = job->call;
    const size_t begin = task * GATHERED_ROWS, bytes = row_bytes(&call->down, job->dtype), stride = call->down.k * item_size(job->dtype);
    (void)scratch;
    for (size_t i = begin; i < begin + GATHERED_ROWS && i < job->plan->num_places; i++)
        take_row(&call->down, job, (const char *)call->inner + i * stride, (char *)call->quantized + i * bytes);
}

/* Puts what the experts give to where their rows have chosen them. */
static void place_rows(const void *given, size_t task, void *scratch) {
    const struct mixture_job *job = given;
    const struct sum_call *sum = &job->call->sum;
    const size_t begin = task * GATHERED_ROWS, bytes = sum->n * item_size(job->dtype);
    (void)scratch;
    for (size_t i = begin; i < begin + GATHERED_ROWS && i < sum->rows * sum->most; i++) {
        char *out = (char *)sum->out + i * bytes;
        const int32_t place = job->plan->places[i];
        if (place < 0)
            memset(out, 0, bytes);
        else
            memcpy(out, (const char *)sum->outs + (size_t)place * bytes, bytes);
    }
}

/* Computes tasks of all experts' products until none is left. */
static void multiply(const struct mixture_plan *plan, atomic_size_t *next, int is_up, void *scratch) {
    size_t expert = 0, before = 0;
    for (;;) {
        const size_t task = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
        for (; expert < plan->active; expert++) {
            const struct expert *own = &plan->experts[expert];
            if (task < (is_up ? own->up_end : own->down_end)) break;
            before = is_up ? own->up_end : own->down_end;
        }
        if (expert == plan->active) return;
        const struct expert *own = &plan->experts[expert];
        if (is_up)
            own->up_function(&own->up, task - before, scratch);
        else
            own->down_function(&own->down, task - before, scratch);
    }
}

static void multiply_up(const void *job, size_t task, void *scratch) {
    struct mixture_plan *plan = ((const struct mixture_job *)job)->plan;
    (void)task;
    multiply(plan, &plan->next_up, 1, scratch);
}

static void multiply_down(const void *job, size_t task, void *scratch) {
    struct mixture_plan *plan = ((const struct mixture_job *)job)->plan;
    (void)task;
    multiply(plan, &plan->next_down, 0, scratch);
}

size_t mixture_works(struct mixture_job *job, struct work works[MIXTURE_WORKS]) {
    struct mixture_call *call = job->call;
    const size_t rows = call->sum.rows, most_places = rows * call->sum.most, threads = (size_t)job->n_threads;
    const size_t gathers = (most_places + GATHERED_ROWS - 1) / GATHERED_ROWS;
    size_t count = 0;
    if (most_places == 0) return 0;
    works[count++] = (struct work){.function = divide_rows, .job = job, .n_tasks = 1};
    works[count++] = (struct work){.function = gather_rows, .job = job, .n_tasks = gathers,
                                   .scratch_bytes = call->weighs_inputs ? call->up.k * item_size(job->dtype) : 0};
    works[count++] = (struct work){.function = multiply_up, .job = job, .n_tasks = threads,
                                   .scratch_bytes = linear_scratch_bytes(&call->up, rows, job->isa, job->dtype)};
    if (is_clamped(call)) works[count++] = (struct work){.function = gate_inner, .job = job, .n_tasks = gathers};
    if (call->activate.columns > 0) works[count++] = (struct work){.function = activate_inner, .job = job, .n_tasks = gathers};
    if (has_one_product(call)) {
        const struct work places = {.function = place_rows, .job = job, .n_tasks = gathers};
        works[count++] = call->are_apart ? places : sum_work(&call->sum, job->isa, job->dtype);
        return count;
    }
    if (call->down.format != NULL) works[count++] = (struct work){.function = quantize_inner, .job = job, .n_tasks = gathers};
    works[count++] = (struct work){.function = multiply_down, .job = job, .n_tasks = threads,
                                   .scratch_bytes = linear_scratch_bytes(&call->down, rows, job->isa, job->dtype)};
    works[count++] = sum_work(&call->sum, job->isa, job->dtype);
    return count;
}

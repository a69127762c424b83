/* Threads: tasks are claimed from a counter by a team of torch's own OpenMP runtime, handed in as its GOMP_parallel entry.
 * A second runtime beside it would have a second set of spinning workers on the same cores. Without one, the caller works alone. */
#include "kernels.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

typedef void (*parallel_function)(void (*body)(void *), void *data, unsigned n_threads, unsigned flags);

static _Atomic(parallel_function) parallel;

void baton_set_parallel(void *gomp_parallel) { atomic_store(&parallel, (parallel_function)gomp_parallel); }

struct team {
    task_function function;
    const void *job;
    size_t n_tasks, scratch_bytes;
    atomic_size_t next;
    atomic_int status;
};

/* One scratch buffer a thread, kept between calls: large ones would be mapped and faulted in anew at every call. */
struct scratch {
    size_t bytes;
    void *memory;
};

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void free_scratch(void *p) {
    free(((struct scratch *)p)->memory);
    free(p);
}

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free_scratch); }

static void *thread_scratch(size_t bytes) {
    pthread_once(&scratch_once, make_scratch_key);
    struct scratch *own = pthread_getspecific(scratch_key);
    if (own == NULL) {
        own = calloc(1, sizeof *own);
        if (own == NULL || pthread_setspecific(scratch_key, own) != 0) {
            free(own);
            return NULL;
        }
    }
    if (own->bytes < bytes) {
        free(own->memory);
        own->bytes = 0;
        if (posix_memalign(&own->memory, 64, bytes) != 0) {
            own->memory = NULL;
            return NULL;
        }
        own->bytes = bytes;
    }
    return own->memory;
}

#if defined(__SSE__)
typedef unsigned fp_state;
static fp_state flush_subnormals(void) {
    fp_state old = _mm_getcsr();
    _mm_setcsr(old | 0x8040u);
    return old;
}
static void restore_fp(fp_state old) { _mm_setcsr(old); }
#elif defined(__aarch64__)
typedef uint64_t fp_state;
static fp_state flush_subnormals(void) {
    fp_state old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"(old | (UINT64_C(1) << 24)));
    return old;
}
static void restore_fp(fp_state old) { __asm__ volatile("msr fpcr, %0" : : "r"(old)); }
#else
typedef int fp_state;
static fp_state flush_subnormals(void) { return 0; }
static void restore_fp(fp_state old) { (void)old; }
#endif

static void work(void *data) {
    struct team *team = data;
    void *scratch = thread_scratch(team->scratch_bytes + 64);
    if (scratch == NULL) {
        atomic_store(&team->status, STATUS_NO_MEMORY);
        return;
    }
    fp_state old = flush_subnormals();
    for (;;) {
        size_t task = atomic_fetch_add(&team->next, 1);
        if (task >= team->n_tasks) break;
        team->function(team->job, task, scratch);
    }
    restore_fp(old);
}

int run_tasks(task_function function, const void *job, size_t n_tasks, int n_threads, size_t scratch_bytes) {
    struct team team = {.function = function, .job = job, .n_tasks = n_tasks, .scratch_bytes = scratch_bytes};
    atomic_init(&team.next, 0);
    atomic_init(&team.status, STATUS_OK);
    parallel_function fork_join = atomic_load(&parallel);
    size_t threads = n_threads < 1 ? 1 : (size_t)n_threads;
    if (threads > n_tasks) threads = n_tasks;
    if (threads > 1 && fork_join != NULL)
        fork_join(work, &team, (unsigned)threads, 0);
    else if (n_tasks > 0)
        work(&team);
    return atomic_load(&team.status);
}

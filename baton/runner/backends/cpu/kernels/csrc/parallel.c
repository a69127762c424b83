/* Threads: a team of torch's own OpenMP runtime computes the works of a call together, and takes each work's tasks from a
 * counter. Python passes in the address of the runtime's GOMP_parallel; without it the calling thread computes alone. A second
 * runtime would have a second set of worker threads, and both would spin on the same cores. */
#include "kernels.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

typedef void (*parallel_function)(void (*body)(void *), void *data, unsigned n_threads, unsigned flags);

static _Atomic(parallel_function) parallel;

void baton_set_parallel(void *gomp_parallel) { atomic_store(&parallel, (parallel_function)gomp_parallel); }

struct team {
    struct work *works;
    size_t n_works, scratch_bytes;
    int64_t *times;
    pthread_t caller; /* the thread that writes the times */
    atomic_int status;
};

/* Each thread keeps one scratch buffer between calls, since a large buffer would be mapped and faulted in again in each call. */
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

/* Tasks are short. A thread that waits for longer than this many spins waits for a thread that has lost its core, and yields. */
enum { SPINS = 4000 };

static void wait_for(struct work *work) {
    for (int spins = 0; atomic_load_explicit(&work->done, memory_order_acquire) < work->n_tasks;)
        if (spins++ < SPINS)
            pause_briefly();
        else
            sched_yield();
}

static void take_tasks(struct work *work, void *scratch) {
    size_t taken = 0;
    for (;; taken++) {
        size_t task = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);
        if (task >= work->n_tasks) break;
        work->function(work->job, task, scratch);
    }
    if (taken > 0) atomic_fetch_add_explicit(&work->done, taken, memory_order_release);
}

int64_t monotonic_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* The body of each thread of the team. Threads wait for tasks and not for each other, so a thread that starts late delays none. */
static void go_through(void *data) {
    struct team *team = data;
    void *scratch = thread_scratch(team->scratch_bytes + 64);
    if (scratch == NULL) {
        atomic_store(&team->status, STATUS_NO_MEMORY);
        return;
    }
    fp_state old = flush_subnormals();
    int64_t *times = team->times != NULL && pthread_equal(team->caller, pthread_self()) ? team->times : NULL;
    if (times != NULL) times[0] = monotonic_ns();
    for (size_t i = 0; i < team->n_works; i++) {
        take_tasks(&team->works[i], scratch);
        if (i + 1 < team->n_works || times != NULL) wait_for(&team->works[i]);
        if (times != NULL) times[i + 1] = monotonic_ns();
    }
    restore_fp(old);
}

int run_works(struct work *works, size_t n_works, int n_threads, int64_t *times) {
    struct team team = {.works = works, .n_works = n_works, .times = times, .caller = pthread_self()};
    atomic_init(&team.status, STATUS_OK);
    size_t threads = n_threads < 1 ? 1 : (size_t)n_threads, most_tasks = 1;
    for (size_t i = 0; i < n_works; i++) {
        if (works[i].n_tasks > most_tasks) most_tasks = works[i].n_tasks;
        if (works[i].scratch_bytes > team.scratch_bytes) team.scratch_bytes = works[i].scratch_bytes;
    }
    parallel_function fork_join = atomic_load(&parallel);
    if (threads > most_tasks) threads = most_tasks;
    if (threads > 1 && fork_join != NULL)
        fork_join(go_through, &team, (unsigned)threads, 0);
    else
        go_through(&team);
    return atomic_load(&team.status);
}

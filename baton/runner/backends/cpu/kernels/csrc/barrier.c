/* A barrier of ranks: processes, or threads of one process, that compute a model together. Each rank writes its own columns of a
 * result into memory that all of them share, and reads those of the others behind the barrier. */
#include "kernels.h"

#include <sched.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* In shared memory, all zeros before the first rank arrives. */
struct barrier {
    _Alignas(64) _Atomic uint32_t arrived;    /* ranks that have arrived and wait, or are about to */
    _Atomic uint32_t tag;                     /* what the first of them waits for; 0: none has arrived */
    _Alignas(64) _Atomic uint32_t generation; /* how often all ranks have arrived */
    _Alignas(64) _Atomic uint32_t asleep;     /* ranks that wait for `generation` in the kernel */
    _Alignas(64) _Atomic uint32_t lost;       /* a rank is lost: nobody waits here any more */
};

void baton_barrier_abort(struct barrier *barrier);

size_t baton_barrier_bytes(void) { return sizeof(struct barrier); }

/* A rank that waits for longer than an operation takes sleeps, and looks now and then whether a rank is lost. */
enum { SPINS = 4000, YIELD_NS = 1000000, SLEEP_NS = 200000000 };

/* Whether the ranks of this process sleep without spinning first: a rank that spins keeps another one from its processor. */
static _Atomic int sleeps_at_once;

void baton_barrier_sleep_at_once(void) { atomic_store(&sleeps_at_once, 1); }

#if defined(__linux__)
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    struct timespec limit = {.tv_nsec = SLEEP_NS};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}
static void wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }
#else
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    struct timespec time = {.tv_nsec = 100000};
    if (atomic_load(word) == value) nanosleep(&time, NULL);
}
static void wake_all(_Atomic uint32_t *word) { (void)word; }
#endif

/* Arrives without waiting for the others. tag: what the ranks wait for, not 0. Ranks that are not at the same place of their
 * work would read one another's numbers as something else, so different tags abort the barrier, as a lost rank does.
 * generation: for baton_barrier_wait. Returns an enum status; STATUS_OK: all have arrived. */
int baton_barrier_arrive(struct barrier *barrier, uint32_t ranks, uint32_t tag, uint32_t *generation) {
    *generation = atomic_load(&barrier->generation);
    if (atomic_load(&barrier->lost)) return STATUS_RANK_LOST;
    uint32_t first = 0;
    if (!atomic_compare_exchange_strong(&barrier->tag, &first, tag) && first != tag) {
        baton_barrier_abort(barrier);
        return STATUS_RANKS_DIFFER;
    }
    if (atomic_fetch_add(&barrier->arrived, 1) + 1 < ranks) return STATUS_WAITING;
    atomic_store(&barrier->arrived, 0);
    atomic_store(&barrier->tag, 0);
    atomic_fetch_add(&barrier->generation, 1);
    if (atomic_load(&barrier->asleep) > 0) wake_all(&barrier->generation);
    return STATUS_OK;
}

/* Waits for the others, a fifth of a second at most. Returns an enum status; STATUS_WAITING: not all have arrived. */
int baton_barrier_wait(struct barrier *barrier, uint32_t generation) {
    int64_t started = 0;
    const int spins_first = !atomic_load_explicit(&sleeps_at_once, memory_order_relaxed);
    for (int spins = 0; atomic_load(&barrier->generation) == generation; spins++) {
        if (atomic_load(&barrier->lost)) return STATUS_RANK_LOST;
        if (spins_first && spins < SPINS) {
            pause_briefly();
            continue;
        }
        if (started == 0) started = monotonic_ns();
        int64_t waited = monotonic_ns() - started;
        if (spins_first && waited < YIELD_NS) {
            sched_yield();
            continue;
        }
        if (waited >= SLEEP_NS) return STATUS_WAITING;
        atomic_fetch_add(&barrier->asleep, 1);
        sleep_while(&barrier->generation, generation);
        atomic_fetch_sub(&barrier->asleep, 1);
    }
    return STATUS_OK;
}

/* Waits until all ranks have arrived; what each wrote before is visible to all. Returns an enum status. */
int baton_barrier(struct barrier *barrier, uint32_t ranks, uint32_t tag) {
    uint32_t generation;
    int status = baton_barrier_arrive(barrier, ranks, tag, &generation);
    while (status == STATUS_WAITING) status = baton_barrier_wait(barrier, generation);
    return status;
}

/* Ends all waiting here for good: every rank that waits returns at once, and so does each that arrives later. */
void baton_barrier_abort(struct barrier *barrier) {
    atomic_store(&barrier->lost, 1);
    wake_all(&barrier->generation);
}

int baton_barrier_aborted(struct barrier *barrier) { return atomic_load(&barrier->lost) != 0; }

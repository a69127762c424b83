/* Meetings of ranks: processes, or threads of one process, that compute a model together. Each rank writes its own columns of a
 * result into memory that all of them share, and reads those of the others after they have met. */
#include "kernels.h"

#include <sched.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* In shared memory, all zeros before the first meeting. */
struct meeting {
    _Alignas(64) _Atomic uint32_t arrived;    /* ranks that have come to the meeting that is being held */
    _Atomic uint32_t tag;                     /* what the first of them has come for; 0: nobody has come */
    _Alignas(64) _Atomic uint32_t generation; /* number of meetings that are over */
    _Alignas(64) _Atomic uint32_t asleep;     /* ranks that wait for `generation` in the kernel */
    _Alignas(64) _Atomic uint32_t lost;       /* a rank is lost: no meeting is held any more */
};

void baton_lose_rank(struct meeting *meeting);

size_t baton_meeting_bytes(void) { return sizeof(struct meeting); }

/* A rank that waits for longer than an operation takes sleeps, and looks now and then whether a rank is lost. */
enum { SPINS = 4000, YIELD_NS = 1000000, SLEEP_NS = 200000000 };

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

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

/* Comes to a meeting without waiting for the others. tag: what it is held for, not 0. Ranks that are not at the same place of their
 * work would read one another's numbers as something else, so different tags end all meetings, as a lost rank does.
 * generation: for baton_wait. Returns an enum status; STATUS_OK: all have come. */
int baton_arrive(struct meeting *meeting, uint32_t ranks, uint32_t tag, uint32_t *generation) {
    *generation = atomic_load(&meeting->generation);
    if (atomic_load(&meeting->lost)) return STATUS_RANK_LOST;
    uint32_t first = 0;
    if (!atomic_compare_exchange_strong(&meeting->tag, &first, tag) && first != tag) {
        baton_lose_rank(meeting);
        return STATUS_RANKS_DIFFER;
    }
    if (atomic_fetch_add(&meeting->arrived, 1) + 1 < ranks) return STATUS_WAITING;
    atomic_store(&meeting->arrived, 0);
    atomic_store(&meeting->tag, 0);
    atomic_fetch_add(&meeting->generation, 1);
    if (atomic_load(&meeting->asleep) > 0) wake_all(&meeting->generation);
    return STATUS_OK;
}

/* Waits for the others, a fifth of a second at most. Returns an enum status; STATUS_WAITING: they have not come yet. */
int baton_wait(struct meeting *meeting, uint32_t generation) {
    int64_t started = 0;
    for (int spins = 0; atomic_load(&meeting->generation) == generation; spins++) {
        if (atomic_load(&meeting->lost)) return STATUS_RANK_LOST;
        if (spins < SPINS) {
            pause_briefly();
            continue;
        }
        if (started == 0) started = now();
        int64_t waited = now() - started;
        if (waited < YIELD_NS) {
            sched_yield();
            continue;
        }
        if (waited >= SLEEP_NS) return STATUS_WAITING;
        atomic_fetch_add(&meeting->asleep, 1);
        sleep_while(&meeting->generation, generation);
        atomic_fetch_sub(&meeting->asleep, 1);
    }
    return STATUS_OK;
}

/* Waits until all ranks have come, and what each wrote before is visible to all. Returns an enum status. */
int baton_meet(struct meeting *meeting, uint32_t ranks, uint32_t tag) {
    uint32_t generation;
    int status = baton_arrive(meeting, ranks, tag, &generation);
    while (status == STATUS_WAITING) status = baton_wait(meeting, generation);
    return status;
}

/* Ends all meetings, those to come included: every rank that waits returns at once. */
void baton_lose_rank(struct meeting *meeting) {
    atomic_store(&meeting->lost, 1);
    wake_all(&meeting->generation);
}

int baton_rank_lost(struct meeting *meeting) { return atomic_load(&meeting->lost) != 0; }

/* Runs planned graphs on one pool of threads that the whole process shares.
 *
 * Steps that run side by side are a wave; most waves are of one step.  A wave's tasks, counted through, are grouped
 * into chunks, and every thread of the run owns a range of them.  It takes chunks from the front of its range, so that
 * wave after wave the same core finds the same data in its cache; who has none left steals from the back of
 * the others' ranges.  Either takes half of what is left there: consecutive tasks can share what they prepare, and the
 * last pieces are small.  Whoever finishes the last chunk of a wave runs the one-task waves that follow and
 * publishes the next parallel one.  So nobody waits for a thread that is idle or descheduled, only for what is in
 * somebody's hands.
 *
 * Who runs a task changes nothing about its result: what a task computes follows from shapes alone.
 *
 * No memory is allocated here, apart from what starting a thread takes. */
#define _GNU_SOURCE /* sched_getcpu, pthread_setaffinity_np */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <time.h>
#include "abi/ggrad.h"
#include "runtime/clock.h"
#include "runtime/fpmode.h"
#include "runtime/park.h"

enum {
    MAX_THREADS = GG_MAX_THREADS,
    CHUNKS_PER_THREAD = 32, /* enough to balance, few enough to count in 8 bits */
    SPIN_NS = 50000,        /* how long a thread looks for work before it sleeps: about what waking it costs */
    WORTH_WAKING = 4,       /* tasks that repay waking sleepers; they slept for want of work, so it is rarely asked */
    AIM_AT_MOST = 16,       /* threads in a run that still get placed one by one */
    LOOK_AHEAD = 256,       /* steps inspected to see whether a run is worth waking sleepers */
    NO_CPU = -1,
    ASK_NS = 80000000,  /* between two questions whether to stop: in Python they cost up to some milliseconds */
    PIECE_NS = 8000000, /* a piece of a slow wave, after which the question may come */
    SLOW_NS = 2000000,  /* a wave that takes as long is worth being cut into pieces, so that a run can stop there */
    ASK_EVERY = 16,     /* fast waves, before the clock is looked at: it is no cheaper than the smallest */
};

#ifdef GG_STRESS
void gg_stress_delay(void); /* the stress test's: waits a random while, to widen every race */
#else
static inline void gg_stress_delay(void) {}
#endif

/* What was taken of a range of chunks, in one word: number of the wave << 24 | from the front << 8 | from the back.
 * A word with the number of an earlier wave says that nothing was taken yet: so a publisher need not touch the ranges,
 * which lie in other cores' caches.  A claim that comes too late finds its wave's number with everything taken, or a later
 * one, and fails: so a late thread never touches a graph that may be gone. */
typedef struct range {
    _Alignas(64) _Atomic uint64_t word;
} range;

enum { ONE_FROM_BACK = 1, ONE_FROM_FRONT = 1 << 8 }; /* and so many more, times as much */
enum { NUMBER_SHIFT = 24, CHUNKS_SHIFT = 8 };        /* in an offer; the number in a range's word too */

/* A wave to take chunks of, in one word: its number << 24 | chunks << 8 | ranges - 1. */
typedef struct offer {
    uint64_t number;
    int chunks, ranges;
} offer;

/* Chunks taken at once. */
typedef struct claimed {
    int first, end;
} claimed;

#define OVER 0x80000000u /* in `published`: the run is over */

/* Whether a run can still be stopped: it cannot once it has begun to change what must change as a whole. */
enum gate { OPEN, STOPPED, STEADY };

/* Whoever knows whether the run shall stop, asked by the thread that called. */
typedef struct question {
    int (*stops)(void); /* NULL: nobody */
    int64_t asked;      /* when */
    unsigned waves;     /* fast ones since the clock was last looked at */
} question;

static struct pool {
    range ranges[MAX_THREADS];

    /* The run, set by its caller before the first publication. */
    gg_step *steps;
    int64_t n;
    char *scratch;
    int64_t scratch_stride;
    gg_fault *fault;
    int64_t steady;
    _Atomic int threads;
    _Atomic int gate;  /* enum gate */
    question question; /* the caller's thread's */

    uint64_t number; /* of publications, ever */

    _Alignas(64) _Atomic int64_t left; /* chunks of the wave not finished, plus its publisher's token */
    /* The number's low 31 bits, and OVER between runs: the word that sleepers wait on.  What follows lies in the same
     * line of the cache, so that who sees the word has the rest. */
    _Alignas(64) _Atomic uint32_t published;
    _Atomic uint64_t offered; /* see offer */
    /* The wave in progress, set by its publisher; it cannot change while somebody holds a chunk. */
    int64_t wave;                              /* its first step */
    int64_t began;                             /* of a slow or new wave; else 0 */
    int64_t chunk_tasks, longer;               /* the first `longer` chunks have one task more than chunk_tasks */
    _Atomic uint64_t asleep[MAX_THREADS / 64]; /* a bit for each thread */

    _Alignas(64) atomic_flag busy; /* held by the caller whose run it is */
    bool initialised, aims;
    int workers;
    pthread_t worker[MAX_THREADS]; /* worker i is thread i of a run; thread 0 is the caller */
    int kept_off[MAX_THREADS];     /* the cpu this worker must not use, or NO_CPU */
} pool = { .published = OVER, .busy = ATOMIC_FLAG_INIT };

/* ---- What Python asks while it plans ---- */

int64_t gg_call_work(const gg_call *call) { return call->kernel->work ? call->kernel->work(call) : 0; }

int64_t gg_call_scratch(const gg_call *call) { return call->kernel->scratch ? call->kernel->scratch(call) : 0; }

int64_t gg_compile(const gg_call *calls, int64_t n, gg_step *steps) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++)
        for (int stage = 0; stage < calls[i].kernel->stages; stage++) {
            const int64_t tasks = calls[i].kernel->tasks(&calls[i], stage);
            if (tasks == 0) continue;
            if (steps != NULL)
                steps[count] = (gg_step){ .call = &calls[i], .stage = stage, .together = 1, .tasks = tasks };
            count++;
        }
    return count;
}

/* ---- Waves ---- */

static inline int chunks_for(int64_t tasks, int threads) {
    return tasks < threads * CHUNKS_PER_THREAD ? (int)tasks : threads * CHUNKS_PER_THREAD;
}

static inline int64_t wave_tasks(const gg_step *first) {
    int64_t tasks = first->tasks;
    for (int k = 1; k < first->together; k++) tasks += first[k].tasks;
    return tasks;
}

/* So is one that never ran, for all that is known. */
static inline bool is_slow(const gg_step *first) { return first->ns == 0 || first->ns > SLOW_NS; }

int64_t gg_pieces(const gg_step *steps, int64_t n, int threads) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    int64_t count = 0;
    /* where one step ends and the next begins, a chunk may be in two; of a slow wave each task may be alone */
    for (int64_t i = 0; i < n; i += steps[i].together) {
        const int64_t tasks = wave_tasks(&steps[i]);
        count += (is_slow(&steps[i]) ? tasks : chunks_for(tasks, threads)) + steps[i].together;
    }
    return count;
}

static inline void run_step(const gg_step *s, int64_t begin, int64_t end, char *scratch) {
    s->call->kernel->run(s->call, s->stage, begin, end, scratch);
}

/* Tasks of a wave, counted through its steps. */
static inline void run_tasks(const gg_step *s, int64_t begin, int64_t end, char *scratch) {
    if (s->together == 1) {
        run_step(s, begin, end, scratch);
        return;
    }
    for (const gg_step *const last = s + s->together; s < last && end > 0; s++) {
        const int64_t to = end < s->tasks ? end : s->tasks;
        if (begin < to) run_step(s, begin, to, scratch);
        begin = begin > s->tasks ? begin - s->tasks : 0;
        end -= s->tasks;
    }
}

static inline bool failed(const gg_fault *fault) { return __atomic_load_n(&fault->code, __ATOMIC_RELAXED) != GG_OK; }

/* ---- Stopping ---- */

static inline bool stopped(const _Atomic int *gate) {
    return atomic_load_explicit(gate, memory_order_relaxed) == STOPPED;
}

static void ask(question *q, _Atomic int *gate) {
    const int64_t now = nanoseconds();
    q->waves = 0;
    if (now - q->asked < ASK_NS) return;
    int open = OPEN;
    if (q->stops()) atomic_compare_exchange_strong(gate, &open, STOPPED);
    q->asked = nanoseconds();
}

static inline void ask_sometimes(question *q, _Atomic int *gate) {
    if (q != NULL && q->stops != NULL && ++q->waves >= ASK_EVERY) ask(q, gate);
}

/* Whether the steps from i on may run: not if the run has failed or was stopped.  From `steady` on it cannot be stopped. */
static inline bool goes_on(int64_t i, int64_t steady, const gg_fault *fault, _Atomic int *gate) {
    if (failed(fault)) return false;
    int open = OPEN;
    if (i >= steady && atomic_load_explicit(gate, memory_order_relaxed) != STEADY)
        return atomic_compare_exchange_strong(gate, &open, STEADY);
    return !stopped(gate);
}

static inline void note_time(gg_step *first, int64_t began) {
    const int64_t ns = nanoseconds() - began + 1;
    if (first->ns == 0 || ns < first->ns) first->ns = ns;
}

/* Tasks begin to end - 1 of a slow wave, the first alone, then as many at once as should take PIECE_NS.  What is left when
 * the run is stopped is skipped.  q: the question to ask, NULL for threads that do not. */
static void run_in_pieces(const gg_step *s, int64_t begin, int64_t end, char *scratch, question *q, _Atomic int *gate) {
    int64_t before = nanoseconds(), most = 1;
    while (begin < end && !stopped(gate)) {
        const int64_t to = end - begin < most ? end : begin + most;
        run_tasks(s, begin, to, scratch);
        const int64_t now = nanoseconds(), each = (now - before) / (to - begin) + 1;
        if (q != NULL && q->stops != NULL) ask(q, gate);
        most = PIECE_NS / each + 1;
        begin = to;
        before = now;
    }
}

static int32_t outcome(gg_fault *fault, const _Atomic int *gate) {
    if (stopped(gate)) fault->code = GG_STOPPED;
    return fault->code;
}

/* A run by one thread. */
static void run_alone(gg_step *steps, int64_t n, char *scratch, gg_fault *fault, question q, int64_t steady) {
    _Atomic int gate = OPEN;
    for (int64_t i = 0; i < n && goes_on(i, steady, fault, &gate); i += steps[i].together) {
        gg_step *const s = &steps[i];
        const int64_t tasks = wave_tasks(s);
        if (tasks == 0) continue;
        if (tasks > 1 && is_slow(s)) {
            const int64_t began = nanoseconds();
            run_in_pieces(s, 0, tasks, scratch, &q, &gate);
            note_time(s, began);
        } else {
            run_tasks(s, 0, tasks, scratch);
        }
        ask_sometimes(&q, &gate);
    }
    outcome(fault, &gate);
}

static inline question *question_of(int me) { return me == 0 ? &pool.question : NULL; }

static inline char *scratch_of(int me) { return pool.scratch + me * pool.scratch_stride; }

/* Run one-task waves from the one at step i on; the next to publish, or pool.n if the run is over. */
static int64_t run_in_line(int me, int64_t i) {
    for (; i < pool.n; i += pool.steps[i].together) {
        const gg_step *s = &pool.steps[i];
        if (!goes_on(i, pool.steady, pool.fault, &pool.gate)) return pool.n;
        if (s->tasks > 1 || s->together > 1) return i;
        if (s->tasks == 1) run_step(s, 0, 1, scratch_of(me));
        ask_sometimes(question_of(me), &pool.gate);
    }
    return i;
}

static inline int first_chunk(const offer *o, int r) { return o->chunks * r / o->ranges; }

static inline offer current_offer(void) {
    const uint64_t word = atomic_load_explicit(&pool.offered, memory_order_acquire);
    return (offer){ word >> NUMBER_SHIFT, word >> CHUNKS_SHIFT & 0xFFFF, (int)(word & 0xFF) + 1 };
}

static inline int64_t first_task(int chunk) {
    return chunk * pool.chunk_tasks + (chunk < pool.longer ? chunk : pool.longer);
}

static void run_chunks(int me, claimed c) {
    const gg_step *s = &pool.steps[pool.wave];
    const int64_t begin = first_task(c.first), end = first_task(c.end);
    if (pool.began != 0) run_in_pieces(s, begin, end, scratch_of(me), question_of(me), &pool.gate);
    else run_tasks(s, begin, end, scratch_of(me));
}

/* ---- Sleeping and waking ---- */

static inline uint32_t wake_bit(int thread) { return 1u << (thread < 31 ? thread : 31); }

/* Wake up to `most` sleepers among threads first to last - 1. */
static void wake(int first, int last, int most) {
    uint32_t bits = 0;
    for (int k = first / 64; k * 64 < last; k++) {
        uint64_t sleepers = atomic_load(&pool.asleep[k]);
        if (last - k * 64 < 64) sleepers &= (UINT64_C(1) << (last - k * 64)) - 1;
        for (; sleepers != 0; sleepers &= sleepers - 1) bits |= wake_bit(k * 64 + __builtin_ctzll(sleepers));
    }
    if (bits != 0) gg_unpark(&pool.published, most, bits);
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Return when something else than `seen` is published (or for no reason; the caller's thread, when it is time to ask). */
static void await_publication(int me, uint32_t seen) {
    /* A thread that the run has no use for would only heat the core. */
    const bool spins = me < atomic_load_explicit(&pool.threads, memory_order_relaxed);
    for (int64_t until = 0; spins;) {
        for (int k = 0; k < 32; k++) {
            if (atomic_load_explicit(&pool.published, memory_order_acquire) != seen) return;
            relax();
        }
        const int64_t now = nanoseconds(); /* by the clock: a pause takes 5 to 50 ns */
        if (until == 0) until = now + SPIN_NS;
        if (now > until) break;
    }
    /* The publisher stores the word, then looks who sleeps; this thread says that it sleeps, then the
     * kernel looks at the word.  One of the two sees the other. */
    _Atomic uint64_t *bits = &pool.asleep[me / 64];
    const uint64_t bit = UINT64_C(1) << (me % 64);
    atomic_fetch_or(bits, bit);
    gg_stress_delay();
    struct timespec until;
    const question *q = question_of(me);
    const bool asks = q != NULL && q->stops != NULL;
    if (asks) {
        const int64_t at = q->asked + ASK_NS;
        until = (struct timespec){ .tv_sec = at / 1000000000, .tv_nsec = at % 1000000000 };
    }
    gg_park(&pool.published, seen, wake_bit(me), asks ? &until : NULL);
    atomic_fetch_and(bits, ~bit);
}

/* ---- Publishing, claiming, working ---- */

/* Offer the wave at step i to all threads of the run, or say that it is over when i == pool.n.
 *
 * `left` holds one more than the chunks, the publisher's token, which it gives back in work().  Without
 * it others could finish this wave and publish the next before `published` is stored here, which
 * would then overwrite theirs, and everybody would sleep for ever. */
static void publish(int64_t i, int worth_waking) {
    const uint64_t number = ++pool.number;
    const uint32_t word = (uint32_t)number & ~OVER;
    if (i == pool.n) {
        gg_stress_delay();
        atomic_store(&pool.published, word | OVER); /* the caller may return now: nothing of the run is touched after */
        wake(0, 1, 1);
        return;
    }
    const int threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
    const int64_t tasks = wave_tasks(&pool.steps[i]);
    const int chunks = chunks_for(tasks, threads);
    const int n_ranges = chunks < threads ? chunks : threads;
    pool.wave = i;
    pool.began = is_slow(&pool.steps[i]) ? nanoseconds() : 0;
    pool.chunk_tasks = tasks / chunks;
    pool.longer = tasks % chunks;
    atomic_store_explicit(&pool.left, chunks + 1, memory_order_relaxed);
    gg_stress_delay();
    const uint64_t offered = number << NUMBER_SHIFT | (uint64_t)chunks << CHUNKS_SHIFT | (uint64_t)(n_ranges - 1);
    atomic_store_explicit(&pool.offered, offered, memory_order_release);
    gg_stress_delay();
    atomic_store(&pool.published, word);
    gg_stress_delay();
    if (tasks >= worth_waking) wake(0, threads, chunks - 1);
}

/* Take half of what is left of range r, rounded up: from the front of my own, from the back of another's. */
static inline claimed claim(const offer *o, int me, int r) {
    _Atomic uint64_t *word = &pool.ranges[r].word;
    const int begin = first_chunk(o, r), size = first_chunk(o, r + 1) - begin;
    const uint64_t untouched = o->number << NUMBER_SHIFT;
    uint64_t w = atomic_load_explicit(word, memory_order_acquire);
    for (;;) {
        if (w >> NUMBER_SHIFT > o->number) return (claimed){ 0, 0 };
        const uint64_t now = w < untouched ? untouched : w;
        const int front = now >> 8 & 255, back = now & 255, some = (size - front - back + 1) / 2;
        if (some <= 0) return (claimed){ 0, 0 };
        gg_stress_delay();
        const uint64_t taken = now + (uint64_t)some * (r == me ? ONE_FROM_FRONT : ONE_FROM_BACK);
        if (atomic_compare_exchange_weak_explicit(word, &w, taken, memory_order_acquire, memory_order_acquire)) {
            const int first = begin + (r == me ? front : size - back - some);
            return (claimed){ first, first + some };
        }
    }
}

/* Run what can be claimed of range r; how many chunks that were. */
static inline int64_t run_range(const offer *o, int me, int r) {
    int64_t finished = 0;
    for (claimed c; (c = claim(o, me, r)).end > 0; finished += c.end - c.first) run_chunks(me, c);
    return finished;
}

/* Give back what was finished; whether that was the last of the wave. */
static inline bool completes(int64_t finished) {
    gg_stress_delay();
    return finished > 0 && atomic_fetch_sub_explicit(&pool.left, finished, memory_order_acq_rel) == finished;
}

/* Work on the wave that is offered until there is nothing to claim; whether its last chunk was finished here.
 * finished: 1 for the publisher of the wave, which is its token; else 0.  What is finished is given back before another's
 * range is looked at, since that may take longer than the last pieces. */
static bool work_on_wave(int me, int64_t finished) {
    const offer o = current_offer();
    /* A run with fewer threads than I have seen may have begun: it has no scratch for me. */
    if (me >= atomic_load_explicit(&pool.threads, memory_order_relaxed)) return false;
    if (me < o.ranges) finished += run_range(&o, me, me);
    if (completes(finished)) return true;
    for (int k = 1, r = me % o.ranges; k <= o.ranges; k++) {
        r = r + 1 < o.ranges ? r + 1 : 0;
        if (r != me && completes(run_range(&o, me, r))) return true;
    }
    return false;
}

/* Work for the run until there is nothing to claim; token: see work_on_wave. */
static void work(int me, int64_t token) {
    while (work_on_wave(me, token)) {
        if (pool.began != 0) note_time(&pool.steps[pool.wave], pool.began);
        ask_sometimes(question_of(me), &pool.gate);
        const int64_t next = run_in_line(me, pool.wave + pool.steps[pool.wave].together);
        const bool over = next == pool.n;
        publish(next, WORTH_WAKING);
        if (over) return;
        token = 1;
    }
}

/* ---- Threads ---- */

/* Signals are the host's business, but a fault of this very thread is not theirs. */
static void block_signals(sigset_t *signals) {
    sigfillset(signals);
    sigdelset(signals, SIGSEGV);
    sigdelset(signals, SIGBUS);
    sigdelset(signals, SIGFPE);
    sigdelset(signals, SIGILL);
}

static _Thread_local bool is_worker;
static sigset_t host_signals; /* what whoever starts the workers has blocked */

/* Python and the programs that it starts get the host's signals: a blocked one would stay so for ever in a child. */
void gg_signals_of_host(int wanted) {
    if (!is_worker) return;
    sigset_t signals = host_signals;
    if (!wanted) block_signals(&signals);
    pthread_sigmask(SIG_SETMASK, &signals, NULL);
}

static void *worker_main(void *id) {
    is_worker = true;
    const int me = (int)(intptr_t)id;
    gg_fpmode_default();
    for (;;) {
        const uint32_t seen = atomic_load(&pool.published);
        work(me, 0);
        if (atomic_load(&pool.published) == seen) await_publication(me, seen);
    }
    return NULL;
}

/* Start workers until there are threads - 1, or as many as the system allows. */
static void start_workers(int threads) {
    if (pool.workers + 1 >= threads) return;
    sigset_t signals;
    block_signals(&signals);
    pthread_sigmask(SIG_SETMASK, &signals, &host_signals);
    while (pool.workers + 1 < threads) {
        const int id = pool.workers + 1;
        if (pthread_create(&pool.worker[id], NULL, worker_main, (void *)(intptr_t)id) != 0) break;
        pthread_detach(pool.worker[id]);
        pool.kept_off[id] = NO_CPU;
        pool.workers = id;
    }
    pthread_sigmask(SIG_SETMASK, &host_signals, NULL);
}

/* Keep the workers of this run off the caller's cpu.  Linux wakes a thread on the cpu of its waker even
 * while others are idle, and moves it only milliseconds later.  GGRAD_AIM=0 switches this off. */
static void aim(int threads) {
#if defined(__linux__)
    if (!pool.aims || threads > AIM_AT_MOST) return;
    const int here = sched_getcpu();
    bool aimed = true;
    for (int i = 1; i < threads; i++) aimed = aimed && pool.kept_off[i] == here;
    if (aimed) return;
    cpu_set_t cpus;
    if (sched_getaffinity(getpid(), sizeof cpus, &cpus) != 0 || here < 0) return;
    const int off = threads <= CPU_COUNT(&cpus) ? here : NO_CPU; /* more threads than cpus: all are needed */
    if (off != NO_CPU) CPU_CLR(off, &cpus);
    for (int i = 1; i < threads; i++)
        if (pool.kept_off[i] != off) {
            pthread_setaffinity_np(pool.worker[i], sizeof cpus, &cpus);
            pool.kept_off[i] = off;
        }
#else
    (void)threads;
#endif
}

/* The child has none of the threads, and another thread's run may have been under way. */
static void forget_workers(void) {
    for (int i = 0; i < MAX_THREADS; i++) atomic_store_explicit(&pool.ranges[i].word, 0, memory_order_relaxed);
    for (int k = 0; k < MAX_THREADS / 64; k++) atomic_store_explicit(&pool.asleep[k], 0, memory_order_relaxed);
    atomic_store(&pool.offered, 0); /* of no chunks: the words above would say that none was taken */
    atomic_store(&pool.published, OVER);
    pool.workers = 0;
    gg_park_after_fork();
    atomic_flag_clear(&pool.busy);
}

static void initialise(void) {
    if (pool.initialised) return;
    const char *aims = getenv("GGRAD_AIM");
    pool.aims = aims == NULL || strcmp(aims, "0") != 0;
    pthread_atfork(NULL, NULL, forget_workers);
    pool.initialised = true;
}

/* ---- A run ---- */

/* Whether the steps have enough tasks to wake sleepers for. */
static bool is_long(const gg_step *steps, int64_t n) {
    int64_t tasks = 0;
    for (int64_t i = 0; i < n && i < LOOK_AHEAD && tasks < WORTH_WAKING; i += steps[i].together) {
        const int64_t more = wave_tasks(&steps[i]);
        if (more > 1) tasks += more;
    }
    return tasks >= WORTH_WAKING;
}

/* The caller holds the pool. */
static void run_together(gg_step *steps, int64_t n, int threads, char *scratch, int64_t scratch_stride, gg_fault *fault,
                         question q, int64_t steady) {
    initialise();
    pool.steps = steps;
    pool.n = n;
    pool.scratch = scratch;
    pool.scratch_stride = scratch_stride;
    pool.fault = fault;
    pool.question = q;
    pool.steady = steady;
    atomic_store_explicit(&pool.gate, OPEN, memory_order_relaxed);
    const int64_t first = run_in_line(0, 0);
    if (first == n) return;

    start_workers(threads);
    if (threads > pool.workers + 1) threads = pool.workers + 1;
    const bool wakes = is_long(steps + first, n - first);
    if (wakes) aim(threads);
    atomic_store_explicit(&pool.threads, threads, memory_order_relaxed);
    publish(first, wakes ? 0 : INT32_MAX);
    work(0, 1);
    for (;;) {
        const uint32_t seen = atomic_load(&pool.published);
        if (seen & OVER) return;
        work(0, 0);
        if (atomic_load(&pool.published) == seen) await_publication(0, seen);
        if (q.stops != NULL) ask(&pool.question, &pool.gate);
    }
}

int gg_run(gg_step *steps, int64_t n, int threads, char *scratch, int64_t scratch_stride, gg_fault *fault,
           int (*stops)(void), int64_t steady) {
    const gg_fpmode callers = gg_fpmode_get();
    gg_fpmode_default();
    const question q = { stops, stops != NULL ? nanoseconds() : 0, 0 };
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > 1 && !atomic_flag_test_and_set(&pool.busy)) {
        run_together(steps, n, threads, scratch, scratch_stride, fault, q, steady);
        outcome(fault, &pool.gate);
        atomic_flag_clear(&pool.busy);
    } else {
        run_alone(steps, n, scratch, fault, q, steady);
    }
    gg_fpmode_set(callers);
    return fault->code;
}

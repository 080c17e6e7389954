/* Runs random programs on csrc/runtime/runtime.c and checks what the runtime promises:
 *
 *   every task of a step runs exactly once, and after all steps of the waves before;
 *   two threads never share a scratch, and no scratch beyond the run's threads is used;
 *   after a fault no later wave runs;
 *   nothing of a run is touched once it has returned (its steps and scratch are freed: a sanitizer would see).
 *
 *   stress_runtime <most threads> <runs> <callers> <forked children>
 *
 * Built with -DGG_STRESS, the runtime calls gg_stress_delay at each step of publishing and claiming. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "abi/ggrad.h"

enum { MOST_STEPS = 40, MOST_TASKS = 3000, MOST_CALLERS = 16, SCRATCH = 64 };

static _Atomic long errors, tasks_run;

static void check(int holds, const char *what) {
    if (holds) return;
    if (atomic_fetch_add(&errors, 1) < 10) fprintf(stderr, "broken: %s\n", what);
}

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

void gg_stress_delay(void) {
    static _Thread_local uint32_t state;
    if (state == 0) state = (uint32_t)(uintptr_t)&state | 1;
    const uint32_t r = next_random(&state) % 1000;
    if (r < 2) usleep(20);
    else if (r < 20) sched_yield();
    else if (r < 200)
        for (volatile uint32_t i = 0; i < r;) i = i + 1;
}

/* A program of one call with many stages, whose kernel keeps books. */
typedef struct program {
    gg_call call;
    gg_fault fault;
    int n, faulty;        /* stages; the one that reports a fault, or -1 */
    int wave[MOST_STEPS]; /* of each stage: the first stage that runs beside it */
    int64_t tasks[MOST_STEPS];
    _Atomic int64_t done[MOST_STEPS];
    _Atomic char ran[MOST_STEPS][MOST_TASKS];
} program;

static void run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    program *p = c->work;
    _Atomic int *users = scratch;
    check(atomic_fetch_add(users, 1) == 0, "a scratch has one user");
    check(0 <= begin && begin < end && end <= p->tasks[stage], "tasks are in range");
    const int first = p->wave[stage];
    for (int i = first > 0 ? p->wave[first - 1] : 0; i < first; i++)
        check(atomic_load(&p->done[i]) == p->tasks[i], "the wave before is complete");
    if (p->faulty >= 0) check(first <= p->faulty, "no wave runs after a fault");
    for (int64_t i = begin; i < end; i++) check(atomic_fetch_add(&p->ran[stage][i], 1) == 0, "a task runs once");
    if (stage == p->faulty) __atomic_store_n(&p->fault.code, GG_INDEX, __ATOMIC_RELAXED);
    atomic_fetch_add(&tasks_run, end - begin);
    atomic_fetch_sub(users, 1);
    atomic_fetch_add(&p->done[stage], end - begin);
}

static const gg_kernel books = { .name = "books", .run = run };

static void run_random_program(program *p, int most_threads, uint32_t *random) {
    memset(p, 0, sizeof *p);
    p->call = (gg_call){ .kernel = &books, .work = p, .fault = &p->fault };
    p->n = 1 + (int)(next_random(random) % MOST_STEPS);
    p->faulty = next_random(random) % 8 == 0 ? (int)next_random(random) % p->n : -1;
    gg_step *steps = malloc((size_t)p->n * sizeof *steps);
    for (int i = 0; i < p->n; i++) {
        const uint32_t kind = next_random(random) % 32;
        p->tasks[i] = kind < 10 ? 1 : kind < 31 ? 2 + next_random(random) % 20 : 1 + next_random(random) % MOST_TASKS;
        steps[i] = (gg_step){ .call = &p->call, .stage = i, .together = 1, .tasks = p->tasks[i] };
        p->wave[i] = i > 0 && next_random(random) % 3 == 0 ? p->wave[i - 1] : i;
        if (p->wave[i] != i) steps[p->wave[i]].together++;
    }
    const int threads = 1 + (int)next_random(random) % most_threads;
    char *scratch = calloc((size_t)threads, SCRATCH);
    gg_run(steps, p->n, threads, scratch, SCRATCH, &p->fault, NULL, p->n);
    free(scratch);
    free(steps);
    int end = p->n;
    if (p->faulty >= 0)
        for (end = p->faulty + 1; end < p->n && p->wave[end] <= p->faulty;) end++;
    for (int i = 0; i < end; i++) check(atomic_load(&p->done[i]) == p->tasks[i], "every task ran");
    check(p->fault.code == (p->faulty >= 0 ? GG_INDEX : GG_OK), "the fault is reported");
}

typedef struct caller {
    int threads, runs;
    uint32_t seed;
} caller;

static void *call_many(void *arg) {
    caller c = *(caller *)arg;
    program *p = malloc(sizeof *p);
    for (int i = 0; i < c.runs; i++) {
        run_random_program(p, c.threads, &c.seed);
        if (i % 64 == 63) usleep(100); /* now and then long enough for the workers to fall asleep */
    }
    free(p);
    return NULL;
}

/* Children made in the middle of other threads' runs must be able to run. */
static void fork_now_and_then(int threads, int children) {
    for (int i = 0; i < children; i++) {
        usleep(500);
        const pid_t child = fork();
        if (child == 0) {
            errors = 0;
            call_many(&(caller){ threads, 20, 77u + (uint32_t)i });
            _exit(errors != 0);
        }
        int status = 1;
        waitpid(child, &status, 0);
        check(status == 0, "a forked child runs");
    }
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s threads runs callers children\n", argv[0]);
        return 2;
    }
    const int threads = atoi(argv[1]), runs = atoi(argv[2]), callers = atoi(argv[3]), children = atoi(argv[4]);
    if (threads < 1 || callers < 1 || callers > MOST_CALLERS) return 2;
    pthread_t thread[MOST_CALLERS];
    caller c[MOST_CALLERS];
    for (int i = 0; i < callers; i++) {
        c[i] = (caller){ threads, runs, 1u + (uint32_t)i };
        pthread_create(&thread[i], NULL, call_many, &c[i]);
    }
    fork_now_and_then(threads, children);
    for (int i = 0; i < callers; i++) pthread_join(thread[i], NULL);
    printf("%ld tasks, %ld errors\n", (long)tasks_run, (long)errors);
    return errors != 0;
}

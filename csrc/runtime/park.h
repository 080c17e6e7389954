/* Sleeping until a word changes: a futex on Linux, one condition variable elsewhere.
 *
 * Or until a time of the monotonic clock, if one is given.  A sleeper has a set of bits and is woken only by a call that names one of them (the condition
 * variable wakes everybody, who then look for themselves). */
#pragma once
#include <stdatomic.h>
#include <stdint.h>
#include <pthread.h>
#include <time.h>

#if defined(__linux__) && !defined(GG_NO_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline void gg_park(_Atomic uint32_t *word, uint32_t seen, uint32_t bits, const struct timespec *until) {
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, seen, until, NULL, bits);
}

static inline void gg_unpark(_Atomic uint32_t *word, int most, uint32_t bits) {
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET_PRIVATE, most, NULL, NULL, bits);
}

static inline void gg_park_after_fork(void) {}

#else

static pthread_mutex_t gg_park_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gg_park_changed = PTHREAD_COND_INITIALIZER;

static inline void gg_park(_Atomic uint32_t *word, uint32_t seen, uint32_t bits, const struct timespec *until) {
    (void)bits;
    struct timespec wall; /* a condition variable goes by the wall clock */
    if (until != NULL) {
        clock_gettime(CLOCK_REALTIME, &wall);
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        const int64_t ns = (until->tv_sec - now.tv_sec) * INT64_C(1000000000) + until->tv_nsec - now.tv_nsec;
        const int64_t at = wall.tv_nsec + (ns > 0 ? ns : 0);
        wall.tv_sec += at / 1000000000;
        wall.tv_nsec = at % 1000000000;
    }
    pthread_mutex_lock(&gg_park_mutex);
    if (atomic_load(word) == seen) {
        if (until != NULL) pthread_cond_timedwait(&gg_park_changed, &gg_park_mutex, &wall);
        else pthread_cond_wait(&gg_park_changed, &gg_park_mutex);
    }
    pthread_mutex_unlock(&gg_park_mutex);
}

/* The word has changed already; holding the mutex, no sleeper is between its look and its wait. */
static inline void gg_unpark(_Atomic uint32_t *word, int most, uint32_t bits) {
    (void)word, (void)most, (void)bits;
    pthread_mutex_lock(&gg_park_mutex);
    pthread_cond_broadcast(&gg_park_changed);
    pthread_mutex_unlock(&gg_park_mutex);
}

static inline void gg_park_after_fork(void) {
    gg_park_mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    gg_park_changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

#endif

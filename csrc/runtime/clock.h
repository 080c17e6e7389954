/* The monotonic clock, by which waits end and traces are written. */
#pragma once
#include <stdint.h>
#include <time.h>

static inline int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

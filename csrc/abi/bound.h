/* Graphs that are called on memory of others: by Python, and by XLA without it.  Python sees this file, as ggrad.h. */
#pragma once
#include "abi/ggrad.h"

/* Where an address that comes with a call goes: into `data` of a tensor of the tables, `offset` bytes on. */
typedef struct gg_spot {
    int64_t tensor;
    int64_t slot; /* which of the addresses */
    int64_t offset;
} gg_spot;

/* A compiled graph whose inputs and results lie where each call says. */
typedef struct gg_bound {
    gg_step *steps;
    int64_t n_steps;
    gg_tensor *tensors;
    const gg_spot *spots;
    int64_t n_spots;
    char *scratch;
    int64_t scratch_stride;
    int64_t steady;
    gg_fault *fault;
} gg_bound;

/* gg_run on these addresses; one call at a time.  Clears the fault beforehand. */
int gg_run_bound(const gg_bound *bound, const uintptr_t *addresses, int threads, int (*stops)(void));

enum { GG_MOST_SLOTS = 64 };

/* A bound graph that XLA calls, one call at a time. */
typedef struct gg_xla_function {
    int64_t id;       /* by which calls name it */
    const char *name; /* for errors */
    const gg_bound *bound;
    int32_t n_args, n_rets;
    const int64_t *nbytes; /* of each argument, then of each result: of one batch */
    int32_t threads;
    int32_t busy; /* 1 while a call runs */
    struct gg_xla_function *next;
} gg_xla_function;

/* From now on calls may name it; it must live as long as the process. */
void gg_xla_register(gg_xla_function *function);

/* XLA's handler: gets a call frame, and gives an error or NULL. */
void *gg_xla_call(void *call_frame);

/* The version of XLA's interface that the handler was written for. */
int gg_xla_api_major(void);
int gg_xla_api_minor(void);

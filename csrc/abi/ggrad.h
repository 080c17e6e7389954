/* The C interface of ggrad: what Python sees, and nothing else.
 *
 * The compiler includes this file and cffi parses it, so it holds declarations
 * only: no #if, no inline code.  (build.py leaves the lines below out, for cffi.)
 *
 * C knows memory, Python knows meaning: whatever reaches this interface has been
 * checked.  The one thing Python cannot check beforehand is the value of an index
 * at run time; a kernel that meets a bad one reports it through gg_fault.
 */
#pragma once
#include <stdint.h>

enum { GG_MAX_DIMS = 4 };

enum gg_dtype {
    GG_F32 = 0,
    GG_F16 = 1,
    GG_BF16 = 2,
    GG_I32 = 3,
    /* blocks of 32 elements, then of 256; see quant.h */
    GG_Q4_0 = 4,
    GG_Q4_1 = 5,
    GG_Q5_0 = 6,
    GG_Q5_1 = 7,
    GG_Q8_0 = 8,
    GG_Q4_K = 9,
    GG_Q5_K = 10,
    GG_Q6_K = 11
};

/* A strided array.  ne: elements per dimension, outermost first, padded with leading 1s;
 * nb: bytes from one element to the next, along quantized rows from one block.  data is NULL for an optional input that was left out. */
typedef struct gg_tensor {
    void *data;
    int32_t dtype;
    int32_t rank; /* dimensions the user sees; ne and nb always have four */
    int64_t ne[4];
    int64_t nb[4];
} gg_tensor;

/* What went wrong during a run; the first report wins and no later node runs. */
typedef struct gg_fault {
    int32_t code;  /* 0: nothing, else enum gg_fault_code */
    int32_t input; /* which source of the node held the value */
    int64_t node;  /* index of the call */
    int64_t value; /* the value found */
    int64_t limit; /* the first value that is not allowed */
    int64_t least; /* the smallest that is */
} gg_fault;

/* SHARED: two use what only one may.  PYTHON: a Python function raised.  STOPPED: gg_run was asked to stop. */
enum gg_fault_code { GG_OK = 0, GG_INDEX = 1, GG_SHARED = 2, GG_PYTHON = 3, GG_STOPPED = 4 };

/* One node of a planned graph, ready to run: every pointer is resolved.
 *
 * An op that takes attributes has a struct in the header of its family, in attrs/: the fields, in order, are the op's
 * annotated keyword-only parameters (float: float, int: int64_t, bool: int32_t, a tuple of ints: int64_t[4], an IntEnum:
 * int32_t, a record: its fields).  A test compares the two, byte for byte. */
typedef struct gg_call {
    const struct gg_kernel *kernel;
    int32_t n_src, n_dst;
    const gg_tensor *src; /* inputs */
    const gg_tensor *dst; /* outputs: the parts of a packed result, or just one */
    const void *attrs;    /* the op's gg_<op>_attrs, see attrs/ */
    void *work;           /* memory that all tasks of the node share */
    gg_fault *fault;
    int64_t index; /* of this call, for fault reports */
    /* Calls without tasks of their own: what they make of each element of dst[0] is made as soon as it is there. */
    const struct gg_call *followers;
    int32_t n_followers;
    const void *prepared; /* what the kernel made of src[0], which never changes, before the first run; NULL: nothing */
} gg_call;

/* In which of its stages (of those that have tasks) a kernel calls its followers. */
enum gg_leads { GG_NO_STAGE = 0, GG_FIRST_STAGE = 1, GG_LAST_STAGE = 2 };

/* A kernel runs in stages, a stage in independent tasks.
 *
 * The number of tasks follows from shapes alone, and no two tasks of a stage write the same
 * byte or read what the other writes: so results are the same bits for any number of threads.
 * A stage begins when the one before is complete. */
typedef struct gg_kernel {
    const char *name;
    int32_t stages;
    int64_t (*tasks)(const gg_call *call, int stage);
    void (*run)(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch);
    int64_t (*work)(const gg_call *call);    /* bytes of call->work; NULL: none */
    int64_t (*scratch)(const gg_call *call); /* bytes of private memory per thread; NULL: none */
    int32_t leads;                           /* enum gg_leads: when it calls its followers, for all of dst[0] */
    /* As a follower: compute `rows` times n elements of dst[0], numbered through, the first from `from` on and each so
     * many after the one before; of sources of dst's size it reads the same elements.  NULL: it cannot follow. */
    void (*follow)(const gg_call *call, int64_t from, int64_t n, int64_t rows, int64_t step);
    /* Of a src[0] that never changes: bytes of a form of it that is worth having; 0 if none is.  The form follows from
     * src[0] and the kernel alone.  NULL: never. */
    int64_t (*prepared)(const gg_call *call);
    void (*prepare)(const gg_call *call, void *prepared); /* make it */
} gg_kernel;

/* A kernel compiled at run time, fitted to the shapes of one node: it is told what it would have to work out. */
typedef struct gg_fitted_kernel {
    gg_kernel kernel; /* first, so that a call's kernel is one of these; its functions are gg_fitted_... */
    int64_t grain;    /* blocks in a task */
    int64_t work;     /* bytes */
    int64_t scratch;
    const int64_t *tasks; /* of each stage */
} gg_fitted_kernel;

int64_t gg_fitted_tasks(const gg_call *call, int stage);
int64_t gg_fitted_work(const gg_call *call);
int64_t gg_fitted_scratch(const gg_call *call);

/* One stage of one call, as the runtime walks them.  Steps of which none reads or writes what another writes may run
 * side by side: the first of them says how many they are, and their tasks count as one step's. */
typedef struct gg_step {
    const gg_call *call;
    int32_t stage;
    int32_t together; /* of the first: how many, itself included; of the others it is not looked at */
    int64_t tasks;
    int64_t ns; /* of the first: the least time that they ever took, noted by runs; 0: they never ran */
} gg_step;

const gg_kernel *gg_kernel_find(const char *name); /* NULL when there is none */
int64_t gg_call_work(const gg_call *call);
int64_t gg_call_scratch(const gg_call *call);
/* One step after another, those without tasks left out.  Returns how many; steps NULL: only counts. */
int64_t gg_compile(const gg_call *calls, int64_t n, gg_step *steps);

enum { GG_MAX_THREADS = 256 }; /* of one run; more are not used */

/* Run all steps on up to `threads` threads, thread i using scratch + i * scratch_stride.
 * While another caller's run has the threads, this one runs alone.  A fault ends the run after the stage that
 * met it; the caller clears *fault beforehand.  Returns the fault code.
 *
 * About ten times a second the caller's thread asks `stops`, unless it is NULL, whether the run shall end: then what has not
 * begun is left out, and the fault is GG_STOPPED.  From step `steady` on an answer comes too late: the run goes on to its
 * end, so that what those steps change is changed as a whole. */
int gg_run(gg_step *steps, int64_t n, int threads, char *scratch, int64_t scratch_stride, gg_fault *fault,
           int (*stops)(void), int64_t steady);

/* For a kernel that calls the host's code: on a worker, which blocks all signals, let through those that the host does,
 * or block them again.  Elsewhere nothing changes. */
void gg_signals_of_host(int wanted);

/* The most pieces in which a run on so many threads can cut the steps' tasks. */
int64_t gg_pieces(const gg_step *steps, int64_t n, int threads);

/* One piece of a step, as a traced run notes it.  Times are nanoseconds of the monotonic clock. */
typedef struct gg_span {
    int64_t index; /* of the call */
    int32_t stage;
    uint64_t thread; /* pthread_self() */
    int64_t tasks;
    int64_t begin, end;
} gg_span;

typedef struct gg_trace {
    gg_span *spans;
    int64_t capacity;
    int64_t count; /* of spans; beyond the capacity they were dropped */
} gg_trace;

/* A step behind a kernel that notes when its pieces ran. */
typedef struct gg_traced_step {
    gg_call call; /* first, so that the kernel finds the rest */
    gg_kernel kernel;
    gg_step step;
    gg_trace *trace;
} gg_traced_step;

/* Steps that do the same and note it in *trace: out[i] runs steps[i] by way of traced[i].  All must outlive the run. */
void gg_trace_steps(const gg_step *steps, int64_t n, gg_trace *trace, gg_traced_step *traced, gg_step *out);

const char *gg_isa(void);            /* the instruction set in use */
int gg_isa_select(const char *name); /* 0 if this CPU has it: for tests and show_config */
const char *gg_isa_name(int i);      /* of all in isas.h the ith, weakest first; NULL after the last */
/* The choice for a CPU with these features, divided by spaces; cap NULL: none. */
const char *gg_isa_for(const char *features, const char *cap);
int gg_default_threads(void);                   /* cores that this process may use, cgroup quota included */
int gg_threads_for(int cpus, const char *root); /* the same for so many cpus and the cgroup files below root */

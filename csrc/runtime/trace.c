/* Traced runs: the same steps, each behind a kernel that notes when it began and ended.
 *
 * The runtime knows nothing of it, so a run that is not traced pays nothing. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include "abi/ggrad.h"
#include "runtime/clock.h"

static void run_traced(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    const gg_traced_step *const traced = (const gg_traced_step *)call;
    gg_trace *const trace = traced->trace;
    const int64_t from = nanoseconds();
    traced->step.call->kernel->run(traced->step.call, stage, begin, end, scratch);
    const int64_t to = nanoseconds();
    const int64_t place = __atomic_fetch_add(&trace->count, 1, __ATOMIC_RELAXED);
    if (place < trace->capacity)
        trace->spans[place] =
            (gg_span){ traced->step.call->index, stage, (uint64_t)pthread_self(), end - begin, from, to };
}

void gg_trace_steps(const gg_step *steps, int64_t n, gg_trace *trace, gg_traced_step *traced, gg_step *out) {
    for (int64_t i = 0; i < n; i++) {
        traced[i] = (gg_traced_step){
            .call = *steps[i].call, .kernel = { .name = "traced", .run = run_traced }, .step = steps[i], .trace = trace
        };
        traced[i].call.kernel = &traced[i].kernel;
        out[i] = steps[i];
        out[i].call = &traced[i].call;
    }
}

/* Runs a planned graph, one step after the other. */
#include <stdint.h>
#include <stddef.h>
#include "ggrad.h"

int64_t gg_call_work(const gg_call *call) { return call->kernel->work ? call->kernel->work(call) : 0; }

int64_t gg_call_scratch(const gg_call *call) { return call->kernel->scratch ? call->kernel->scratch(call) : 0; }

int64_t gg_compile(const gg_call *calls, int64_t n, gg_step *steps) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++)
        for (int stage = 0; stage < calls[i].kernel->stages; stage++) {
            const int64_t tasks = calls[i].kernel->tasks(&calls[i], stage);
            if (tasks == 0) continue;
            if (steps != NULL) steps[count] = (gg_step){ &calls[i], stage, tasks };
            count++;
        }
    return count;
}

int gg_run(const gg_step *steps, int64_t n, int threads, char *scratch, int64_t scratch_stride, gg_fault *fault) {
    (void)threads, (void)scratch_stride;
    for (int64_t i = 0; i < n && fault->code == GG_OK; i++)
        steps[i].call->kernel->run(steps[i].call, steps[i].stage, 0, steps[i].tasks, scratch);
    return fault->code;
}

int gg_default_threads(void) { return 1; }

/* What a kernel answers whose tasks and memory were worked out when the graph was built. */
#include <stdint.h>
#include <stddef.h>
#include "abi/ggrad.h"

static const gg_fitted_kernel *fitted(const gg_call *call) { return (const gg_fitted_kernel *)call->kernel; }

int64_t gg_fitted_tasks(const gg_call *call, int stage) { return fitted(call)->tasks[stage]; }
int64_t gg_fitted_work(const gg_call *call) { return fitted(call)->work; }
int64_t gg_fitted_scratch(const gg_call *call) { return fitted(call)->scratch; }

/* Graphs called on memory that is given with each call: addresses go into the tables, then the steps run. */
#include "abi/bound.h"

int gg_run_bound(const gg_bound *bound, const uintptr_t *addresses, int threads, int (*stops)(void)) {
    for (int64_t i = 0; i < bound->n_spots; i++) {
        const gg_spot *spot = &bound->spots[i];
        bound->tensors[spot->tensor].data = (void *)(addresses[spot->slot] + (uintptr_t)spot->offset);
    }
    bound->fault->code = GG_OK;
    return gg_run(bound->steps, bound->n_steps, threads, bound->scratch, bound->scratch_stride, bound->fault, stops,
                  bound->steady);
}

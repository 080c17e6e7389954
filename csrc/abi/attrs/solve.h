/* Attributes of solvers. */
#pragma once
#include <stdint.h>

typedef struct gg_solve_tri_attrs {
    int32_t transposed;
} gg_solve_tri_attrs;

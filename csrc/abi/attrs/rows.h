/* Attributes of gathered rows. */
#pragma once
#include <stdint.h>

typedef struct gg_get_rows_back_attrs {
    int64_t rows;
    int32_t batched;
} gg_get_rows_back_attrs;

/* Attributes of dropout. */
#pragma once
#include <stdint.h>

typedef struct gg_dropout_attrs {
    float p;
    int64_t key;
} gg_dropout_attrs;

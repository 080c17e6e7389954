/* Attributes of the lightning indexer. */
#pragma once
#include <stdint.h>
#include "abi/ggrad.h"

typedef struct gg_lightning_indexer_back_attrs {
    int32_t wanted[GG_MOST_RESULTS];
} gg_lightning_indexer_back_attrs;

/* Attributes of scans. */
#pragma once
#include <stdint.h>
#include "abi/ggrad.h"

typedef struct gg_delta_scan_attrs {
    int32_t wanted[GG_MOST_RESULTS];
} gg_delta_scan_attrs;

typedef gg_delta_scan_attrs gg_delta_scan_back_attrs;
typedef gg_delta_scan_attrs gg_selective_scan_back_attrs;

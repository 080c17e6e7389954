/* Attributes of optimizers. */
#pragma once
#include <stdint.h>

typedef struct gg_clip_factor_attrs {
    float max_norm;
} gg_clip_factor_attrs;

enum gg_step_rule { GG_MOMENTUM, GG_ADAM, GG_RMSPROP, GG_ADAGRAD, GG_LION, GG_AVERAGE };

typedef struct gg_opt_step_attrs {
    int32_t rule;
} gg_opt_step_attrs;

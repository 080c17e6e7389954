/* Attributes of Kimi Delta Attention. */
#pragma once
#include <stdint.h>

/* How inputs of Kimi Delta Attention are taken: all its ops begin with it. */
typedef struct gg_kda_form {
    float scale;
    int32_t l2norm;
    int32_t gate; /* 0: given, 1: softplus, 2: lower bound */
    float lower_bound;
    int32_t beta_form; /* 0: given, 1: sigmoid, 2: twice that */
    int32_t state_v_first;
} gg_kda_form;

typedef struct gg_kda_attrs {
    gg_kda_form form;
    int64_t chunk_size;
    int32_t final_state;
    int32_t keep; /* 0: nothing, 1: states, 2: all */
} gg_kda_attrs;

typedef struct gg_kda_back_attrs {
    gg_kda_form form;
    int64_t chunk_size;
    int64_t needs; /* bits: dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias */
} gg_kda_back_attrs;

typedef struct gg_kda_recurrent_attrs {
    gg_kda_form form;
    int32_t final_state;
} gg_kda_recurrent_attrs;

typedef struct gg_kda_recurrent_pool_attrs {
    gg_kda_form form;
} gg_kda_recurrent_pool_attrs;

typedef struct gg_kda_gate_attrs {
    int32_t gate;
    float lower_bound;
} gg_kda_gate_attrs;

typedef gg_kda_gate_attrs gg_kda_gate_back_attrs;

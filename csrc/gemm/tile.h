/* Where gg_micro's tiles go: into f32 rows, whole or cut off at an edge. */
#pragma once
#include "gemm/pack.h"

/* One tile: dst[m][j] (+)= sum over k of row[m][k] * panel[k][j]. */
typedef struct gg_tile {
    int64_t K;
    const float *rows;
    int64_t line; /* as gg_row_panels has it */
    const float *panel;
    float *dst;
    int64_t dst_step;
    int add;
} gg_tile;

GG_INLINE void gg_tile_of(const int M, const int vectors, const int packed, const gg_tile *t) {
    vf c[GG_MR][GG_NV];
    float *to = t->dst;
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) /* on its way while the tile is made, line by line of the cache */
#pragma GCC unroll 8
        for (int j = 0; j < vectors * GG_VW; j += 16) __builtin_prefetch(to + m * t->dst_step + j, 1);
    gg_micro_part(M, vectors, t->K, t->rows, packed ? 1 : t->line, packed ? GG_MR : 1, t->panel, GG_NR, c);
    if (t->add) {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++, to += t->dst_step)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) vf_store(to + j * GG_VW, vf_load(to + j * GG_VW) + c[m][j]);
    } else {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++, to += t->dst_step)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) vf_store(to + j * GG_VW, c[m][j]);
    }
}

static void gg_run_whole_tile(int rows, int vectors, const gg_tile *t) {
    if (t->line == 0) {
        if (vectors == GG_NV) GG_EACH_M(rows, gg_tile_of, GG_NV, 1, t)
        else GG_EACH_M(rows, gg_tile_of, GG_NV / 2, 1, t)
    } else {
        if (vectors == GG_NV) GG_EACH_M(rows, gg_tile_of, GG_NV, 0, t)
        else GG_EACH_M(rows, gg_tile_of, GG_NV / 2, 0, t)
    }
}

/* `columns`, 1 to GG_NR, of the panel's are dst's. */
static void gg_run_tile(int rows, int columns, const gg_tile *t) {
    const int vectors = columns <= GG_NR / 2 ? GG_NV / 2 : GG_NV;
    if (columns == vectors * GG_VW) {
        gg_run_whole_tile(rows, vectors, t);
        return;
    }
    float value[GG_MR * GG_NR], *from = value, *to = t->dst;
    gg_tile whole = *t;
    whole.dst = value;
    whole.dst_step = GG_NR;
    whole.add = 0;
    gg_run_whole_tile(rows, vectors, &whole);
    for (int m = 0; m < rows; m++, from += GG_NR, to += t->dst_step)
        for (int j = 0; j < columns; j++) to[j] = t->add ? to[j] + from[j] : from[j];
}

/* dst[n][m] (+)= sum over k of row[n][k] * column[m][k] for N rows and M packed columns. */
typedef struct gg_strip {
    int64_t N, M, K;
    gg_row_panels rows;
    const float *panels;
    float *dst;
    int64_t dst_step;
    int add;
} gg_strip;

/* A panel of columns stays in L1 while the rows pass, which are fewer bytes for each tile than the panel. */
static void gg_run_strip(const gg_strip *s) {
    for (int64_t m = 0; m < s->M; m += GG_NR)
        for (int64_t n = 0; n < s->N; n += GG_MR)
            gg_run_tile((int)gg_min(GG_MR, s->N - n), (int)gg_min(GG_NR, s->M - m),
                        &(gg_tile){
                            .K = s->K,
                            .rows = s->rows.data + n / GG_MR * s->rows.panel,
                            .line = s->rows.line,
                            .panel = s->panels + m * s->K,
                            .dst = s->dst + n * s->dst_step + m,
                            .dst_step = s->dst_step,
                            .add = s->add,
                        });
}

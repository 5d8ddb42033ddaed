// What Python describes to the kernels; `engine/cpu/library.py` has the same structures.

#pragma once

#include <stdint.h>

enum { FLOAT32, BFLOAT16, INT8 };

typedef struct {
    const void *weight;  // [panels][inputs][PANEL]: 64 outputs side by side
    const float *scale;  // [outputs], of INT8
    const float *bias;   // [outputs] or null
    int64_t inputs, outputs, format;  // outputs: a multiple of PANEL
} Linear;

// y [rows][y_stride] = x [rows][x_stride] times the layer's weights, plus its bias.
void multiply(const Linear *linear, const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t rows);

enum { SILU, GELU_TANH };

typedef struct {
    Linear qkv, out, gate_up, down;
    const float *attention_norm, *mlp_norm;
    const float *query_norm, *key_norm;  // [head_dim] or null
    int64_t window;                      // tokens that a token sees, itself included; 0: all
} Layer;

typedef struct {
    const Layer *layers;
    Linear head;
    const float *norm;
    int64_t layer_count, hidden, heads, kv_heads, head_dim, inner, activation, block_size;
    float epsilon, scaling, softcap;
} Model;

typedef struct {
    const float *cosine, *sine;    // [rows][rotary]
    int64_t rotary;                // numbers of a head that are rotated
    int64_t rows;
    const int64_t *positions;      // [rows]
    const int64_t *tables;         // [rows]: where a row's block table begins in `blocks`
    const int64_t *blocks;         // block tables, one behind the other
    const int64_t *chunks;         // [chunk_count + 1]: first rows of the chunks of sequences
    int64_t chunk_count;
    const int64_t *wanted;         // [wanted_count]: rows whose logits are wanted
    int64_t wanted_count;
    float *kv;                     // [blocks][layers][2][block_size][kv_heads][head_dim]
    float *x, *normed, *qkv, *attended, *gate_up, *gated;  // [rows][...], see `forward`
    float *logits;                 // [wanted_count][head.outputs]
} Batch;

typedef struct {
    const Model *model;
    const Batch *batch;
    int64_t layer;
    const float *norm_weight, *delta;
} Step;

static inline float *kv_at(const Step *s, int64_t row, int64_t position, int64_t value) {
    const Model *m = s->model;
    int64_t width = m->kv_heads * m->head_dim;
    int64_t block = s->batch->blocks[s->batch->tables[row] + position / m->block_size];
    int64_t plane = (block * m->layer_count + s->layer) * 2 + value;
    return s->batch->kv + (plane * m->block_size + position % m->block_size) * width;
}

// Attention of all rows, over what the cache holds. `items`: room for chunk_count + 1 numbers.
void attend(Step *step, int64_t *items);

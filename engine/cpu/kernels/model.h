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
    Linear gate_up, down;
} Mlp;

typedef struct {
    Linear qkv, out;
    Linear router;      // [experts]; of a mixture
    const Mlp *mlps;    // [experts], or the only one
    int64_t experts;    // 0: no mixture
    const float *attention_norm, *mlp_norm;          // of what a part reads; null: it is not normed
    const float *attention_out_norm, *mlp_out_norm;  // of what a part adds; null: it is not normed
    const float *query_norm, *key_norm;              // [query_norm_size], [key_norm_size] or null
    int64_t query_norm_size, key_norm_size;          // of one head, or of all heads together
    int64_t window;     // tokens that a token sees, itself included; 0: all
    int64_t rotary;     // which table of cosines and sines; -1: none
} Layer;

typedef struct {
    const Layer *layers;
    Linear head;
    const float *norm;
    int64_t layer_count, hidden, heads, kv_heads, head_dim, activation, block_size;
    int64_t experts_per_token, normalises;  // whether the shares of a token's experts add up to 1
    float epsilon, scaling, softcap;
    float residual, logit_scale, logit_softcap;
} Model;

typedef struct {
    const float *cosine, *sine;    // [tables][rows][rotary]
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
    // Of mixtures: inputs and outputs of one expert, and sums [rows][...]; experts and their shares [rows][experts_per_token];
    // the rows that chose the expert in progress [rows].
    float *routed, *expert_out, *mixed, *shares;
    int64_t *chosen, *expert_rows;
    float *logits;                 // [wanted_count][head.outputs]
} Batch;

typedef struct {
    const Model *model;
    const Batch *batch;
    int64_t layer;
    const float *norm_weight;               // of what the next part reads
    const float *out_norm;                  // of what the last part adds
    float *delta;                           // what it adds: [rows][padded(hidden)]
    int64_t expert;                         // the one in progress
} Step;

// Outputs of a linear layer with so many, which come in whole panels.
static inline int64_t padded(int64_t outputs) { return (outputs + 63) / 64 * 64; }

static inline float *kv_at(const Step *s, int64_t row, int64_t position, int64_t value) {
    const Model *m = s->model;
    int64_t width = m->kv_heads * m->head_dim;
    int64_t block = s->batch->blocks[s->batch->tables[row] + position / m->block_size];
    int64_t plane = (block * m->layer_count + s->layer) * 2 + value;
    return s->batch->kv + (plane * m->block_size + position % m->block_size) * width;
}

// The layer's MLP, or its mixture of MLPs, over `normed`; returns what it adds, [rows][padded(hidden)].
float *mlp(Step *step);

// Attention of all rows, over what the cache holds. `items`: room for chunk_count + 1 numbers.
void attend(Step *step, int64_t *items);

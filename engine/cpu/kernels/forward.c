// The forward pass of a decoder-only transformer on a CPU, over a paged KV cache.
//
// Batch-invariant by construction: each output number is one chain of fused multiply-adds in an order that depends only on the
// model and on the token's own position. How many rows run together, where a prompt was cut, how many threads there are and
// which vectors the CPU has change which numbers are computed side by side, but never the order of one sum.
//
// Everything is written with vectors of 16 floats, which the compiler maps to one AVX-512 register, two of AVX2 or four of NEON.

#include <string.h>

#include "model.h"
#include "threads.h"
#include "vectors.h"

INLINE void rotate(float *head, const float *cosine, const float *sine, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = __builtin_fmaf(a, cosine[i], -b * sine[i]);
        head[i + half] = __builtin_fmaf(b, cosine[i + half], a * sine[i + half]);
    }
}

// The residual stream takes in what the last part added, and is normed for the next one.
static void add_and_norm(void *context, int64_t row) {
    const Step *s = context;
    const Batch *b = s->batch;
    int64_t hidden = s->model->hidden;
    float *x = b->x + row * hidden, *normed = b->normed + row * hidden;
    if (s->delta) {
        float *delta = s->delta + row * padded(hidden);
        if (s->out_norm) rms_norm(delta, s->out_norm, s->model->epsilon, hidden, delta);
        for (int64_t i = 0; i < hidden; i += LANES)
            STORE(x + i, FMA((v16)s->model->residual, LOAD(delta + i), LOAD(x + i)));
    }
    if (s->norm_weight) rms_norm(x, s->norm_weight, s->model->epsilon, hidden, normed);
    else memcpy(normed, x, hidden * sizeof(float));
}

INLINE void norm_heads(float *heads, int64_t numbers, const float *weight, int64_t size, float epsilon) {
    for (int64_t i = 0; weight && i < numbers; i += size) rms_norm(heads + i, weight, epsilon, size, heads + i);
}

// Norms and rotates one row's queries and keys, scales the queries, and writes keys and values to the cache.
static void rotate_and_cache(void *context, int64_t row) {
    const Step *s = context;
    const Model *m = s->model;
    const Batch *b = s->batch;
    const Layer *layer = m->layers + s->layer;
    int64_t dim = m->head_dim, width = m->kv_heads * dim;
    float *query = b->qkv + row * layer->qkv.outputs, *key = query + m->heads * dim, *value = key + width;
    norm_heads(query, m->heads * dim, layer->query_norm, layer->query_norm_size, m->epsilon);
    norm_heads(key, width, layer->key_norm, layer->key_norm_size, m->epsilon);
    if (layer->rotary >= 0) {
        int64_t at = (layer->rotary * b->rows + row) * b->rotary;
        for (int64_t head = 0; head < m->heads + m->kv_heads; head++)
            rotate(query + head * dim, b->cosine + at, b->sine + at, b->rotary);
    }
    for (int64_t i = 0; i < m->heads * dim; i += LANES) STORE(query + i, LOAD(query + i) * m->scaling);
    memcpy(kv_at(s, row, b->positions[row], 0), key, width * sizeof(float));
    memcpy(kv_at(s, row, b->positions[row], 1), value, width * sizeof(float));
}

// Scales one row of logits and bounds them: cap * tanh(x / cap).
typedef struct {
    const Model *model;
    float *logits;
} Logits;

static void finish_logits(void *context, int64_t row) {
    const Logits *s = context;
    const Model *m = s->model;
    float *logits = s->logits + row * m->head.outputs;
    for (int64_t i = 0; i < m->head.outputs; i += LANES) {
        v16 x = LOAD(logits + i) * m->logit_scale;
        STORE(logits + i, m->logit_softcap > 0.0f ? softcap16(x, m->logit_softcap) : x);
    }
}

// Logits [rows][head.outputs] of rows of `x` [rows][hidden], which the last norm has been applied to.
void project(const Model *m, const float *x, float *logits, int64_t rows) {
    Logits all = {m, logits};
    multiply(&m->head, x, m->hidden, logits, m->head.outputs, rows);
    if (m->logit_scale != 1.0f || m->logit_softcap > 0.0f) parallel(finish_logits, &all, rows);
}

// `items`: room for chunk_count + 1 numbers. On entry `x` holds the embeddings of the rows.
void forward(const Model *m, const Batch *b, int64_t *items) {
    Step step = {.model = m, .batch = b, .norm_weight = m->layers[0].attention_norm};
    int64_t width = m->heads * m->head_dim;
    parallel(add_and_norm, &step, b->rows);
    for (; step.layer < m->layer_count; step.layer++) {
        const Layer *layer = m->layers + step.layer;
        multiply(&layer->qkv, b->normed, m->hidden, b->qkv, layer->qkv.outputs, b->rows);
        parallel(rotate_and_cache, &step, b->rows);
        attend(&step, items);
        // What a part adds to the residual stream lies in `gate_up` or `qkv` while those are free.
        multiply(&layer->out, b->attended, width, b->gate_up, layer->out.outputs, b->rows);
        step.delta = b->gate_up, step.out_norm = layer->attention_out_norm, step.norm_weight = layer->mlp_norm;
        parallel(add_and_norm, &step, b->rows);
        step.delta = mlp(&step), step.out_norm = layer->mlp_out_norm;
        step.norm_weight = step.layer + 1 < m->layer_count ? m->layers[step.layer + 1].attention_norm : m->norm;
        parallel(add_and_norm, &step, b->rows);
    }
    for (int64_t i = 0; i < b->wanted_count; i++)
        memcpy(b->x + i * m->hidden, b->normed + b->wanted[i] * m->hidden, m->hidden * sizeof(float));
    if (b->wanted_count) project(m, b->x, b->logits, b->wanted_count);
}

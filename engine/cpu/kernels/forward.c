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

// out = x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019, arXiv:1910.07467); size is a multiple of 16.
INLINE void rms_norm(const float *x, const float *weight, float epsilon, int64_t size, float *out) {
    v16 squares = (v16)0.0f;
    for (int64_t i = 0; i < size; i += LANES) squares = FMA(LOAD(x + i), LOAD(x + i), squares);
    float scale = 1.0f / __builtin_sqrtf(sum16(squares) / (float)size + epsilon);
    for (int64_t i = 0; i < size; i += LANES) STORE(out + i, LOAD(x + i) * scale * LOAD(weight + i));
}

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
    float *x = b->x + row * hidden;
    if (s->delta) {
        int64_t stride = (hidden + PANEL - 1) / PANEL * PANEL;
        for (int64_t i = 0; i < hidden; i += LANES) STORE(x + i, LOAD(x + i) + LOAD(s->delta + row * stride + i));
    }
    if (s->norm_weight) rms_norm(x, s->norm_weight, s->model->epsilon, hidden, b->normed + row * hidden);
}

// Norms and rotates one row's queries and keys, scales the queries, and writes keys and values to the cache.
static void rotate_and_cache(void *context, int64_t row) {
    const Step *s = context;
    const Model *m = s->model;
    const Batch *b = s->batch;
    const Layer *layer = m->layers + s->layer;
    int64_t dim = m->head_dim, width = m->kv_heads * dim;
    float *query = b->qkv + row * layer->qkv.outputs, *key = query + m->heads * dim, *value = key + width;
    const float *cosine = b->cosine + row * b->rotary, *sine = b->sine + row * b->rotary;
    for (int64_t head = 0; head < m->heads; head++) {
        float *one = query + head * dim;
        if (layer->query_norm) rms_norm(one, layer->query_norm, m->epsilon, dim, one);
        rotate(one, cosine, sine, b->rotary);
        for (int64_t i = 0; i < dim; i += LANES) STORE(one + i, LOAD(one + i) * m->scaling);
    }
    for (int64_t head = 0; head < m->kv_heads; head++) {
        float *one = key + head * dim;
        if (layer->key_norm) rms_norm(one, layer->key_norm, m->epsilon, dim, one);
        rotate(one, cosine, sine, b->rotary);
    }
    memcpy(kv_at(s, row, b->positions[row], 0), key, width * sizeof(float));
    memcpy(kv_at(s, row, b->positions[row], 1), value, width * sizeof(float));
}

static void activate(void *context, int64_t row) {
    const Step *s = context;
    const Model *m = s->model;
    int64_t stride = m->layers[s->layer].gate_up.outputs;
    const float *gate = s->batch->gate_up + row * stride, *up = gate + m->inner;
    float *out = s->batch->gated + row * m->inner;
    for (int64_t i = 0; i < m->inner; i += LANES) {
        v16 x = LOAD(gate + i), slope = x;
        if (m->activation == GELU_TANH) slope = 1.595769122f * FMA(x * x * x, 0.044715f, x);
        slope = select16(slope < (v16)(-80.0f), (v16)(-80.0f), slope);
        STORE(out + i, x / (1.0f + exp16(-slope)) * LOAD(up + i));
    }
}

// `items`: room for chunk_count + 1 numbers. On entry `x` holds the embeddings of the rows.
void forward(const Model *m, const Batch *b, int64_t *items) {
    Step step = {m, b, 0, m->layers[0].attention_norm, 0};
    int64_t width = m->heads * m->head_dim;
    parallel(add_and_norm, &step, b->rows);
    for (; step.layer < m->layer_count; step.layer++) {
        const Layer *layer = m->layers + step.layer;
        multiply(&layer->qkv, b->normed, m->hidden, b->qkv, layer->qkv.outputs, b->rows);
        parallel(rotate_and_cache, &step, b->rows);
        attend(&step, items);
        // What a part adds to the residual stream lies in `qkv` or `gate_up` while those are free.
        multiply(&layer->out, b->attended, width, b->gate_up, layer->out.outputs, b->rows);
        step.delta = b->gate_up, step.norm_weight = layer->mlp_norm;
        parallel(add_and_norm, &step, b->rows);
        multiply(&layer->gate_up, b->normed, m->hidden, b->gate_up, layer->gate_up.outputs, b->rows);
        parallel(activate, &step, b->rows);
        multiply(&layer->down, b->gated, m->inner, b->qkv, layer->down.outputs, b->rows);
        step.delta = b->qkv;
        step.norm_weight = step.layer + 1 < m->layer_count ? m->layers[step.layer + 1].attention_norm : m->norm;
        parallel(add_and_norm, &step, b->rows);
    }
    for (int64_t i = 0; i < b->wanted_count; i++)
        memcpy(b->x + i * m->hidden, b->normed + b->wanted[i] * m->hidden, m->hidden * sizeof(float));
    if (b->wanted_count) multiply(&m->head, b->x, m->hidden, b->logits, m->head.outputs, b->wanted_count);
}

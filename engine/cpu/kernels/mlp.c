// The MLP of a layer, or a mixture of them: a router chooses a few experts for each token.

#include <string.h>

#include "model.h"
#include "threads.h"
#include "vectors.h"

// gate_up [row][2 * inner] becomes gated [row][inner].
static void activate(void *context, int64_t row) {
    const Step *s = context;
    const Mlp *one = s->model->layers[s->layer].mlps + s->expert;
    int64_t inner = one->down.inputs;
    const float *gate = s->batch->gate_up + row * one->gate_up.outputs, *up = gate + inner;
    float *out = s->batch->gated + row * inner;
    for (int64_t i = 0; i < inner; i += LANES) {
        v16 x = LOAD(gate + i), slope = x;
        if (s->model->activation == GELU_TANH) slope = 1.595769122f * FMA(x * x * x, 0.044715f, x);
        slope = select16(slope < (v16)(-80.0f), (v16)(-80.0f), slope);
        STORE(out + i, x / (1.0f + exp16(-slope)) * LOAD(up + i));
    }
}

static void run_mlp(Step *s, const float *x, float *y, int64_t rows) {
    const Batch *b = s->batch;
    const Mlp *one = s->model->layers[s->layer].mlps + s->expert;
    multiply(&one->gate_up, x, s->model->hidden, b->gate_up, one->gate_up.outputs, rows);
    parallel(activate, s, rows);
    multiply(&one->down, b->gated, one->down.inputs, y, one->down.outputs, rows);
}

// The experts with the largest logits, the first of equals; their shares are a softmax over all experts.
static void choose(void *context, int64_t row) {
    const Step *s = context;
    const Model *m = s->model;
    const Layer *layer = m->layers + s->layer;
    float *logits = s->batch->gate_up + row * layer->router.outputs, *shares = s->batch->shares + row * m->experts_per_token;
    int64_t *chosen = s->batch->chosen + row * m->experts_per_token;
    float largest = logits[0], total = 0.0f, kept = 0.0f;
    for (int64_t e = 1; e < layer->experts; e++) largest = logits[e] > largest ? logits[e] : largest;
    for (int64_t e = 0; e < layer->experts; e += LANES) STORE(logits + e, exp16(LOAD(logits + e) - largest));
    for (int64_t e = 0; e < layer->experts; e++) total += logits[e];
    for (int64_t k = 0; k < m->experts_per_token; k++) {
        int64_t best = 0;
        for (int64_t e = 1; e < layer->experts; e++) best = logits[e] > logits[best] ? e : best;
        chosen[k] = best, shares[k] = logits[best] / total, kept += shares[k];
        logits[best] = -1.0f;
    }
    for (int64_t k = 0; m->normalises && k < m->experts_per_token; k++) shares[k] /= kept;
}

// The rows that chose the expert in progress, and their inputs one behind the other.
static int64_t gather(const Step *s) {
    const Model *m = s->model;
    const Batch *b = s->batch;
    int64_t count = 0;
    for (int64_t row = 0; row < b->rows; row++)
        for (int64_t k = 0; k < m->experts_per_token; k++)
            if (b->chosen[row * m->experts_per_token + k] == s->expert) {
                memcpy(b->routed + count * m->hidden, b->normed + row * m->hidden, m->hidden * sizeof(float));
                b->expert_rows[count++] = row;
                break;  // where logits are not finite, an expert may be chosen twice
            }
    return count;
}

// A row's sum takes in its experts in the order of their numbers, whatever the other rows chose.
static void mix(void *context, int64_t item) {
    const Step *s = context;
    const Model *m = s->model;
    const Batch *b = s->batch;
    int64_t row = b->expert_rows[item], k = 0, width = padded(m->hidden);
    while (b->chosen[row * m->experts_per_token + k] != s->expert) k++;
    v16 share = (v16)b->shares[row * m->experts_per_token + k];
    float *sum = b->mixed + row * width;
    const float *part = b->expert_out + item * width;
    for (int64_t i = 0; i < m->hidden; i += LANES) STORE(sum + i, FMA(share, LOAD(part + i), LOAD(sum + i)));
}

float *mlp(Step *s) {
    const Model *m = s->model;
    const Batch *b = s->batch;
    const Layer *layer = m->layers + s->layer;
    s->expert = 0;
    if (!layer->experts) {
        run_mlp(s, b->normed, b->qkv, b->rows);
        return b->qkv;
    }
    multiply(&layer->router, b->normed, m->hidden, b->gate_up, layer->router.outputs, b->rows);
    parallel(choose, s, b->rows);
    memset(b->mixed, 0, b->rows * padded(m->hidden) * sizeof(float));
    for (; s->expert < layer->experts; s->expert++) {
        int64_t count = gather(s);
        if (!count) continue;
        run_mlp(s, b->routed, b->expert_out, count);
        parallel(mix, s, count);
    }
    return b->mixed;
}

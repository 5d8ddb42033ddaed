// Paged attention, tile by tile of 64 keys. A tile begins at a multiple of 64 in the sequence, so that a token's sums are the same
// wherever its prompt was cut (FlashAttention's scheme: Dao et al. 2022, arXiv:2205.14135).

#include <string.h>

#include "model.h"
#include "threads.h"
#include "vectors.h"

enum { QUERIES = 48, DIM_MAX = 256 };

typedef struct {
    float score[KEYS];
    float largest, total;
} Softmax;

// 64 keys as columns: out[dim][64]. Columns without a key are zero.
INLINE void transpose_keys(const float *const *keys, int64_t count, int64_t dim, float (*out)[KEYS]) {
    for (int64_t first = 0; first < KEYS; first += LANES) {
        for (int64_t d = 0; d < dim; d += LANES) {
            v16 t[LANES];
            UNROLL for (int i = 0; i < LANES; i++) t[i] = first + i < count ? LOAD(keys[first + i] + d) : (v16)0.0f;
            // Four rounds of exchanging halves, of 8, 4, 2 and 1 numbers.
#define A8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define B8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define A4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define B4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define A2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define B2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define A1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define B1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define EXCHANGE(step, a, b)                                       \
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & step)) {      \
        v16 low = t[i], high = t[i + step];                        \
        t[i] = __builtin_shufflevector(low, high, a);              \
        t[i + step] = __builtin_shufflevector(low, high, b);       \
    }
            EXCHANGE(8, A8, B8)
            EXCHANGE(4, A4, B4)
            EXCHANGE(2, A2, B2)
            EXCHANGE(1, A1, B1)
            UNROLL for (int i = 0; i < LANES; i++) STORE(&out[d + i][first], t[i]);
        }
    }
}

// Scores of up to 6 queries and 64 keys, summed over the numbers of a head in order.
INLINE void score_tile(const int count, const float *const *query, float (*keys)[KEYS], int64_t dim, Softmax *softmax) {
    enum { STEP = COLUMNS };
    for (int64_t first = 0; first < KEYS; first += STEP) {
        v16 sum[ROWS][STEP / LANES];
        UNROLL for (int q = 0; q < count; q++)
            UNROLL for (int c = 0; c < STEP / LANES; c++) sum[q][c] = (v16)0.0f;
        for (int64_t d = 0; d < dim; d++) {
            v16 k[STEP / LANES];
            UNROLL for (int c = 0; c < STEP / LANES; c++) k[c] = LOAD(&keys[d][first + c * LANES]);
            UNROLL for (int q = 0; q < count; q++) {
                v16 value = (v16)query[q][d];
                UNROLL for (int c = 0; c < STEP / LANES; c++) sum[q][c] = FMA(value, k[c], sum[q][c]);
            }
        }
        UNROLL for (int q = 0; q < count; q++)
            UNROLL for (int c = 0; c < STEP / LANES; c++) STORE(softmax[q].score + first + c * LANES, sum[q][c]);
    }
}

// out = out * correction + weights x values, for up to 6 queries, key after key.
INLINE void value_tile(const int count, const Softmax *softmax, const float *correction, const float *const *values,
                       int64_t keys, int64_t dim, float (*out)[DIM_MAX]) {
    enum { STEP = COLUMNS };
    for (int64_t first = 0; first < dim; first += STEP) {
        const int64_t vectors = (dim - first < STEP ? dim - first : STEP) / LANES;
        if (vectors == STEP / LANES) {
            v16 sum[ROWS][STEP / LANES];
            UNROLL for (int q = 0; q < count; q++)
                UNROLL for (int c = 0; c < STEP / LANES; c++)
                    sum[q][c] = LOAD(out[q] + first + c * LANES) * correction[q];
            for (int64_t k = 0; k < keys; k++) {
                UNROLL for (int q = 0; q < count; q++) {
                    v16 weight = (v16)softmax[q].score[k];
                    UNROLL for (int c = 0; c < STEP / LANES; c++)
                        sum[q][c] = FMA(weight, LOAD(values[k] + first + c * LANES), sum[q][c]);
                }
            }
            UNROLL for (int q = 0; q < count; q++)
                UNROLL for (int c = 0; c < STEP / LANES; c++) STORE(out[q] + first + c * LANES, sum[q][c]);
            continue;
        }
        for (int64_t at = first; at < first + vectors * LANES; at += LANES)
            for (int q = 0; q < count; q++) {
                v16 sum = LOAD(out[q] + at) * correction[q];
                for (int64_t k = 0; k < keys; k++) sum = FMA((v16)softmax[q].score[k], LOAD(values[k] + at), sum);
                STORE(out[q] + at, sum);
            }
    }
}

// Takes 64 scores into a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867): the scores become weights.
// Returns by how much what was summed before counts less now. Keys outside [begin, end) are not seen.
INLINE float soften(Softmax *softmax, int64_t begin, int64_t end, float softcap) {
    const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    v16 score[KEYS / LANES];
    v16 highest = (v16)-__builtin_inff();
    UNROLL for (int c = 0; c < KEYS / LANES; c++) {
        v16 one = LOAD(softmax->score + c * LANES);
        if (softcap > 0.0f) one = softcap16(one, softcap);
        v16i key = lane + c * LANES;
        score[c] = select16((key >= (int)begin) & (key < (int)end), one, (v16)-__builtin_inff());
        highest = select16(score[c] > highest, score[c], highest);
    }
    float largest = max16(highest), before = softmax->largest;
    if (!(largest > before)) largest = before;
    v16 total = (v16)0.0f;
    UNROLL for (int c = 0; c < KEYS / LANES; c++) {
        score[c] = exp16(score[c] - largest);
        total += score[c];
        STORE(softmax->score + c * LANES, score[c]);
    }
    float correction = exp16((v16)(before - largest))[0];
    softmax->largest = largest;
    softmax->total = __builtin_fmaf(softmax->total, correction, sum16(total));
    return correction;
}

typedef struct {
    const Step *step;
    int64_t rows_each;            // of a chunk, in one item
    const int64_t *first_items;   // [chunk_count + 1]
} Attention;

#define FOR_COUNT(count, call)                                             \
    switch (count) {                                                       \
        case 1: { enum { N = 1 }; call; } break;                           \
        case 2: { enum { N = 2 }; call; } break;                           \
        case 3: { enum { N = 3 }; call; } break;                           \
        case 4: { enum { N = 4 }; call; } break;                           \
        case 5: { enum { N = 5 }; call; } break;                           \
        default: { enum { N = 6 }; call; }                                 \
    }

static void score_some(int64_t n, const float *const *q, float (*keys)[KEYS], int64_t dim, Softmax *s) {
    FOR_COUNT(n, score_tile(N, q, keys, dim, s))
}

static void value_some(int64_t n, const Softmax *s, const float *correction, const float *const *values, int64_t keys,
                       int64_t dim, float (*out)[DIM_MAX]) {
    FOR_COUNT(n, value_tile(N, s, correction, values, keys, dim, out))
}

// Asks for the keys and values of a tile before they are needed: they lie scattered, so the processor does not foresee them.
INLINE void prefetch_tile(const Step *s, int64_t row, int64_t base, int64_t end, int64_t kv_head) {
    const Model *m = s->model;
    enum { LINE = 64 / sizeof(float) };
    for (int64_t k = base; k < base + KEYS && k < end; k++) {
        const float *key = kv_at(s, row, k, 0) + kv_head * m->head_dim;
        const float *value = key + m->block_size * m->kv_heads * m->head_dim;
        for (int64_t i = 0; i < m->head_dim; i += LINE) {
            __builtin_prefetch(key + i, 0, 2);
            __builtin_prefetch(value + i, 0, 2);
        }
    }
}

// Some rows of one chunk, and the query heads of one key head, over all keys that the rows see.
static void attend_item(void *context, int64_t item) {
    const Attention *a = context;
    const Step *s = a->step;
    const Model *m = s->model;
    const Batch *b = s->batch;
    const Layer *layer = m->layers + s->layer;
    int64_t kv_head = item % m->kv_heads, part = item / m->kv_heads, chunk = 0;
    while (part >= a->first_items[chunk + 1]) chunk++;
    int64_t first = b->chunks[chunk] + (part - a->first_items[chunk]) * a->rows_each;
    int64_t last = first + a->rows_each < b->chunks[chunk + 1] ? first + a->rows_each : b->chunks[chunk + 1];
    int64_t group = m->heads / m->kv_heads, count = (last - first) * group, dim = m->head_dim;
    float keys[DIM_MAX][KEYS], out[QUERIES][DIM_MAX], correction[QUERIES];
    Softmax softmax[QUERIES];
    const float *query[QUERIES];
    for (int64_t q = 0; q < count; q++) {
        query[q] = b->qkv + (first + q / group) * layer->qkv.outputs + (kv_head * group + q % group) * dim;
        softmax[q].largest = -1e30f, softmax[q].total = 0.0f;
        memset(out[q], 0, dim * sizeof(float));
    }
    int64_t end = b->positions[last - 1] + 1, begin = 0;
    if (layer->window && b->positions[first] + 1 > layer->window) begin = b->positions[first] + 1 - layer->window;
    for (int64_t base = begin / KEYS * KEYS; base < end; base += KEYS) {
        const float *key[KEYS], *value[KEYS];
        int64_t seen = end - base < KEYS ? end - base : KEYS;
        for (int64_t k = 0; k < seen; k++) {
            key[k] = kv_at(s, first, base + k, 0) + kv_head * dim;
            value[k] = key[k] + m->block_size * m->kv_heads * dim;
        }
        prefetch_tile(s, first, base + KEYS, end, kv_head);
        transpose_keys(key, seen, dim, keys);
        for (int64_t q = 0; q < count; q += ROWS) {
            int64_t some = count - q < ROWS ? count - q : ROWS;
            score_some(some, query + q, keys, dim, softmax + q);
            for (int64_t i = q; i < q + some; i++) {
                int64_t position = b->positions[first + i / group];
                int64_t from = layer->window ? position + 1 - layer->window - base : 0;
                correction[i] = soften(softmax + i, from, position + 1 - base, m->softcap);
            }
            value_some(some, softmax + q, correction + q, value, seen, dim, out + q);
        }
    }
    for (int64_t q = 0; q < count; q++) {
        float *target = b->attended + (first + q / group) * m->heads * dim + (kv_head * group + q % group) * dim;
        float scale = 1.0f / softmax[q].total;
        for (int64_t i = 0; i < dim; i += LANES) STORE(target + i, LOAD(out[q] + i) * scale);
    }
}

void attend(Step *step, int64_t *first_items) {
    const Model *m = step->model;
    const Batch *b = step->batch;
    int64_t group = m->heads / m->kv_heads, each = QUERIES / group, parts = 0;
    for (int64_t chunk = 0; chunk < b->chunk_count; chunk++) {
        first_items[chunk] = parts;
        parts += (b->chunks[chunk + 1] - b->chunks[chunk] + each - 1) / each;
    }
    first_items[b->chunk_count] = parts;
    Attention attention = {step, each, first_items};
    parallel(attend_item, &attention, parts * m->kv_heads);
}

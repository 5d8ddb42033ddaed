// The forward pass of a decoder-only transformer on a CPU, over a paged KV cache.
//
// Batch-invariant by construction: each output number is one chain of fused multiply-adds in an order that depends only on the
// model and on the token's own position. How many rows run together, where a prompt was cut, how many threads there are and
// which vectors the CPU has change which numbers are computed side by side, but never the order of one sum.
//
// Everything is written with vectors of 16 floats, which the compiler maps to one AVX-512 register, two of AVX2 or four of NEON.

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((ext_vector_type(16)));
typedef int v16i __attribute__((ext_vector_type(16)));
typedef v16 v16u __attribute__((aligned(4)));  // may lie at any float
typedef uint16_t v16h __attribute__((ext_vector_type(16), aligned(2)));
typedef int8_t v16b __attribute__((ext_vector_type(16), aligned(1)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("clang loop unroll(full)")
#define LOAD(p) (*(const v16u *)(p))
#define STORE(p, v) (*(v16u *)(p) = (v))
#define FMA(a, b, c) __builtin_elementwise_fma((v16)(a), (v16)(b), (v16)(c))

enum { LANES = 16, PANEL = 64, KEYS = 64, ROWS = 6 };
#ifdef __AVX512F__
enum { COLUMNS = 64 };  // of a tile: 6 x 64 sums stay in registers
#else
enum { COLUMNS = 16 };
#endif

// --- threads -----------------------------------------------------------------------------------------------------------------

typedef void (*Work)(void *context, int64_t item);

static struct {
    pthread_mutex_t lock;
    pthread_cond_t begun, done;
    int64_t threads, round, busy, items;
    atomic_int_fast64_t next;
    Work work;
    void *context;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER, .threads = 1};

static void run_items(void) {
    for (int64_t item; (item = atomic_fetch_add(&pool.next, 1)) < pool.items;) pool.work(pool.context, item);
}

static void *helper(void *unused) {
    int64_t seen = 0;
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.round == seen) pthread_cond_wait(&pool.begun, &pool.lock);
        seen = pool.round;
        pthread_mutex_unlock(&pool.lock);
        run_items();
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0) pthread_cond_signal(&pool.done);
    }
    return 0;
}

// Starts threads up to this number in all; returns how many there are. For the thread that computes, once.
int64_t start_threads(int64_t threads) {
    for (; pool.threads < threads; pool.threads++) {
        pthread_t made;
        if (pthread_create(&made, 0, helper, 0)) break;
        pthread_detach(made);
    }
    return pool.threads;
}

static void parallel(Work work, void *context, int64_t items) {
    if (pool.threads == 1 || items == 1) {
        for (int64_t item = 0; item < items; item++) work(context, item);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool.work = work, pool.context = context, pool.items = items, pool.busy = pool.threads - 1;
    atomic_store(&pool.next, 0);
    pool.round++;
    pthread_cond_broadcast(&pool.begun);
    pthread_mutex_unlock(&pool.lock);
    run_items();
    pthread_mutex_lock(&pool.lock);
    while (pool.busy) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

// --- functions of one vector ---------------------------------------------------------------------------------------------------

INLINE float sum16(v16 v) {
    float s[LANES];
    STORE(s, v);
    UNROLL for (int step = 8; step; step /= 2)
        UNROLL for (int i = 0; i < step; i++) s[i] += s[i + step];
    return s[0];
}

INLINE float max16(v16 v) {
    float m = v[0];
    UNROLL for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

INLINE v16 select16(v16i mask, v16 yes, v16 no) {
    v16i bits = (mask & __builtin_bit_cast(v16i, yes)) | (~mask & __builtin_bit_cast(v16i, no));
    return __builtin_bit_cast(v16, bits);
}

// e^x for x <= 88; exactly 0 below -87. Cephes' expf: 2^n times a polynomial in the rest, off by at most 2 units in the last place.
INLINE v16 exp16(v16 x) {
    v16i tiny = x < (v16)(-87.0f);
    x = select16(tiny, (v16)0.0f, x);
    v16 n = __builtin_elementwise_roundeven(x * 1.44269504f);
    v16 r = FMA(n, -0.693359375f, x);
    r = FMA(n, 2.12194440e-4f, r);
    v16 p = (v16)1.9875691500e-4f;
    p = FMA(p, r, 1.3981999507e-3f);
    p = FMA(p, r, 8.3334519073e-3f);
    p = FMA(p, r, 4.1665795894e-2f);
    p = FMA(p, r, 1.6666665459e-1f);
    p = FMA(p, r, 5.0000001201e-1f);
    p = FMA(p, r * r, r) + 1.0f;
    v16i power = (__builtin_convertvector(n, v16i) + 127) << 23;
    return select16(tiny, (v16)0.0f, p * __builtin_bit_cast(v16, power));
}

// --- linear layers -------------------------------------------------------------------------------------------------------------

enum { FLOAT32, BFLOAT16, INT8 };

typedef struct {
    const void *weight;  // [panels][inputs][PANEL]: 64 outputs side by side
    const float *scale;  // [outputs], of INT8
    const float *bias;   // [outputs] or null
    int64_t inputs, outputs, format;  // outputs: a multiple of PANEL
} Linear;

INLINE v16 load_weight(const void *weight, int64_t at, const int format) {
    if (format == FLOAT32) return *(const v16u *)((const float *)weight + at);
    if (format == BFLOAT16) {
        v16i wide = __builtin_convertvector(*(const v16h *)((const uint16_t *)weight + at), v16i) << 16;
        return __builtin_bit_cast(v16, wide);
    }
    return __builtin_convertvector(__builtin_convertvector(*(const v16b *)((const int8_t *)weight + at), v16i), v16);
}

// y[rows][COLUMNS] = x[rows][inputs] times some columns of one panel, summed over the inputs in order.
INLINE void tile(const int rows, const int format, const Linear *linear, int64_t column, const float *x, int64_t x_stride,
                 float *y, int64_t y_stride) {
    enum { VECTORS = COLUMNS / LANES };
    v16 sum[ROWS][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < VECTORS; c++) sum[r][c] = (v16)0.0f;
    int64_t at = column / PANEL * linear->inputs * PANEL + column % PANEL;
    for (int64_t k = 0; k < linear->inputs; k++, at += PANEL) {
        v16 w[VECTORS];
        UNROLL for (int c = 0; c < VECTORS; c++) w[c] = load_weight(linear->weight, at + c * LANES, format);
        UNROLL for (int r = 0; r < rows; r++) {
            v16 value = (v16)x[r * x_stride + k];
            UNROLL for (int c = 0; c < VECTORS; c++) sum[r][c] = FMA(value, w[c], sum[r][c]);
        }
    }
    UNROLL for (int c = 0; c < VECTORS; c++) {
        int64_t output = column + c * LANES;
        UNROLL for (int r = 0; r < rows; r++) {
            v16 out = sum[r][c];
            if (format == INT8) out *= LOAD(linear->scale + output);
            if (linear->bias) out += LOAD(linear->bias + output);
            STORE(y + r * y_stride + output, out);
        }
    }
}

typedef struct {
    const Linear *linear;
    const float *x;
    float *y;
    int64_t x_stride, y_stride, rows;
} Product;

#define TILES(format)                                                                                     \
    switch (rows) {                                                                                       \
        case 1: tile(1, format, p->linear, column, x, p->x_stride, y, p->y_stride); break;                \
        case 2: tile(2, format, p->linear, column, x, p->x_stride, y, p->y_stride); break;                \
        case 3: tile(3, format, p->linear, column, x, p->x_stride, y, p->y_stride); break;                \
        case 4: tile(4, format, p->linear, column, x, p->x_stride, y, p->y_stride); break;                \
        case 5: tile(5, format, p->linear, column, x, p->x_stride, y, p->y_stride); break;                \
        default: tile(6, format, p->linear, column, x, p->x_stride, y, p->y_stride);                      \
    }

static void float32_tiles(const Product *p, int64_t rows, int64_t column, const float *x, float *y) { TILES(FLOAT32) }
static void bfloat16_tiles(const Product *p, int64_t rows, int64_t column, const float *x, float *y) { TILES(BFLOAT16) }
static void int8_tiles(const Product *p, int64_t rows, int64_t column, const float *x, float *y) { TILES(INT8) }

static void product_panel(void *context, int64_t panel) {
    const Product *p = context;
    for (int64_t row = 0; row < p->rows; row += ROWS) {
        int64_t rows = p->rows - row < ROWS ? p->rows - row : ROWS;
        const float *x = p->x + row * p->x_stride;
        float *y = p->y + row * p->y_stride;
        for (int64_t column = panel * PANEL; column < (panel + 1) * PANEL; column += COLUMNS) {
            if (p->linear->format == FLOAT32) float32_tiles(p, rows, column, x, y);
            else if (p->linear->format == BFLOAT16) bfloat16_tiles(p, rows, column, x, y);
            else int8_tiles(p, rows, column, x, y);
        }
    }
}

// y [rows][y_stride] = x [rows][x_stride] times the layer's weights, plus its bias.
void multiply(const Linear *linear, const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t rows) {
    enum { BLOCK = 240 };  // rows of x that stay in the second-level cache
    for (int64_t row = 0; row < rows; row += BLOCK) {
        int64_t some = rows - row < BLOCK ? rows - row : BLOCK;
        Product product = {linear, x + row * x_stride, y + row * y_stride, x_stride, y_stride, some};
        parallel(product_panel, &product, linear->outputs / PANEL);
    }
}

// --- norms, rotary embedding, activation -----------------------------------------------------------------------------------------

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

// --- the model -----------------------------------------------------------------------------------------------------------------

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

INLINE float *kv_at(const Step *s, int64_t row, int64_t position, int64_t value) {
    const Model *m = s->model;
    int64_t width = m->kv_heads * m->head_dim;
    int64_t block = s->batch->blocks[s->batch->tables[row] + position / m->block_size];
    int64_t plane = (block * m->layer_count + s->layer) * 2 + value;
    return s->batch->kv + (plane * m->block_size + position % m->block_size) * width;
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

// --- attention -----------------------------------------------------------------------------------------------------------------

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
        if (softcap > 0.0f) {
            v16 twice = one * (2.0f / softcap);
            twice = select16(twice > (v16)80.0f, (v16)80.0f, select16(twice < (v16)-80.0f, (v16)-80.0f, twice));
            one = softcap - 2.0f * softcap / (1.0f + exp16(twice));
        }
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

static void attend(Step *step, int64_t *first_items) {
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

// --- the forward pass ------------------------------------------------------------------------------------------------------------

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

// Linear layers. Each output is summed over the inputs in order, so it does not depend on how many rows there are.

#include "model.h"
#include "threads.h"
#include "vectors.h"

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

void multiply(const Linear *linear, const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t rows) {
    enum { BLOCK = 240 };  // rows of x that stay in the second-level cache
    for (int64_t row = 0; row < rows; row += BLOCK) {
        int64_t some = rows - row < BLOCK ? rows - row : BLOCK;
        Product product = {linear, x + row * x_stride, y + row * y_stride, x_stride, y_stride, some};
        parallel(product_panel, &product, linear->outputs / PANEL);
    }
}

// Vectors of 16 floats, which the compiler maps to one AVX-512 register, two of AVX2 or four of NEON.

#pragma once

#include <stdint.h>

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

// cap * tanh(x / cap), as cap - 2 cap / (1 + e^(2 x / cap)) (Gemma 2, arXiv:2408.00118).
INLINE v16 softcap16(v16 x, float cap) {
    v16 twice = x * (2.0f / cap);
    twice = select16(twice > (v16)80.0f, (v16)80.0f, select16(twice < (v16)-80.0f, (v16)-80.0f, twice));
    return cap - 2.0f * cap / (1.0f + exp16(twice));
}

// out = x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019, arXiv:1910.07467); size is a multiple of 16.
INLINE void rms_norm(const float *x, const float *weight, float epsilon, int64_t size, float *out) {
    v16 squares = (v16)0.0f;
    for (int64_t i = 0; i < size; i += LANES) squares = FMA(LOAD(x + i), LOAD(x + i), squares);
    float scale = 1.0f / __builtin_sqrtf(sum16(squares) / (float)size + epsilon);
    for (int64_t i = 0; i < size; i += LANES) STORE(out + i, LOAD(x + i) * scale * LOAD(weight + i));
}

// What gate and up of an expert become, and the biases of its GEMMs. ACT (2 silu·mul, 4 gelu·mul); LIMIT and ALPHA where
// gates are limited; UP_BIAS and DOWN_BIAS, the types of their elements, where there are biases: they are the last
// arguments, first that of gate and up. Their order is that of the rows of the weights.
#pragma once
#include "prelude.cuh"

#ifdef UP_BIAS
#define UP_BIAS_PARAMETER , const void* up_bias
#define UP_BIAS_ARGUMENT , up_bias
#define BIAS_OF_UP(row) load1<UP_BIAS>(up_bias, row)
#else
#define UP_BIAS_PARAMETER
#define UP_BIAS_ARGUMENT
#define BIAS_OF_UP(row) 0.0f
#endif
#ifdef DOWN_BIAS
#define DOWN_BIAS_PARAMETER , const void* down_bias
#define DOWN_BIAS_ARGUMENT , down_bias
#define BIAS_OF_DOWN(row) load1<DOWN_BIAS>(down_bias, row)
#else
#define DOWN_BIAS_PARAMETER
#define DOWN_BIAS_ARGUMENT
#define BIAS_OF_DOWN(row) 0.0f
#endif

#ifdef LIMIT
DEVICE float gated_exactly(float gate, float up) {
    gate = fminf(gate, LIMIT), up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return gate / (1.0f + expf(-ALPHA * gate)) * (up + 1.0f);
}
// With the exponential and the division of the hardware.
DEVICE float gated(float gate, float up) {
    gate = fminf(gate, LIMIT), up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return __fdividef(gate, 1.0f + __expf(-ALPHA * gate)) * (up + 1.0f);
}
#else
DEVICE float gated_exactly(float gate, float up) { return gate / (1.0f + expf(-gate_exponent<ACT>(gate))) * up; }
DEVICE float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate_exponent<ACT>(gate))) * up; }
#endif

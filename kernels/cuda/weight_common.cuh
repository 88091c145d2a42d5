// What the two kernels that make weights do alike.
#ifndef ESPALIER_WEIGHT_COMMON
#define ESPALIER_WEIGHT_COMMON

#include "codebook.cuh"

// What both are called with.
struct Arguments {
    const u32* trellis;
    const u16* suh;
    const u16* svh;
    u16* weight;
    int in_tiles, out_tiles;
    int in_features;
    int start, stop;  // rows of the weight that are wanted
    float norm;       // 1 / sqrt(ROTATION_IN ROTATION_OUT), a 0 counting as 1, times the value of a decoded 1
};

__device__ __forceinline__ void copy_async(u32 shared_address, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(source));
}

__device__ __forceinline__ u32 packed(float low, float high) {
    return BFLOAT16 ? bfloat2_from_floats(low, high) : half2_from_floats(low, high);
}

__device__ __forceinline__ float sum_of(float a, float b) { return a + b; }
__device__ __forceinline__ float difference_of(float a, float b) { return a - b; }
__device__ __forceinline__ u32 sum_of(u32 a, u32 b) { return half2_add(a, b); }
__device__ __forceinline__ u32 difference_of(u32 a, u32 b) { return half2_subtract(a, b); }

// Add and subtract COUNT rows, FIRST apart, as the Hadamard matrix of that size does, without its factor.
template <int FIRST, int COUNT, typename T, int ROWS, int N>
__device__ __forceinline__ void mix(T (&rows)[ROWS][N]) {
#pragma unroll
    for (int step = FIRST; step < FIRST * COUNT; step *= 2)
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if ((i & step) == 0)
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const T a = rows[i][j], b = rows[i + step][j];
                    rows[i][j] = sum_of(a, b);
                    rows[i + step][j] = difference_of(a, b);
                }
}

#endif  // ESPALIER_WEIGHT_COMMON

// Hadamard rotations, scales and rounding of the expert bank's activations, a warp a chunk of them (expert_bank.cu).
#ifndef ESPALIER_BANK_ROTATION
#define ESPALIER_BANK_ROTATION

#include "bank_data.cuh"

// ---- rotation -------------------------------------------------------------------------------------------------------

// The orthonormal Hadamard transform of the blocks of a chunk; a lane has EACH neighbouring numbers.
template <int BLOCK>
__device__ __forceinline__ void rotate(float (&v)[EACH], int lane) {
    if constexpr (BLOCK > 0) {
#pragma unroll
        for (int step = 1; step < EACH; step *= 2) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (i & step) continue;
                const float a = v[i], b = v[i + step];
                v[i] = a + b, v[i + step] = a - b;
            }
        }
#pragma unroll
        for (int step = 1; step * EACH < BLOCK; step *= 2) {
            const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < EACH; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], step));
        }
        constexpr float NORM = BLOCK == 32    ? 0.17677669529663687f
                               : BLOCK == 64  ? 0.125f
                               : BLOCK == 128 ? 0.08838834764831845f
                                              : 0.0625f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) v[i] *= NORM;
    }
}

// EACH floats of two rows of partial sums, each added up over its slices. The loads of several slices of both are under
// way at once.
__device__ __forceinline__ void summed(float (&v0)[EACH], const float* part0, int slices0, float (&v1)[EACH],
                                       const float* part1, int slices1, int stride) {
    constexpr int AT_ONCE = 16 / EACH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) v0[i] = v1[i] = 0;
#pragma unroll 1
    for (int slice = 0; slice < max(slices0, slices1); slice += AT_ONCE) {
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            float4 four0[AT_ONCE], four1[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                four0[j] = four1[j] = {};
                const int at = (slice + j) * stride + i;
                if (slice + j < slices0) four0[j] = __ldcg(reinterpret_cast<const float4*>(part0 + at));
                if (slice + j < slices1) four1[j] = __ldcg(reinterpret_cast<const float4*>(part1 + at));
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                v0[i] += four0[j].x, v0[i + 1] += four0[j].y, v0[i + 2] += four0[j].z, v0[i + 3] += four0[j].w;
                v1[i] += four1[j].x, v1[i + 1] += four1[j].y, v1[i + 2] += four1[j].z, v1[i + 3] += four1[j].w;
            }
        }
    }
}

__device__ __forceinline__ u16 halfword(uint2 four, int i) {
    return static_cast<u16>((i < 2 ? four.x : four.y) >> (16 * (i & 1)));
}

struct Scales {
    uint2 four[EACH / 4];
};

// scales[first ... ], those from `size` on are not read; scales are aligned to 16 and their length is a multiple of it.
__device__ __forceinline__ Scales load_scales(const u16* scales, int first, int size) {
    Scales loaded = {};
    if (first < size) {
#pragma unroll
        for (int i = 0; i < EACH / 4; ++i) loaded.four[i] = reinterpret_cast<const uint2*>(scales + first)[i];
    }
    return loaded;
}

// v *= scales, zero from `size` on.
__device__ __forceinline__ void scaled(float (&v)[EACH], const Scales& scales, int first, int size) {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        v[i] = first + i < size ? v[i] * float_of_half(halfword(scales.four[i / 4], i % 4)) : 0.0f;
}

// Write a rotated chunk to shared memory as float16, divided by 2^exponent where it is very large or very small. The
// exponent is a multiple of 16 and almost always 0: the largest magnitude of a chunk comes to lie in [2^-8, 2^8).
__device__ __forceinline__ void store_inputs(const float (&v)[EACH], int token, int chunk, int lane) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) largest = fmaxf(largest, fabsf(v[i]));
    const int bits = __reduce_max_sync(~0u, __float_as_int(largest));
    const int magnitude = (bits >> 23) - 127;  // -127 for zero
    // An infinity or a NaN is left as it is; the factor is a normal number.
    const int exponent = bits == 0 || magnitude > 127 ? 0 : min(max(((magnitude + 8) >> 4) * 16, -112), 120);
    const float factor = __int_as_float((127 - exponent) << 23);
    // In the order of the operand B: of a tile's pairs 0 ... 7, pair i + 4 comes behind pair i.
    const int first = chunk * CHUNK + lane * EACH, pair = first % 16 / 2;
    u32* tile = reinterpret_cast<u32*>(team_data().inputs + token * INPUT_STRIDE + first / 16 * 32);
#pragma unroll
    for (int i = 0; i < EACH / 2; ++i)
        tile[(pair + i) % 4 * 2 + (pair + i) / 4] = half2_of(v[2 * i] * factor, v[2 * i + 1] * factor);
    if (lane == 0) team_data().exponents[token][chunk] = exponent;
}

#endif

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

// EACH floats of a row of partial sums, added up over its slices.
__device__ __forceinline__ void summed(float (&v)[EACH], const float* part, int slices, int stride) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) v[i] = 0;
#pragma unroll 8
    for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            const float4 four = __ldcg(reinterpret_cast<const float4*>(part + slice * stride + i));
            v[i] += four.x, v[i + 1] += four.y, v[i + 2] += four.z, v[i + 3] += four.w;
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
        for (int i = 0; i < EACH / 4; ++i) loaded.four[i] = __ldg(reinterpret_cast<const uint2*>(scales + first) + i);
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

// The end of phase 3 of matmul.cu: from rotated sums to y.
#ifndef ESPALIER_MATMUL_OUTPUTS
#define ESPALIER_MATMUL_OUTPUTS

#include "matmul_problem.cuh"

__device__ __forceinline__ void add_eight(float (&v)[8], const float* source) {
    const float4 a = reinterpret_cast<const float4*>(source)[0], b = reinterpret_cast<const float4*>(source)[1];
    v[0] += a.x, v[1] += a.y, v[2] += a.z, v[3] += a.w;
    v[4] += b.x, v[5] += b.y, v[6] += b.z, v[7] += b.w;
}

// Eight sums of a row over all buffers, `source` those of the first one.
__device__ __forceinline__ void add_buffers(float (&v)[8], const Problem& p, const float* source, int sum_stride) {
#pragma unroll 2
    for (int b = 0; b < p.buffers; ++b, source += p.rows * sum_stride) add_eight(v, source);
}

// Count a warp that has written its parts of some rows, each lane that is `wanted` one row at its own counter; return
// as bits which lanes are the last of `all`. These see all parts of their row and leave the counter zero. All lanes;
// what they wrote before is seen by whoever comes later.
__device__ __forceinline__ u32 last_arrivals(int* counter, int all, bool wanted) {
    int before = -1;
    __syncwarp();
    if (wanted) {
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        if (before == all - 1) *counter = 0;
    }
    __syncwarp();
    return __ballot_sync(0xFFFFFFFFu, before == all - 1);
}

// Eight outputs of a row from column n on: rotated sums to y.
__device__ __forceinline__ void store_outputs(const float (&v)[8], const Problem& p, int row, int n) {
    if (n >= p.out_features) return;
    const uint4 scales = *reinterpret_cast<const uint4*>(p.svh + n);
    const u32 scale[4] = {scales.x, scales.y, scales.z, scales.w};
    const float shift = (p.is_bfloat ? power_of_two(BFLOAT_SHIFT) : 1.0f) * DECODED_UNIT;
    float out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        out[i] = v[i] * float_from_half((u16)(scale[i / 2] >> (16 * (i & 1)))) * p.norm * shift;
        if (p.bias_kind != 0 && n + i < p.out_features) {
            const float bias = p.bias_kind == 1   ? static_cast<const float*>(p.bias)[n + i]
                               : p.bias_kind == 2 ? float_from_half(static_cast<const u16*>(p.bias)[n + i])
                                                  : float_from_bfloat(static_cast<const u16*>(p.bias)[n + i]);
            out[i] += bias;
        }
    }
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        word[i] = p.is_bfloat ? bfloat2_from_floats(out[2 * i], out[2 * i + 1])
                              : half2_from_floats(out[2 * i], out[2 * i + 1]);
    u16* target = p.y + (long long)row * p.out_features + n;
    if (p.y_aligned) {
        *reinterpret_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (n + i < p.out_features) target[i] = (u16)(word[i / 2] >> (16 * (i & 1)));
    }
}

#endif  // ESPALIER_MATMUL_OUTPUTS

// The consumers of decode_weight_sm90.cu: the rest of the rotation, scales, and the rows of the weight.
#ifndef ESPALIER_WEIGHT_ROWS
#define ESPALIER_WEIGHT_ROWS

#include "weight_layout.cuh"

// Element of the matrix along the output: the Hadamard matrix of 64 or less, in blocks, or the unit matrix; a float16.
__device__ __forceinline__ u32 matrix_element(int row, int column) {
    constexpr int SIDE = ROTATION_OUT == 0 ? 1 : ROTATION_OUT < 64 ? ROTATION_OUT : 64;
    return row / SIDE != column / SIDE ? 0 : __popc(row & column & (SIDE - 1)) % 2 ? 0xBC00u : 0x3C00u;
}

// All threads: write it as operand a.
__device__ __forceinline__ void fill_matrix(char* matrix) {
    for (int i = threadIdx.x; i < (int)MATRIX_BYTES / 16; i += THREADS) {
        const int row = i % 64, column = i / 64 * 8;
        u32 pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            pairs[j] = matrix_element(row, column + 2 * j) | matrix_element(row, column + 2 * j + 1) << 16;
        reinterpret_cast<uint4*>(matrix)[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

// The products of part `part` of an operand. With ROTATE_FIRST: of 64 inputs, or 32 of them, for outputs 0 to 63 in the
// first half of the sums and for 64 to 127 in the second; else of 128 inputs, for outputs 64 half ... + 63.
template <int SIGN>
__device__ __forceinline__ void multiply_operand(float (&sums)[SUM_ROWS][8], u32 operand, int half, int part) {
    const u64 matrix = operand_descriptor(MATRIX_START, 1024, 128);
    const u32 first = ROTATE_FIRST ? (16 * half + 8 * part) * COLUMN_OF_PIECES : ROTATION_OUT == 128 ? 0 : half * 1024;
    const u64 values = operand_descriptor(operand + first, 128, COLUMN_OF_PIECES);
    constexpr u64 MATRIX_STEP = descriptor_bytes(2048), STEP = descriptor_bytes(256);
    begin_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_warpgroup<1>(sums, matrix + i * MATRIX_STEP, values + i * STEP, i > 0);
    if constexpr (!ROTATE_FIRST && ROTATION_OUT == 128)  // the matrix of 128 is four of 64, the last negated
#pragma unroll
        for (int i = 0; i < 4; ++i)
            multiply_warpgroup<SIGN>(sums, matrix + i * MATRIX_STEP, values + (i + 4) * STEP, true);
    end_products(sums);
}

// sum (16 x 8) = c + a b, with operands of half the depth of those in tensor_core.cuh. The result is apart from c: ptxas 13.0
// takes c for what it was, later on, where it is a sum of a warpgroup and overwritten.
__device__ __forceinline__ void multiply_add_8(float (&sum)[4], const float* c, u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Rotate a lane's numbers along four of the seven binary digits of the input, in two float16 terms.
__device__ __forceinline__ void rotate_sums(float (&x)[8], const u32 (&matrix)[2][2], u32 minus_unit) {
    const u32 high[4] = {half2_from_floats(x[0], x[1]), half2_from_floats(x[2], x[3]), half2_from_floats(x[4], x[5]),
                         half2_from_floats(x[6], x[7])};
    float rest[2][4];  // the first term times the negated unit matrix leaves the second
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply_add_8(rest[i], x + 4 * i, high[2 * i], high[2 * i + 1], minus_unit);
    const u32 low[4] = {half2_from_floats(rest[0][0], rest[0][1]), half2_from_floats(rest[0][2], rest[0][3]),
                        half2_from_floats(rest[1][0], rest[1][1]), half2_from_floats(rest[1][2], rest[1][3])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float result[4] = {0, 0, 0, 0};
        multiply_add(result, high, matrix[i][0], matrix[i][1]);
        multiply_add(result, low, matrix[i][0], matrix[i][1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[4 * i + j] = result[j];
    }
}

// What is left of both rotations.
__device__ __forceinline__ void rotate_rest(float (&sums)[SUM_ROWS][8], const u32 (&matrix)[2][2], u32 minus_unit) {
    if constexpr (ROTATE_FIRST) {
        if constexpr (ROTATION_OUT == 128) mix<SUM_ROWS / 2, 2>(sums);
        if constexpr (MIX_LAST) mix<2, 2>(sums);
    } else {
#pragma unroll
        for (int i = 0; i < SUM_ROWS; ++i) rotate_sums(sums[i], matrix, minus_unit);
        mix<1, IN_TILES>(sums);
    }
}

// Scale, round and store eight neighbours along the input of two rows that are eight apart.
struct Rows {
    u16* first;
    long long below;  // numbers to the second
    bool wanted[2];

    __device__ __forceinline__ void store(
        const float (&even)[8], const float (&odd)[8], const float (&out)[2], const float4 (&in)[2], int column) const {
        const float scale[8] = {in[0].x, in[0].y, in[0].z, in[0].w, in[1].x, in[1].y, in[1].z, in[1].w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* x = (j < 2 ? even : odd) + 4 * (j % 2) + 2 * i;
                pairs[j] = packed(x[0] * out[i] * scale[2 * j], x[1] * out[i] * scale[2 * j + 1]);
            }
            if (wanted[i]) *(uint4*)(first + i * below + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
};

#endif  // ESPALIER_WEIGHT_ROWS

// The rotation of a block of weights, but for the mixing of tiles along the output (decode_weight.cu says why it is exact).
#ifndef ESPALIER_WEIGHT_ROTATION
#define ESPALIER_WEIGHT_ROTATION

#include "tensor_core.cuh"
#include "weight_block.cuh"

struct Matrices {
    // 16 x 16; the input's also negated, its rows in the order in which a lane ends up with four neighbours along the input.
    u32 in[2][4], out[4];
    u32 minus_unit;  // half of an operand whose product with a matrix is half of that matrix, negated
};

__device__ __forceinline__ Matrices matrices(int lane) {
    Matrices m;
    const int g = lane / 4, c = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int column = c + 8 * (i / 2);
        const int in_row = 4 * (g / 2) + 2 * (i % 2) + g % 2, out_row = g + 8 * (i % 2);
        m.in[0][i] = hadamard16<ROTATION_IN != 0>(in_row, column) | hadamard16<ROTATION_IN != 0>(in_row, column + 1) << 16;
        m.out[i] =
            hadamard16<ROTATION_OUT != 0>(out_row, column) | hadamard16<ROTATION_OUT != 0>(out_row, column + 1) << 16;
        m.in[1][i] = m.in[0][i] ^ 0x80008000u;
    }
    m.minus_unit = (c == g ? 0xBC00u : 0u) | (c + 1 == g ? 0xBC000000u : 0u);
    return m;
}

// What the bias of the table adds to a sum of first products, with the opposite sign: a constant has only a zeroth component,
// which is row 0 of the first tile, unless nothing is rotated. A lane has rows lane / 4 and 8 more.
__device__ __forceinline__ float minus_bias(int tile, int lane, int row, int sources) {
    if (!IS_GRID || (ROTATION_IN && (row != 0 || lane >= 4 || tile % IN_TILES / MIX_SUMS != 0))) return 0;
    return -BIAS * SUMMANDS * MIX_PAIRS * (1.0f / (1 << 24)) * sources;
}

__device__ __forceinline__ void start(u32 (&sum)[2][2], float row_0, float row_8) {
    sum[0][0] = sum[1][0] = half2_from_floats(row_0, row_0);
    sum[0][1] = sum[1][1] = half2_from_floats(row_8, row_8);
}
__device__ __forceinline__ void start(float (&sum)[2][4], float row_0, float row_8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = i % 4 < 2 ? row_0 : row_8;
}

// Both halves of a tile times a matrix, added to their sums.
template <typename Sum>
__device__ __forceinline__ void multiply_add(Sum (&sum)[2], const u32 (&matrix)[4], const u32 (&pairs)[4]) {
    multiply_add(sum[0], matrix, pairs[0], pairs[1]);
    multiply_add(sum[1], matrix, pairs[2], pairs[3]);
}

// The second product of a tile. The halves of the result are along the input: number 2 i + j of half h is row lane / 4 + 8 i
// of the tile (output), column 4 (lane % 4) + 2 h + j.
__device__ __forceinline__ void rotate_out(const Matrices& m, const u32 (&sum)[2][2], float (&result)[2][4]) {
    start(result, 0, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) multiply_add(result[half], m.out, sum[0][half], sum[1][half]);
}

// The same for a first product in float32, which is split in two float16 terms.
__device__ __forceinline__ void rotate_out(const Matrices& m, const float (&sum)[2][4], float (&result)[2][4]) {
    start(result, 0, 0);
    // As an operand a, in whatever order, the first term times the negated unit matrix leaves the second.
    const u32 high[4] = {half2_from_floats(sum[0][0], sum[0][1]), half2_from_floats(sum[1][0], sum[1][1]),
                         half2_from_floats(sum[0][2], sum[0][3]), half2_from_floats(sum[1][2], sum[1][3])};
    float rest[2][4] = {{sum[0][0], sum[0][1], sum[1][0], sum[1][1]}, {sum[0][2], sum[0][3], sum[1][2], sum[1][3]}};
    multiply_add(rest[0], high, m.minus_unit, 0);
    multiply_add(rest[1], high, 0, m.minus_unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* r = rest[half];
        multiply_add(result[half], m.out, high[2 * half], high[2 * half + 1]);
        multiply_add(result[half], m.out, half2_from_floats(r[0], r[1]), half2_from_floats(r[2], r[3]));
    }
}

// Where the sums lie, in pieces of 16 bytes: numbers 4 half ... + 3 of a lane's result. A lane of the reader finds four
// neighbours along the input, of two rows that are eight apart, in two pieces. The swap of neighbouring tiles spares
// writers to wait.
__device__ __forceinline__ int piece(int out_tile, int row, int half, int in_piece) {
    return ((out_tile * 8 + row) * 2 + half) * 32 + (in_piece ^ 4 * (row % 2));
}

template <bool>
struct FirstProduct {
    typedef float Sum[2][4];
};
template <>
struct FirstProduct<true> {
    typedef u32 Sum[2][2];
};

// Decode a column of eight tiles and rotate it, but for the mixing of tiles along the output.
__device__ __forceinline__ void make_sums(
    const Decoder& decoder, const Matrices& m, const TileColumn& column, int lane, float4* sums) {
    u32 pairs[SOURCES == 1 ? TILES : 1][4];
    int weight = 1;  // of a constant in all sources
    if constexpr (SOURCES == 1) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) decode_tile(decoder, column.tile(0, tile), lane, pairs[tile]);
        mix<MIX_SUMS * MIX_PRODUCTS, MIX_PAIRS>(pairs);
    } else {
        weight = 0;
#pragma unroll
        for (int source = 0; source < SOURCES; ++source)
            weight += source_negated(source, column.in_block, column.out_block) ? -1 : 1;
    }
#pragma unroll
    for (int first = 0; first < TILES; first += MIX_SUMS) {
        float near[MIX_SUMS][8];
#pragma unroll
        for (int tile = first; tile < first + MIX_SUMS; ++tile) {
            FirstProduct<EXACT>::Sum sum;
            start(sum, minus_bias(tile, lane, 0, weight), minus_bias(tile, lane, 8, weight));
            if constexpr (SOURCES == 1) {
                const int result = tile / MIX_SUMS % MIX_PRODUCTS;
#pragma unroll
                for (int i = 0; i < MIX_PRODUCTS; ++i)
                    multiply_add(sum, m.in[__popc(result & i) % 2], pairs[tile + (i - result) * MIX_SUMS]);
            } else {
#pragma unroll
                for (int source = 0; source < SOURCES; ++source) {
                    const u32 flip = source_negated(source, column.in_block, column.out_block) ? 0x80008000u : 0u;
                    const u32 in[4] = {m.in[0][0] ^ flip, m.in[0][1] ^ flip, m.in[0][2] ^ flip, m.in[0][3] ^ flip};
                    decode_tile(decoder, column.tile(source, tile), lane, pairs[0]);
                    multiply_add(sum, in, pairs[0]);
                }
            }
            float result[2][4];
            rotate_out(m, sum, result);
#pragma unroll
            for (int i = 0; i < 8; ++i) near[tile - first][i] = result[i / 4][i % 4];
        }
        mix<1, MIX_SUMS>(near);
#pragma unroll
        for (int tile = first; tile < first + MIX_SUMS; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* r = &near[tile - first][4 * half];
                sums[piece(column.warp, lane / 4, half, 4 * tile + lane % 4)] = make_float4(r[0], r[1], r[2], r[3]);
            }
    }
}

#endif  // ESPALIER_WEIGHT_ROTATION

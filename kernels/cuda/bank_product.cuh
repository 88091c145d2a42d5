// The expert bank's products: a task's inputs in shared memory times 128 columns of a matrix. See expert_bank.cu.
#ifndef ESPALIER_BANK_PRODUCT
#define ESPALIER_BANK_PRODUCT

#include "bank_data.cuh"
#include "lane_tile.cuh"

// ---- the product ----------------------------------------------------------------------------------------------------

struct Matrix {
    const u32* tiles;
    int height, width;   // in tiles: along the inputs, along the outputs
};

// Multiply `count` tokens' inputs in shared memory, `size` of them from `first` on, with 128 columns; the sums of the
// warps go to shared memory. A warp has four tiles along k and eight along the columns, and of these a part.
template <class B>
__device__ __forceinline__ void product(const Matrix matrix, int block, int first, int size, int count) {
    const int lane = threadIdx.x & 31, warp = team_warp(), part = warp % PARTS;
    Team& team = team_data();
    const int row = lane >> 2, q = lane & 3, token = row < count ? row : 0;
    const int column = min(block * 8 + row, matrix.width - 1);
    const int steps = (size + 63) / 64;
    const unsigned char* inputs = team.inputs + token * INPUT_STRIDE;
    float sums[8 / PARTS][4] = {};
    // All chunks of a token are brought to its largest exponent.
    int exponent = -112;
    for (int chunk = 0; chunk * CHUNK < size; ++chunk) exponent = max(exponent, team.exponents[token][chunk]);

    TilePart<B> next;
    auto load = [&](int step) {
        const int tile = min(first / 16 + step * 4 + q, matrix.height - 1);  // beyond the end, the inputs are zero
        next.load(matrix.tiles + (static_cast<i64>(tile) * matrix.width + column) * B::TILE_WORDS, part);
    };
    int step = warp / PARTS;
    if (step < steps) load(step);
    for (; step < steps; step += K_WARPS) {
        const TilePart<B> tile = next;
        if (step + K_WARPS < steps) load(step + K_WARPS);
        uint4 values[2];
        const uint4* place = reinterpret_cast<const uint4*>(inputs + (step * 4 + q) * 32);
        values[0] = place[0], values[1] = place[1];
        const int below = exponent - team.exponents[token][step * 64 / CHUNK];
        if (below) {
            const u32 factor = half2_of(exp2f(-below), exp2f(-below));
            values[0] = {half2_product(values[0].x, factor), half2_product(values[0].y, factor),
                         half2_product(values[0].z, factor), half2_product(values[0].w, factor)};
            values[1] = {half2_product(values[1].x, factor), half2_product(values[1].y, factor),
                         half2_product(values[1].z, factor), half2_product(values[1].w, factor)};
        }
        multiply<B>(tile, values, sums, lane);
    }
    // The sums of this lane are of the tokens 2 q and 2 q + 1, whose exponents lanes of those rows have.
    const float factor = exp2f(exponent);
    const float factor0 = __shfl_sync(~0u, factor, 8 * q), factor1 = __shfl_sync(~0u, factor, 8 * q + 4);
    float* out = &team.sums[warp / PARTS][0][16 * row + 8 / PARTS * part];
#pragma unroll
    for (int i = 0; i < 8 / PARTS; ++i) {
        if (2 * q < count) {
            float* at = out + 2 * q * SUM_STRIDE + i;
            at[0] = sums[i][0] * factor0, at[8] = sums[i][2] * factor0;
        }
        if (2 * q + 1 < count) {
            float* at = out + (2 * q + 1) * SUM_STRIDE + i;
            at[0] = sums[i][1] * factor1, at[8] = sums[i][3] * factor1;
        }
    }
}

__device__ __forceinline__ void any_product(int book, const Matrix matrix, int block, int first, int size, int count) {
#define BOOK(NUMBER, ...)                                                      \
    case NUMBER:                                                               \
        product<Book<__VA_ARGS__>>(matrix, block, first, size, count);         \
        break;
    switch (book) {
        BOOKS
        default: __trap();  // no such codebook: the sums would be what the memory held before
    }
#undef BOOK
}

// Add up the warps' sums, and write them to out[token * stride + column].
__device__ __forceinline__ void write_sums(float* out, i64 stride, int count) {
    const Team& team = team_data();
    team_barrier();
    for (int i = team_thread(); i < count * COLUMNS; i += TEAM_THREADS) {
        const int token = i / COLUMNS, column = i % COLUMNS;
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < K_WARPS; ++warp) sum += team.sums[warp][token][column];
        __stcg(out + token * stride + column, sum);
    }
    team_barrier();
}

#endif

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

// Twice the bits of a codebook's weights. Not from an array, which the compiler would put into memory.
__device__ __forceinline__ int half_steps_of(int book) {
    int half_steps = 0;
#define BOOK(NUMBER, HALF_STEPS, ...) half_steps = book == NUMBER ? HALF_STEPS : half_steps;
    BOOKS
#undef BOOK
    return half_steps;
}

__device__ constexpr int largest_half_steps() {
    int largest = 0;
#define BOOK(NUMBER, HALF_STEPS, ...) largest = most(largest, HALF_STEPS);
    BOOKS
#undef BOOK
    return largest;
}

// The first part of a tile that a lane multiplies in a task, of whichever codebook: asked for before the inputs are
// made, as it has to be waited for too. Not where codebooks are so wide that registers would be short.
struct FirstPart {
    static constexpr bool LOADED = largest_half_steps() <= 8;
    static constexpr int WORDS = LOADED ? 4 * largest_half_steps() / PARTS : 0;
    u32 word[WORDS + 1];

    __device__ __forceinline__ void load(const Matrix matrix, int half_steps, int block, int first) {
        if (!LOADED) return;
        const int lane = threadIdx.x & 31, part = team_warp() % PARTS, words = 4 * half_steps / PARTS;
        const int tile = min(first / 16 + team_warp() / PARTS * 4 + (lane & 3), matrix.height - 1);
        const int column = min(block * 8 + (lane >> 2), matrix.width - 1);
        const i64 number = static_cast<i64>(tile) * matrix.width + column;
        const u32* start = matrix.tiles + number * 4 * half_steps + part * words;
        word[0] = start[part ? -1 : 4 * half_steps - 1];
        if (half_steps % 2 == 0) {
#pragma unroll
            for (int i = 0; i + 4 <= WORDS; i += 4) {
                if (i >= words) continue;
                const uint4 four = *reinterpret_cast<const uint4*>(start + i);
                word[i + 1] = four.x, word[i + 2] = four.y, word[i + 3] = four.z, word[i + 4] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i += 2) {
                if (i >= words) continue;
                const uint2 two = *reinterpret_cast<const uint2*>(start + i);
                word[i + 1] = two.x, word[i + 2] = two.y;
            }
        }
    }
};

// Multiply `count` tokens' inputs in shared memory, `size` of them from `first` on, with 128 columns; the sums of the
// warps go to shared memory. A warp has four tiles along k and eight along the columns, and of these a part.
template <class B>
__device__ __forceinline__ void product(const Matrix matrix, int block, int first, int size, int count,
                                        bool begins, const FirstPart& begin) {
    const int lane = threadIdx.x & 31, warp = team_warp(), part = warp % PARTS;
    Team& team = team_data();
    const int row = lane >> 2, q = lane & 3, token = row < count ? row : 0;
    const int column = min(block * 8 + row, matrix.width - 1);
    const int steps = (size + 63) / 64;
    const unsigned char* inputs = team.inputs + token * INPUT_STRIDE;
    float sums[8 / PARTS][4] = {};
    // All chunks of a token are brought to its largest exponent.
    int exponent = -112, lowest = 120;
#pragma unroll
    for (int chunk = 0; chunk < SLICE / CHUNK; ++chunk) {
        if (chunk * CHUNK >= size) continue;
        const int each = team.exponents[token][chunk];
        exponent = max(exponent, each), lowest = min(lowest, each);
    }
    const bool alike = __all_sync(~0u, lowest == exponent);

    TilePart<B> next;
    // Of this warp's tiles. Beyond the end of the matrix the inputs are zero, and the last tile is read again.
    const int before = part ? -1 : B::TILE_WORDS - 1, step_words = K_WARPS * 4 * matrix.width * B::TILE_WORDS;
    int step = warp / PARTS, tile_row = first / 16 + step * 4 + q;
    const i64 tile_number = static_cast<i64>(min(tile_row, matrix.height - 1)) * matrix.width + column;
    const u32* start = matrix.tiles + tile_number * B::TILE_WORDS + part * B::WORDS;
    bool loaded = false;
    if constexpr (FirstPart::LOADED) {
        if (begins) {
#pragma unroll
            for (int i = 0; i <= B::WORDS; ++i) next.word[i] = begin.word[i];
            loaded = true;
        }
    }
    if (!loaded && step < steps) next.load(start, before);
    for (; step < steps; step += K_WARPS) {
        const TilePart<B> tile = next;
        tile_row += 4 * K_WARPS;
        if (tile_row < matrix.height) start += step_words;
        if (step + K_WARPS < steps) next.load(start, before);
        uint4 values[2];
        const uint4* place = reinterpret_cast<const uint4*>(inputs + (step * 4 + q) * 32);
        values[0] = place[0], values[1] = place[1];
        if (!alike) {  // as good as never
            const int below = exponent - team.exponents[token][step * 64 / CHUNK];
            const u32 factor = half2_of(exp2f(-below), exp2f(-below));
            values[0] = {half2_product(values[0].x, factor), half2_product(values[0].y, factor),
                         half2_product(values[0].z, factor), half2_product(values[0].w, factor)};
            values[1] = {half2_product(values[1].x, factor), half2_product(values[1].y, factor),
                         half2_product(values[1].z, factor), half2_product(values[1].w, factor)};
        }
        multiply<B>(tile, values, sums, lane);
    }
    // The sums of this lane are of the tokens 2 q and 2 q + 1, whose exponents lanes of those rows have.
    const float own = exp2f(exponent);
    const float factor0 = __shfl_sync(~0u, own, 8 * q), factor1 = __shfl_sync(~0u, own, 8 * q + 4);
    static_assert(8 / PARTS == 4, "a lane has four neighbouring columns, and the four that are eight beyond");
    float* out = &team.sums[warp / PARTS][0][16 * row + 4 * part];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (2 * q + i >= count) continue;
        const float factor = i ? factor1 : factor0;
        float4* at = reinterpret_cast<float4*>(out + (2 * q + i) * SUM_STRIDE);
        at[0] = {sums[0][i] * factor, sums[1][i] * factor, sums[2][i] * factor, sums[3][i] * factor};
        at[2] = {sums[0][i + 2] * factor, sums[1][i + 2] * factor, sums[2][i + 2] * factor, sums[3][i + 2] * factor};
    }
}

// `begins`: the block is the first of the task, of which `begin` has been loaded.
__device__ __forceinline__ void any_product(int book, const Matrix matrix, int block, int first, int size, int count,
                                            bool begins, const FirstPart& begin) {
#define BOOK(NUMBER, ...)                                                                      \
    case NUMBER:                                                                               \
        product<Book<__VA_ARGS__>>(matrix, block, first, size, count, begins, begin);          \
        break;
    switch (book) {
        BOOKS
        default: __trap();  // no such codebook: the sums would be what the memory held before
    }
#undef BOOK
}

// Add up the warps' sums, and write them to out[token * stride + column]. Only the warp that announces waits until all
// of them are written.
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
    if (team_warp() == ANNOUNCE_WARP)
        asm volatile("bar.sync %0, %1;" ::"r"(TEAMS + team_number() + 1), "n"(TEAM_THREADS) : "memory");
    else asm volatile("bar.arrive %0, %1;" ::"r"(TEAMS + team_number() + 1), "n"(TEAM_THREADS) : "memory");
}

#endif

// A block of 128 x 128 weights: how it is made, what of it lies in shared memory, and the numbers of its tiles.
#ifndef ESPALIER_WEIGHT_BLOCK
#define ESPALIER_WEIGHT_BLOCK

#include "weight_common.cuh"

constexpr int BLOCK = 128;
constexpr int TILES = BLOCK / 16;  // of a block, along each side
constexpr int THREADS = 32 * TILES;

constexpr int IN_SOURCES = ROTATION_IN == 256 ? 2 : 1, OUT_SOURCES = ROTATION_OUT == 256 ? 2 : 1;
constexpr int SOURCES = IN_SOURCES * OUT_SOURCES;
// How many neighbouring tiles a rotation mixes inside a block of 128.
constexpr int IN_TILES = ROTATION_IN >= 128 ? 8 : ROTATION_IN >= 32 ? ROTATION_IN / 16 : 1;
constexpr int OUT_TILES = ROTATION_OUT >= 128 ? 8 : ROTATION_OUT >= 32 ? ROTATION_OUT / 16 : 1;

// The largest code of a grid. Table entries are codes plus this, which needs no sign; the products take it away again.
constexpr int BIAS = FAMILY == FAMILY_E2M1 ? 12 : FAMILY == FAMILY_INT5 ? 14 : FAMILY == FAMILY_INT6 ? 30 : 123;
constexpr int SUMMANDS = ROTATION_IN ? 16 : 1;  // of the first product

// How the tiles that a rotation along the input mixes are mixed: grids as float16 pairs before the products, while that is
// exact; EXL3's numbers by summing two products; and the rest, neighbouring tiles, as float32 after both products.
__device__ constexpr int pair_tiles() {
    int tiles = 1;
    while (IS_GRID && SOURCES == 1 && 2 * tiles <= IN_TILES && BIAS * SUMMANDS * 2 * tiles <= 2048) tiles *= 2;
    return tiles;
}
constexpr int MIX_PAIRS = pair_tiles();
constexpr int MIX_PRODUCTS = !IS_GRID && SOURCES == 1 && IN_TILES > 1 ? 2 : 1;
constexpr int MIX_SUMS = IN_TILES / (MIX_PAIRS * MIX_PRODUCTS);
// Whether the first products are float16 numbers.
constexpr bool EXACT = IS_GRID ? BIAS * SUMMANDS * MIX_PAIRS * SOURCES <= 2048 : SUMMANDS * SOURCES == 1;

// Shared memory: sums, two buffers of trellis, of scales, table.
constexpr int BLOCK_WORDS = SOURCES * TILES * TILES * TILE_WORDS;
constexpr int SUMS_BYTES = BLOCK * BLOCK * 4;
constexpr int TRELLIS_BYTES = STAGED ? BLOCK_WORDS * 4 : 0;
constexpr int SCALE_PIECES = BLOCK / 8;  // of 16 bytes
constexpr int SCALES_BYTES = 4 * BLOCK * 2;  // suh and svh of this block and the next

// The block that a source of block (in_block, out_block) is: of two that a rotation of 256 mixes, the first or the second.
__device__ __forceinline__ int source_in(int source, int in_block) {
    return IN_SOURCES == 2 ? (in_block & ~1) + source % 2 : in_block;
}
__device__ __forceinline__ int source_out(int source, int out_block) {
    return OUT_SOURCES == 2 ? (out_block & ~1) + source / IN_SOURCES : out_block;
}
// Of the two, the second half of the result takes the second negated.
__device__ __forceinline__ bool source_negated(int source, int in_block, int out_block) {
    return (in_block % 2 && source % IN_SOURCES) != (out_block % 2 && source / IN_SOURCES);
}

// Start to copy what block (in_block, out_block) is made of: its scales, and its trellis with that of the blocks it is rotated
// with.
__device__ __forceinline__ void fetch(const Arguments& a, u32 target, u32 scales, int in_block, int out_block) {
    constexpr int ROW = TILES * TILE_WORDS / 4;  // 16-byte pieces of eight tiles in a row
    constexpr int PIECES = SOURCES * TILES * ROW;
#pragma unroll
    for (int first = 0; STAGED && first < PIECES; first += THREADS) {
        const int i = first + threadIdx.x;
        if (PIECES % THREADS != 0 && i >= PIECES) break;
        const int piece = i % ROW, row = i / ROW % TILES, source = i / (ROW * TILES);
        const int tile_row = source_in(source, in_block) * TILES + row;
        const int first_column = source_out(source, out_block) * TILES;
        if (tile_row < a.in_tiles && first_column + piece * 4 / TILE_WORDS < a.out_tiles) {
            const long long tile = (long long)tile_row * a.out_tiles + first_column;
            copy_async(target + i * 16, a.trellis + tile * TILE_WORDS + piece * 4);
        }
    }
    if (threadIdx.x < 2 * SCALE_PIECES) {
        const bool in = threadIdx.x < SCALE_PIECES;
        const int first = (in ? in_block : out_block) * BLOCK + threadIdx.x % SCALE_PIECES * 8;
        if (first < 16 * (in ? a.in_tiles : a.out_tiles))
            copy_async(scales + threadIdx.x * 16, (in ? a.suh : a.svh) + first);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

struct Decoder {
#if IS_GRID
    const u8* table;  // of codes plus BIAS

    // As float16 bits, a small whole number is that multiple of 2^-24.
    __device__ __forceinline__ u32 pair(u32 state0, u32 state1) const {
        return low_halves(table[grid_index(state0)], table[grid_index(state1)]);
    }
#else
    __device__ __forceinline__ u32 pair(u32 state0, u32 state1) const { return exl3_pair(state0, state1); }
#endif
};

// The four pairs of a lane of one tile: two operands of 16 in x 8 out.
__device__ __forceinline__ void decode_tile(const Decoder& decoder, const u32* tile, int lane, u32 (&pairs)[4]) {
    const Segment segment = load_segment(tile, lane);
    pairs[0] = decoder.pair(window<0>(segment), window<1>(segment));
    pairs[1] = decoder.pair(window<2>(segment), window<3>(segment));
    pairs[2] = decoder.pair(window<4>(segment), window<5>(segment));
    pairs[3] = decoder.pair(window<6>(segment), window<7>(segment));
}

// Where the tiles of a warp's column are.
struct TileColumn {
    const u32* staged;  // in shared memory: the tile of the first row and first source
    const u32* trellis;
    int in_tiles, out_tiles, in_block, out_block, warp;

    __device__ __forceinline__ const u32* tile(int source, int row) const {
        if constexpr (STAGED) return staged + (source * TILES + row) * TILES * TILE_WORDS;
        // Of a tile past the edge nothing is used: any tile will do.
        const int tile_row = min(source_in(source, in_block) * TILES + row, in_tiles - 1);
        const int tile_column = min(source_out(source, out_block) * TILES + warp, out_tiles - 1);
        return trellis + ((long long)tile_row * out_tiles + tile_column) * TILE_WORDS;
    }
};

#endif  // ESPALIER_WEIGHT_BLOCK

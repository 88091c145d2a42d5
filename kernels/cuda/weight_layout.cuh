// How decode_weight_sm90.cu divides the work, and where things lie in shared memory.
#ifndef ESPALIER_WEIGHT_LAYOUT
#define ESPALIER_WEIGHT_LAYOUT

#include "codebook_tables.cuh"
#include "overlap.cuh"
#include "shared_barrier.cuh"
#include "tensor_core.cuh"
#include "warpgroup.cuh"
#include "weight_common.cuh"

constexpr int BLOCK = 128, TILES = BLOCK / 16;  // a block of weights, and its tiles along each side
constexpr int IN_TILES = ROTATION_IN >= 32 ? ROTATION_IN / 16 : 1;  // that a rotation along the input mixes

// Whether tiles are rotated along the input before the product along the output. The largest code: such a tile has sums
// of 16 MIX_PAIRS of them, and float16 is exact to 2048.
constexpr bool ROTATE_FIRST = IS_GRID;
static_assert(FAMILY != FAMILY_INT8, "sums of int8 would have to be split too");
constexpr int LARGEST = FAMILY == FAMILY_E2M1 ? 12 : FAMILY == FAMILY_INT5 ? 14 : 30;
__device__ constexpr int mixed_pairs() {
    int tiles = 1;
    while (ROTATE_FIRST && 2 * tiles <= IN_TILES && LARGEST * 16 * 2 * tiles <= 2048) tiles *= 2;
    return tiles;
}
constexpr int MIX_PAIRS = mixed_pairs();
constexpr bool MIX_LAST = ROTATE_FIRST && MIX_PAIRS < IN_TILES;  // int6: the halves of a rotation of 128, as float32

// Consumers of ROTATE_FIRST have half the sums at a time, unless halves are mixed: registers for more producers.
constexpr int PARTS = ROTATE_FIRST && !MIX_LAST ? 2 : 1, SUM_ROWS = 8 / PARTS;
constexpr int PRODUCERS = PARTS == 2 ? 4 : 3, CONSUMERS = 2;  // warpgroups
constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = PARTS == 2 ? 96 : 128;
// Consumers get what producers have given back: they would wait for more than that forever.
static_assert(PRODUCERS * PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                  (PRODUCERS + CONSUMERS) * (65536 / THREADS / 8 * 8),
              "a thread has as many registers at launch as the threads of a block allow, in eights");

// A column of pieces (warpgroup.cuh): one piece beside the other along the output, 16 of them, or 8 with ROTATE_FIRST, and 32
// bytes so that the lanes of store_row meet different banks.
constexpr u32 COLUMN_OF_PIECES = (ROTATE_FIRST ? 8 : 16) * 128 + 32;
constexpr u32 OPERAND_BYTES = (ROTATE_FIRST ? 32 : 16) * COLUMN_OF_PIECES;

// Where the operand has tile column `column`, of 16 outputs, of a block ...
__device__ __forceinline__ u32 column_offset(int column) {
    return ROTATE_FIRST ? column / 4 * (8 / PARTS) * COLUMN_OF_PIECES + column % 4 * 256 : column * 256;
}
// ... and in it the tiles 2 pair and 2 pair + 1. With ROTATE_FIRST each consumer takes two pairs, of all outputs.
__device__ constexpr int consumer_of(int pair) { return MIX_LAST ? pair % 2 : pair / 2; }
__device__ constexpr u32 pair_offset(int pair) {
    const int second = MIX_LAST ? pair / 2 : pair % 2;
    return (ROTATE_FIRST ? 16 * consumer_of(pair) + 4 * PARTS * second : 4 * pair) * COLUMN_OF_PIECES;
}

// Shared memory, from TABLE_START on. The matrix is that of 64 outputs.
constexpr int BUFFERS = 2;  // operands that are being made or used; a producer warp has as many columns of tiles
constexpr int PRODUCER_WARPS = 4 * PRODUCERS;
constexpr u32 MATRIX_BYTES = 64 * 64 * 2, STAGED_BYTES = 4 * TILES * TILE_WORDS;  // a column of tiles
constexpr u32 MATRIX_START = TABLE_START + TABLE_BYTES;
constexpr u32 OPERANDS_START = MATRIX_START + MATRIX_BYTES;
constexpr u32 STAGED_START = OPERANDS_START + BUFFERS * OPERAND_BYTES;
constexpr u32 SCALES_START = STAGED_START + PRODUCER_WARPS * BUFFERS * STAGED_BYTES;  // two times 128 float32 a consumer
constexpr u32 BARRIERS_START = SCALES_START + CONSUMERS * 2 * BLOCK * 4;
static_assert(BARRIERS_START + BUFFERS * 16 <= SHARED_BYTES + TABLE_START, "the host knows how much that is");
static_assert(THREADS == 128 * (PRODUCERS + CONSUMERS), "and how many threads");
static_assert(4 * CONSUMERS == TILES, "a barrier counts the producers of a block, a column each, or the consumers' warps");
__device__ __forceinline__ SharedBarrier full_barrier(int buffer) { return {BARRIERS_START + 16 * buffer}; }
__device__ __forceinline__ SharedBarrier empty_barrier(int buffer) { return {BARRIERS_START + 16 * buffer + 8}; }

// The blocks that a thread block makes, one after the other.
struct Blocks {
    int in_block, out_block, count;
    int in_blocks, in_step, out_step;

    __device__ __forceinline__ explicit Blocks(const Arguments& a) {
        in_blocks = (a.in_features + BLOCK - 1) / BLOCK;
        const int first = a.start / BLOCK, all = in_blocks * ((a.stop + BLOCK - 1) / BLOCK - first);
        in_block = blockIdx.x % in_blocks, out_block = first + blockIdx.x / in_blocks;
        in_step = gridDim.x % in_blocks, out_step = gridDim.x / in_blocks;
        count = (all - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    }

    __device__ __forceinline__ void advance(int blocks) {
        for (int i = 0; i < blocks; ++i) {
            in_block += in_step, out_block += out_step;
            if (in_block >= in_blocks) in_block -= in_blocks, ++out_block;
        }
    }
};

#endif  // ESPALIER_WEIGHT_LAYOUT

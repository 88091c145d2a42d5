// The producers of decode_weight_sm90.cu: a column of eight tiles, decoded, as part of the operand of a product.
#ifndef ESPALIER_WEIGHT_COLUMN
#define ESPALIER_WEIGHT_COLUMN

#include "weight_layout.cuh"

// ---- the windows of a tile in shared memory -----------------------------------------------------------------------

// Where a lane finds the words of a tile: the first, which may be the last of the ring, and those that follow.
struct TileWords {
    u32 first, rest;
    __device__ __forceinline__ TileWords(u32 tile, int lane) {
        const int index = (lane * LANE_BITS - 16) >> 5;
        rest = tile + 4 * (index + 1);
        first = rest - 4 + (index < 0 ? 4 * TILE_WORDS : 0);
    }
};

__device__ __forceinline__ u32 shared_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}

// As load_segment, of a tile that lies `offset` behind. Past its end nothing is used, but it can be read.
__device__ __forceinline__ Segment shared_segment(const TileWords& words, int offset, int lane) {
    Segment segment;
    segment.word[SEGMENT_WORDS] = 0;
    u32 raw = shared_word(words.first + offset);
    segment.word[0] = raw;
#pragma unroll
    for (int i = ALIGNED ? 1 : 0; i < SEGMENT_WORDS; ++i) {
        const u32 following = shared_word(words.rest + offset + 4 * (ALIGNED ? i - 1 : i));
        segment.word[i] = ALIGNED ? following : __funnelshift_l(following, raw, (lane * LANE_BITS - 16) & 31);
        raw = following;
    }
    return segment;
}

// The hash of position J of the lane.
template <int J>
__device__ __forceinline__ u32 window_hash(const Segment& segment) {
    constexpr int first = SEGMENT_OFFSET + window_end(J);
    constexpr int word = first / 32, offset = first % 8, byte = first % 32 / 8;
    constexpr int after = word + 2 <= SEGMENT_WORDS ? word + 2 : SEGMENT_WORDS;
    u32 high = segment.word[word], low = byte == 3 ? segment.word[word + 1] : 0;
    if constexpr (offset != 0) high = __funnelshift_l(segment.word[word + 1], high, offset);
    if constexpr (offset != 0 && byte == 3) low = __funnelshift_l(segment.word[after], low, offset);
    constexpr u32 SELECTED = byte == 0 ? 0x3232 : byte == 1 ? 0x2121 : byte == 2 ? 0x1010 : 0x0707;
    return hashed_twice(__byte_perm(high, low, SELECTED));
}

template <int J>
__device__ __forceinline__ u32 value_pair(const Segment& segment, const Lookup& lookup) {
    const u32 first = window_hash<J>(segment), second = window_hash<J + 1>(segment);
#if IS_GRID
    return grid_pair(first, second, lookup);
#else
    return exl3_pair_of_hashes(first, second);
#endif
}

// ---- a column -----------------------------------------------------------------------------------------------------

// Start to copy the eight tiles of a column; those past the edge stay what they are.
__device__ __forceinline__ void fetch_column(
    const u32* trellis, int in_tiles, int out_tiles, int tile_row, int tile_column, u32 target, int lane) {
    constexpr int PIECES = TILE_WORDS / 4;  // of a tile, 16 bytes each
    if (tile_column >= out_tiles) return;
#pragma unroll
    for (int first = 0; first < TILES * PIECES; first += 32) {
        const int i = first + lane, row = tile_row + i / PIECES;
        if ((TILES * PIECES % 32 == 0 || i < TILES * PIECES) && row < in_tiles)
            copy_async(target + 16 * i, trellis + ((long long)row * out_tiles + tile_column) * TILE_WORDS + i % PIECES * 4);
    }
}

// The values of a column, in pairs along the input.
__device__ __forceinline__ void decode_column(
    u32 (&pairs)[TILES][4], const TileWords& words, const Lookup& lookup, int lane) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const Segment segment = shared_segment(words, tile * 4 * TILE_WORDS, lane);
        pairs[tile][0] = value_pair<0>(segment, lookup);
        pairs[tile][1] = value_pair<2>(segment, lookup);
        pairs[tile][2] = value_pair<4>(segment, lookup);
        pairs[tile][3] = value_pair<6>(segment, lookup);
    }
}

__device__ __forceinline__ void store_row(u32 address, const u32 (&row)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(row[0]), "r"(row[1]), "r"(row[2]), "r"(row[3])
                 : "memory");
}

// Mix the tiles of a column as far as float16 is exact, rotate them where that comes first, and store them.
__device__ __forceinline__ void store_column(
    u32 (&pairs)[TILES][4], const u32 (&matrix)[2][2], u32 operand, int column, int lane) {
    mix<1, MIX_PAIRS>(pairs);
    const u32 target = operand + column_offset(column) + lane % 4 * COLUMN_OF_PIECES + lane / 4 * 16;
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // output lane / 4 + 8 i of both tiles
            // A lane's numbers of two tiles, inputs 2 q and 2 q + 1 and 8 more of each, become a row of a piece. So the row's
            // position in its column of pieces and the piece's change places.
            const u32 two[4] = {pairs[tile][2 * i], pairs[tile + 1][2 * i], pairs[tile][2 * i + 1], pairs[tile + 1][2 * i + 1]};
            u32 row[4] = {two[0], two[1], two[2], two[3]};
            if constexpr (ROTATE_FIRST) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 sum[2] = {0, 0};
                    multiply_add(sum, two, matrix[half][0], matrix[half][1]);
                    row[2 * half] = sum[0], row[2 * half + 1] = sum[1];
                }
            }
            store_row(target + pair_offset(tile / 2) + 128 * i, row);
        }
}

#endif  // ESPALIER_WEIGHT_COLUMN

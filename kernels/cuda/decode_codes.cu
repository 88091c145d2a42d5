// decode_codes: the trellis of a module to its stored codes, in the rotated basis (spec/packing.md), bit for bit.
//
// Grid (out tiles / 8, in tiles / 8), 256 threads. A warp decodes one tile at a time; eight side by side go through shared
// memory, so that they are stored in whole rows.
#include "codebook.cuh"

#if IS_GRID
typedef signed char Code;
#else
typedef u16 Code;
#endif

constexpr int TILES = 8;                      // side by side, one for each warp; and one below the other
constexpr int ROW_CODES = TILES * 16;
constexpr int VECTOR = 16 / sizeof(Code);     // codes of one store

extern "C" __global__ void __launch_bounds__(256) decode_codes(
    const u32* __restrict__ trellis, Code* __restrict__ codes, int in_tiles, int out_tiles) {
    __shared__ __align__(16) Code rows[16][ROW_CODES + VECTOR];
#if IS_GRID
    __shared__ signed char table[TABLE_ENTRIES];
    for (int i = threadIdx.x; i < TABLE_ENTRIES; i += blockDim.x) table[i] = (signed char)grid_code(i);
    __syncthreads();
#endif
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_column = blockIdx.x * TILES;
    const int columns = min(TILES, out_tiles - first_column);
    const int last_row = min((int)(blockIdx.y + 1) * TILES, in_tiles);
    for (int tile_row = blockIdx.y * TILES; tile_row < last_row; ++tile_row) {
        if (warp < columns) {
            const long long tile = (long long)tile_row * out_tiles + first_column + warp;
            const Segment segment = load_segment(trellis + tile * TILE_WORDS, lane);
            const u32 states[8] = {window<0>(segment), window<1>(segment), window<2>(segment), window<3>(segment),
                                   window<4>(segment), window<5>(segment), window<6>(segment), window<7>(segment)};
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const int row = 2 * (lane % 4) + 8 * (j / 2 % 2), column = 16 * warp + lane / 4 + 8 * (j / 4);
#if IS_GRID
                rows[row][column] = table[grid_index(states[j])];
                rows[row + 1][column] = table[grid_index(states[j + 1])];
#else
                const u32 pair = exl3_pair(states[j], states[j + 1]);
                rows[row][column] = (u16)pair;
                rows[row + 1][column] = (u16)(pair >> 16);
#endif
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * (ROW_CODES / VECTOR); i += blockDim.x) {
            const int row = i / (ROW_CODES / VECTOR), column = i % (ROW_CODES / VECTOR) * VECTOR;
            if (column < 16 * columns) {
                const long long target = (16LL * tile_row + row) * (16LL * out_tiles) + 16 * first_column + column;
                *(uint4*)(codes + target) = *(const uint4*)&rows[row][column];
            }
        }
        __syncthreads();
    }
}

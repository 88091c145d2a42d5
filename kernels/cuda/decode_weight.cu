// decode_weight: the trellis of a module to rows of its weight, (out, in), in the original basis (spec/rotation.md §3), in
// one pass. decode_weight_sm90.cu does the same where it can.
//
// Further macros: ROTATION_IN and ROTATION_OUT (0, 32, 64, 128, 256), BFLOAT16 (0 or 1), STAGED (1: the trellis goes through
// shared memory; 0: where that is too small) and RESIDENT (thread blocks that a multiprocessor holds).
//
// A thread block makes blocks of 128 x 128 weights, one after the other; the trellis of the next comes in meanwhile. First
// warp w decodes the eight tiles of tile column w and rotates them along the input and, within tiles, along the output: a
// Hadamard matrix of 128 is that of 16, a product of tensor cores, times one of 8 between tiles, sums of whole tiles or of
// their products. What comes out of the first products is the operand of the second as it lies in the registers. The float32
// sums go through shared memory, where they turn into rows, and warp w mixes the tiles along the output, scales and stores.
// A rotation of 256 adds or subtracts the tiles of two blocks first, that is, decodes twice.
//
// Exactness: every sum of a grid codebook is exact, whatever the rotation. Numbers are whole multiples of 2^-24, the least
// float16, and sums of them stay below 2^24 times that, where float32 is exact. Between the products they are float16: where
// they stay below 2^11 times that they are exact as they are, elsewhere they are split in two terms. Of EXL3's numbers the two
// terms keep 22 bits.
#include "weight_rotation.cuh"

// The first `count` of four neighbours of a row, one by one.
__device__ __noinline__ void store_single(u16* target, int count, u32 low, u32 high) {
    if (count > 0) target[0] = (u16)low;
    if (count > 1) target[1] = (u16)(low >> 16);
    if (count > 2) target[2] = (u16)high;
    if (count > 3) target[3] = (u16)(high >> 16);
}

// Rows r, r + 8, r + 16, ... r + 120 of the block of sums: mix the tiles along the output, scale, round and store.
__device__ __forceinline__ void store_rows(
    const Arguments& a, const float4* sums, const u16* scales, int r, int lane, int in_block, int out_block) {
    const int k = in_block * BLOCK + 4 * lane, first = out_block * BLOCK;
    // Two halves, of two neighbours along the input each. Read one after the other they take fewer registers.
    constexpr int AT_ONCE = RESIDENT > 2 ? 1 : 2;
    u32 pairs[2 * TILES][2];
#pragma unroll
    for (int begin = 0; begin < 2; begin += AT_ONCE) {
        float rows[AT_ONCE][TILES][4];
#pragma unroll
        for (int half = begin; half < begin + AT_ONCE; ++half)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const float4 sum = sums[piece(tile, r, half, lane)];
                float(&row)[4] = rows[half - begin][tile];
                row[0] = sum.x, row[1] = sum.y, row[2] = sum.z, row[3] = sum.w;
            }
#pragma unroll
        for (int half = begin; half < begin + AT_ONCE; ++half) {
            mix<1, OUT_TILES>(rows[half - begin]);
            const u32 in_pair = *(const u32*)(scales + 4 * lane + 2 * half);
            const float in_0 = float_from_half((u16)in_pair) * a.norm, in_1 = float_from_half((u16)(in_pair >> 16)) * a.norm;
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                const float out = float_from_half(scales[BLOCK + 8 * i + r]);
                const float* row = &rows[half - begin][i / 2][i % 2 * 2];
                pairs[i][half] = packed(row[0] * out * in_0, row[1] * out * in_1);
            }
        }
    }
    u16* target = a.weight + (long long)(first + r - a.start) * a.in_features + k;
    const long long step = 8LL * a.in_features;
    if (a.in_features % 4 == 0 && first >= a.start && first + BLOCK <= a.stop) {
        if (k >= a.in_features) return;
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i, target += step) *(uint2*)target = make_uint2(pairs[i][0], pairs[i][1]);
    } else {
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i, target += step) {
            const int n = first + 8 * i + r;
            if (n >= a.start && n < a.stop) store_single(target, a.in_features - k, pairs[i][0], pairs[i][1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) decode_weight(
    const u32* __restrict__ trellis, const u16* __restrict__ suh, const u16* __restrict__ svh, u16* __restrict__ weight,
    int in_tiles, int out_tiles, int in_features, int start, int stop, float norm) {
    const Arguments a = {trellis, suh, svh, weight, in_tiles, out_tiles, in_features, start, stop, norm};
    extern __shared__ __align__(128) char shared[];
    float4* sums = (float4*)shared;
    const u32* words = (const u32*)(shared + SUMS_BYTES);
    const u16* scales = (const u16*)(shared + SUMS_BYTES + 2 * TRELLIS_BYTES);
    const u32 words_address = (u32)__cvta_generic_to_shared(words);
    const u32 scales_address = (u32)__cvta_generic_to_shared(scales);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    const int in_blocks = (in_features + BLOCK - 1) / BLOCK;
    const int first_out_block = start / BLOCK;
    const int blocks = in_blocks * ((stop + BLOCK - 1) / BLOCK - first_out_block);
    int block = blockIdx.x;
    if (block >= blocks) return;
    int in_block = block % in_blocks, out_block = first_out_block + block / in_blocks;
    const int in_step = gridDim.x % in_blocks, out_step = gridDim.x / in_blocks;
    fetch(a, words_address, scales_address, in_block, out_block);

#if IS_GRID
    u8* table = (u8*)(shared + SUMS_BYTES + 2 * TRELLIS_BYTES + SCALES_BYTES);
    for (int i = threadIdx.x; i < TABLE_ENTRIES; i += THREADS) table[i] = (u8)(grid_code(i) + BIAS);
    const Decoder decoder = {table};
#else
    const Decoder decoder = {};
#endif
    const Matrices m = matrices(lane);

    for (int turn = 0;; ++turn) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();  // trellis, scales and table are there, and all that was read of the block before has been read
        int next_in = in_block + in_step, next_out = out_block + out_step;
        if (next_in >= in_blocks) next_in -= in_blocks, ++next_out;
        block += gridDim.x;
        const int here = turn % 2, there = here ^ 1;
        if (block < blocks)
            fetch(a, words_address + there * TRELLIS_BYTES, scales_address + there * BLOCK * 4, next_in, next_out);
        const u32* staged = words + here * (TRELLIS_BYTES / 4) + warp * TILE_WORDS;
        const TileColumn column = {staged, trellis, in_tiles, out_tiles, in_block, out_block, warp};
        make_sums(decoder, m, column, lane, sums);
        __syncthreads();  // the sums are there
        store_rows(a, sums, scales + here * BLOCK * 2, warp, lane, in_block, out_block);
        if (block >= blocks) return;
        in_block = next_in, out_block = next_out;
    }
}

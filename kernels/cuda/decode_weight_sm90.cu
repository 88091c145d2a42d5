// decode_weight_sm90: what decode_weight.cu does, for rotations of at most 128, with the products of warpgroups of compute
// capability 9.0 (code for sm_90a).
//
// A thread block makes blocks of 128 x 128 weights, one after the other, and its warps have two tasks. *Producers* decode:
// each takes a column of eight tiles, mixes the tiles along the input, rotates along the input within tiles and leaves the
// numbers as operand in shared memory, in one of two buffers. Two warpgroups of *consumers* multiply it with the Hadamard matrix
// of 64 along the output, do what is left of the rotation as float32, scale, round and store. Two barriers a buffer say that it
// is full, and empty; nobody else waits.
//
// Rotating along the input first takes float16 numbers that are exact: sums of codes, as far as they stay below 2048 (e2m1,
// int5; int6 but for the last sums and differences). EXL3's numbers come to the product along the output as they are
// (ROTATE_FIRST is false); consumers split its sums into two float16 terms, 22 bits, and rotate them along four of the seven
// binary digits of the input.
//
// Macros: those of codebook_tables.cuh (WIDE_TABLE is 0; not int8), ROTATION_IN and ROTATION_OUT (0, 32, 64, 128), BFLOAT16 (0 or
// 1), THREADS and SHARED_BYTES. in_features is a multiple of 8.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "weight_column.cuh"
#include "weight_rows.cuh"

__device__ __forceinline__ void produce(const Arguments& a, const u32 (&matrix)[2][2], int warp, int lane) {
    const Lookup lookup(lane);
    const u32 staged = STAGED_START + warp * BUFFERS * STAGED_BYTES;
    Blocks blocks(a);
    const int columns = blocks.count * TILES;
    auto fetch = [&](int column, u32 target) {
        if (column < columns)
            fetch_column(a.trellis, a.in_tiles, a.out_tiles, blocks.in_block * TILES, blocks.out_block * TILES + column % TILES,
                         target, lane);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    blocks.advance(warp / TILES);
    fetch(warp, staged);
    u32 here = 0;
    for (int column = warp; column < columns; column += PRODUCER_WARPS) {
        blocks.advance((column + PRODUCER_WARPS) / TILES - column / TILES);
        fetch(column + PRODUCER_WARPS, staged + (STAGED_BYTES - here));
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        u32 pairs[TILES][4];
        decode_column(pairs, TileWords(staged + here, lane), lookup, lane);
        here = STAGED_BYTES - here;
        const int block = column / TILES, buffer = block % BUFFERS, round = block / BUFFERS;
        if (round) empty_barrier(buffer).wait(round - 1);
        store_column(pairs, matrix, OPERANDS_START + buffer * OPERAND_BYTES, column % TILES, lane);
        show_to_products();
        full_barrier(buffer).arrive(lane);  // and all have read what is staged
    }
}

__device__ __forceinline__ void consume(const Arguments& a, const u32 (&matrix)[2][2], char* shared_0, int warp, int lane) {
    const int g = lane / 4, q = lane % 4, half = warp / 4, thread = threadIdx.x % 128;
    const u32 minus_unit = (2 * q == g ? 0xBC00u : 0u) | (2 * q + 1 == g ? 0xBC000000u : 0u);
    constexpr int ROWS = ROTATE_FIRST ? 4 : 2;  // of a lane: two that are 8 apart, with ROTATE_FIRST also those 64 further on
    Blocks blocks(a);
    u16 next_in = 0, next_out[ROWS] = {};
    auto first_row = [&] { return blocks.out_block * BLOCK + (ROTATE_FIRST ? 16 * (warp % 4) : 16 * warp) + g; };
    auto load_scales = [&] {
        const int k = blocks.in_block * BLOCK + thread;
        next_in = k < a.in_features ? a.suh[k] : (u16)0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int n = first_row() + 8 * (i % 2) + 64 * (i / 2);
            next_out[i] = n < a.stop ? a.svh[n] : (u16)0;
        }
    };
    if (blocks.count > 0) load_scales();
    for (int block = 0; block < blocks.count; ++block) {
        const int first_n = first_row(), k = blocks.in_block * BLOCK + 16 * (q % 2) + 8 * (q / 2);
        Rows rows[ROWS / 2];
        float out[ROWS / 2][2];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int n = first_n + 8 * (i % 2) + 64 * (i / 2);
            if (i % 2 == 0) rows[i / 2].first = a.weight + (long long)(n - a.start) * a.in_features + k;
            rows[i / 2].below = 8LL * a.in_features;
            rows[i / 2].wanted[i % 2] = n >= a.start && n < a.stop;
            out[i / 2][i % 2] = float_from_half(next_out[i]);
        }
        // Both scales of the next block are on their way while this one is made.
        float* in = (float*)(shared_0 + SCALES_START) + (2 * half + block % 2) * BLOCK;
        in[thread] = float_from_half(next_in) * a.norm;
        asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
        blocks.advance(1);
        if (block + 1 < blocks.count) load_scales();

        const int buffer = block % BUFFERS;
        full_barrier(buffer).wait(block / BUFFERS);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            float sums[SUM_ROWS][8];
            const u32 operand = OPERANDS_START + buffer * OPERAND_BYTES;
            if (ROTATE_FIRST || half == 0)
                multiply_operand<1>(sums, operand, half, part);
            else
                multiply_operand<-1>(sums, operand, half, part);
            if (part == PARTS - 1) empty_barrier(buffer).arrive(lane);
            rotate_rest(sums, matrix, minus_unit);
            constexpr int GROUPS = SUM_ROWS / ROWS;  // of 32 neighbours along the input, of which a lane has eight
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const int column = 32 * (!ROTATE_FIRST ? group : MIX_LAST ? 2 * group + half : 2 * half + part + group);
                const float4* scales = (const float4*)(in + column) + 4 * (q % 2) + 2 * (q / 2);
                const float4 in_scales[2] = {scales[0], scales[1]};
                if (column < a.in_features - k)
#pragma unroll
                    for (int i = 0; i < ROWS / 2; ++i) {
                        const int row = 2 * group + i * (SUM_ROWS / 2);
                        rows[i].store(sums[row], sums[row + 1], out[i], in_scales, column);
                    }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_weight_sm90(
    const u32* trellis, const u16* suh, const u16* svh, u16* weight,
    int in_tiles, int out_tiles, int in_features, int start, int stop, float norm) {
    const Arguments a = {trellis, suh, svh, weight, in_tiles, out_tiles, in_features, start, stop, norm};
    extern __shared__ __align__(128) char shared[];
    const u32 start_address = (u32)__cvta_generic_to_shared(shared);
    if (start_address != TABLE_START) __trap();  // the table's is fixed, and no byte is left over
    char* shared_0 = shared - start_address;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);

    start_next();
    const TableEntries entries = load_entries();
    if (threadIdx.x < 2 * BUFFERS)  // the warps of a block of weights: eight producers, and all consumers
        SharedBarrier{BARRIERS_START + 8 * threadIdx.x}.make(TILES);
    __syncthreads();  // for racecheck, which takes the making of barriers for writes elsewhere
    fill_table(shared_0 + TABLE_START, entries);
    fill_matrix(shared_0 + MATRIX_START);
    show_to_products();
    __syncthreads();
    wait_for_previous();

    u32 matrix[2][2];  // 16 x 16 along the input, as operand b
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 2 * (lane % 4) + 8 * (i % 2), column = lane / 4 + 8 * (i / 2);
        matrix[i / 2][i % 2] =
            hadamard16<ROTATION_IN != 0>(row, column) | hadamard16<ROTATION_IN != 0>(row + 1, column) << 16;
    }
    if (warp < 4 * CONSUMERS) {
        take_registers<CONSUMER_REGISTERS>();
        consume(a, matrix, shared_0, warp, lane);
    } else {
        release_registers<PRODUCER_REGISTERS>();
        produce(a, matrix, warp - 4 * CONSUMERS, lane);
    }
}

#else  // never launched

extern "C" __global__ void decode_weight_sm90() {}

#endif

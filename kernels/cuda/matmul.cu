// y = x W^T + bias for up to 8 GROUPS rows, weights decoded in registers, rotations fused, in one launch.
//
// W^T = diag(suh) H_in V H_out diag(svh) (spec/rotation.md §3). In three phases:
//
//   1. inputs:   x' = x diag(suh) H_in of a slice of k, to float16 in shared memory, in the order of the mma operand.
//                Each row of a slice is scaled by a power of two, so that it neither overflows nor loses small values.
//   2. product:  warps divide a block of columns and the steps along k among themselves; sums in float32.
//   3. outputs:  sums of the warps, in fixed order; where several thread blocks have a part of k, the last warp to come
//                adds up what all have left in global memory, again in fixed order, so that the result does not depend
//                on timing. Then H_out, svh and bias.
//
// Work is cut in one of two ways. grid = (1, n): blocks of columns times units of k are one sequence, of which each
// thread block has an equal share. grid = (ranks, n): each thread block has the same range of k in every block of
// columns that it takes; it needs fewer inputs. kernels/cuda/matmul_plan.py chooses.
//
// Macros: those of tile_stream.cuh; GROUPS: rows in eights; ONE_ROW: there is only one; THREADS of a block.
#include "matmul_inputs.cuh"
#include "matmul_outputs.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) matmul(
    const u16* x, const u32* trellis, const u16* suh, const u16* svh, const void* bias, u16* y, float* parts,
    int* arrived, const u16* prepared, const int* prepared_exponent, long long x_stride, int rows, int is_bfloat,
    int bias_kind, int x_aligned, int y_aligned, int in_features, int out_features, int k_tiles, int n_tiles,
    int rotation_in, int rotation_out, int unit_tiles, int slice_tiles, int column_groups, int buffers, int blocks,
    int units, int most_parts, int inputs_at, int sums_at, float norm) {
    const Problem p = {
        x, trellis, suh, svh, bias, y, x_stride, ONE_ROW ? 1 : rows, in_features, out_features, k_tiles, n_tiles,
        rotation_in, rotation_out, is_bfloat, bias_kind, x_aligned, y_aligned, unit_tiles, slice_tiles, column_groups,
        buffers, parts, arrived, norm,
    };
    extern __shared__ __align__(128) char shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int tig = lane & 3, quad = lane >> 2;
    const int group = warp % p.column_groups, share = warp / p.column_groups, shares = warps / p.column_groups;
    const int width = p.column_groups * TILES * 16;  // columns of a block
    const int input_stride = p.slice_tiles * 16 + 8, sum_stride = width + 4;
    const u32 items = blocks * units;
    const Cut cut = {(u32)blocks, (u32)units, items * blockIdx.y / gridDim.y, items * (blockIdx.y + 1) / gridDim.y};
    const int count = cut.count();
    // Inputs of this range of k are needed, a slice at a time; slices are counted from its start.
    const int inputs_first = gridDim.x > 1 ? min((int)blockIdx.x * p.unit_tiles, p.k_tiles) : 0;
    const int inputs_end = gridDim.x > 1 ? min(inputs_first + p.unit_tiles, p.k_tiles) : p.k_tiles;

    const u32 shared_base = (u32)__cvta_generic_to_shared(shared);
    const int table_at = TABLE_ALIGNED ? 65536 - shared_base : 0;
    Shared s;
    s.table = shared + table_at;
    s.inputs = reinterpret_cast<u16*>(shared + inputs_at);
    s.sums = reinterpret_cast<float*>(shared + sums_at);
    s.largest = reinterpret_cast<u32*>(s.sums + p.buffers * p.rows * sum_stride);
    s.exponent = reinterpret_cast<int*>(s.largest + p.rows * ((p.slice_tiles + 15) / 16));
    const Lookup lookup(shared_base + table_at, lane);

    // The steps of a warp come in runs: those of one slice in one share. While a warp computes a step the next one is
    // under way, of this run or of the first after it that has any, `ahead`.
    struct Run {
        const u32* words;
        int tile, end, columns;
    };
    int ahead_share = 0, ahead_end = 0;
    const int tile_stride = 4 * shares;
    const long long word_stride = (long long)tile_stride * p.n_tiles * TILE_WORDS;
    auto slice_of = [&](int tile) { return (u32)(tile - inputs_first) / p.slice_tiles; };
    auto find_run = [&] {
        for (; ahead_share < count; ++ahead_share, ahead_end = 0) {
            const Share part = cut.share(p, ahead_share);
            for (int tile = max(ahead_end, part.first); tile < part.end; tile = ahead_end) {
                ahead_end = min((int)(inputs_first + (slice_of(tile) + 1) * p.slice_tiles), part.end);
                const int first = tile + 4 * share + tig;
                if (tile + 4 * share >= ahead_end) continue;
                const int n_tile = (part.block * p.column_groups + group) * TILES;
                const u32* words = p.trellis + ((long long)first * p.n_tiles + n_tile) * TILE_WORDS + lane_offset(lane);
                return Run{words, first, ahead_end, p.n_tiles - n_tile - quad / RUNS};
            }
        }
        return Run{p.trellis, 0, 0, 0};
    };
    Run run{nullptr, 0, 0, 0}, ahead = run;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        run = ahead;
        ahead = find_run();
    }
    // While the kernel before this one runs, nothing may be read that it may write; but it may be fetched to L2.
    if (run.tile < run.end)
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            if (piece * UNITS < run.columns) prefetch(run.words + piece * UNITS * TILE_WORDS);
    if (threadIdx.x * 64 < (inputs_end - inputs_first) * 16) prefetch(p.suh + inputs_first * 16 + threadIdx.x * 64);
    if (threadIdx.x * 64 < width && count > 0) {
        const int n = cut.share(p, 0).block * width + threadIdx.x * 64;
        if (n < p.out_features) prefetch(p.svh + n);
    }
    fill_table(s.table);
    wait_for_previous();

    Step next;
    load_step(next, run.words, run.tile < run.end ? run.columns : 0);

    int inputs_row[GROUPS];  // of B column `quad`; rows that do not exist repeat the last
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) inputs_row[j] = min(8 * j + quad, p.rows - 1) * input_stride + tig * 16;

    int turn = 0, present = -1;  // of exponents; the slice whose inputs are there
    for (int i = 0; i < count; ++i) {
        const Share part = cut.share(p, i);
        float sum[TILES][GROUPS][4];
#pragma unroll
        for (int u = 0; u < TILES; ++u)
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[u][j][e] = 0.0f;

#pragma unroll 1
        for (int tile = part.first; tile < part.end;) {
            const int slice = slice_of(tile), slice_first = inputs_first + slice * p.slice_tiles;
            const int end = min(slice_first + p.slice_tiles, part.end);
            if (slice != present) {
                const bool fresh = tile == part.first;
                if (present >= 0) __syncthreads();
                turn ^= 1;
                const int tiles = min(p.slice_tiles, inputs_end - slice_first);
                if (prepared != nullptr) {
                    copy_inputs(p, s, input_stride, slice_first, tiles, turn, prepared, prepared_exponent);
                } else {
                    make_inputs(p, s, input_stride, slice_first, tiles, turn, fresh);
                }
                present = slice;
                if (!fresh) {
#pragma unroll
                    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int row = min(8 * j + 2 * tig + e, p.rows - 1);
                            const int change = s.exponent[turn * p.rows + row] - s.exponent[(turn ^ 1) * p.rows + row];
                            const float factor = power_of_two(max(change, -126));
#pragma unroll
                            for (int u = 0; u < TILES; ++u) sum[u][j][e] *= factor, sum[u][j][e + 2] *= factor;
                        }
                }
            }
            int steps = (end - tile - 4 * share + tile_stride - 1) / tile_stride;
            const u16* inputs = s.inputs + (tile - slice_first + 4 * share) * 16;
            tile = end;
            if (steps <= 0) continue;
#pragma unroll 1
            for (; steps > 0; --steps) {
                Step now = next;
                run.words += word_stride;
                run.tile += tile_stride;
                if (steps == 1) run = ahead;
                load_step(next, run.words, run.tile < run.end ? run.columns : 0);
                close_rings(now, lane);
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    uint4 b[GROUPS];
#pragma unroll
                    for (int j = 0; j < GROUPS; ++j)
                        b[j] = *reinterpret_cast<const uint4*>(inputs + inputs_row[j] + pair * 8);
#pragma unroll
                    for (int u = 0; u < TILES; ++u)
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            u32 a[4];
#if IS_GRID && INDEX_BITS > 8 && GROUPS == 1
                            const u32 b0 = r ? b[0].z : b[0].x, b1 = r ? b[0].w : b[0].y;
                            decode_half_operand<0>(a, now, u, 2 * pair + r, lookup);
                            mma_16x8x16(sum[u][0], a, b0, b1);
                            decode_half_operand<1>(a, now, u, 2 * pair + r, lookup);
                            mma_16x8x16(sum[u][0], a, b0 >> 16, b1 >> 16);
#else
                            decode_operand(a, now, u, 2 * pair + r, lookup);
#pragma unroll
                            for (int j = 0; j < GROUPS; ++j)
                                mma_16x8x16(sum[u][j], a, r ? b[j].z : b[j].x, r ? b[j].w : b[j].y);
#endif
                        }
                }
                inputs += tile_stride * 16;
            }
            ahead = find_run();
        }

        // Sums of the warps: those of the first shares write a buffer each, further ones add to it.
        if (i > 0) __syncthreads();
        for (int round = 0; round * p.buffers < shares; ++round) {
            if (share / p.buffers == round) {
                float* buffer = s.sums + share % p.buffers * p.rows * sum_stride;
#pragma unroll
                for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int row = 8 * j + 2 * tig + e;
                        if (row >= p.rows) continue;
                        const float factor = power_of_two(-s.exponent[turn * p.rows + row]);
                        float* target = buffer + row * sum_stride + group * TILES * 16;
#pragma unroll
                        for (int u = 0; u < TILES; ++u) {
                            const int column = unit_column(u, lane);
                            float low = sum[u][j][e] * factor, high = sum[u][j][e + 2] * factor;
                            if (round > 0) low += target[column], high += target[column + 8];
                            target[column] = low;
                            target[column + 8] = high;
                        }
                    }
            }
            __syncthreads();
        }

        // Sums of the buffers, a warp to a row. Where other thread blocks have a part of these columns, the last warp
        // to come adds up what all have left, in their order.
        const int contributions = cut.contributions(part.block), column = lane * 8;
        for (int row = warp; row < p.rows; row += warps) {
            float v[8] = {};
            if (column < width) {
                const float* source = s.sums + row * sum_stride + column;
#pragma unroll 2
                for (int b = 0; b < p.buffers; ++b, source += p.rows * sum_stride) add_eight(v, source);
            }
            if (contributions > 1) {
                float* row_parts = p.parts + ((long long)part.block * p.rows + row) * most_parts * width + column;
                if (column < width) {
                    float4* mine = reinterpret_cast<float4*>(row_parts + cut.contribution(part.block) * width);
                    mine[0] = make_float4(v[0], v[1], v[2], v[3]);
                    mine[1] = make_float4(v[4], v[5], v[6], v[7]);
                }
                if (!is_last_arrival(p.arrived + part.block * p.rows + row, contributions, lane)) continue;
#pragma unroll
                for (int e = 0; e < 8; ++e) v[e] = 0.0f;
                if (column < width) {
#pragma unroll 4
                    for (int c = 0; c < contributions; ++c) add_eight(v, row_parts + c * width);
                }
            }
            rotate(v, p.rotation_out, lane);
            if (column < width) store_outputs(v, p, row, part.block * width + column);
        }
    }
}

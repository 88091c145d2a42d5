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

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul(
    const u16* x, const u32* trellis, const u16* suh, const u16* svh, const void* bias, u16* y, float* parts,
    int* arrived, const u16* prepared, const int* prepared_exponent, long long x_stride, int rows, int is_bfloat,
    int bias_kind, int x_aligned, int y_aligned, int in_features, int out_features, int k_tiles, int n_tiles,
    int rotation_in, int rotation_out, int unit_tiles, int slice_tiles, int column_groups, int buffers, int blocks,
    int units, int most_parts, int sum_sets, int input_sets, int inputs_at, int sums_at, int words_at, float norm) {
    const Problem p = {
        x, trellis, suh, svh, bias, y, x_stride, ONE_ROW ? 1 : rows, in_features, out_features, k_tiles, n_tiles,
        rotation_in, rotation_out, is_bfloat, bias_kind, x_aligned, y_aligned, unit_tiles, slice_tiles, column_groups,
        buffers, sum_sets, parts, arrived, norm,
    };
    extern __shared__ __align__(128) char shared[];
    const TableEntries entries = load_entries();
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);  // the compiler sees: the same in all lanes
    const int tig = lane & 3, quad = lane >> 2;
    const int log_groups = log2_of(p.column_groups);
    const int group = warp & (p.column_groups - 1), share = warp >> log_groups, shares = warps >> log_groups;
    const int width = p.column_groups * TILES * 16;  // columns of a block
    const int input_stride = p.slice_tiles * 16 + 8, sum_stride = width + 4;
    const u32 items = blocks * units;
    Cut cut = {(u32)blocks, (u32)units, blockIdx.y, blockIdx.y + 1};
    if (gridDim.x == 1 && gridDim.y != items)
        cut.begin = items * blockIdx.y / gridDim.y, cut.end = items * (blockIdx.y + 1) / gridDim.y;
    cut.first_block = quotient(cut.begin, cut.units);
    const int count = cut.count();
    // Inputs of this range of k are needed, a slice at a time; slices are counted from its start. Where there is room
    // for two, the next slice of prepared inputs is copied while one is used.
    const int inputs_first = gridDim.x > 1 ? min((int)blockIdx.x * p.unit_tiles, p.k_tiles) : 0;
    const int inputs_end = gridDim.x > 1 ? min(inputs_first + p.unit_tiles, p.k_tiles) : p.k_tiles;

    const u32 shared_base = (u32)__cvta_generic_to_shared(shared);
    Shared s;
    s.table = shared + (TABLE_START - shared_base);
    s.inputs = reinterpret_cast<u16*>(shared + inputs_at);
    s.sums = reinterpret_cast<float*>(shared + sums_at);
    s.largest = reinterpret_cast<u32*>(s.sums + p.sum_sets * p.buffers * p.rows * sum_stride);
    s.exponent = reinterpret_cast<int*>(s.largest + p.rows * ((p.slice_tiles + 15) / 16));
    s.barriers = ((u32)__cvta_generic_to_shared(s.exponent + 2 * p.rows) + 7) & ~7u;
    if (threadIdx.x < p.sum_sets) {
        s.added(threadIdx.x).make(warps);
        s.used(threadIdx.x).make(min(p.rows, warps));
    }
    const Lookup lookup(lane);

    // The steps of a warp come in runs: those of one slice in one share. `run` is where the next step to be fetched is,
    // one or two ahead of the one that is computed: steps are fetched across the ends of runs.
    struct Run {
        const u32* words;
        int left, room;  // steps for which the lane has something to fetch; how much: `fetched_room`
        int steps;
    };
    int run_share = 0, run_end = 0;
    const int log_stride = log2_of(shares) + 2;
    int tile_stride = 4 * shares;
    keep(tile_stride);
    long long word_stride = (long long)tile_stride * p.n_tiles * TILE_WORDS;
    asm volatile("" : "+l"(word_stride));
    auto slice_of = [&](int tile) { return quotient(tile - inputs_first, p.slice_tiles); };
    auto find_run = [&] {
        for (; run_share < count; ++run_share, run_end = 0) {
            const Share part = cut.share(p, run_share);
            for (int tile = max(run_end, part.first); tile < part.end; tile = run_end) {
                run_end = min((int)(inputs_first + (slice_of(tile) + 1) * p.slice_tiles), part.end);
                const int first = tile + 4 * share, end = run_end + tile_stride - 1;
                if (first >= run_end) continue;
                const int row = first + fetched_row(lane), column = (part.block * p.column_groups + group) * TILES;
                const u32* tiles = p.trellis + ((long long)row * p.n_tiles + column) * TILE_WORDS;
                const int room = fetched_room(lane, p.n_tiles - column);
                return Run{tiles + fetched_offset(lane), (end - row) >> log_stride, room, (end - first) >> log_stride};
            }
        }
        return Run{p.trellis, 0, 0, 1 << 30};
    };
    Run run = find_run();
    auto next_step = [&] {
        run.words += word_stride;
        --run.left;
        if (--run.steps == 0) run = find_run();
    };
    // While the kernel before this one runs, nothing may be read that it may write; but it may be fetched to L2.
#if STAGED
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = 0; i < COPIES; ++i)
            if (step < run.left && i * 8 < run.room) prefetch(run.words + step * word_stride + i * 32);
#else
    const u32* first_words = run.words;
    const int first_room = run.left > 0 ? run.room : 0;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
        if (piece * UNITS < first_room) prefetch(first_words + piece * UNITS * TILE_WORDS);
    next_step();
#endif
    if (threadIdx.x * 64 < (inputs_end - inputs_first) * 16) {
        prefetch(p.suh + inputs_first * 16 + threadIdx.x * 64);
        if (prepared != nullptr) prefetch(prepared + inputs_first * 16 + threadIdx.x * 64);
    }
    if (threadIdx.x * 64 < width && count > 0) {
        const int n = cut.share(p, 0).block * width + threadIdx.x * 64;
        if (n < p.out_features) prefetch(p.svh + n);
    }
    fill_table(s.table, entries);
    wait_for_previous();
    start_next();

    Step next = {};
#if STAGED
    Stages stages((u32)__cvta_generic_to_shared(shared) + words_at + warp * (2 * STAGE_BYTES), lane);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        stages.fetch(run.words, run.left > 0 ? run.room : 0);
        stages.turn();
        next_step();
    }
    stages.wait<1>();
    stages.read(next);
#else
    fetch(next, first_words, first_room);
#endif

    int inputs_row[GROUPS];  // of B column `quad`; rows that do not exist repeat the last
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
        inputs_row[j] = min(8 * j + quad, p.rows - 1) * input_stride + tig * 16;
        keep(inputs_row[j]);
    }
    int before = lane_before(lane);
    keep(before);

    int turn = 0, present = -1;  // of exponents and buffers; the slice whose inputs are there
    const int buffer_size = input_sets == 2 ? p.rows * input_stride : 0;
    auto copy_slice = [&](int slice, int turn) {
        const int first = inputs_first + slice * p.slice_tiles, tiles = min(p.slice_tiles, inputs_end - first);
        copy_inputs(p, s.inputs + turn * buffer_size, input_stride, first, tiles, prepared);
        if (threadIdx.x < p.rows) s.exponent[turn * p.rows + threadIdx.x] = prepared_exponent[threadIdx.x];
    };
    // Where there are several sets of sums, those of a block of columns are finished after the next block: by then all
    // warps have added theirs, and nobody has to wait.
    const int log_sets = log2_of(p.sum_sets), delay = p.sum_sets > 1;
    for (int i = 0; i < count + delay; ++i) {
        if (i < count) {
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
                    turn ^= 1;
                    if (prepared != nullptr) {
                        if (input_sets == 1 && present >= 0) __syncthreads();
                        if (input_sets == 1 || present < 0) copy_slice(slice, turn);
                        finish_copies();
                        const int following = end < part.end  ? slice + 1
                                              : i + 1 < count ? slice_of(cut.share(p, i + 1).first)
                                                              : slice;
                        if (input_sets == 2 && following != slice) copy_slice(following, turn ^ 1);
                    } else {
                        if (present >= 0) __syncthreads();
                        const int tiles = min(p.slice_tiles, inputs_end - slice_first);
                        make_inputs(p, s, input_stride, slice_first, tiles, turn, fresh);
                    }
                    present = slice;
                    if (!fresh && prepared == nullptr) {
#pragma unroll
                        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int row = min(8 * j + 2 * tig + e, p.rows - 1);
                                const int* exponent = s.exponent + row;
                                const int change = exponent[turn * p.rows] - exponent[(turn ^ 1) * p.rows];
                                const float factor = power_of_two(max(change, -126));
#pragma unroll
                                for (int u = 0; u < TILES; ++u) sum[u][j][e] *= factor, sum[u][j][e + 2] *= factor;
                            }
                    }
                }
                int steps = (end - tile - 4 * share + tile_stride - 1) >> log_stride;
                const u16* inputs = s.inputs + turn * buffer_size + (tile - slice_first + 4 * share) * 16;
                tile = end;
                if (steps <= 0) continue;
#pragma unroll 1
                for (; steps > 0; --steps) {
                    Step now = next;
#if STAGED
                    stages.wait<0>();
                    stages.turn();
                    stages.read(next);
                    stages.turn();
                    stages.fetch(run.words, run.left > 0 ? run.room : 0);
                    stages.turn();
#else
                    fetch(next, run.words, run.left > 0 ? run.room : 0);
#endif
                    close_rings(now, before);
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
                                decode_operand(a, now, u, 2 * pair + r, lookup);
#pragma unroll
                                for (int j = 0; j < GROUPS; ++j)
                                    multiply_add(sum[u][j], a, r ? b[j].z : b[j].x, r ? b[j].w : b[j].y);
                            }
                    }
                    inputs += tile_stride * 16;
                    next_step();
                }
            }

            // Sums of the warps: those of the first shares write a buffer each, further ones add to it. Nobody waits
            // for the warps that finish a block of columns, where there are several sets of buffers.
            const int set = i & (p.sum_sets - 1), use = i >> log_sets;
            float* sums = s.sums + set * p.buffers * p.rows * sum_stride;
            if (use > 0) s.used(set).wait(use - 1);
            const int log_buffers = log2_of(p.buffers);
            float factors[GROUPS][2];
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    factors[j][e] = power_of_two(-s.exponent[turn * p.rows + min(8 * j + 2 * tig + e, p.rows - 1)]);
            for (int round = 0; round << log_buffers < shares; ++round) {
                if (round > 0) __syncthreads();
                if (share >> log_buffers == round) {
                    float* buffer = sums + (share & (p.buffers - 1)) * p.rows * sum_stride;
#pragma unroll
                    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int row = 8 * j + 2 * tig + e;
                            if (row >= p.rows) continue;
                            float* target = buffer + row * sum_stride + group * TILES * 16;
#pragma unroll
                            for (int u = 0; u < TILES; ++u) {
                                const int column = unit_column(u, lane);
                                float low = sum[u][j][e] * factors[j][e], high = sum[u][j][e + 2] * factors[j][e];
                                if (round > 0) low += target[column], high += target[column + 8];
                                target[column] = low;
                                target[column + 8] = high;
                            }
                        }
                }
            }
            s.added(set).arrive(lane);
        }
        const int done = i - delay;
        if (done < 0) continue;
        const Share part = cut.share(p, done);
        const int set = done & (p.sum_sets - 1), use = done >> log_sets;
        float* sums = s.sums + set * p.buffers * p.rows * sum_stride;

        // Sums of the buffers, a warp to a row. Where other thread blocks have a part of these columns, the last warp
        // to come adds up what all have left, in their order; the rows of a warp are counted at once.
        const int first_row = (warp - done * p.rows) & (warps - 1);  // other warps for each block of columns
        if (first_row >= p.rows) continue;
        s.added(set).wait(use);
        const int contributions = cut.contributions(part.block), column = lane * 8;
        float* block_parts = p.parts + (long long)part.block * p.rows * most_parts * width + column;
        u32 mine = 0xFFFFFFFFu;  // rows to finish, counted from `first_row` in steps of `warps`
        if (contributions > 1) {
            for (int row = first_row; row < p.rows; row += warps)
                if (column < width) {
                    float v[8] = {};
                    add_buffers(v, p, sums + row * sum_stride + column, sum_stride);
                    float4* part_of_row = reinterpret_cast<float4*>(
                        block_parts + (row * most_parts + cut.contribution(part.block)) * width);
                    part_of_row[0] = make_float4(v[0], v[1], v[2], v[3]);
                    part_of_row[1] = make_float4(v[4], v[5], v[6], v[7]);
                }
            const int row = first_row + lane * warps;
            mine = last_arrivals(p.arrived + part.block * p.rows + row, contributions, row < p.rows);
        }
        for (int row = first_row; row < p.rows; row += warps, mine >>= 1) {
            if (!(mine & 1)) continue;
            float v[8] = {};
            if (column < width) {
                if (contributions > 1) {
                    const float* source = block_parts + row * most_parts * width;
#pragma unroll 4
                    for (int c = 0; c < contributions; ++c) add_eight(v, source + c * width);
                } else {
                    add_buffers(v, p, sums + row * sum_stride + column, sum_stride);
                }
            }
            rotate(v, p.rotation_out, lane);
            if (column < width) store_outputs(v, p, row, part.block * width + column);
        }
        s.used(set).arrive(lane);
    }
}

// The expert bank's tasks: what each of them reads, computes and leaves behind. See expert_bank.cu.
#ifndef ESPALIER_BANK_TASKS
#define ESPALIER_BANK_TASKS

#include "bank_data.cuh"
#include "bank_rotation.cuh"
#include "bank_product.cuh"

// ---- tasks ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ const u16* scale_row(const Arguments& a, int before, int expert, int length) {
    return a.scales + static_cast<i64>(a.experts) * before + static_cast<i64>(expert) * length;
}

// The place of the rotation scales of each projection in the scales, divided by the number of experts.
constexpr int SUH_GATE = 0, SVH_GATE = GATE_IN, SUH_UP = SVH_GATE + GATE_OUT, SVH_UP = SUH_UP + UP_IN;
constexpr int SUH_DOWN = SVH_UP + UP_OUT, SVH_DOWN = SUH_DOWN + DOWN_IN;

template <int BLOCK>
__device__ __forceinline__ void stage_x(const Arguments& a, const Task& task, const u16* suh) {
    const int lane = threadIdx.x & 31, chunks = task.size / CHUNK, first = task.first;
    for (int item = team_warp(); item < chunks * task.count; item += TEAM_WARPS) {
        const int token = item / chunks, chunk = item % chunks, start = first + chunk * CHUNK + lane * EACH;
        const int assignment = shared_data().keys[task.start + token] & 0xFFFF;
        const u16* row = a.x + static_cast<i64>(assignment / a.top_k) * HIDDEN;
        const Scales scales = load_scales(suh, start, HIDDEN);
        float v[EACH];
        if constexpr (HIDDEN % 4 == 0) {
#pragma unroll
            for (int i = 0; i < EACH; i += 4) {
                uint2 raw = {};
                if (start + i < HIDDEN) raw = __ldg(reinterpret_cast<const uint2*>(row + start + i));
#pragma unroll
                for (int j = 0; j < 4; ++j) v[i + j] = float_of(halfword(raw, j));
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH; ++i) v[i] = start + i < HIDDEN ? float_of(__ldg(row + start + i)) : 0.0f;
        }
        scaled(v, scales, start, HIDDEN);
        rotate<BLOCK>(v, lane);
        store_inputs(v, token, chunk, lane);
    }
}

__device__ __forceinline__ void stage_inner(const Arguments& a, const Task& task) {
    const int lane = threadIdx.x & 31, chunks = task.size / CHUNK, first = task.first;
    const u16* svh_gate = scale_row(a, SVH_GATE, task.expert, GATE_OUT);
    const u16* svh_up = scale_row(a, SVH_UP, task.expert, UP_OUT);
    const u16* suh = scale_row(a, SUH_DOWN, task.expert, DOWN_IN);
    for (int item = team_warp(); item < chunks * task.count; item += TEAM_WARPS) {
        const int token = item / chunks, chunk = item % chunks, start = first + chunk * CHUNK + lane * EACH;
        const float* part = a.part_a + static_cast<i64>(task.start + token) * 2 * a.a_slices * A_STRIDE + start;
        const Scales gate_scales = load_scales(svh_gate, start, INTERMEDIATE);
        const Scales up_scales = load_scales(svh_up, start, INTERMEDIATE);
        const Scales down_scales = load_scales(suh, start, INTERMEDIATE);
        float gate[EACH], up[EACH];
        // A chunk may reach beyond the columns there are; nothing of it is used then.
        summed(gate, part, start < A_STRIDE ? a.a_slices : 0, A_STRIDE);
        summed(up, part + a.a_slices * A_STRIDE, start < A_STRIDE ? a.a_slices : 0, A_STRIDE);
        rotate<OUT_GATE>(gate, lane);
        rotate<OUT_UP>(up, lane);
        scaled(gate, gate_scales, start, INTERMEDIATE);
        scaled(up, up_scales, start, INTERMEDIATE);
#pragma unroll
        for (int i = 0; i < EACH; ++i) gate[i] = __fdividef(gate[i], 1 + __expf(-gate[i])) * up[i];
        scaled(gate, down_scales, start, INTERMEDIATE);
        rotate<IN_DOWN>(gate, lane);
        store_inputs(gate, token, chunk, lane);
    }
}

__device__ __forceinline__ int pieces(int count, int together) { return (count + together - 1) / together; }

// Called by one thread.
__device__ __forceinline__ void work_out(const Arguments& a, int ticket, Task& task) {
    const Shared& s = shared_data();
    const int a_pieces = pieces(A_BLOCKS, a.a_together), b_pieces = pieces(B_BLOCKS, a.b_together);
    const int all_a = s.groups * 2 * a_pieces * a.a_slices, all_b = s.groups * b_pieces * a.b_slices;
    const bool is_b = ticket >= all_a;
    int rest = is_b ? ticket - all_a : ticket;
    if (is_b && rest >= all_b) {
        rest -= all_b;
        task.kind = rest < a.tokens * CHUNKS_OUT ? 2 : 3;
        task.number = rest / CHUNKS_OUT, task.block = rest % CHUNKS_OUT;  // a token and a chunk of its features
        return;
    }
    task.kind = is_b;
    task.projection = is_b ? 2 : rest & 1;
    if (!is_b) rest >>= 1;
    const int count = is_b ? b_pieces : a_pieces, together = is_b ? a.b_together : a.a_together;
    const int slices = is_b ? a.b_slices : a.a_slices, all_chunks = (is_b ? B_INPUTS : A_INPUTS) / CHUNK;
    task.block = rest % count * together, rest /= count;
    task.blocks = min(together, (is_b ? B_BLOCKS : A_BLOCKS) - task.block);
    task.slice = rest % slices, task.number = rest / slices;
    const int each = pieces(all_chunks, slices);
    task.first = min(task.slice * each, all_chunks) * CHUNK;
    task.size = min(each * CHUNK, all_chunks * CHUNK - task.first);
    task.start = s.start[task.number], task.count = s.start[task.number + 1] - task.start;
    task.expert = s.keys[task.start] >> 16;
    task.tiles = s.tiles[task.projection][task.number], task.book = s.books[task.projection][task.number];
}

__device__ __forceinline__ Matrix matrix_of(const Arguments& a, const Task& task) {
    const int height = task.kind ? DOWN_IN : task.projection ? UP_IN : GATE_IN;
    const int width = task.kind ? DOWN_OUT : task.projection ? UP_OUT : GATE_OUT;
    return {a.trellis + static_cast<i64>(task.tiles) * 32, height / 16, width / 16};
}

// Ask for the bits of a task, so that they are in the level-2 cache when the team needs them.
__device__ __forceinline__ void prefetch(const Arguments& a, const Task& task) {
    const Matrix matrix = matrix_of(a, task);
    constexpr u64 HALF_STEPS[] = {BOOK_HALF_STEPS};
    u64 half_steps = HALF_STEPS[0];
#pragma unroll
    for (int i = 1; i < sizeof(HALF_STEPS) / sizeof(u64); ++i)
        if (task.book == i) half_steps = HALF_STEPS[i];
    const u16* scales[3] = {
        scale_row(a, task.projection ? SUH_UP : SUH_GATE, task.expert, task.projection ? UP_IN : GATE_IN)};
    if (task.kind) {
        scales[0] = scale_row(a, SVH_GATE, task.expert, GATE_OUT);
        scales[1] = scale_row(a, SVH_UP, task.expert, UP_OUT);
        scales[2] = scale_row(a, SUH_DOWN, task.expert, DOWN_IN);
    }
    const int end = task.kind ? INTERMEDIATE : HIDDEN;
#pragma unroll
    for (int i = 0; i < 3; ++i)
        for (int at = task.first + team_thread() * 64; at < min(task.first + task.size, end); at += TEAM_THREADS * 64)
            if (i == 0 || task.kind) asm volatile("prefetch.global.L2 [%0];" ::"l"(scales[i] + at));
    // Eight neighbouring tiles take half_steps cache lines.
    const int words = 4 * static_cast<int>(half_steps), lines = task.blocks * static_cast<int>(half_steps);
    const int rows = min(task.size / 16, matrix.height - task.first / 16), lane = threadIdx.x & 31;
    const u32* start = matrix.tiles + static_cast<i64>(task.first / 16 * matrix.width + task.block * 8) * words;
    for (int row = team_warp() * 4 + lane / 8; row < rows; row += TEAM_WARPS * 4)
        for (int line = lane % 8; line < lines; line += 8)
            if (task.block * 8 * words + line * 32 < matrix.width * words)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(start + row * matrix.width * words + line * 32));
}

__device__ __forceinline__ void stage(const Arguments& a, const Task& task) {
    if (task.kind) {
        stage_inner(a, task);
    } else {
        const bool up = task.projection;
        const u16* suh = up ? scale_row(a, SUH_UP, task.expert, UP_IN) : scale_row(a, SUH_GATE, task.expert, GATE_IN);
        if (IN_UP == IN_GATE || !up) stage_x<IN_GATE>(a, task, suh);
        else stage_x<IN_UP>(a, task, suh);
    }
}

__device__ __forceinline__ void multiply_task(const Arguments& a, const Task& task) {
    const Matrix matrix = matrix_of(a, task);
    const int slices = task.kind ? a.b_slices : a.a_slices, row = task.kind ? B_STRIDE : A_STRIDE;
    const i64 stride = static_cast<i64>(task.kind ? 1 : 2) * slices * row;
    float* out = (task.kind ? a.part_b : a.part_a) + task.start * stride;
    out += ((task.kind ? 0 : task.projection * slices) + task.slice) * row;
    const int end = task.block + task.blocks, kind = task.kind, number = task.number;
    for (int block = task.block; block < end; ++block) {
        any_product(task.book, matrix, block, task.first, task.size, task.count);
        write_sums(out + block * COLUMNS, stride, task.count);
        if (team_thread() == 0) announce(a.counters + (kind ? B_DONE + block : A_DONE + number));
    }
}

__device__ __forceinline__ float routing_weight(const Arguments& a, int assignment) {
    if (a.weight_kind == 0) return static_cast<const float*>(a.weights)[assignment];
    const u16 bits = static_cast<const u16*>(a.weights)[assignment];
    return a.weight_kind == 1 ? float_of_half(bits) : __uint_as_float(static_cast<u32>(bits) << 16);
}

__device__ __forceinline__ void sum_experts(const Arguments& a, const Task& task) {
    const int lane = threadIdx.x & 31, chunk = task.block, token = task.number, start = chunk * CHUNK + lane * EACH;
    const Shared& s = shared_data();
    float total[EACH] = {};
    for (int slot = team_warp(); slot < a.top_k; slot += TEAM_WARPS) {
        const int assignment = token * a.top_k + slot, place = s.place[assignment];
        if (place == 0xFFFF) continue;
        const int expert = s.keys[place] >> 16;
        float v[EACH];
        const float weight = routing_weight(a, assignment);
        const Scales scales = load_scales(scale_row(a, SVH_DOWN, expert, DOWN_OUT), start, HIDDEN);
        summed(v, a.part_b + static_cast<i64>(place) * a.b_slices * B_STRIDE + start, a.b_slices, B_STRIDE);
        rotate<OUT_DOWN>(v, lane);
        scaled(v, scales, start, HIDDEN);
#pragma unroll
        for (int i = 0; i < EACH; ++i) total[i] += weight * v[i];
    }
    float* sums = &team_data().sums[0][0][0];  // [warp][feature]
#pragma unroll
    for (int i = 0; i < EACH; ++i) sums[team_warp() * CHUNK + lane * EACH + i] = total[i];
    team_barrier();
    for (int i = team_thread(); i < CHUNK; i += TEAM_THREADS) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < TEAM_WARPS; ++warp) sum += sums[warp * CHUNK + i];
        if (chunk * CHUNK + i < HIDDEN) a.y[static_cast<i64>(token) * HIDDEN + chunk * CHUNK + i] = narrowed(sum);
    }
}

#endif

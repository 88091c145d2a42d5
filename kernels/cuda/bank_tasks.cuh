// The expert bank's tasks: what each of them reads, computes and leaves behind. See expert_bank.cu.
#ifndef ESPALIER_BANK_TASKS
#define ESPALIER_BANK_TASKS

#include "bank_data.cuh"
#include "bank_product.cuh"
#include "bank_rotation.cuh"
#include "bank_stage.cuh"

// What a ticket stands for. Called by one thread.
__device__ __forceinline__ void work_out(const Arguments& a, u32 ticket, Task& task) {
    const Shared& s = shared_data();
    const u32 all_a = s.groups * 2 * a.of_a.blocks * a.of_a.slices, all_b = s.groups * a.of_b.blocks * a.of_b.slices;
    const bool is_b = ticket >= all_a;
    u32 rest = is_b ? ticket - all_a : ticket;
    if (is_b && rest >= all_b) {
        rest -= all_b;
        task.kind = rest < a.tokens * CHUNKS_OUT ? 2 : 3;
        task.number = rest / CHUNKS_OUT, task.block = rest % CHUNKS_OUT;  // a token and a chunk of its features
        return;
    }
    const int chunks = is_b ? a.of_b.chunks : a.of_a.chunks, together = is_b ? a.of_b.together : a.of_a.together;
    const u32 slices = is_b ? a.of_b.slices : a.of_a.slices, blocks = is_b ? a.of_b.blocks : a.of_a.blocks;
    const int all_chunks = (is_b ? B_INPUTS : A_INPUTS) / CHUNK;
    task.kind = is_b;
    task.projection = is_b ? 2 : rest & 1;
    if (!is_b) rest >>= 1;
    const u32 before = rest / blocks, number = before / slices;
    task.block = (rest - before * blocks) * together;
    task.blocks = min(together, (is_b ? B_BLOCKS : A_BLOCKS) - task.block);
    task.slice = before - number * slices, task.number = number;
    task.first = min(task.slice * chunks, all_chunks) * CHUNK;
    task.size = min(chunks * CHUNK, all_chunks * CHUNK - task.first);
    const int start = s.start[number], key = s.keys[start];
    task.start = start, task.count = s.start[number + 1] - start, task.expert = key >> 16;
    task.tiles = s.tiles[task.projection][number], task.book = s.books[task.projection][number];
}

__device__ __forceinline__ Matrix matrix_of(const Arguments& a, const Task& task) {
    const int height = task.kind ? DOWN_IN : task.projection ? UP_IN : GATE_IN;
    const int width = task.kind ? DOWN_OUT : task.projection ? UP_OUT : GATE_OUT;
    return {a.trellis + static_cast<i64>(task.tiles) * 32, height / 16, width / 16};
}

__device__ __forceinline__ void prefetch_line(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Ask for `bytes` of memory, a line for each thread of a warp.
__device__ __forceinline__ void prefetch_row(const void* start, int bytes) {
    for (int at = (threadIdx.x & 31) * 128; at < bytes; at += 32 * 128)
        prefetch_line(static_cast<const char*>(start) + at);
}

// Ask for what a task needs beside what it waits for, so that it is in the level-2 cache when the team needs it.
__device__ __forceinline__ void prefetch(const Arguments& a, const Task& task) {
    if (task.kind == 2) {
        const Shared& s = shared_data();
        const int slot = team_thread(), assignment = task.number * a.top_k + slot;
        if (slot >= a.top_k) return;  // of more experts than threads, those are not asked for
        const int place = s.place[assignment];
        if (place == 0xFFFF) return;
        const u16* scales = scale_row(a, SVH_DOWN, s.keys[place] >> 16, DOWN_OUT) + task.block * CHUNK;
#pragma unroll
        for (int i = 0; i < CHUNK; i += 64)
            if (task.block * CHUNK + i < HIDDEN) prefetch_line(scales + i);
        prefetch_line(static_cast<const u16*>(a.weights) + (a.weight_kind ? 1 : 2) * assignment);
        return;
    }
    const Matrix matrix = matrix_of(a, task);
    // A thread to a row of tiles, eight of which take half_steps cache lines; another warp for the scales.
    const int words = 4 * half_steps_of(task.book), stride = matrix.width * words;
    const int rows = min(task.size / 16, matrix.height - task.first / 16);
    const int end = min(task.blocks * 8, matrix.width - task.block * 8) * words;
    const u32* start = matrix.tiles + static_cast<i64>(task.first / 16 * matrix.width + task.block * 8) * words;
    for (int row = team_thread(); row < rows; row += TEAM_THREADS)
        for (int at = 0; at < end; at += 32) prefetch_line(start + row * stride + at);
    if (team_warp() != TEAM_WARPS - 1) return;
    const int bytes = 2 * min(task.size, (task.kind ? INTERMEDIATE : HIDDEN) - task.first);
    if (task.kind) {
        prefetch_row(scale_row(a, SVH_GATE, task.expert, GATE_OUT) + task.first, bytes);
        prefetch_row(scale_row(a, SVH_UP, task.expert, UP_OUT) + task.first, bytes);
        prefetch_row(scale_row(a, SUH_DOWN, task.expert, DOWN_IN) + task.first, bytes);
    } else if (task.projection) {
        prefetch_row(scale_row(a, SUH_UP, task.expert, UP_IN) + task.first, bytes);
    } else {
        prefetch_row(scale_row(a, SUH_GATE, task.expert, GATE_IN) + task.first, bytes);
    }
}

__device__ __forceinline__ void multiply_task(const Arguments& a, const Task& task, const FirstPart& begin) {
    const Matrix matrix = matrix_of(a, task);
    const int slices = task.kind ? a.of_b.slices : a.of_a.slices, row = task.kind ? B_STRIDE : A_STRIDE;
    const i64 stride = static_cast<i64>(task.kind ? 1 : 2) * slices * row;
    float* out = (task.kind ? a.part_b : a.part_a) + task.start * stride;
    out += ((task.kind ? 0 : task.projection * slices) + task.slice) * row;
    const int end = task.block + task.blocks, kind = task.kind, number = task.number;
    for (int block = task.block; block < end; ++block) {
        if (block > task.block) team_barrier();  // the last sums have been read
        any_product(task.book, matrix, block, task.first, task.size, task.count, block == task.block, begin);
        write_sums(out + block * COLUMNS, stride, task.count);
        if (announces()) announce(a.counters + (kind ? B_DONE + block : A_DONE + number));
    }
}

// A weight as it is stored, and as a number: not together, as whoever loads it need not wait for it yet.
__device__ __forceinline__ u32 load_weight(const Arguments& a, int assignment) {
    if (a.weight_kind == 0) return static_cast<const u32*>(a.weights)[assignment];
    return static_cast<const u16*>(a.weights)[assignment];
}

__device__ __forceinline__ float weight_of(const Arguments& a, u32 bits) {
    if (a.weight_kind == 0) return __uint_as_float(bits);
    return a.weight_kind == 1 ? float_of_half(static_cast<u16>(bits)) : __uint_as_float(bits << 16);
}

__device__ __forceinline__ void sum_experts(const Arguments& a, const Task& task) {
    const int lane = threadIdx.x & 31, chunk = task.block, token = task.number, start = chunk * CHUNK + lane * EACH;
    const Shared& s = shared_data();
    float total[EACH] = {};
    // Two experts at once.
    for (int slot = team_warp(); slot < a.top_k; slot += 2 * TEAM_WARPS) {
        float v[2][EACH];
        u32 weight[2];
        Scales scales[2];
        const float* part[2];
        int slices[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int assignment = token * a.top_k + slot + i * TEAM_WARPS;
            const int place = slot + i * TEAM_WARPS < a.top_k ? s.place[assignment] : 0xFFFF;
            const bool there = place != 0xFFFF;
            slices[i] = there ? a.of_b.slices : 0;
            part[i] = a.part_b + static_cast<i64>(place) * a.of_b.slices * B_STRIDE + start;
            weight[i] = there ? load_weight(a, assignment) : 0;
            scales[i] = {};
            if (there) scales[i] = load_scales(scale_row(a, SVH_DOWN, s.keys[place] >> 16, DOWN_OUT), start, HIDDEN);
        }
        summed(v[0], part[0], slices[0], v[1], part[1], slices[1], B_STRIDE);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rotate<OUT_DOWN>(v[i], lane);
            scaled(v[i], scales[i], start, HIDDEN);
#pragma unroll
            for (int j = 0; j < EACH; ++j) total[j] += weight_of(a, weight[i]) * v[i][j];
        }
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

// The expert bank's inputs: what a task multiplies, rotated and rounded into the team's shared memory (expert_bank.cu).
#ifndef ESPALIER_BANK_STAGE
#define ESPALIER_BANK_STAGE

#include "bank_data.cuh"
#include "bank_rotation.cuh"

__device__ __forceinline__ const u16* scale_row(const Arguments& a, int before, int expert, int length) {
    return a.scales + static_cast<i64>(a.experts) * before + static_cast<i64>(expert) * length;
}

// The place of the rotation scales of each projection in the scales, divided by the number of experts.
constexpr int SUH_GATE = 0, SVH_GATE = GATE_IN, SUH_UP = SVH_GATE + GATE_OUT, SVH_UP = SUH_UP + UP_IN;
constexpr int SUH_DOWN = SVH_UP + UP_OUT, SVH_DOWN = SUH_DOWN + DOWN_IN;

// A token of a task and a chunk of its inputs. The warps of a team take them in turns.
struct Item {
    int chunk, token;
    __device__ __forceinline__ void settle(int chunks) {
        while (chunk >= chunks) chunk -= chunks, ++token;
    }
    __device__ __forceinline__ void go_on(int chunks) { chunk += TEAM_WARPS, settle(chunks); }
};

// EACH neighbouring numbers of x, those from HIDDEN on are zero.
struct Row {
    u16 number[EACH];

    __device__ __forceinline__ void load(const u16* row, int start) {
        if constexpr (HIDDEN % 4 == 0) {
#pragma unroll
            for (int i = 0; i < EACH; i += 4) {
                uint2 raw = {};
                if (start + i < HIDDEN) raw = *reinterpret_cast<const uint2*>(row + start + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) number[i + j] = halfword(raw, j);
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH; ++i) number[i] = start + i < HIDDEN ? row[start + i] : 0;
        }
    }
};

template <int BLOCK>
__device__ __forceinline__ void stage_x(const Arguments& a, const Task& task, const u16* suh) {
    const int lane = threadIdx.x & 31, chunks = task.size / CHUNK, first = task.first + lane * EACH;
    if (chunks == 0) return;
    Item next = {team_warp(), 0};
    next.settle(chunks);
    while (next.token < task.count) {  // two at once: their loads are under way together
        Item item[2];
        Row x[2];
        Scales scales[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            item[i] = next;
            if (next.token >= task.count) break;
            const int start = first + next.chunk * CHUNK;
            x[i].load(a.x + static_cast<i64>(shared_data().token[task.start + next.token]) * HIDDEN, start);
            scales[i] = load_scales(suh, start, HIDDEN);
            next.go_on(chunks);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (item[i].token >= task.count) break;
            float v[EACH];
#pragma unroll
            for (int j = 0; j < EACH; ++j) v[j] = float_of(x[i].number[j]);
            scaled(v, scales[i], first + item[i].chunk * CHUNK, HIDDEN);
            rotate<BLOCK>(v, lane);
            store_inputs(v, item[i].token, item[i].chunk, lane);
        }
    }
}

__device__ __forceinline__ void stage_inner(const Arguments& a, const Task& task) {
    const int lane = threadIdx.x & 31, chunks = task.size / CHUNK, first = task.first;
    const u16* svh_gate = scale_row(a, SVH_GATE, task.expert, GATE_OUT);
    const u16* svh_up = scale_row(a, SVH_UP, task.expert, UP_OUT);
    const u16* suh = scale_row(a, SUH_DOWN, task.expert, DOWN_IN);
    if (chunks == 0) return;
    Item item = {team_warp(), 0};
    item.settle(chunks);
    for (; item.token < task.count; item.go_on(chunks)) {
        const int token = item.token, chunk = item.chunk, start = first + chunk * CHUNK + lane * EACH;
        const float* part = a.part_a + static_cast<i64>(task.start + token) * 2 * a.of_a.slices * A_STRIDE + start;
        const Scales gate_scales = load_scales(svh_gate, start, INTERMEDIATE);
        const Scales up_scales = load_scales(svh_up, start, INTERMEDIATE);
        const Scales down_scales = load_scales(suh, start, INTERMEDIATE);
        float gate[EACH], up[EACH];
        // A chunk may reach beyond the columns there are; nothing of it is used then.
        const int slices = start < A_STRIDE ? a.of_a.slices : 0;
        summed(gate, part, slices, up, part + a.of_a.slices * A_STRIDE, slices, A_STRIDE);
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

#endif

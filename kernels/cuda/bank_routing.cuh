// Which experts a batch needs, in which order and for which tokens: every block works it out for itself. See
// expert_bank.cu.
#ifndef ESPALIER_BANK_ROUTING
#define ESPALIER_BANK_ROUTING

#include "bank_data.cuh"

// The expert of this thread's assignment, -1 for none.
__device__ __forceinline__ int expert_of_thread(const Arguments& a) {
    const int i = threadIdx.x;
    if (i >= a.tokens * a.top_k || i >= MOST) return -1;
    const i64 id = a.id_bytes == 8 ? static_cast<const i64*>(a.ids)[i] : static_cast<const int*>(a.ids)[i];
    return id >= 0 && id < a.experts ? static_cast<int>(id) : -1;
}

// By expert, and the assignments of one as they come. Those without an expert are last.
__device__ __forceinline__ int sorting_key(int expert) {
    return expert < 0 ? 0x7FFFFFFF : expert * 65536 + static_cast<int>(threadIdx.x);
}

// Sort up to 32 assignments by expert and cut them into groups of up to eight tokens: one warp, which waits for none.
__device__ __forceinline__ void sort_few(const Arguments& a, int expert) {
    Shared& s = shared_data();
    const int lane = threadIdx.x, count = a.tokens * a.top_k;
    const bool valid = expert >= 0;
    const int key = sorting_key(expert);
    u32 less = 0, lower = 0;  // assignments before this one, and those of experts before this one's
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
        const int other = __shfl_sync(~0u, key, i);
        less |= static_cast<u32>(other < key) << i;
        lower |= static_cast<u32>(other < expert * 65536) << i;
    }
    const int place = __popc(less);
    const bool first = valid && (place - __popc(lower)) % TOKENS == 0;
    const u32 firsts = __ballot_sync(~0u, first), valids = __ballot_sync(~0u, valid);
    const int number = __popc(less & firsts), groups = __popc(firsts);
    s.place[lane] = valid ? place : 0xFFFF;
    if (valid) s.keys[place] = key, s.token[place] = lane / a.top_k;
    if (lane == 0) s.groups = groups, s.start[groups] = __popc(valids);
    if (!first) return;
    s.start[number] = place;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        s.tiles[i][number] = static_cast<u32>(a.offsets[i * a.experts + expert] >> 6);
        s.books[i][number] = static_cast<unsigned char>(a.books[i * a.experts + expert]);
    }
}

// The same by the whole block.
__device__ __forceinline__ void sort_many(const Arguments& a, int expert) {
    Shared& s = shared_data();
    const int tid = threadIdx.x, lane = tid & 31, count = a.tokens * a.top_k;
    const bool valid = expert >= 0;
    const int key = sorting_key(expert);
    i64 offsets[3];
    int books[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        offsets[i] = valid ? a.offsets[i * a.experts + expert] : 0;
        books[i] = valid ? a.books[i * a.experts + expert] : 0;
    }
    if (tid < MOST) s.unsorted[tid] = key, s.place[tid] = 0xFFFF;
    const int valid_count = __syncthreads_count(valid);
    int place = 0, before = 0;
    if (valid) {
        const int lowest = expert * 65536;
#pragma unroll 4
        for (int i = 0; i < (count + 3) / 4; ++i) {  // beyond the end, keys are the largest
            const int4 keys = reinterpret_cast<const int4*>(s.unsorted)[i];
            place += (keys.x < key) + (keys.y < key) + (keys.z < key) + (keys.w < key);
            before += (keys.x < lowest) + (keys.y < lowest) + (keys.z < lowest) + (keys.w < lowest);
        }
        s.keys[place] = key;
        s.place[tid] = static_cast<u16>(place);
        s.token[place] = static_cast<u16>(tid / a.top_k);
    }
    __syncthreads();
    // In sorted order: does a group start here? Then count the starts before.
    const bool first = valid && (place - before) % TOKENS == 0;
    if (valid) s.unsorted[place] = first;
    __syncthreads();
    const bool starts = tid < valid_count && s.unsorted[tid];
    const u32 vote = __ballot_sync(~0u, starts);
    if (lane == 0 && tid < MOST) s.totals[tid >> 5] = __popc(vote);
    __syncthreads();
    int number = __popc(vote & ((1u << lane) - 1)), groups = 0;
    for (int i = 0; i * 32 < valid_count; ++i) {
        if (i < tid >> 5) number += s.totals[i];
        groups += s.totals[i];
    }
    if (starts) s.start[number] = static_cast<u16>(tid), s.unsorted[tid] = number;
    if (tid == 0) s.start[groups] = static_cast<u16>(valid_count), s.groups = groups;
    __syncthreads();
    if (first) {
        const int group = s.unsorted[place];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            s.tiles[i][group] = static_cast<u32>(offsets[i] >> 6);
            s.books[i][group] = static_cast<unsigned char>(books[i]);
        }
    }
}

// Called by all threads of a block.
__device__ __forceinline__ void sort_assignments(const Arguments& a, int expert) {
    if (a.tokens * a.top_k > 32) sort_many(a, expert);
    else if (threadIdx.x < 32) sort_few(a, expert);
    __syncthreads();
}

#endif

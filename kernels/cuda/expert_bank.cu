// The routed experts of a batch of tokens, in one launch: y[t] = sum of w * down(silu(gate(x)) * up(x)).
//
// Macros (kernels/cuda/expert_bank.py): HIDDEN, INTERMEDIATE (true sizes), IN_GATE ... OUT_DOWN (rotation blocks),
// BOOKS (a list BOOK(0, ...) BOOK(1, ...) of the codebooks that occur), BOOK_HALF_STEPS (a list of numbers), TABLES (a
// list of the tables they look numbers up in), FIRST_FREE (shared memory below is for tables), BFLOAT (x and y are
// bfloat16), THREADS (of a thread block), TEAM_WARPS, SLICE (inputs of a task at most), SHARED_BYTES (for what lies
// behind the tables), ASSIGNMENTS (of tokens to experts at most).
//
// A thread block is several teams of warps, which share the tables of the codebooks and nothing else: while one waits
// for memory or for another team, the others compute. The work is a list of tasks; teams take them in order, by ticket:
//   A  a group of up to eight tokens of one expert x gate or up x blocks of 128 columns x a slice of the inputs:
//      partial sums
//   B  a group of tokens of one expert x blocks of 128 columns of down x a slice: waits for the A tasks of the group,
//      sums their parts, rotates and activates, multiplies: partial sums
//   C  a token x a chunk of its features: waits for all B tasks of these columns, rotates, weighs, sums over experts
// A task waits only for tasks with smaller tickets, which running teams hold: no thread block need be resident for
// another's sake, and the kernel is safe beside any other. A team may take its next ticket early: of the unfinished
// tasks, the one with the smallest ticket is always being worked on. All sums have a fixed order: the result does not
// depend on timing.
#include "bank_data.cuh"
#include "bank_tasks.cuh"

// ---- routing --------------------------------------------------------------------------------------------------------

// The expert of this thread's assignment, -1 for none.
__device__ __forceinline__ int expert_of_thread(const Arguments& a) {
    const int i = threadIdx.x;
    if (i >= a.tokens * a.top_k || i >= MOST) return -1;
    const i64 id = a.id_bytes == 8 ? static_cast<const i64*>(a.ids)[i] : static_cast<const int*>(a.ids)[i];
    return id >= 0 && id < a.experts ? static_cast<int>(id) : -1;
}

// Sort the assignments by expert and cut them into groups of up to eight tokens; every block does it for itself.
__device__ __forceinline__ void sort_assignments(const Arguments& a, int expert) {
    Shared& s = shared_data();
    const int tid = threadIdx.x, lane = tid & 31, count = a.tokens * a.top_k;
    const bool valid = expert >= 0;
    const int key = valid ? expert * 65536 + tid : 0x7FFFFFFF;
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
    __syncthreads();
}

// A table of 2^INDEX_BITS numbers, copied to 2^SPREAD places STRIDE bytes apart, 2^COPIES times to each.
template <int INDEX_BITS, int SPREAD, int COPIES, int STRIDE, int BASE>
__device__ __forceinline__ void fill_table(const u16* numbers) {
    constexpr int AT_ONCE = COPIES >= 2 ? 4 : 1, STEPS = (1 << COPIES) / AT_ONCE;
#pragma unroll 4
    for (int i = threadIdx.x; i < (STEPS << SPREAD); i += THREADS) {
        const int place = i / STEPS, step = i % STEPS;
        const u32 number = __ldg(numbers + (place >> (SPREAD - INDEX_BITS)));
        const u32 address = BASE + place * STRIDE + step * AT_ONCE * 4;
        if constexpr (AT_ONCE == 4)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(number));
        else asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(number));
    }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void expert_bank(
    const u16* x, const void* ids, const void* weights, const u32* trellis, const u16* scales, const i64* offsets,
    const int* books, const u16* tables, float* part_a, float* part_b, u16* y, u32* counters, int tokens, int top_k,
    int experts, int id_bytes, int weight_kind, int a_slices, int b_slices, int a_together,
    int b_together) {
    const Arguments a = {x, ids, weights, trellis, scales, offsets, books, part_a, part_b, y, counters,
                         tokens, top_k, experts, id_bytes, weight_kind, a_slices, b_slices, a_together, b_together};
    for (int i = threadIdx.x * 16; i < 3 * experts; i += THREADS * 16) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(offsets + i));
        asm volatile("prefetch.global.L2 [%0];" ::"l"(books + i));
    }
    const int expert = expert_of_thread(a);
    int ticket = 0;
    if (team_thread() == 0) ticket = atomicAdd(a.counters + TICKET, 1);
#define TABLE(FROM, ...) fill_table<__VA_ARGS__>(tables + FROM);
    TABLES
#undef TABLE
    sort_assignments(a, expert);
    Shared& s = shared_data();
    Team& team = team_data();
    if (team_thread() == 0) work_out(a, ticket, team.tasks[0]);
    team_barrier();
    if (team.tasks[0].kind < 2) prefetch(a, team.tasks[0]);
    for (int turn = 0; team.tasks[turn].kind < 3; turn ^= 1) {
        const Task& task = team.tasks[turn];  // not read behind the team's last barrier of a turn
        Task& next = team.tasks[turn ^ 1];
        int next_ticket = 0;
        if (team_thread() == 0) {
            constexpr int SPAN = CHUNK / COLUMNS;
            if (task.kind == 1) wait_for(a.counters + A_DONE + task.number, 2 * A_BLOCKS * a.a_slices);
            if (task.kind == 2)
                for (int i = task.block * SPAN; i < min((task.block + 1) * SPAN, B_BLOCKS); ++i)
                    wait_for(a.counters + B_DONE + i, s.groups * a.b_slices);
            // Only now: who waits takes no work from those who are busy.
            next_ticket = atomicAdd(a.counters + TICKET, 1);
        }
        if (task.kind) team_barrier();
        if (task.kind < 2) stage(a, task);
        else sum_experts(a, task);
        if (team_thread() == 0) work_out(a, next_ticket, next);
        team_barrier();
        const bool multiplies = task.kind < 2;
        if (next.kind < 2) prefetch(a, next);
        if (multiplies) multiply_task(a, task);
    }
    // The last block to leave clears the counters for the next launch.
    __syncthreads();
    if (threadIdx.x == 0) s.leavers = atomicAdd(a.counters + LEFT, 1);
    __syncthreads();
    if (s.leavers == gridDim.x - 1)
        for (int i = threadIdx.x; i < A_DONE + MOST; i += THREADS) a.counters[i] = 0;
}

// The routed experts of a batch of tokens, in one launch: y[t] = sum of w * down(silu(gate(x)) * up(x)).
//
// Macros (kernels/cuda/expert_bank.py): HIDDEN, INTERMEDIATE (true sizes), IN_GATE ... OUT_DOWN (rotation blocks),
// BOOKS (a list BOOK(0, ...) BOOK(1, ...) of the codebooks that occur), TABLES (a list of the tables they look numbers
// up in), FIRST_FREE (shared memory below is for tables), BFLOAT (x and y are bfloat16), THREADS (of a thread block),
// TEAM_WARPS, SLICE (inputs of a task at most), SHARED_BYTES (for what lies behind the tables), ASSIGNMENTS (of tokens
// to experts at most).
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
#include "bank_routing.cuh"
#include "bank_tasks.cuh"

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
    int experts, int id_bytes, int weight_kind, int a_slices, int a_chunks, int a_together, int a_blocks,
    int b_slices, int b_chunks, int b_together, int b_blocks) {
    const Arguments a = {x, ids, weights, trellis, scales, offsets, books, part_a, part_b, y, counters,
                         tokens, top_k, experts, id_bytes, weight_kind, {a_slices, a_chunks, a_together, a_blocks},
                         {b_slices, b_chunks, b_together, b_blocks}};
    // No kernel writes what the tables are made of: it need not be waited for. Nothing else is read through the read-only
    // cache (`__ldg`): this kernel may run already while it is being written.
#define TABLE(FROM, ...) fill_table<__VA_ARGS__>(tables + FROM);
    TABLES
#undef TABLE
    wait_for_previous();
    start_next();
    for (int i = threadIdx.x * 16; i < 3 * experts; i += THREADS * 16) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(offsets + i));
        asm volatile("prefetch.global.L2 [%0];" ::"l"(books + i));
    }
    const int expert = expert_of_thread(a);
    u32 ticket = 0;
    if (controls()) ticket = take_ticket(a);
    Shared& s = shared_data();
    Team& team = team_data();
    sort_assignments(a, expert);
    if (controls()) work_out(a, ticket, team.tasks[0]);
    team_barrier();
    if (team.tasks[0].kind < 3) prefetch(a, team.tasks[0]);
    for (int turn = 0; team.tasks[turn].kind < 3; turn ^= 1) {
        const Task task = team.tasks[turn];
        Task& next = team.tasks[turn ^ 1];
        FirstPart begin = {};
        if (task.kind < 2) begin.load(matrix_of(a, task), half_steps_of(task.book), task.block, task.first);
        u32 next_ticket = 0;
        if (controls()) {
            constexpr int SPAN = CHUNK / COLUMNS;
            if (task.kind == 1) wait_for(a.counters + A_DONE + task.number, 2 * A_BLOCKS * a.of_a.slices);
            if (task.kind == 2)
                for (int i = task.block * SPAN; i < min((task.block + 1) * SPAN, B_BLOCKS); ++i)
                    wait_for(a.counters + B_DONE + i, s.groups * a.of_b.slices);
            // Only now: who waits takes no work from those who are busy.
            next_ticket = take_ticket(a);
        }
        if (task.kind) team_barrier();
        if (task.kind < 2) stage(a, task);
        else sum_experts(a, task);
        if (controls()) work_out(a, next_ticket, next);
        team_barrier();
        const bool multiplies = task.kind < 2;
        if (next.kind < 3) prefetch(a, next);
        if (multiplies) multiply_task(a, task, begin);
    }
    // The last block to leave clears the counters for the next launch. Its threads are told by the barrier itself.
    __syncthreads();
    if (__syncthreads_or(threadIdx.x == 0 && atomicAdd(a.counters + LEFT, 1) == gridDim.x - 1))
        for (int i = threadIdx.x; i < A_DONE + MOST; i += THREADS) a.counters[i] = 0;
}

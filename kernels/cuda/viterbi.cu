// Tail-biting Viterbi search over 2^16 states: the encoder's back end "cuda". The rule is that of
// espalier_format/encoder/branch_cost.py and numpy_backend.py; the states come out the same, bit for bit.
//
// One block searches a few rings at a time. What passes from a step to the next is the least metric of every group of
// states that share their successors, in shared memory. Which branch won is not noted: every SPACING steps the metrics
// go to global memory, and from there a tracing warp finds the path backwards. It knows the state at the end of
// SPACING steps, which leaves few states possible at their beginning, and searches those again. Tracing runs beside the
// next search: a block alternates between two sets of rings.
//
// Defines:
//   EVEN_BITS, ODD_BITS  new bits of even and odd positions
//   COST                 how branch costs are found:
//                        TABLE (0)  narrow; few levels: a table for each step, a copy of it in every bank
//                        FLOAT (1)  narrow; computed in float32, which is exact here
//                        WIDE (2)   32-bit metrics, computed in integers
//   LEVELS               distinct codes (TABLE)
//   RINGS                rings that a block searches at once: 1 (WIDE), 2, or 4 (TABLE)
//   TWO_STEPS            whether metrics skip shared memory at every other step (TABLE, 2 bits, at most 16 levels)
//   SPACING              steps between checkpoints: a power of two; their bits are at most 8

#include "viterbi_layout.cuh"

#include "viterbi_narrow.cuh"

#include "viterbi_two_steps.cuh"

#include "viterbi_wide.cuh"

#include "viterbi_trace.cuh"

// What a searching thread has all the time.
struct Searcher {
    u32 shared;
    int thread, level_code;
    const short* all_codes;
    Rule rule;
};

DEVICE u32 address_of(u32 metrics, u32 group) {
    return metrics + (COST == WIDE ? wide_place(group) : place(group * WORDS)) * 4;
}

// Put metrics before the first position: all 0, or 0 for the group of the start state alone.
DEVICE void begin_metrics(const Searcher& s, int set, int pass) {
    const u32 metrics = s.shared + METRICS;
    const u32 others = pass == 0 ? 0 : COST == WIDE ? s.rule.unreachable : twice(s.rule.unreachable);
    for (int word = s.thread; word < EVEN_BYTES / 4; word += SEARCHERS) store(metrics + word * 4, others);
    searchers_meet();
    if (pass && s.thread < RINGS) {
        const u32 end = load(s.shared + ENDS + (set * RINGS + s.thread) * 4);
        const u32 address = address_of(metrics, end & ((STATES >> EVEN_BITS) - 1));
        if (COST == WIDE) store(address, 0);
        else store_short(address + s.thread * 2, 0);
    }
}

// The lowest state with the least metric at the last position, whose groups have their metrics in `metrics`.
DEVICE void find_end(const Searcher& s, int set, const Slots& slots, u32 metrics) {
    constexpr int BATCH = 16; // loads at a time
    if (s.thread < RINGS) store_long(s.shared + BEST + s.thread * 8, ~0ull);
    searchers_meet();
    int target[RINGS];
    u64 best[RINGS];
    for (int ring = 0; ring < RINGS; ring++) {
        target[ring] = load_short(s.shared + TARGETS + ((set * RINGS + ring) * RING + s.rule.reach - 1) * 2);
        best[ring] = ~0ull;
    }
    for (int batch = s.thread; batch < STATES; batch += BATCH * SEARCHERS) {
        int code[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) code[k] = s.all_codes[batch + k * SEARCHERS];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const u32 state = batch + k * SEARCHERS, group = state >> ODD_BITS;
            u32 words[WORDS];
            load_words<WORDS>(SLOTTED ? slots.address(group) : address_of(metrics, group), words);
            for (int ring = 0; ring < RINGS; ring++) {
                const u32 metric = metric_of(words[ring / 2], ring) + branch_cost(target[ring], code[k], s.rule);
                best[ring] = min(best[ring], (u64)metric << 16 | state);
            }
        }
    }
    for (int ring = 0; ring < RINGS; ring++) {
#pragma unroll
        for (int other = 1; other < WARP; other *= 2)
            best[ring] = min(best[ring], __shfl_xor_sync(0xFFFFFFFFu, best[ring], other));
        if (s.thread % WARP == 0)
            asm volatile("red.shared.min.u64 [%0], %1;" ::"r"(s.shared + BEST + ring * 8), "l"(best[ring]) : "memory");
    }
    searchers_meet();
    if (s.thread < RINGS)
        store(s.shared + ENDS + (set * RINGS + s.thread) * 4, (u32)load_long(s.shared + BEST + s.thread * 8) & 0xFFFF);
}

// What a search goes through once.
struct Pass {
    u32 targets; // address
    Span span;
    int first_kept;
    u32* checkpoints;

    DEVICE int position(int step) const { return (span.first + step) % RING; }
    // Where the metrics after a step go, or null.
    DEVICE u32* kept(int step) const {
        if ((step + 2) % SPACING || step + 1 < first_kept || step + 1 > span.steps - 1 - SPACING) return nullptr;
        return checkpoints + (size_t)((step + 2) / SPACING - 1) * CHECKPOINT_WORDS;
    }
};

// A step, with what comes before it and after it.
template <int PARITY>
DEVICE void take_step(const Searcher& s, const Pass& pass, Slots& slots, const u32 (&codes)[CODE_REGISTERS], int index) {
    u32 lowest[WORDS];
    for (int word = 0; word < WORDS; word++) lowest[word] = 0xFFFFFFFFu;
    u32* const checkpoint = SPACING == 1 || PARITY == 0 ? pass.kept(index) : nullptr;
    if constexpr (COST == WIDE) {
        const int target = load_short(pass.targets + pass.position(index) * 2);
        const u32 base = index ? reported_lowest(s.shared, 1 - PARITY, 0) : 0;
        search_step_wide(s.shared, PARITY, target, base, s.rule, s.thread, checkpoint, lowest[0]);
        report_lowest(s.shared, PARITY, s.thread, lowest);
    } else {
        // Else the compiler would unpack codes once, for several steps, and run out of registers.
        const u32 zero = load(s.shared + ZERO);
        Step step;
        u32 next[WORDS];
        if (COST == TABLE) {
            step.lane = s.thread % WARP * 4 * WORDS + zero;
            level_costs(next, pass.targets, pass.position(index + 1), s.level_code, s.rule);
        } else {
            step.magic = ((142 + s.rule.shift) << 23) + zero; // 2^(15 + shift): the last bit is worth 2^(shift - 8)
            for (int ring = 0; ring < 2; ring++) {
                const int target = load_short(pass.targets + (ring * RING + pass.position(index)) * 2);
                step.target[ring] = __uint_as_float(step.magic | (target + 32768));
            }
            step.base = index % 4 == 2 ? reported_lowest(s.shared, 0, 0) : 0;
            step.largest = s.rule.largest;
        }
        search_step<PARITY, PARITY ? ODD_BITS : EVEN_BITS, PARITY ? EVEN_BITS : ODD_BITS>(
            codes, step, s.shared, slots, s.thread, checkpoint, lowest);
        if (COST == TABLE) {
            if (index % 4 == 2) {
                for (int word = 0; word < WORDS; word++) next[word] -= reported_lowest(s.shared, 0, word);
            }
            fill_table(s.shared, 1 - PARITY, s.thread, next);
        }
        if (PARITY && index % 4 == 1) report_lowest(s.shared, 0, s.thread, lowest);
    }
    searchers_meet();
}

// Take all steps, two at a time, and return the address of the metrics after them.
DEVICE u32 take_two_steps(const Searcher& s, const Pass& pass, const u32 (&codes)[CODE_REGISTERS], int steps) {
    u32 next[WORDS], after_next[WORDS], table = s.shared, in = s.shared + METRICS, out = in + EVEN_BYTES;
    level_costs(next, pass.targets, pass.position(1), s.level_code, s.rule);
    fill_table(table, 1, s.thread, next);
    searchers_meet();
    for (int index = 0; index < steps; index += 2) {
        u32 lowest[WORDS] = {0xFFFFFFFFu};
        level_costs(next, pass.targets, pass.position(index + 2), s.level_code, s.rule);
        level_costs(after_next, pass.targets, pass.position(index + 3), s.level_code, s.rule);
        search_two_steps(codes, table, in, out, s.thread, pass.kept(index), lowest[0]);
        if (index % 4 == 0) report_lowest(s.shared, 0, s.thread, lowest);
        else next[0] -= reported_lowest(s.shared, 0, 0);
        table = table == s.shared ? s.shared + NEXT_TABLE : s.shared;
        fill_table(table, 0, s.thread, next);
        fill_table(table, 1, s.thread, after_next);
        const u32 swap = in;
        in = out, out = swap;
        searchers_meet();
    }
    return in;
}

// Search the ring once, or as much of it as the free pass sees: from its first position to where the tracing warp, or
// find_end, goes on.
DEVICE void search_pass(const Searcher& s, const u32 (&codes)[CODE_REGISTERS], int set, int number, u32* checkpoints) {
    const bool free = number == 0; // may begin and end anywhere
    const Span span = span_of(number, s.rule);
    const int first_kept = number == s.rule.passes - 1 ? 0 : span.middle - 1;
    const Pass pass = {s.shared + TARGETS + set * RINGS * RING * 2, span, first_kept, checkpoints};
    Slots slots;
    if (SLOTTED) slots.begin(s.shared + METRICS);
    begin_metrics(s, set, number);
    if (COST == TABLE) {
        u32 costs[WORDS];
        level_costs(costs, pass.targets, pass.position(0), s.level_code, s.rule);
        fill_table(s.shared, 0, s.thread, costs);
    }
    if constexpr (TWO_STEPS) {
        const u32 metrics = take_two_steps(s, pass, codes, free ? span.steps - 2 : RING - 1 - SPACING);
        if (!free) return;
        const u32 last = 2 * (s.shared + METRICS) + EVEN_BYTES - metrics; // the other buffer
        search_one_step(pass.targets, pass.position(span.steps - 2), s.all_codes, s.rule, metrics, last, s.thread);
        searchers_meet();
        find_end(s, set, slots, last);
    } else {
        searchers_meet();
        const int steps = span.steps - 1 - (free ? 0 : SPACING);
        for (int index = 0;; index += 2) {
            take_step<0>(s, pass, slots, codes, index);
            if (index + 1 >= steps) break;
            take_step<1>(s, pass, slots, codes, index + 1);
            if (index + 2 >= steps) break;
        }
        if (free) find_end(s, set, slots, s.shared + METRICS + EVEN_BYTES);
    }
}

// targets (rings, 256) in fixed point; states (rings, 256); codes (65536): c' of every state; levels (65536): which of
// level_codes it is; checkpoints: SETS * CHECKPOINTS * CHECKPOINT_WORDS words for each block.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
viterbi(const short* __restrict__ targets, u16* __restrict__ states, const short* __restrict__ codes,
        const u8* __restrict__ levels, const short* __restrict__ level_codes, u32* __restrict__ checkpoints, int rings,
        int passes, int reach, int limit, int shift, u32 largest, u32 unreachable) {
    extern __shared__ __align__(1024) char memory[];
    u32 shared = (u32)__cvta_generic_to_shared(memory);
    if (TWO_STEPS) shared = (shared + 4095) & ~4095u;
    const int thread = threadIdx.x, lane = thread % WARP;
    const bool searching = thread < SEARCHERS;
    checkpoints += (size_t)blockIdx.x * SETS * CHECKPOINTS * CHECKPOINT_WORDS;

    Searcher searcher = {shared, thread, 0, codes, {limit, shift, largest, unreachable, passes, reach}};
    u32 own_codes[CODE_REGISTERS];
    if (searching && COST != WIDE) {
        if constexpr (TWO_STEPS) load_own_nibbles(own_codes, levels, thread);
        else load_own_codes(own_codes, codes, levels, shared, thread);
        if (COST == TABLE) searcher.level_code = level_codes[min(thread / WARP * ROUNDS + lane % ROUNDS, LEVELS - 1)];
    }
    if (COST == WIDE) {
        for (int k = thread; k < STATES / 2; k += THREADS) store(shared + wide_code(2 * k), ((const u32*)codes)[k]);
    }
    if (thread == 0) store(shared + ZERO, 0);
    __syncthreads();

    const int groups = (rings + RINGS - 1) / RINGS; // of rings that are searched at once
    const int mine = (groups - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    const int jobs = (mine + SETS - 1) / SETS * SETS * passes;
    for (int job = 0; job <= jobs; job++) {
        // Jobs go through the sets, then the passes, then the next rings. Tracing is one job behind.
        const int now = searching ? job : job - 1;
        const int set = (now + SETS) % SETS, pass = (now + SETS * passes) / SETS % passes;
        const int turn = (now + SETS * passes) / (SETS * passes) - 1;
        const int group = (int)blockIdx.x + (turn * SETS + set) * (int)gridDim.x;
        u32* const kept = checkpoints + (size_t)set * CHECKPOINTS * CHECKPOINT_WORDS;
        if (now >= 0 && now < jobs && group < groups) {
            if (searching) {
                if (pass == 0) {
                    for (int k = thread; k < RINGS * RING; k += SEARCHERS) {
                        const int source = min(group * RINGS + k / RING, rings - 1);
                        store_short(shared + TARGETS + (set * RINGS * RING + k) * 2,
                                    targets[(size_t)source * RING + k % RING]);
                    }
                    searchers_meet();
                }
                search_pass(searcher, own_codes, set, pass, kept);
            } else {
                const int ring = (thread - SEARCHERS) / WARP, index = group * RINGS + ring;
                trace_pass(shared, set, ring, pass, codes, searcher.rule, kept,
                           index < rings ? states + (size_t)index * RING : nullptr, lane);
            }
        }
        all_meet();
    }
}

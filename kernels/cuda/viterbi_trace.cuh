// Tracing paths back through checkpoints: one warp a ring.

constexpr int CHECKPOINT_WORDS = (STATES >> (SPACING == 1 ? EVEN_BITS : ODD_BITS)) * WORDS; // before odd positions
constexpr int CHECKPOINTS = RING / SPACING - 1; // metrics before steps SPACING - 1, 2 * SPACING - 1, ...

// New bits of a step after a checkpoint, which comes before an odd position or, at widths that do not alternate, any.
DEVICE constexpr int bits_after(int steps) { return steps % 2 ? EVEN_BITS : ODD_BITS; }
// How many bits are unknown of the state that many steps after a checkpoint, when that of SPACING steps is known.
DEVICE constexpr int unknown_bits(int steps) {
    int bits = 0;
    for (int later = steps + 1; later <= SPACING; later++) bits += bits_after(later);
    return bits;
}
DEVICE constexpr int held_by_lane(int bits) { return bits > 5 ? 1 << (bits - 5) : 1; }

// A state that may be on the path: metric << PATH_BITS | branch << 8 | the unknown bits of the first state. The least of
// them has the lowest branch among equal metrics.
template <bool LONG> struct EntryOf { typedef u32 Type; };
template <> struct EntryOf<true> { typedef u64 Type; };
typedef EntryOf<COST == WIDE>::Type Entry;
constexpr int PATH_BITS = COST == WIDE ? 16 : 12;
static_assert(unknown_bits(0) <= 8, "a path and a branch must fit below the metric");

// One step of the search in `trace_back`, of the state `steps` after the checkpoint: keep the least of all branches.
template <int STEPS>
DEVICE void trace_step(Entry* entries, u32 state, const short* code, int target, const Rule& rule, int lane) {
    constexpr int UNKNOWN = unknown_bits(STEPS), LEFT = unknown_bits(STEPS + 1);
    constexpr int HELD = held_by_lane(UNKNOWN), HELD_LEFT = held_by_lane(LEFT);
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const u32 key = (k << 5 | lane) & ((1 << UNKNOWN) - 1);
        const u32 metric = (u32)(entries[k] >> PATH_BITS) + branch_cost(target, code[k], rule);
        entries[k] = (Entry)metric << PATH_BITS | key >> LEFT << 8 | (u32)(entries[k] & 0xFF);
    }
#pragma unroll
    for (int k = HELD_LEFT; k < HELD; k++) entries[k % HELD_LEFT] = min(entries[k % HELD_LEFT], entries[k]);
#pragma unroll
    for (int bit = LEFT; bit < UNKNOWN && bit < 5; bit++) {
#pragma unroll
        for (int k = 0; k < HELD_LEFT; k++) entries[k] = min(entries[k], __shfl_xor_sync(0xFFFFFFFFu, entries[k], 1 << bit));
    }
}

template <int STEPS>
DEVICE void load_codes(short (&code)[SPACING][held_by_lane(unknown_bits(0))], u32 state, const short* codes, int lane) {
    constexpr int UNKNOWN = unknown_bits(STEPS);
#pragma unroll
    for (int k = 0; k < held_by_lane(UNKNOWN); k++) {
        const u32 key = (k << 5 | lane) & ((1 << UNKNOWN) - 1);
        code[STEPS][k] = codes[(key << (16 - UNKNOWN) | state >> UNKNOWN) & 0xFFFF];
    }
    if constexpr (STEPS + 1 < SPACING) load_codes<STEPS + 1>(code, state, codes, lane);
}

template <int STEPS>
DEVICE void trace_steps(Entry* entries, u32 state, const short (&code)[SPACING][held_by_lane(unknown_bits(0))],
                        const int (&target)[SPACING], const Rule& rule, int lane) {
    trace_step<STEPS>(entries, state, code[STEPS], target[STEPS], rule, lane);
    if constexpr (STEPS + 1 < SPACING) trace_steps<STEPS + 1>(entries, state, code, target, rule, lane);
}

// Return the state SPACING steps before `state`, which is the one of step `step + SPACING`. Beginning with the metrics
// before `step`, it searches the states that can lead there: their low bits are known. A lane has the candidates whose
// unknown bits end with its number. All that is read depends on `state` alone, so that memory is waited for once.
DEVICE u32 trace_back(u32 state, int step, const u32* checkpoint, int ring, u32 targets, int first, const short* codes,
                      const Rule& rule, int lane) {
    constexpr int ALL = unknown_bits(0), HELD = held_by_lane(ALL);
    int target[SPACING];
    short code[SPACING][HELD];
    Entry entries[HELD];
#pragma unroll
    for (int k = 0; k < SPACING; k++) target[k] = load_short(targets + (first + step + k) % RING * 2);
    load_codes<0>(code, state, codes, lane);
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const u32 key = (k << 5 | lane) & ((1 << ALL) - 1);
        const u32 group = (key << (16 - ALL) | state >> ALL) >> bits_after(0);
        entries[k] = (Entry)metric_of(checkpoint[group * WORDS + ring / 2], ring) << PATH_BITS | key;
    }
    trace_steps<0>(entries, state, code, target, rule, lane);
    return (((u32)entries[0] & 0xFF) << (16 - ALL) | state >> ALL) & 0xFFFF;
}

DEVICE void trace_pass(u32 shared, int set, int ring, int pass, const short* codes, const Rule& rule,
                       const u32* checkpoints, u16* states, int lane) {
    const Span span = span_of(pass, rule);
    const bool last = pass == rule.passes - 1;
    const u32 end = shared + ENDS + (set * RINGS + ring) * 4;
    const u32 targets = shared + TARGETS + (set * RINGS + ring) * RING * 2;
    const u32 boundary = load(end);
    u32 state = boundary;
    for (int step = span.steps - 1 - SPACING;; step -= SPACING) {
        // The state at `step + SPACING` is known.
        u32 before = boundary;
        if (step >= 0) {
            const u32* const checkpoint = checkpoints + (size_t)((step + 1) / SPACING - 1) * CHECKPOINT_WORDS;
            before = trace_back(state, step, checkpoint, ring, targets, span.first, codes, rule, lane);
        }
        if (last && states) {
            // The states in between are windows of the stream.
            constexpr int OWN = unknown_bits(0);
            const u32 stream = before << OWN | (state & ((1u << OWN) - 1));
#pragma unroll
            for (int k = 0; k < SPACING; k++) {
                if (lane == k) states[(span.first + step + 1 + k) % RING] = (u16)(stream >> unknown_bits(k + 1));
            }
        }
        if (step < 0) break;
        state = before;
        if (!last && step == span.middle - 1) {
            __syncwarp(); // all lanes have read the boundary
            if (lane == 0) store(end, state);
            break;
        }
    }
}

// A step of a wide search: metrics of 32 bits, one ring.
//
// A thread has two neighbouring groups of the next position, or more such pairs; from 7 bits on, a share of the branches
// that lead to a pair. Metrics of the groups that lead to a pair lie side by side.

constexpr int PAIRS_EACH = PAIRS > SEARCHERS ? PAIRS / SEARCHERS : 1;
constexpr int SHARE = (1 << EVEN_BITS) / SHARES;                   // branches
constexpr u32 FIRST_CODE = 0x000000FF, SECOND_CODE = 0x0000FF00; // -1 for one of two codes

DEVICE u32 wide_place(u32 group) {
    const u32 branch = group >> REST_BITS;
    return (group & ((1 << REST_BITS) - 1)) * ROW + branch + branch / SHARE * 4;
}
DEVICE u32 wide_code(u32 state) { return CODES + state * 2 + (state >> (16 - EVEN_BITS)) / SHARE * SHARE_GAP; }

DEVICE void search_step_wide(u32 shared, int parity, int target, u32 base, const Rule& rule, int thread, u32* checkpoint,
                             u32& lowest) {
    const u32 before = shared + METRICS + (parity ? EVEN_BYTES : 0), after = shared + METRICS + (parity ? 0 : EVEN_BYTES);
    const int share = thread % SHARES;
#pragma unroll
    for (int pair = 0; pair < PAIRS_EACH; pair++) {
        const u32 group = 2 * (thread / SHARES + pair * SEARCHERS);
        const u32 from = before + ((group >> EVEN_BITS) * ROW + share * (SHARE + 4)) * 4;
        const u32 codes = shared + wide_code((share * SHARE) << (16 - EVEN_BITS) | group);
        u32 best[2] = {0xFFFFFFFFu, 0xFFFFFFFFu}, bound = 0xFFFFFFFFu;
#pragma unroll 4
        for (int branch = 0; branch < SHARE; branch += 4) {
            u32 metric[4];
            load_words<4>(from + branch * 4, metric);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u32 both_codes = load(codes + ((branch + k) << (16 - EVEN_BITS)) * 2);
                const int first = __dp2a_lo((int)both_codes, (int)FIRST_CODE, target);
                const int second = __dp2a_lo((int)both_codes, (int)SECOND_CODE, target);
                best[0] = min(best[0], (u32)(first * first) + metric[k]);
                best[1] = min(best[1], (u32)(second * second) + metric[k]);
                bound = min(bound, metric[k]);
            }
        }
        // A distance beyond the limit costs as much as the limit.
        best[0] = min(best[0], bound + rule.largest);
        best[1] = min(best[1], bound + rule.largest);
        for (int other = 1; other < SHARES; other *= 2) {
            best[0] = min(best[0], __shfl_xor_sync(0xFFFFFFFFu, best[0], other));
            best[1] = min(best[1], __shfl_xor_sync(0xFFFFFFFFu, best[1], other));
        }
        best[0] -= base, best[1] -= base;
        lowest = min(lowest, min(best[0], best[1]));
        if (share == 0) {
            store(after + wide_place(group) * 4, best[0]);
            store(after + wide_place(group + 1) * 4, best[1]);
            if (checkpoint) *(uint2*)(checkpoint + group) = make_uint2(best[0], best[1]);
        }
    }
}

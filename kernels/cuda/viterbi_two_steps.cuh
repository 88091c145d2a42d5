// Two steps of a narrow search at 2 bits and few levels: metrics in between stay in registers.
//
// For one x of 10 bits, the groups a << 10 | x, a of 4 bits, lead to the groups b << 12 | x << 2 | n of the next position,
// b the low bits of a and n the new ones, and these to x << 4 | n << 2 | n'. A thread has two x: 64 states of each step.
// Levels take 4 bits here. Tables for two steps are filled while the others are read.

constexpr int X_BITS = 10;

// State `index` of a thread: [x][step][group of 16][branch][low].
DEVICE int two_step_state(int thread, int index) {
    const int x = thread + (index >> 7) * SEARCHERS, group = index >> 4 & 3, branch = index >> 2 & 3, low = index & 3;
    if (index >> 6 & 1) return branch << 14 | x << 4 | group << 2 | low;
    return branch << 14 | group << 12 | x << 2 | low;
}

// Of 8 states in a register, the first four are the low halves of its bytes.
template <int COUNT> DEVICE void load_own_nibbles(u32 (&own)[COUNT], const u8* levels, int thread) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        own[k] = 0;
#pragma unroll
        for (int part = 0; part < 8; part++)
            own[k] |= (u32)levels[two_step_state(thread, k * 8 + part)] << (part % 4 * 8 + part / 4 * 4);
    }
}

// `table` is the address of the tables of these steps, `in` and `out` those of metrics; `checkpoint` is where metrics
// between the two steps go, or null.
template <int COUNT>
DEVICE void search_two_steps(const u32 (&codes)[COUNT], u32 table, u32 in, u32 out, int thread, u32* checkpoint, u32& lowest) {
    const u32 bytes = (table >> 8 & 0xF0) * 0x01010101u;               // of the address, beside a level
    const u32 lane = thread % WARP * 4 | table >> 16 << 8;             // its lowest byte and the third one
    const u32 from = in + place(thread) * 4, to = out + place(thread << 4) * 4;
    // The costs of 16 states: 4 branches by 4 states.
    auto costs = [&](int group, int parity, u32 (&cost)[16]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 packed = codes[group * 2 + half];
            const u32 split[2] = {packed & 0x0F0F0F0F | bytes, packed >> 4 & 0x0F0F0F0F | bytes};
#pragma unroll
            for (int k = 0; k < 8; k++)
                cost[half * 8 + k] = load(__byte_perm(split[k / 4], lane, 0x7504 | (k & 3) << 4) + parity * PARITY_BYTES);
        }
    };
    u32 finished[4];
#pragma unroll
    for (int unit = 0; unit < 2; unit++) {
        u32 between[4][4];
#pragma unroll
        for (int group = 0; group < 4; group++) {
            u32 metric[4], cost[16];
#pragma unroll
            for (int branch = 0; branch < 4; branch++)
                metric[branch] = load(from + ((branch << 2 | group) << X_BITS | unit * SEARCHERS) * 4);
            costs(unit * 8 + group, 0, cost);
            if (unit && group == 0) store_words<4>(to ^ 48, finished);
#pragma unroll
            for (int low = 0; low < 4; low++) {
                const u32 pair = least(metric[0] + cost[low], metric[1] + cost[4 + low]);
                between[group][low] = least_of_three(metric[2] + cost[8 + low], metric[3] + cost[12 + low], pair);
            }
            if (checkpoint) {
                const u32* const v = between[group];
                *(uint4*)(checkpoint + (group << 12 | (thread + unit * SEARCHERS) << 2)) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
#pragma unroll
        for (int group = 0; group < 4; group++) {
            u32 cost[16];
            costs(unit * 8 + 4 + group, 1, cost);
            if (group) store_words<4>((to + unit * SEARCHERS * 64) ^ (group - 1) * 16, finished);
#pragma unroll
            for (int low = 0; low < 4; low++) {
                const u32 pair = least(between[0][group] + cost[low], between[1][group] + cost[4 + low]);
                finished[low] = least_of_three(between[2][group] + cost[8 + low], between[3][group] + cost[12 + low], pair);
                lowest = least(lowest, finished[low]);
            }
        }
    }
    store_words<4>((to + SEARCHERS * 64) ^ 48, finished);
}

// One step in place of two, from codes in global memory: the last of a ring's 255.
DEVICE void search_one_step(u32 targets, int position, const short* codes, const Rule& rule, u32 in, u32 out, int thread) {
    const int target[2] = {load_short(targets + position * 2), load_short(targets + (RING + position) * 2)};
#pragma unroll 4
    for (int group = thread; group < STATES >> 2; group += SEARCHERS) {
        u32 best = 0xFFFFFFFFu;
#pragma unroll
        for (int branch = 0; branch < 4; branch++) {
            const int code = codes[branch << 14 | group];
            const u32 cost = branch_cost(target[0], code, rule) | branch_cost(target[1], code, rule) << 16;
            best = least(best, load(in + place(branch << 12 | group >> 2) * 4) + cost);
        }
        store(out + place(group) * 4, best);
    }
}

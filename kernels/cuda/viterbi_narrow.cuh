// A step of a narrow search: metrics of 16 bits, two rings in a word.
//
// State s = high << (16 - W) | x << W | low, with W bits of high and low. A thread has STATES / SEARCHERS = 128 states,
// the same ones in every step: for UNITS values of x all of high and LOWS values of low.

constexpr int LOWS = W < 4 ? 1 << W : 8;
constexpr int UNITS = W < 4 ? 128 >> 2 * W : 1;
constexpr int CODE_REGISTERS = COST == TABLE ? 32 : COST == FLOAT ? 64 : 1;

DEVICE int first_x(int thread) { return W < 4 ? thread : thread >> 1; }
DEVICE int first_low(int thread) { return W < 4 ? 0 : (thread & 1) << 3; }
DEVICE int state_of(int thread, int unit, int high, int low) {
    return high << (16 - W) | (first_x(thread) + unit * SEARCHERS) << W | (first_low(thread) + low);
}

// The codes of a thread's states: 8 bits, the level and the table's address; or 16, c' + 2^15.
DEVICE void load_own_codes(u32 (&own)[CODE_REGISTERS], const short* codes, const u8* levels, u32 shared, int thread) {
    constexpr int PER_REGISTER = 128 / CODE_REGISTERS;
#pragma unroll
    for (int k = 0; k < CODE_REGISTERS; k++) {
        own[k] = 0;
#pragma unroll
        for (int part = 0; part < PER_REGISTER; part++) {
            const int index = k * PER_REGISTER + part;
            const int state = state_of(thread, index / LOWS >> W, index / LOWS & ((1 << W) - 1), index % LOWS);
            if (COST == TABLE) own[k] |= (levels[state] + (shared >> 8)) << part * 8;
            else own[k] |= (u32)(codes[state] + 32768) << part * 16;
        }
    }
}

// What the branch costs of a step need.
struct Step {
    u32 lane;        // TABLE: a lane's place in the entries
    float target[2]; // FLOAT: the targets, in the form of unpacked codes
    u32 magic;
    u32 base;        // FLOAT: what is subtracted from all metrics
    u32 largest;     // the largest cost
};

// FLOAT: 1.5 * 2^23. A sum with it is an integer, in the low bits of the float; comparing the bits compares the sums.
constexpr u32 ROUNDING = 0x4B400000;

// What costs are added to.
struct Metric {
    u32 word[WORDS];

    DEVICE void set(const u32* words, const Step& step) {
#pragma unroll
        for (int k = 0; k < WORDS; k++) word[k] = words[k] - (COST == FLOAT ? step.base : 0);
    }
    // FLOAT: the metric of a ring, plus ROUNDING.
    DEVICE u32 rounding(int ring) const { return __byte_perm(word[0], ROUNDING, ring ? 0x7632 : 0x7610); }
};

// Sums of a metric and the cost of a step to a state, which is the `index`-th of the thread: TABLE, two rings in a word,
// none of which carries into the other, whatever does within a table's entry; FLOAT, a word for each ring, plus ROUNDING.
constexpr int SUMS = COST == FLOAT ? 2 : WORDS;

DEVICE u32 least_sum(u32 a, u32 b) { return COST == FLOAT ? min(a, b) : least(a, b); }
DEVICE u32 least_sum(u32 a, u32 b, u32 c) { return COST == FLOAT ? min(min(a, b), c) : least_of_three(a, b, c); }

template <int PARITY>
DEVICE void load_cost(u32 (&cost)[SUMS], const u32 (&codes)[CODE_REGISTERS], int index, const Step& step) {
    if constexpr (COST == TABLE) {
        const u32 selector = 0x5500 | (index & 3) << 4 | 0x0004; // bytes: lane, level, 0, 0
        load_words<WORDS>(__byte_perm(codes[index / 4], step.lane, selector) + PARITY * PARITY_BYTES, cost);
    }
}
DEVICE void add_cost(u32 (&sum)[SUMS], const u32 (&codes)[CODE_REGISTERS], int index, const Step& step, const Metric& metric) {
    if constexpr (COST == TABLE) {
#pragma unroll
        for (int k = 0; k < SUMS; k++) sum[k] += metric.word[k];
    } else {
        const float code = __uint_as_float(__byte_perm(codes[index / 2], step.magic, index & 1 ? 0x7632 : 0x7610));
#pragma unroll
        for (int ring = 0; ring < SUMS; ring++) {
            const float distance = step.target[ring] - code;
            float square; // rounded down to an integer: the cost has no fraction
            asm("fma.rm.f32 %0, %1, %1, %2;" : "=f"(square) : "f"(distance), "f"(__uint_as_float(metric.rounding(ring))));
            sum[ring] = __float_as_uint(square);
        }
    }
}

// At 1 bit two buffers of metrics do not fit. They are four quarters and two spare ones; a step goes through the first
// half of x, which empties two quarters and fills the spare ones, and then through the second.
struct Slots {
    u32 quarter[4], spare[2]; // addresses

    DEVICE void begin(u32 metrics) {
        for (int k = 0; k < 4; k++) quarter[k] = metrics + k * QUARTER_BYTES;
        for (int k = 0; k < 2; k++) spare[k] = metrics + (4 + k) * QUARTER_BYTES;
    }
    DEVICE void advance() {
        const u32 next[4] = {spare[0], spare[1], quarter[0], quarter[2]};
        spare[0] = quarter[1], spare[1] = quarter[3];
        for (int k = 0; k < 4; k++) quarter[k] = next[k];
    }
    DEVICE u32 address(u32 group) const { return quarter[group >> 13] + (group & 8191) * 4; }
};

// One step of the groups of a thread: from the metrics of groups of BITS to those of NEXT_BITS. States that lead to the
// same groups of the next position, for one value of x, are a butterfly.
template <int PARITY, int BITS, int NEXT_BITS>
DEVICE void search_step(const u32 (&codes)[CODE_REGISTERS], Step& step, u32 shared, Slots& slots, int thread,
                        u32* checkpoint, u32 (&lowest)[WORDS]) {
    constexpr int BRANCHES = 1 << NEXT_BITS, RESTS = 1 << (W - NEXT_BITS);
    constexpr int QUEUES = W < 4 ? 1 << (W - BITS) : 1; // metrics of one `high`
    constexpr int BUTTERFLIES = UNITS * RESTS;
    constexpr int PIECE = LOWS * WORDS < 4 ? LOWS * WORDS : 4; // words that are written at a time
    const int x = first_x(thread), first = first_low(thread);
    if (checkpoint) checkpoint += (x << W | first) * WORDS;
    const u32 before = shared + METRICS + (PARITY ? EVEN_BYTES : 0), after = shared + METRICS + (PARITY ? 0 : EVEN_BYTES);
    const u32 from = before + place((x << (W - BITS) | first >> BITS) * WORDS) * 4;
    const u32 to = after + place((x << W | first) * WORDS) * 4;

    auto read = [&](int unit, int high, Metric* metric) {
        u32 address = from + (high << (16 - W - BITS) | unit * SEARCHERS << (W - BITS)) * 4 * WORDS;
        if (SLOTTED) address = slots.quarter[2 * high + unit / 16] + (x + unit % 16 * SEARCHERS) * 4;
        u32 words[QUEUES * WORDS];
        load_words<QUEUES * WORDS>(address, words);
#pragma unroll
        for (int queue = 0; queue < QUEUES; queue++) metric[queue].set(words + queue * WORDS, step);
    };
    auto write = [&](int butterfly, const u32* best) {
        const int unit = butterfly / RESTS, rest = butterfly % RESTS;
        const int word = (rest << (16 - W) | unit * SEARCHERS << W) * WORDS;
        u32 address = to + word * 4;
        if (SLOTTED) {
            const u32 quarter = unit < 8 ? slots.spare[0] : unit < 16 ? slots.spare[1] : slots.quarter[unit < 24 ? 0 : 2];
            address = quarter + (x + unit % 8 * SEARCHERS) * 8;
        }
#pragma unroll
        for (int k = 0; k < LOWS * WORDS; k += PIECE) {
            store_words<PIECE>(address ^ k * 4, best + k);
            if (checkpoint) {
                u32* const kept = checkpoint + word + k;
                if (PIECE == 2) *(uint2*)kept = make_uint2(best[k], best[k + 1]);
                else *(uint4*)kept = make_uint4(best[k], best[k + 1], best[k + 2], best[k + 3]);
            }
        }
    };

    u32 best[LOWS][SUMS], finished[LOWS * WORDS];
#pragma unroll
    for (int butterfly = 0; butterfly < BUTTERFLIES; butterfly++) {
        const int unit = butterfly / RESTS, rest = butterfly % RESTS;
        if (SLOTTED && unit == 16) searchers_meet();
        u32 bound[QUEUES];
#pragma unroll
        for (int pair = 0; pair < BRANCHES; pair += 2) {
            Metric metric[2][QUEUES];
            u32 sum[2][LOWS][SUMS];
#pragma unroll
            for (int branch = 0; branch < 2; branch++) {
                const int high = (pair + branch) << (W - NEXT_BITS) | rest;
                read(unit, high, metric[branch]);
#pragma unroll
                for (int low = 0; low < LOWS; low++)
                    load_cost<PARITY>(sum[branch][low], codes, (unit << W | high) * LOWS + low, step);
            }
            // Only now, so that the loads above need not wait for it.
            if (pair == 0 && butterfly) write(butterfly - 1, finished);
#pragma unroll
            for (int queue = 0; queue < QUEUES; queue++) {
                const u32 words[2] = {metric[0][queue].word[0], metric[1][queue].word[0]};
                bound[queue] = pair ? least_of_three(words[0], words[1], bound[queue]) : least(words[0], words[1]);
            }
#pragma unroll
            for (int low = 0; low < LOWS; low++) {
                const int queue = QUEUES == 1 ? 0 : low >> BITS;
#pragma unroll
                for (int branch = 0; branch < 2; branch++) {
                    const int high = (pair + branch) << (W - NEXT_BITS) | rest;
                    add_cost(sum[branch][low], codes, (unit << W | high) * LOWS + low, step, metric[branch][queue]);
                }
#pragma unroll
                for (int k = 0; k < SUMS; k++) {
                    const u32 first = sum[0][low][k], second = sum[1][low][k];
                    best[low][k] = pair ? least_sum(first, second, best[low][k]) : least_sum(first, second);
                }
            }
        }
#pragma unroll
        for (int low = 0; low < LOWS; low++) {
            if (COST == FLOAT) {
                // A distance beyond the limit costs as much as the limit.
                Metric least_metric = {{bound[QUEUES == 1 ? 0 : low >> BITS]}};
                for (int ring = 0; ring < 2; ring++)
                    best[low][ring] = min(best[low][ring], least_metric.rounding(ring) + step.largest);
                finished[low] = __byte_perm(best[low][0], best[low][1], 0x5410);
            } else {
#pragma unroll
                for (int word = 0; word < WORDS; word++) finished[low * WORDS + word] = best[low][word];
            }
#pragma unroll
            for (int word = 0; word < WORDS; word++)
                lowest[word] = least(lowest[word], finished[low * WORDS + word]);
        }
    }
    write(BUTTERFLIES - 1, finished);
    if (SLOTTED) slots.advance();
}

// The costs of a thread's level, for the targets of a position.
DEVICE void level_costs(u32 (&costs)[WORDS], u32 targets, int position, int level_code, const Rule& rule) {
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        const u32 at = targets + (2 * word * RING + position) * 2;
        costs[word] = branch_cost(load_short(at), level_code, rule);
        costs[word] |= branch_cost(load_short(at + RING * 2), level_code, rule) << 16;
    }
}

// Fill a step's table: every warp has ROUNDS levels.
DEVICE void fill_table(u32 table, int parity, int thread, const u32 (&costs)[WORDS]) {
    const u32 row = table + thread / WARP * ROUNDS * LEVEL_BYTES + parity * PARITY_BYTES + thread % WARP * 4 * WORDS;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        u32 entry[WORDS];
#pragma unroll
        for (int word = 0; word < WORDS; word++)
            entry[word] = ROUNDS == 1 ? costs[word] : __shfl_sync(0xFFFFFFFFu, costs[word], round);
        store_words<WORDS>(row + round * LEVEL_BYTES, entry);
    }
}

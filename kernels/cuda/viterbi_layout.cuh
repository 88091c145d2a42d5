// What the parts of viterbi.cu share: constants, the layout of shared memory, access to it, arithmetic on metrics.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define TABLE 0
#define FLOAT 1
#define WIDE 2

constexpr int RING = 256, HALF = 128, STATES = 65536, WARP = 32;
constexpr int W = EVEN_BITS > ODD_BITS ? EVEN_BITS : ODD_BITS;
constexpr int SEARCHERS = 512;                    // threads that search
constexpr int THREADS = SEARCHERS + RINGS * WARP; // one tracing warp a ring
constexpr int SETS = 2;                           // sets of rings that a block alternates between
constexpr int WORDS = (RINGS + 1) / 2;            // of a metric: narrow, two rings share a word

// WIDE: groups in pairs of neighbours; from 7 bits on, threads share the branches of a pair (viterbi_wide.cuh).
constexpr int PAIRS = STATES >> EVEN_BITS >> 1;
constexpr int SHARES = PAIRS < SEARCHERS ? SEARCHERS / PAIRS : 1;
constexpr int REST_BITS = COST == WIDE ? 16 - 2 * EVEN_BITS : 0;
constexpr int ROW = (1 << EVEN_BITS) + 4 * SHARES; // words, with gaps against bank conflicts
constexpr int SHARE_GAP = WARP / SHARES * 4;       // bytes between the codes of two shares, for the same reason

// Shared memory, in bytes from an address that is a multiple of 1024; with TWO_STEPS, of 4096.
constexpr int ROUNDS = LEVELS ? (LEVELS + 15) / 16 : 1; // levels of a warp
constexpr int LEVEL_BYTES = 256;
constexpr int PARITY_BYTES = WORDS == 2 ? ROUNDS * 16 * LEVEL_BYTES : LEVEL_BYTES / 2;
constexpr int NEXT_TABLE = 65536; // TWO_STEPS: between the tables of alternate steps
constexpr int TABLE_BYTES =
    COST == TABLE ? ROUNDS * 16 * LEVEL_BYTES * WORDS + (TWO_STEPS ? NEXT_TABLE : 0) : 0; // [level][parity][bank]
constexpr bool SLOTTED = W == 1;           // metrics too large for two buffers: see Slots
constexpr int QUARTER_BYTES = STATES >> 1; // of 2^15 metrics
constexpr int EVEN_BYTES = COST == WIDE ? (ROW << REST_BITS) * 4 : (STATES >> EVEN_BITS) * 4 * WORDS;
constexpr int ODD_BYTES = COST == WIDE ? EVEN_BYTES : (STATES >> ODD_BITS) * 4 * WORDS;
constexpr int METRICS = TABLE_BYTES; // before even positions, then before odd ones
constexpr int CODES = METRICS + (SLOTTED ? 6 * QUARTER_BYTES : EVEN_BYTES + ODD_BYTES);
constexpr int LOWEST = CODES + (COST == WIDE ? STATES * 2 + SHARES * SHARE_GAP : 0); // [parity][word][warp]
constexpr int TARGETS = LOWEST + 2 * WORDS * 16 * 4;                                 // [set][ring][position], 16 bits
constexpr int ENDS = TARGETS + SETS * RINGS * RING * 2; // [set][ring]: state at the end of the ring
constexpr int BEST = ENDS + SETS * RINGS * 4;           // [ring], 64 bits
constexpr int ZERO = BEST + 4 * 8;                      // a 0 that the compiler does not know of
constexpr int SHARED_BYTES = ZERO + 8 + (TWO_STEPS ? 3072 : 0);
static_assert(BEST % 8 == 0 && TARGETS % 16 == 0, "entries must be aligned");

// What a search needs to know, the same for all rings.
struct Rule {
    int limit, shift;
    u32 largest, unreachable;
    int passes;
    int reach; // positions that the free pass sees on either side of its boundary: a multiple of 8
};

// The positions of a pass. The boundary of the next one lies between those of steps `middle - 1` and `middle`.
struct Span {
    int first, steps, middle;
};
DEVICE Span span_of(int pass, const Rule& rule) {
    if (pass == 0) return {RING - rule.reach, 2 * rule.reach, rule.reach};
    return {pass % 2 ? 0 : HALF, RING, HALF};
}

// ---- shared memory by address: one address register, offsets in the instruction ------------------------------------

DEVICE u32 load(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}
// COUNT words, 1, 2 or 4, aligned to their size.
template <int COUNT> DEVICE void load_words(u32 address, u32* v) {
    if constexpr (COUNT == 1) v[0] = load(address);
    if constexpr (COUNT == 2)
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(address) : "memory");
    if constexpr (COUNT == 4)
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
DEVICE u64 load_long(u32 address) {
    u64 value;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
    return value;
}
DEVICE int load_short(u32 address) {
    short value;
    asm volatile("ld.shared.s16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
    return value;
}
DEVICE void store(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
template <int COUNT> DEVICE void store_words(u32 address, const u32* v) {
    if constexpr (COUNT == 1) store(address, v[0]);
    if constexpr (COUNT == 2)
        asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(v[0]), "r"(v[1]) : "memory");
    if constexpr (COUNT == 4)
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                     : "memory");
}
DEVICE void store_long(u32 address, u64 value) {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}
DEVICE void store_short(u32 address, int value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((short)value) : "memory");
}
DEVICE void searchers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(SEARCHERS) : "memory"); }
// These and the tracing warps.
DEVICE void all_meet() { asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory"); }

// ---- arithmetic on metrics: two of 16 bits, or one of 32 -----------------------------------------------------------

DEVICE u32 least(u32 a, u32 b) { return COST == WIDE ? min(a, b) : __vminu2(a, b); }
DEVICE u32 least_of_three(u32 a, u32 b, u32 c) { return COST == WIDE ? min(min(a, b), c) : __vimin3_u16x2(a, b, c); }
DEVICE u32 twice(u32 value) { return value | value << 16; }
DEVICE u32 metric_of(u32 word, int ring) { return COST == WIDE ? word : word >> ring % 2 * 16 & 0xFFFF; }

DEVICE u32 branch_cost(int target, int code, const Rule& rule) {
    const u32 distance = min((u32)abs(target - code), (u32)rule.limit) << rule.shift;
    return distance * distance >> (COST == WIDE ? 0 : 16);
}

// Where a word of narrow metrics lies. Threads that write 32 bytes or more in a row would meet in the same banks: the
// pieces of 16 bytes are permuted within 128.
constexpr bool PERMUTED = COST != WIDE && (TWO_STEPS || (W < 4 ? 1 << W : 8) * WORDS >= 8);
DEVICE u32 place(u32 word) { return PERMUTED ? word ^ ((word >> 5 & 7) << 2) : word; }

// ---- what is subtracted now and then: the least metric. Each warp reports its own. ---------------------------------

DEVICE void report_lowest(u32 shared, int slot, int thread, u32 (&lowest)[WORDS]) {
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
#pragma unroll
        for (int other = 1; other < WARP; other *= 2)
            lowest[word] = least(lowest[word], __shfl_xor_sync(0xFFFFFFFFu, lowest[word], other));
        if (thread % WARP == 0) store(shared + LOWEST + ((slot * WORDS + word) * 16 + thread / WARP) * 4, lowest[word]);
    }
}
DEVICE u32 reported_lowest(u32 shared, int slot, int word) {
    u32 lowest = 0xFFFFFFFFu;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 v[4];
        load_words<4>(shared + LOWEST + (slot * WORDS + word) * 64 + k * 16, v);
        lowest = least(lowest, least(least(v[0], v[1]), least(v[2], v[3])));
    }
    return lowest;
}

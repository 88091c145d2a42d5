// The expert bank's sizes, its shared memory and its arguments, and how its teams wait for each other (expert_bank.cu).
#ifndef ESPALIER_BANK_DATA
#define ESPALIER_BANK_DATA

#include "lane_tile.cuh"
#include "overlap.cuh"

typedef long long i64;

constexpr int WARPS = THREADS / 32, TEAMS = WARPS / TEAM_WARPS, TEAM_THREADS = 32 * TEAM_WARPS;
constexpr int TOKENS = 8;        // of a group: the columns of an mma
constexpr int COLUMNS = 128;     // outputs of a task: eight tiles
constexpr int MOST = 512;        // assignments of tokens to experts
constexpr int K_WARPS = TEAM_WARPS / PARTS;

__device__ constexpr int rounded(int size, int unit) { return (size + unit - 1) / unit * unit; }
__device__ constexpr int padded(int size, int block) { return rounded(size, block ? block : 16); }
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }

constexpr int GATE_IN = padded(HIDDEN, IN_GATE), GATE_OUT = padded(INTERMEDIATE, OUT_GATE);
constexpr int UP_IN = padded(HIDDEN, IN_UP), UP_OUT = padded(INTERMEDIATE, OUT_UP);
constexpr int DOWN_IN = padded(INTERMEDIATE, IN_DOWN), DOWN_OUT = padded(HIDDEN, OUT_DOWN);
constexpr int LARGEST_BLOCK = most(most(most(IN_GATE, OUT_GATE), most(IN_UP, OUT_UP)), most(IN_DOWN, OUT_DOWN));

constexpr int EACH = LARGEST_BLOCK > 128 ? 8 : 4;  // neighbouring features of a lane, where a warp rotates a chunk
constexpr int CHUNK = 32 * EACH;
constexpr int A_INPUTS = rounded(most(GATE_IN, UP_IN), CHUNK), B_INPUTS = rounded(DOWN_IN, CHUNK);
constexpr int A_BLOCKS = (most(GATE_OUT, UP_OUT) + COLUMNS - 1) / COLUMNS;
constexpr int B_BLOCKS = (DOWN_OUT + COLUMNS - 1) / COLUMNS;
constexpr int A_STRIDE = rounded(A_BLOCKS * COLUMNS, 256), B_STRIDE = rounded(B_BLOCKS * COLUMNS, 256);
constexpr int CHUNKS_OUT = (HIDDEN + CHUNK - 1) / CHUNK;

// ---- shared memory --------------------------------------------------------------------------------------------------

constexpr int INPUT_STRIDE = SLICE * 2 + 16;   // bytes of a token's inputs; the 16 spread tokens over the banks
constexpr int SUM_STRIDE = COLUMNS + 4;        // floats

// A task, worked out by one thread of the team.
struct Task {
    int kind;                   // 0 A, 1 B, 2 C, 3 none left
    int number, start, count;   // of the group, its first place in the order of assignments, tokens of it
    int expert, projection, book;
    int block, blocks;          // of 128 columns
    int slice, first, size;     // inputs
    u32 tiles;                  // of the matrix, in pieces of 128 bytes
};

struct Team {
    unsigned char inputs[TOKENS * INPUT_STRIDE];
    float sums[K_WARPS][TOKENS][SUM_STRIDE];
    int exponents[TOKENS][SLICE / CHUNK];
    Task tasks[2];
    int padding[2];  // to a multiple of 16 bytes
};

struct Shared {
    Team teams[TEAMS];
    int unsorted[MOST];         // first, for its alignment to 16 bytes
    int keys[MOST];             // expert * 2^16 + assignment, sorted
    u16 place[MOST];            // where in the order an assignment is, 2^16 - 1: nowhere
    u16 token[MOST];            // of each assignment in that order
    u16 start[MOST + 2];        // of each group, and the end
    u32 tiles[3][MOST];         // of the matrices of each group
    unsigned char books[3][MOST];
    int groups, totals[MOST / 32];
};

// The host asks for this much (kernels/cuda/expert_bank.py), and launches no more assignments than this.
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host asks for too little shared memory");
static_assert(MOST == ASSIGNMENTS, "the host takes another number of assignments for the most");

extern __shared__ __align__(1024) unsigned char dynamic[];

// Tables lie at fixed addresses of shared memory, from 1024 to FIRST_FREE; what the driver takes ends before.
__device__ __forceinline__ Shared& shared_data() {
    const u32 begin = static_cast<u32>(__cvta_generic_to_shared(dynamic));
    return *reinterpret_cast<Shared*>(dynamic + (FIRST_FREE - begin));
}

__device__ __forceinline__ int team_number() { return threadIdx.x / TEAM_THREADS; }
__device__ __forceinline__ Team& team_data() { return shared_data().teams[team_number()]; }
__device__ __forceinline__ int team_thread() { return threadIdx.x % TEAM_THREADS; }
__device__ __forceinline__ int team_warp() { return threadIdx.x / 32 % TEAM_WARPS; }
__device__ __forceinline__ void team_barrier() {
    asm volatile("bar.sync %0, %1;" ::"r"(team_number() + 1), "n"(TEAM_THREADS) : "memory");
}

// ---- arguments ------------------------------------------------------------------------------------------------------

// How the tasks A and B are cut.
struct Pieces {
    int slices, chunks;      // of the inputs, and how many chunks of them each has
    int together, blocks;    // column blocks of a task, and how many tasks those of a matrix make
};

struct Arguments {
    const u16* x;             // (tokens, HIDDEN)
    const void* ids;          // (tokens, top_k), 4 or 8 bytes each
    const void* weights;      // (tokens, top_k)
    const u32* trellis;
    const u16* scales;
    const i64* offsets;       // (3, experts), in halfwords
    const int* books;         // (3, experts)
    float* part_a;            // [place][gate, up][slice][A_STRIDE]
    float* part_b;            // [place][slice][B_STRIDE]
    u16* y;                   // (tokens, HIDDEN)
    u32* counters;            // ticket, leavers, B tasks done by column block, A tasks done by group; all zero
    int tokens, top_k, experts;
    int id_bytes;
    int weight_kind;          // 0 float32, 1 float16, 2 bfloat16
    Pieces of_a, of_b;
};

constexpr int TICKET = 0, LEFT = 1, B_DONE = 2, A_DONE = 2 + B_BLOCKS;

__device__ __forceinline__ float float_of_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ float float_of(u16 bits) {
#if BFLOAT
    return __uint_as_float(static_cast<u32>(bits) << 16);
#else
    return float_of_half(bits);
#endif
}

__device__ __forceinline__ u16 narrowed(float value) {
    u16 bits;
#if BFLOAT
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

__device__ __forceinline__ u32 half2_of(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 half2_product(u32 a, u32 b) {
    u32 pair;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

// ---- who waits for whom ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void wait_for(const u32* counter, u32 count) {
    u32 seen;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < count);
}

// Of a team, one thread waits and takes tickets, another says what has been done: of the warps that stage least.
constexpr int CONTROL_WARP = TEAM_WARPS - 1, ANNOUNCE_WARP = TEAM_WARPS - 2;

__device__ __forceinline__ bool controls() { return team_thread() == CONTROL_WARP * 32; }
__device__ __forceinline__ bool announces() { return team_thread() == ANNOUNCE_WARP * 32; }

// Called by one thread. No addition: the compiler would wait for its result at once, to share it among the warp.
__device__ __forceinline__ u32 take_ticket(const Arguments& a) {
    u32 ticket;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7FFFFFFF;" : "=r"(ticket) : "l"(a.counters + TICKET)
                 : "memory");
    return ticket;
}

// Called by one thread after a barrier of the team: what the team has written is seen by whoever waits.
__device__ __forceinline__ void announce(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

#endif

// Products with tiles in registers: a lane's run of the trellis stream, its windows, and mma.m16n8k16 straight from
// them.
//
// A *unit* is 32 consecutive ring positions of a tile, 2 HALF_STEPS bytes: of V, all 16 rows k of the columns c and c +
// 8, where c is the number of the unit in its tile. Eight positions of it are a lane's share of the A operand of one
// mma: {(0,1), (4,5), (2,3), (6,7)} have k = 2r, 2r + 1 | 2r, 2r + 1 | 2r + 8, 2r + 9 | 2r + 8, 2r + 9 for the r-th
// eight, of the columns c | c + 8 | c | c + 8.
//
// So that a lane reads 16 bytes or more at once, a warp does not take one tile: the four lanes of a quad hold the same
// units of four tiles that follow each other along k, and the eight quads hold different units. The sum over a quad
// that mma makes is a sum over k, whatever rows of V its lanes hold, as long as each lane's B operand is of the same
// rows. In one *step* a warp multiplies 4 tiles along k by TILES tiles along n; a lane holds TILES units, in PIECES
// runs of UNITS units that lie together.
//
// A lane reads its words itself, one step ahead. But the four lanes of a quad so read from four places far from each
// other, and where the pipe of shared memory is busy with look-ups, the cache that shares it with them is in the way.
// There the words can be STAGED: copied to shared memory two steps ahead, 128 bytes of a row of tiles by eight lanes,
// and read from there one step ahead. A warp copies for itself alone.
//
// Macros beside those of codebook_tables.cuh: TILES; STAGED (0 or 1). Used by matmul.cu; made for other kernels that
// multiply as well.
#ifndef ESPALIER_TILE_STREAM
#define ESPALIER_TILE_STREAM

#include "codebook_tables.cuh"
#include "tensor_core.cuh"

// The longest run that loads in 16, 8 or 4 bytes at a time without leaving gaps between lanes.
__device__ constexpr int whole_units(int half_steps) {
    return half_steps == 8 || half_steps == 16 ? 1 : half_steps == 4 || half_steps >= 10 ? 2 : 4;
}
constexpr int UNITS = whole_units(HALF_STEPS) < TILES ? whole_units(HALF_STEPS) : TILES;
constexpr int PIECES = TILES / UNITS;
constexpr int PIECE_WORDS = HALF_STEPS * UNITS / 2;
constexpr int RUNS = 8 / UNITS;  // of a tile
static_assert(HALF_STEPS * UNITS % 2 == 0, "a run is of whole words");
constexpr int LOAD_WORDS = PIECE_WORDS % 4 == 0 ? 4 : PIECE_WORDS % 2 == 0 ? 2 : 1;

// The words of one step. word[p][0] is what stands before run p on the ring; only its last 16 bits count.
struct Step {
    u32 word[PIECES][PIECE_WORDS + 1];
};

#if STAGED

constexpr int ROW_PARTS = TILES * HALF_STEPS;  // 16 bytes each, of a row of tiles of a step
constexpr int COPIES = (ROW_PARTS + 7) / 8;    // of a lane
constexpr int ROW_BYTES = (ROW_PARTS * 16 + 95) / 128 * 128 + 32;  // of a stage; rows begin in different banks
constexpr int STAGE_BYTES = 4 * ROW_BYTES;

// The row of tiles of a step that a lane fetches from, and where there, in words, from the first of the warp's tiles on.
__device__ __forceinline__ int fetched_row(int lane) { return lane >> 3; }
__device__ __forceinline__ int fetched_offset(int lane) { return (lane & 7) * 4; }
// How much a lane may fetch, where so many tiles along n are left: what `fetch` takes.
__device__ __forceinline__ int fetched_room(int lane, int tiles) {
    return min(tiles, TILES) * HALF_STEPS - (lane & 7);
}

// Two stages of a warp, used in turn.
class Stages {
    u32 present, both;  // what of this stage a lane reads; the sum of both places
    int to;             // from there to where it copies to

  public:
    __device__ __forceinline__ Stages(u32 start, int lane) {
        const int quad = lane >> 2;
        const int from = (lane & 3) * ROW_BYTES + (quad / RUNS * TILE_WORDS + quad % RUNS * PIECE_WORDS) * 4;
        present = start + from, both = 2 * present + STAGE_BYTES;
        to = fetched_row(lane) * ROW_BYTES + fetched_offset(lane) * 4 - from;
    }
    // Begin to copy a step to the present stage: `room` is 0 where nothing exists for a lane.
    __device__ __forceinline__ void fetch(const u32* words, int room) const {
#pragma unroll
        for (int i = 0; i < COPIES; ++i)
            asm volatile("{.reg .pred p; setp.gt.s32 p, %2, %3; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(
                             present + to + i * 128),
                         "l"(words + i * 32), "r"(room), "r"(i * 8)
                         : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    __device__ __forceinline__ void turn() { present = both - present; }
    // Wait until of the steps that lanes of the warp have begun to copy all are there but the last `LEFT`.
    template <int LEFT>
    __device__ __forceinline__ void wait() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
        __syncwarp();
    }
    // The words of the step in the present stage; of tiles that do not exist, any.
    __device__ __forceinline__ void read(Step& step) const {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
#pragma unroll
            for (int i = 1; i <= PIECE_WORDS; i += LOAD_WORDS) {
                u32* word = &step.word[p][i];
                const u32 from = present + (p * UNITS * TILE_WORDS + i - 1) * 4;
                if constexpr (LOAD_WORDS == 4)
                    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                                 : "r"(from)
                                 : "memory");
                else if constexpr (LOAD_WORDS == 2)
                    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "r"(from) : "memory");
                else
                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word[0]) : "r"(from) : "memory");
            }
    }
};

#else

__device__ __forceinline__ int fetched_row(int lane) { return lane & 3; }
__device__ __forceinline__ int fetched_offset(int lane) {
    const int quad = lane >> 2;
    return quad / RUNS * TILE_WORDS + quad % RUNS * PIECE_WORDS;
}
__device__ __forceinline__ int fetched_room(int lane, int tiles) { return tiles - (lane >> 2) / RUNS; }

// Read a step; `room` is 0 where nothing exists for a lane. What does not exist keeps its value.
__device__ __forceinline__ void fetch(Step& step, const u32* words, int room) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int i = 1; i <= PIECE_WORDS; i += LOAD_WORDS) {
            u32* word = &step.word[p][i];
            const u32* from = words + p * UNITS * TILE_WORDS + i - 1;
            if constexpr (LOAD_WORDS == 4)
                asm volatile("{.reg .pred p; setp.gt.s32 p, %5, %6; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                             : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
                             : "l"(from), "r"(room), "r"(p * UNITS));
            else if constexpr (LOAD_WORDS == 2)
                asm volatile("{.reg .pred p; setp.gt.s32 p, %3, %4; @p ld.global.v2.u32 {%0, %1}, [%2];}"
                             : "+r"(word[0]), "+r"(word[1])
                             : "l"(from), "r"(room), "r"(p * UNITS));
            else
                asm volatile("{.reg .pred p; setp.gt.s32 p, %2, %3; @p ld.global.u32 %0, [%1];}"
                             : "+r"(word[0])
                             : "l"(from), "r"(room), "r"(p * UNITS));
        }
}

#endif

// The lane that has what stands before each run of a lane.
__device__ __forceinline__ int lane_before(int lane) {
    return (lane >> 2) % RUNS == 0 ? lane + 4 * (RUNS - 1) : lane - 4;
}

// Fetch what stands before each run, from the lane that has it. All 32 lanes must come here.
__device__ __forceinline__ void close_rings(Step& step, int before) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const u32 last = step.word[p][PIECE_WORDS];
        step.word[p][0] = RUNS == 1 ? last : __shfl_sync(0xFFFFFFFFu, last, before);
    }
}

// The column of V, in the warp's TILES tiles, of unit `unit` (0 ... TILES - 1) of a lane; it also has column + 8.
__device__ __forceinline__ int unit_column(int unit, int lane) {
    const int quad = lane >> 2;
    return 16 * (unit / UNITS * UNITS + quad / RUNS) + quad % RUNS * UNITS + unit % UNITS;
}

// Position i of a run ends here, counted from the start of the word before the run.
__device__ constexpr int position_end(int i) {
    return 32 + (i >> 1) * HALF_STEPS + (i & 1 ? HALF_STEPS : HALF_STEPS >> 1);
}

__device__ __forceinline__ u32 shifted_word(const u32* word, int index, int shift) {
    if (shift == 0) return word[index];
    return __funnelshift_l(index < PIECE_WORDS ? word[index + 1] : 0u, word[index], shift);
}

// The state that ends at `end`, twice in its word (`hashed_twice`). So one byte permutation takes it from two words, and
// needs no zeros. `end` is a constant once loops are unrolled; the shifted words of one offset in a byte are shared by
// all states that have it.
__device__ __forceinline__ u32 doubled_state(const u32* word, int end) {
    const int shift = end & 7, first = (end >> 3) - 2, index = first >> 2;
    const u32 a = shifted_word(word, index, shift);
    if ((first & 3) == 0) return __byte_perm(a, 0, 0x3232);
    if ((first & 3) == 1) return __byte_perm(a, 0, 0x2121);
    if ((first & 3) == 2) return __byte_perm(a, 0, 0x1010);
    return __byte_perm(a, shifted_word(word, index + 1, shift), 0x0707);
}

__device__ __forceinline__ u32 hash_at(const u32* word, int position) {
    return hashed_twice(doubled_state(word, position_end(position)));
}

// ---- products ------------------------------------------------------------------------------------------------------

// The values of positions `i` and `i + 1` of a run, as a pair of float16 (of grids in units of DECODED_UNIT).
__device__ __forceinline__ u32 decode_pair(const u32* word, int i, const Lookup& lookup) {
    u32 x0 = hash_at(word, i), x1 = hash_at(word, i + 1);
#if IS_GRID
    return grid_pair(x0, x1, lookup);
#elif FAMILY == FAMILY_EXL3_MUL1
    // As exl3_pair_of_hashes, with both sums in one word: 1024 + the sum of the bytes needs 16 bits.
    x1 = __dp4a(x1, 0x01010101u, 0x6400u);
    x0 = __dp4a(x0, 0x01010101u, x1 * 65536u + 0x6400u);
    return half2_fma(x0, 0x1EEE1EEEu, 0xC931C931u);
#else
    return exl3_pair_of_hashes(x0, x1);
#endif
}

// Decode the A operand of the r-th mma (0 ... 3) of a unit (0 ... TILES - 1).
__device__ __forceinline__ void decode_operand(u32 (&a)[4], const Step& step, int unit, int r, const Lookup& lookup) {
    const u32* word = step.word[unit / UNITS];
    const int i = unit % UNITS * 32 + r * 8;
    a[0] = decode_pair(word, i, lookup);
    a[1] = decode_pair(word, i + 4, lookup);
    a[2] = decode_pair(word, i + 2, lookup);
    a[3] = decode_pair(word, i + 6, lookup);
}

#endif  // ESPALIER_TILE_STREAM

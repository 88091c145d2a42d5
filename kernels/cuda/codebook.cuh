// From the words of a tile to numbers: windows of the trellis stream (spec/packing.md) and the codebooks.
//
// Specialised by macros (kernels/cuda/macros.py): FAMILY, HALF_STEPS (twice the bits per weight), MULTIPLIER, ADDEND and,
// for grids, INDEX_BITS. Numbers are float16 bit patterns, alone or in pairs; the type __half would need a header.
//
// A warp decodes a tile: lane t has the ring positions 8t ... 8t + 7. They are, of V (rows along the input k, columns
// along the output n),
//     position j of a lane:  k = 2 (t % 4) + (j & 1) + 8 ((j >> 1) & 1)      n = t / 4 + 8 (j >> 2)
// which is the operand order of mma.m16n8k16: the pairs (0,1) and (2,3) are the B operand (16 k x 8 n) of the columns
// 0..7, the pairs (4,5) and (6,7) that of 8..15; and {(0,1), (4,5), (2,3), (6,7)} is the A operand (16 n x 16 k) of V^T.
#ifndef ESPALIER_CODEBOOK
#define ESPALIER_CODEBOOK

#define FAMILY_E2M1 1
#define FAMILY_INT5 2
#define FAMILY_INT6 3
#define FAMILY_INT8 4
#define FAMILY_EXL3_3INST 5
#define FAMILY_EXL3_MCG 6
#define FAMILY_EXL3_MUL1 7
#define IS_GRID (FAMILY <= FAMILY_INT8)

#include "grids.cuh"  // GRID_CODES, of this family

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// ---- float16 without a header -------------------------------------------------------------------------------------

__device__ __forceinline__ u32 half2_add(u32 a, u32 b) {
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ __forceinline__ u32 half2_subtract(u32 a, u32 b) {
    u32 difference;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

__device__ __forceinline__ u32 half2_fma(u32 a, u32 b, u32 c) {
    u32 result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// Rounds to nearest even; overflows to an infinity.
__device__ __forceinline__ u16 half_from_float(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float float_from_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// The pair of float16 (low, high) of two floats.
__device__ __forceinline__ u32 half2_from_floats(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 bfloat2_from_floats(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// ---- windows ------------------------------------------------------------------------------------------------------

constexpr int TILE_WORDS = 4 * HALF_STEPS;    // of 32 bits, in a tile
constexpr int LANE_BITS = 4 * HALF_STEPS;     // stream bits that the eight positions of a lane bring
// Where 4 HALF_STEPS is a multiple of 32, a lane's bits start in the middle of a word, for all lanes alike. Elsewhere the
// words are shifted into place, by 0 ... 28 bits.
constexpr bool ALIGNED = LANE_BITS % 32 == 0;
constexpr int SEGMENT_OFFSET = ALIGNED ? 16 : 0;  // bits before the first bit that a lane needs
constexpr int SEGMENT_WORDS = (SEGMENT_OFFSET + 16 + LANE_BITS + 31) / 32;

// End of position j of a lane, counted from the end of the last position of the lane before.
__device__ constexpr int window_end(int j) { return (j + 1) * (HALF_STEPS / 2) + (HALF_STEPS % 2) * ((j + 1) / 2); }

// The bits of a lane's eight windows, most significant first: 16 old bits, then the LANE_BITS new ones.
struct Segment {
    u32 word[SEGMENT_WORDS + 1];  // the last is never read as a whole; zero
};

// Read the segment of a lane from a tile, in global or shared memory, 4-byte aligned. The ring closes: the words before
// the first are the last.
__device__ __forceinline__ Segment load_segment(const u32* tile, int lane) {
    Segment segment;
    segment.word[SEGMENT_WORDS] = 0;
    const int start = lane * LANE_BITS - 16;  // from -16
    int index = start >> 5;
    if constexpr (ALIGNED) {
#pragma unroll
        for (int i = 0; i < SEGMENT_WORDS; ++i)
            segment.word[i] = tile[i == 0 && index < 0 ? TILE_WORDS - 1 : index + i];
    } else {
        const int shift = start & 31;
        u32 raw = tile[index < 0 ? TILE_WORDS - 1 : index];
#pragma unroll
        for (int i = 0; i < SEGMENT_WORDS; ++i) {
            // The last word may lie past the tile; then no bit of it is used.
            const int next = index + i + 1;
            const u32 following = tile[next < TILE_WORDS ? next : 0];
            segment.word[i] = __funnelshift_l(following, raw, shift);
            raw = following;
        }
    }
    return segment;
}

// The state of position J of the lane, with zeros above its 16 bits. One byte permutation, and a funnel shift that the
// positions with the same offset in a byte share.
template <int J>
__device__ __forceinline__ u32 window(const Segment& segment) {
    constexpr int first = SEGMENT_OFFSET + window_end(J);  // first bit of the window
    constexpr int word = first / 32, offset = first % 8, byte = first % 32 / 8;
    static_assert(word < SEGMENT_WORDS, "a window lies inside its segment");
    u32 high = segment.word[word], low = 0;
    constexpr bool spans = byte == 3;  // after the shift: the last byte of this word and the first of the next
    if constexpr (offset != 0) high = __funnelshift_l(segment.word[word + 1], high, offset);
    if constexpr (spans) {
        low = segment.word[word + 1];
        if constexpr (offset != 0) {
            constexpr int after = word + 2 <= SEGMENT_WORDS ? word + 2 : SEGMENT_WORDS;
            low = __funnelshift_l(segment.word[after], low, offset);
        }
    }
    // __byte_perm numbers the bytes of (high, low) from the least significant of its first operand.
    if constexpr (byte == 0) return high >> 16;
    if constexpr (byte == 1) return __byte_perm(high, 0, 0x4421);
    if constexpr (byte == 2) return high & 0xFFFF;
    return __byte_perm(high, low, 0x0007) & 0xFFFF;
}

// ---- codebooks ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 hashed(u32 state) { return state * MULTIPLIER + ADDEND; }

// The same of a state that a byte permutation has taken twice into its word, s + 2^16 s, which spares a mask:
// (1 + 2^16) (1 - 2^16) = 1 modulo 2^32.
__device__ __forceinline__ u32 hashed_twice(u32 doubled) { return doubled * (MULTIPLIER * (1u - 65536u)) + ADDEND; }

#if IS_GRID

constexpr int TABLE_ENTRIES = 1 << INDEX_BITS;

__device__ __forceinline__ u32 grid_index(u32 state) { return hashed(state) >> (32 - INDEX_BITS); }

// The stored code of an entry of the table (e2m1: doubled).
__device__ __forceinline__ int grid_code(int entry) { return GRID_CODES[entry]; }

#else

// The values of two hashes, as a pair of float16: exact to the bit (spec/codebook-exl3.md §2, §3).
__device__ __forceinline__ u32 exl3_pair_of_hashes(u32 x0, u32 x1) {
#if FAMILY == FAMILY_EXL3_MUL1
    x0 = __dp4a(x0, 0x01010101u, 0x6400u);  // the float16 1024 + the sum of the bytes
    x1 = __dp4a(x1, 0x01010101u, 0x6400u);
    return half2_fma(low_halves(x0, x1), 0x1EEE1EEEu, 0xC931C931u);
#else
    x0 = (x0 & 0x8FFF8FFFu) ^ 0x3B603B60u;
    x1 = (x1 & 0x8FFF8FFFu) ^ 0x3B603B60u;
    return half2_add(low_halves(x0, x1), high_halves(x0, x1));
#endif
}

__device__ __forceinline__ u32 exl3_pair(u32 state0, u32 state1) {
    return exl3_pair_of_hashes(hashed(state0), hashed(state1));
}

#endif  // IS_GRID
#endif  // ESPALIER_CODEBOOK

// A lane decodes tiles of its own: the inner loop of products where every expert has a codebook of its own.
//
// In the fragments of mma.m16n8k16 a row of A may be any output column and a position along k any input, as long as A and
// B agree. Here the row group g = lane / 4 of a warp stands for one of eight neighbouring tiles along the output, and the
// k positions of lane q = lane % 4 for one of four neighbouring tiles along the input. So a lane has whole tiles, whose
// bits it loads with wide loads, and every shift and byte position in them is known to the compiler. The operand B of
// position c of the ring of eight (c = 4 g' + q') holds the inputs 2 q', 2 q' + 1, 2 q' + 8, 2 q' + 9 of the lane's tile.
//
// The numbers go to A one by one, in the low half of a register, with zero in the high half: a second mma with the odd
// inputs costs less than packing pairs, since the tensor cores are idle.
#ifndef ESPALIER_LANE_TILE
#define ESPALIER_LANE_TILE

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int KIND_TABLE = 0;       // a grid, looked up in shared memory
constexpr int KIND_TABLE_BYTE = 1;  // the same, where the highest byte of the product is the index
constexpr int KIND_3INST = 2;       // exl3-3inst and exl3-mcg
constexpr int KIND_MUL1 = 3;        // exl3-mul1

// Warps share tiles: each decodes a part of every tile. Parts keep registers and code small; four are no faster than two.
constexpr int PARTS = 2;

// HALF_STEPS: twice the bits per weight. A table has 2^INDEX_BITS entries of 2^COPIES neighbouring copies (4 bytes each),
// from the address BASE of shared memory on; of KIND_TABLE_BYTE it has 256 entries, 256 bytes apart, of 32 copies.
template <int HALF_STEPS_, int KIND_, u32 MULTIPLIER_, u32 ADDEND_, int INDEX_BITS_, int COPIES_, int BASE_>
struct Book {
    static constexpr int HALF_STEPS = HALF_STEPS_, KIND = KIND_, INDEX_BITS = INDEX_BITS_, COPIES = COPIES_, BASE = BASE_;
    // A window comes twice in its 32-bit word: s + 2^16 s. (1 + 2^16) (1 - 2^16) = 1 modulo 2^32.
    static constexpr u32 MULTIPLIER = MULTIPLIER_ * (1u - 65536u), ADDEND = ADDEND_;
    static constexpr int TILE_WORDS = 4 * HALF_STEPS;
    static constexpr int WORDS = TILE_WORDS / PARTS;  // of a part of a tile
};

// The end of the window of ring position i of a part, in bits from the start of the part (spec/packing.md §4).
__device__ constexpr int window_end(int half_steps, int i) {
    return (i + 1) * (half_steps / 2) + (half_steps % 2) * ((i + 1) / 2);
}

// Words of a part of a tile, behind the word that comes before them in the ring.
template <class B>
struct TilePart {
    u32 word[B::WORDS + 1];

    // From where the part starts, and how far from there the word before it is.
    __device__ __forceinline__ void load(const u32* start, int before) {
        word[0] = start[before];
        if constexpr (B::WORDS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < B::WORDS / 4; ++i) {
                const uint4 four = reinterpret_cast<const uint4*>(start)[i];
                word[4 * i + 1] = four.x, word[4 * i + 2] = four.y, word[4 * i + 3] = four.z, word[4 * i + 4] = four.w;
            }
        } else if constexpr (B::WORDS % 2 == 0) {
#pragma unroll
            for (int i = 0; i < B::WORDS / 2; ++i) {
                const uint2 two = reinterpret_cast<const uint2*>(start)[i];
                word[2 * i + 1] = two.x, word[2 * i + 2] = two.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < B::WORDS; ++i) word[i + 1] = start[i];
        }
    }

    // The words, moved towards the end of the stream by 0 ... 7 bits.
    __device__ __forceinline__ u32 moved(int index, int bits) const {
        const u32 low = word[index + 1];
        if (bits == 0) return low;
        // The word before the first is needed for its last fifteen bits only.
        return index < 0 ? low >> bits : __funnelshift_r(low, word[index < 0 ? 0 : index], bits);
    }

    // The state of ring position i of the part, in both halves of the result; i is known to the compiler.
    __device__ __forceinline__ u32 window(int i) const {
        const int end = window_end(B::HALF_STEPS, i), bits = (8 - end % 8) % 8, byte = (end + bits) / 8 - 1;
        const u32 last = moved(byte / 4, bits);
        if (byte % 4 == 0) return __byte_perm(last, moved(byte / 4 - 1, bits), 0x4343);
        const int low = 3 - byte % 4;
        return __byte_perm(last, 0, 0x1010 * (low + 1) + 0x0101 * low);
    }
};

template <int BASE>
__device__ __forceinline__ u32 looked_up(u32 place) {
    u32 number;
    asm("ld.shared.u32 %0, [%1+%2];" : "=r"(number) : "r"(place), "n"(BASE));  // tables do not change: not volatile
    return number;
}

// The float16 number of a state (given twice), in the low half. The high half is zero, or the number again (KIND_3INST).
template <class B>
__device__ __forceinline__ u32 number(u32 twice, u32 lane_bytes) {
    const u32 product = twice * B::MULTIPLIER + B::ADDEND;
    if constexpr (B::KIND == KIND_TABLE_BYTE) {
        return looked_up<B::BASE>(__byte_perm(product, lane_bytes, 0x7634));
    } else if constexpr (B::KIND == KIND_TABLE) {
        constexpr int SHIFT = 30 - B::INDEX_BITS - B::COPIES;
        constexpr u32 MASK = ((1u << B::INDEX_BITS) - 1) << (B::COPIES + 2);
        return looked_up<B::BASE>(((product >> SHIFT) & MASK) | lane_bytes);
    } else if constexpr (B::KIND == KIND_3INST) {
        const u32 pair = (product & 0x8FFF8FFFu) ^ 0x3B603B60u;
        u32 sum;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(__byte_perm(pair, 0, 0x1010)), "r"(__byte_perm(pair, 0, 0x3232)));
        return sum;
    } else {
        const u32 sum = __dp4a(product, 0x01010101u, 0x6400u);  // the float16 1024 + the sum of the bytes
        u32 value;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(value) : "r"(sum), "r"(0x1EEEu), "r"(0xC931u));
        return value;
    }
}

__device__ __forceinline__ void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Multiply a lane's part of a tile (warp: four tiles along k, eight along n, some of the columns of each) with the inputs.
//
// `inputs` are the sixteen float16 of the lane's k tile and token lane / 4, in pairs: 0 1, 8 9, 2 3, 10 11, 4 5 ... 14 15.
// Sums: [i][0 ... 3] are of column i of the part, for tokens 2 q and 2 q + 1, and of the column 8 beyond, for the same, of
// tile lane / 4. The first column of a part is 8 / PARTS times its number.
template <class B>
__device__ __forceinline__ void multiply(
    const TilePart<B>& tile, const uint4 (&inputs)[2], float (&sums)[8 / PARTS][4], u32 lane) {
    const u32 pairs[8] = {inputs[0].x, inputs[0].y, inputs[0].z, inputs[0].w, inputs[1].x, inputs[1].y, inputs[1].z, inputs[1].w};
    const u32 lane_bytes = 4 * (lane & ((1u << B::COPIES) - 1));
    u32 even[8], odd[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // Where the high half of a number is not zero, that of the inputs must be.
        constexpr bool TWICE = B::KIND == KIND_3INST;
        even[i] = TWICE ? pairs[i] & 0xFFFF : pairs[i];
        odd[i] = TWICE ? pairs[i] >> 16 : __byte_perm(pairs[i], 0, 0x1032);
    }
#pragma unroll
    for (int c = 0; c < 32 / PARTS; ++c) {
        u32 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = number<B>(tile.window(8 * c + j), lane_bytes);
        mma(sums[c / 4], v[0], v[4], v[2], v[6], even[c % 4 * 2], even[c % 4 * 2 + 1]);
        mma(sums[c / 4], v[1], v[5], v[3], v[7], odd[c % 4 * 2], odd[c % 4 * 2 + 1]);
    }
}

#endif

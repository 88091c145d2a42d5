// Tables of the grids in shared memory, made so that a look-up takes few instructions and few lanes wait for a bank.
//
// Each entry is there once for every bank, so that 32 lanes read 32 entries at once.
//
// e2m1 and int5: the top byte of the hash is the index. An entry has 128 bytes, a word for each lane, in the first half
// of the table with the float16 in the low half of the word and in the second with it in the high half, so that the sum
// of two words is a pair. A dot product of bytes makes the offset, 128 times the index and the lane's, because the pipe
// of byte permutations has more to do.
//
// The indices of int6 and int8 are longer. With WIDE_TABLE, where there is room:
//   int6   One byte permutation makes the offset here too: it takes the top byte of the hash as byte 1, and repeats the
//          next bit, the ninth, in all bits above. Entries where that bit is set so stand 65536 bytes before the
//          others. Of the 256 bytes of an entry half are used.
//   int8   An entry is a byte, the code and 128. A row of 128 bytes has four of them for every lane, in its own bank.
//          33 times the index ends in the last two bits of the index, which choose the byte; from its bit 7 on it is a
//          number that no two indices with the same byte share, the row; the bits between are replaced by the lane's.
// Else, in 64 KiB: int6 has 128 bytes an entry, int8 16, so that eight lanes share a copy.
//
// The table begins at a fixed address, TABLE_START: loads have room for a constant, so that nothing is added to the
// offset of an entry. Inputs and sums follow it in one piece.
//
// Macros beside those of codebook.cuh: WIDE_TABLE (0 or 1; 1 for int6 and int8 only); THREADS of a block.
#ifndef ESPALIER_CODEBOOK_TABLES
#define ESPALIER_CODEBOOK_TABLES

#include "codebook.cuh"

constexpr bool WIDE_BYTES = WIDE_TABLE && FAMILY == FAMILY_INT8;
constexpr float DECODED_UNIT = WIDE_BYTES ? 512.0f : 1.0f;  // decoded values are to be multiplied by this
constexpr u32 TABLE_START = 1024;  // in shared memory; a thread block's own begins here or before

// Keep a value in its register: the compiler would rather compute some of them again in every step.
template <class T>
__device__ __forceinline__ void keep(T& value) {
    asm volatile("" : "+r"(value));
}

#if IS_GRID

constexpr bool BYTE_INDEX = INDEX_BITS <= 8;
static_assert(!(WIDE_TABLE && BYTE_INDEX), "an index of one byte needs no wide table");
constexpr u32 BYTE_SPREAD = 33;
constexpr int BYTE_ROWS = (BYTE_SPREAD * (TABLE_ENTRIES - 1) >> 7) + 1;
constexpr int ENTRY_BYTES = WIDE_TABLE ? 256 : BYTE_INDEX || INDEX_BITS == 9 ? 128 : 16;
constexpr int TABLE_BYTES = WIDE_BYTES ? BYTE_ROWS * 128 : WIDE_TABLE ? 131072 : 65536;

constexpr int USED = WIDE_TABLE ? 8 : 16;  // pieces of 16 bytes, of every 256; where entries are words
constexpr int FILLED = WIDE_BYTES ? BYTE_ROWS : TABLE_BYTES / 256 * USED;
constexpr int EACH = (FILLED + THREADS - 1) / THREADS;

// Where a thread writes its n-th value, in 16 bytes from the start, and the number of the entry there.
__device__ __forceinline__ int at_of(int n) {
    int i = threadIdx.x + n * THREADS;
    if (FILLED % THREADS != 0) i = min(i, FILLED - 1);  // what is past the end is not written
    return i / USED * 16 + i % USED;
}
__device__ __forceinline__ int place_of(int n) { return at_of(n) * 16 / ENTRY_BYTES; }

// What a thread writes to the table: codes; of bytes, the word of a row.
struct TableEntries {
    u32 value[EACH];
};

// Volatile, to begin where it stands.
__device__ __forceinline__ int load_code(int entry) {
    int code;
    asm volatile("ld.global.s8 %0, [%1];" : "=r"(code) : "l"(GRID_CODES + entry));
    return code;
}

// The first of two steps, to be early in the kernel: what it reads takes its time.
__device__ __forceinline__ TableEntries load_entries() {
    TableEntries entries;
    if constexpr (WIDE_BYTES) {
        int code[EACH][4];
#pragma unroll
        for (int n = 0; n < EACH; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // Of entries 4 a + i that with 33 (4 a + i) in [128 row, 128 row + 128). Where there is none the byte
                // is never read.
                const int row = threadIdx.x + n * THREADS;
                const u32 entry = (128 * row + 4 * BYTE_SPREAD - 1 - BYTE_SPREAD * i) / (4 * BYTE_SPREAD) * 4 + i;
                code[n][i] = load_code(min(entry, TABLE_ENTRIES - 1u));
            }
#pragma unroll
        for (int n = 0; n < EACH; ++n)
            entries.value[n] = (u32)(code[n][0] + 128) | (u32)(code[n][1] + 128) << 8 | (u32)(code[n][2] + 128) << 16 |
                               (u32)(code[n][3] + 128) << 24;
    } else {
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int place = place_of(n);
            entries.value[n] = load_code(BYTE_INDEX   ? (place & 255) >> (8 - INDEX_BITS)
                                         : WIDE_TABLE ? 2 * (place & 255) + (place < 256)  // the ninth bit set: first
                                                      : place);
        }
    }
    return entries;
}

// The second step. All threads of the block; the caller synchronises.
__device__ __forceinline__ void fill_table(char* table, const TableEntries& entries) {
    uint4* words = reinterpret_cast<uint4*>(table);
    if constexpr (WIDE_BYTES) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int start = threadIdx.x - lane + n * THREADS;
            if (start >= BYTE_ROWS) break;
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
                const u32 word = __shfl_sync(0xFFFFFFFFu, entries.value[n], i + (lane >> 3));
                const int row = start + i + (lane >> 3);
                if (row < BYTE_ROWS) words[row * 8 + (lane & 7)] = make_uint4(word, word, word, word);
            }
        }
    } else {
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            if (FILLED % THREADS != 0 && threadIdx.x + n * THREADS >= FILLED) break;
            u32 value = half_from_float((FAMILY == FAMILY_E2M1 ? 0.5f : 1.0f) * (int)entries.value[n]);
            if (BYTE_INDEX && place_of(n) >= 256) value <<= 16;
            words[at_of(n)] = make_uint4(value, value, value, value);
        }
    }
}

// What a lane needs to look entries up.
struct Lookup {
    u32 lane_bytes;
    __device__ __forceinline__ explicit Lookup(int lane) {
        lane_bytes = (ENTRY_BYTES >= 128 ? lane : lane % (ENTRY_BYTES / 4)) * 4;
        keep(lane_bytes);
    }
};

// What is looked up for a hash: the value in the low half of a word (with HIGH, of a byte-indexed table: in the high
// half), else zero. Of a wide table of bytes: the byte.
template <bool HIGH>
__device__ __forceinline__ u32 looked_up(u32 hash, const Lookup& lookup) {
    u32 address, value;
    // Volatile: not to be moved before the barrier after fill_table.
    if constexpr (WIDE_BYTES) {
        address = ((hash >> (32 - INDEX_BITS)) * BYTE_SPREAD & ~0x7Cu) | lookup.lane_bytes;
        asm volatile("ld.shared.u8 %0, [%1 + %2];" : "=r"(value) : "r"(address), "n"(TABLE_START));
    } else if constexpr (WIDE_TABLE) {
        // __byte_perm does not promise to repeat bits.
        asm("prmt.b32 %0, %1, %2, 0xAA34;" : "=r"(address) : "r"(hash), "r"(lookup.lane_bytes));
        asm volatile("ld.shared.u32 %0, [%1 + %2];" : "=r"(value) : "r"(address), "n"(TABLE_START + 65536));
    } else {
        constexpr u32 MASK = ((1u << INDEX_BITS) - 1) * ENTRY_BYTES;
        address = BYTE_INDEX ? __dp4a(hash, 0x80000000u, lookup.lane_bytes) : (hash >> 16 & MASK) | lookup.lane_bytes;
        asm volatile("ld.shared.u32 %0, [%1 + %2];"
                     : "=r"(value)
                     : "r"(address), "n"(TABLE_START + (HIGH ? 32768 : 0)));
    }
    return value;
}

// (low half of c, high half of c + low half of b times `factor`), on the pipe of float16, which has little else to do.
__device__ __forceinline__ u32 add_to_high(u32 c, u32 b, u32 factor) {
    u32 sum;  // an instruction takes the low half of b for both halves as it is
    asm("{.reg .b16 low, high; .reg .b32 twice; mov.b32 {low, high}, %1; mov.b32 twice, {low, low};"
        " fma.rn.f16x2 %0, twice, %2, %3;}"
        : "=r"(sum)
        : "r"(b), "r"(factor << 16), "r"(c));
    return sum;
}

// The values of two hashes, as a pair of float16 in units of DECODED_UNIT.
__device__ __forceinline__ u32 grid_pair(u32 first, u32 second, const Lookup& lookup) {
    const u32 low = looked_up<false>(first, lookup), high = looked_up<BYTE_INDEX>(second, lookup);
    if constexpr (BYTE_INDEX) return half2_add(low, high);
    // A byte is a float16 too: itself times 2^-24. 2^15 makes it 2^-9, and 1/4 is 128 times that: all exact.
    if constexpr (WIDE_BYTES) return add_to_high(half2_fma(low, 0x78007800u, 0xB400B400u), high, 0x7800u);
    return add_to_high(low, high, 0x3C00u);
}

#else
constexpr int TABLE_BYTES = 0;
struct TableEntries {};
__device__ __forceinline__ TableEntries load_entries() { return {}; }
__device__ __forceinline__ void fill_table(char*, const TableEntries&) {}
struct Lookup {
    __device__ __forceinline__ explicit Lookup(int) {}
};
#endif  // IS_GRID
#endif  // ESPALIER_CODEBOOK_TABLES

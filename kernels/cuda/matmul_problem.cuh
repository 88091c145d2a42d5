// What the parts of matmul.cu share: the problem, how it is cut, and rotations.
#ifndef ESPALIER_MATMUL_PROBLEM
#define ESPALIER_MATMUL_PROBLEM

#include "overlap.cuh"
#include "shared_barrier.cuh"
#include "tile_stream.cuh"

constexpr int ROTATED = 256;  // elements that a warp rotates at a time, eight to a lane

struct Problem {
    const u16* x;
    const u32* trellis;
    const u16* suh;
    const u16* svh;
    const void* bias;
    u16* y;
    long long x_stride;         // elements between rows of x
    int rows;
    int in_features, out_features;
    int k_tiles, n_tiles;       // of the padded matrix
    int rotation_in, rotation_out;
    int is_bfloat;              // x and y are bfloat16, not float16
    int bias_kind;              // 0 none, 1 float32, 2 float16, 3 bfloat16
    int x_aligned, y_aligned;   // rows of x and y may be read and written 16 bytes at a time
    int unit_tiles;             // grid (1, n): k tiles of a unit. (ranks, n): of the range of a thread block
    int slice_tiles;            // k tiles whose inputs are in shared memory at a time, a multiple of 4
    int column_groups;          // warps side by side along n, a power of two
    int buffers;                // of sums, a power of two
    int sum_sets;               // of buffers, 1, 2 or 4
    float* parts;               // [blocks of columns][rows][contributions][width] where there is more than one of these
    int* arrived;               // [blocks of columns][rows], zero before and after
    float norm;                 // 1 / the root of the product of both rotation blocks
};

__device__ __forceinline__ float float_from_bfloat(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// A bfloat16 can be so large that its product with a scale overflows float32. All of them are made smaller by this.
constexpr int BFLOAT_SHIFT = 24;

// Multiply 256 elements by the Hadamard matrix of +1 and -1 in blocks of `block`; a lane has eight that lie together.
__device__ __forceinline__ void rotate(float (&v)[8], int block, int lane) {
    if (block == 0) return;
#pragma unroll
    for (int h = 1; h < 8; h *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if ((i & h) == 0) {
                const float a = v[i], b = v[i + h];
                v[i] = a + b;
                v[i + h] = a - b;
            }
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
        if (8 * h >= block) break;
        const float sign = lane & h ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = fmaf(v[i], sign, __shfl_xor_sync(0xFFFFFFFFu, v[i], h));
    }
}

// Where the parts of shared memory are. Of each set of sums: all warps have added to it; it has been used.
struct Shared {
    char* table;
    u16* inputs;       // [rows][input_stride]
    float* sums;       // [sum_sets][buffers][rows][sum_stride]
    u32* largest;      // [rows][parts of 256 inputs]
    int* exponent;     // [2][rows]
    u32 barriers;      // address of two for each set of sums
    __device__ __forceinline__ SharedBarrier added(int set) const { return {barriers + 16 * set}; }
    __device__ __forceinline__ SharedBarrier used(int set) const { return {barriers + 16 * set + 8}; }
};

// What a thread block does of the product: its i-th block of columns, and the k tiles [first, end) of it.
struct Share {
    int block, first, end;
};

__device__ __forceinline__ int log2_of(int power) { return 31 - __clz(power); }

// a / b. Most are of a number below b, or by 1; divisions would be most of what a thread block has to do at first.
__device__ __forceinline__ u32 quotient(u32 a, u32 b) { return a < b ? 0 : b == 1 ? a : a / b; }

// All numbers fit 32 bits: the host sees to it that blocks * units * thread blocks does.
struct Cut {
    u32 blocks, units;   // blocks of columns; units of k
    u32 begin, end;      // of the sequence of blocks and units, this thread block's part
    u32 first_block;     // of that part
    __device__ __forceinline__ u32 owner(u32 item) const { return ((item + 1) * gridDim.y - 1) / (blocks * units); }
    __device__ __forceinline__ int count() const {
        if (gridDim.x > 1) return gridDim.y >= blocks ? 1 : (blocks - blockIdx.y + gridDim.y - 1) / gridDim.y;
        return begin == end ? 0 : quotient(end - 1, units) - first_block + 1;
    }
    __device__ __forceinline__ Share share(const Problem& p, int i) const {
        if (gridDim.x > 1) {
            const int first = min((int)blockIdx.x * p.unit_tiles, p.k_tiles);
            return {(int)(blockIdx.y + i * gridDim.y), first, min(first + p.unit_tiles, p.k_tiles)};
        }
        const u32 block = first_block + i;
        const u32 first = max(begin, block * units) - block * units;
        const u32 last = min(end, (block + 1) * units) - block * units;
        return {(int)block, (int)first * p.unit_tiles, min((int)last * p.unit_tiles, p.k_tiles)};
    }
    // How many thread blocks have a part of a block of columns, and which of them this one is.
    __device__ __forceinline__ int contributions(u32 block) const {
        if (gridDim.x > 1) return gridDim.x;
        return units == 1 ? 1 : owner((block + 1) * units - 1) - owner(block * units) + 1;
    }
    __device__ __forceinline__ int contribution(u32 block) const {
        return gridDim.x > 1 ? blockIdx.x : blockIdx.y - owner(block * units);
    }
};

__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

#endif  // ESPALIER_MATMUL_PROBLEM

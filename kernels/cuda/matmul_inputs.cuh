// Phase 1 of matmul.cu: rotated inputs in float16, in the order of the mma operand.
#ifndef ESPALIER_MATMUL_INPUTS
#define ESPALIER_MATMUL_INPUTS

#include "matmul_problem.cuh"

// Eight elements of a row of x from `k` on, one by one; zeros past the true size.
__device__ __forceinline__ uint4 load_unaligned(const Problem& p, int row, int k) {
    const u16* source = p.x + row * p.x_stride + k;
    u32 bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = k + i < p.in_features ? source[i] : 0;
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = bits[2 * i] | bits[2 * i + 1] << 16;
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ u16 half_of(const uint4& words, int i) {
    const u32 word = i < 2 ? words.x : i < 4 ? words.y : i < 6 ? words.z : words.w;
    return (u16)(i & 1 ? word >> 16 : word);
}

// The exponent of the factor for a slice whose largest magnitude is `largest` (bits of a float): after the rotation,
// which can add up `block` of them, all of it is at most 2^15.
__device__ __forceinline__ int slice_exponent(u32 largest, int block) {
    const int log_block = block == 0 ? 0 : 31 - __clz(block);
    const int exponent = 14 - log_block - ((int)(largest >> 23) - 127);
    return exponent < 120 ? exponent : 120;
}

// Phase 1. Fills inputs and exponent[turn] of the slice of k tiles [first, first + tiles); the exponents are not above
// those of the other turn, unless `fresh`: when no sums exist yet. All threads; the inputs are not in use. Ends with a
// barrier.
//
// Two passes over x, 256 elements of a row to a warp at a time: the first finds the largest x * suh of each row. The
// loops are kept small, because small problems pay for every instruction that they have to fetch. No load is through
// the read-only cache (`__ldg`), here and elsewhere: this kernel may run already while what it reads is being written.
__device__ __forceinline__ void make_inputs(const Problem& p, const Shared& s, int input_stride, int first, int tiles,
                                            int turn, bool fresh) {
    constexpr int AT_ONCE = GROUPS == 1 ? 2 : 4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const u32 parts = (tiles * 16 + ROTATED - 1) / ROTATED, tasks = p.rows * parts;
    const int size = min(tiles * 16, p.in_features - first * 16);
    const float inverse = __fdividef(1.0f, parts);  // near enough for fewer than 2^20 tasks
    auto row_of = [&](u32 task) { return ONE_ROW ? 0u : (u32)((task + 0.5f) * inverse); };
    uint4 values[AT_ONCE] = {}, scales[AT_ONCE] = {};
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        for (u32 start = warp; start < tasks; start += AT_ONCE * warps) {
            if (pass == 0 || tasks > AT_ONCE * warps)  // else they are still there
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const u32 task = start + i * warps;
                const u32 row = row_of(task);
                const int local = (task - row * parts) * ROTATED + lane * 8;
                values[i] = scales[i] = make_uint4(0, 0, 0, 0);
                if (task < tasks && local < size) {
                    const u16* source = p.x + row * p.x_stride + first * 16 + local;
                    if (p.x_aligned) values[i] = *reinterpret_cast<const uint4*>(source);
                    scales[i] = *reinterpret_cast<const uint4*>(p.suh + first * 16 + local);
                }
            }
#pragma unroll 1
            for (int i = 0; i < AT_ONCE; ++i) {
                const u32 task = start + i * warps;
                const uint4 value = values[0], scale = scales[0];
#pragma unroll
                for (int j = 1; j < AT_ONCE; ++j) values[j - 1] = values[j], scales[j - 1] = scales[j];
                values[AT_ONCE - 1] = value, scales[AT_ONCE - 1] = scale;  // all are back in place at the end
                if (task >= tasks) continue;
                const int row = row_of(task), part = task - row * parts;
                const int local = part * ROTATED + lane * 8;
                const uint4 bits = p.x_aligned ? value : load_unaligned(p, row, first * 16 + local);
                float v[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const u16 half = half_of(bits, j);
                    v[j] = p.is_bfloat ? float_from_bfloat(half) * power_of_two(-BFLOAT_SHIFT) : float_from_half(half);
                    v[j] *= float_from_half(half_of(scale, j));
                }
                u32 largest = 0;
                if (pass == 0) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) largest = max(largest, __float_as_uint(v[j]) & 0x7FFFFFFFu);
                    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
                    if (lane == 0) s.largest[task] = largest;
                    continue;
                }
                for (u32 j = lane; j < parts; j += 32) largest = max(largest, s.largest[row * parts + j]);
                int exponent = slice_exponent(__reduce_max_sync(0xFFFFFFFFu, largest), p.rotation_in);
                if (!fresh) exponent = min(exponent, s.exponent[(turn ^ 1) * p.rows + row]);
                if (part == 0 && lane == 0) s.exponent[turn * p.rows + row] = exponent;
                const float factor = power_of_two(exponent);
                rotate(v, p.rotation_in, lane);
                // Of a tile's 16 elements (2r, 2r + 1) and (2r + 8, 2r + 9) stand together: operand r of a lane.
                if (local < input_stride - 8) {
                    u16* tile = s.inputs + row * input_stride + (local & ~15);
                    u32* target = reinterpret_cast<u32*>(tile) + (local >> 3 & 1);
#pragma unroll
                    for (int r = 0; r < 4; ++r)
                        target[2 * r] = half2_from_floats(v[2 * r] * factor, v[2 * r + 1] * factor);
                }
            }
        }
        __syncthreads();
    }
}

// Copy 16 bytes to shared memory, or none of them and zeros instead, without waiting.
__device__ __forceinline__ void copy_async(u32 target, const u16* source, bool wanted) {
    const int size = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(size)
                 : "memory");
}

// The same from what the kernel `rotate_inputs` has left: all of x, in the order of the operand, with one exponent a
// row. Begins to copy; `finish_copies` ends all that has begun.
__device__ __forceinline__ void copy_inputs(const Problem& p, u16* inputs, int input_stride, int first, int tiles,
                                            const u16* prepared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int pieces = tiles * 2, held = p.slice_tiles * 2;  // of eight elements
    const int log_side = p.rows > 8 ? 0 : p.rows > 4 ? 1 : 2, side = 1 << log_side;  // warps to a row
    for (int row = warp >> log_side; row < p.rows; row += warps >> log_side) {
        const u16* source = prepared + ((long long)row * p.k_tiles + first) * 16;
        const u32 target = (u32)__cvta_generic_to_shared(inputs + row * input_stride);
#pragma unroll 4
        for (int piece = (warp & (side - 1)) * 32 + lane; piece < held; piece += side * 32)
            copy_async(target + piece * 16, source + piece * 8, piece < pieces);
    }
}

__device__ __forceinline__ void finish_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}

// Where many rows and a long k make it dear for every thread block to rotate the inputs, this does it once. A thread
// block takes a row. Shared memory: as make_inputs uses it.
extern "C" __global__ void __launch_bounds__(THREADS, 1) rotate_inputs(
    const u16* x, const u16* suh, u16* prepared, int* exponent, long long x_stride, int is_bfloat, int x_aligned,
    int in_features, int k_tiles, int rotation_in) {
    extern __shared__ __align__(128) char shared[];
    Problem p = {};
    p.x = x + blockIdx.x * x_stride;
    p.suh = suh;
    p.x_stride = x_stride;
    p.rows = 1;
    p.in_features = in_features;
    p.k_tiles = k_tiles;
    p.rotation_in = rotation_in;
    p.is_bfloat = is_bfloat;
    p.x_aligned = x_aligned;
    Shared s = {};
    s.largest = reinterpret_cast<u32*>(shared);
    s.exponent = reinterpret_cast<int*>(s.largest + (k_tiles + 15) / 16);
    s.inputs = prepared + (long long)blockIdx.x * k_tiles * 16;
    start_next();  // what a product has to do before it needs these inputs takes longer than this
    wait_for_previous();
    make_inputs(p, s, k_tiles * 16 + 8, 0, k_tiles, 0, true);
    if (threadIdx.x == 0) exponent[blockIdx.x] = s.exponent[0];
}

#endif  // ESPALIER_MATMUL_INPUTS

// The matrix multiply-add of tensor cores, and Hadamard matrices as its operand.
#ifndef ESPALIER_TENSOR_CORE
#define ESPALIER_TENSOR_CORE

#include "codebook.cuh"

// sum (16 x 8, float32) += a (16 x 16) b (16 x 8), float16 operands, as mma.m16n8k16 lays them out: with g = lane / 4 and
// c = 2 (lane % 4), a = {(g, c), (g + 8, c), (g, c + 8), (g + 8, c + 8)}, b = {(c, g), (c + 8, g)}, pairs along the summed
// index, and sum = {(g, c), (g, c + 1), (g + 8, c), (g + 8, c + 1)}.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with a float16 sum, {(g, c), (g + 8, c)} in pairs: rounded once for each call.
__device__ __forceinline__ void multiply_add(u32 (&sum)[2], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
        : "+r"(sum[0]), "+r"(sum[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Element (row, column) of the 16 x 16 Hadamard matrix without its factor 1/4, or of the unit matrix: a float16.
template <bool ROTATED>
__device__ __forceinline__ u32 hadamard16(int row, int column) {
    if constexpr (ROTATED) return __popc(row & column) % 2 ? 0xBC00u : 0x3C00u;
    return row == column ? 0x3C00u : 0u;
}

#endif  // ESPALIER_TENSOR_CORE

// What compute capability 9.0 has of its own (code for sm_90a): products of four warps together, and registers that warps
// hand to one another.
#ifndef ESPALIER_WARPGROUP
#define ESPALIER_WARPGROUP

typedef unsigned int u32;
typedef unsigned long long u64;

// ---- products of a warpgroup --------------------------------------------------------------------------------------
//
// sum (64 x 128, float32) += a (64 x 16) b (16 x 128), float16 operands in shared memory, in pieces of 8 x 8 numbers, 128
// bytes. A row of a piece, 16 bytes, is along the summed index of a, and along the columns of b. The pieces of a that
// follow along the summed index are `leading` bytes apart, the rows of pieces `stride`; of b the columns of pieces are
// `stride` bytes apart, and what follows along the summed index `leading`. Warp w of the four gets rows 16 w + lane / 4
// and 8 more; number [c / 2][4 (c % 2) + 2 i + e] of a lane is row 8 i of these, column 8 c + 2 (lane % 4) + e.

__device__ __forceinline__ u64 operand_descriptor(u32 address, u32 leading, u32 stride) {
    return (u64)(address >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32;
}
__device__ constexpr u64 descriptor_bytes(u32 bytes) { return bytes >> 4; }  // to be added to a descriptor

#define EIGHT(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7])
// Start one, with a times SIGN; without `accumulate` what is in `sum` does not count.
template <int SIGN>
__device__ __forceinline__ void multiply_warpgroup(float (&sum)[8][8], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{.reg .pred accumulate; setp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
        "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, "
        "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
        "%60, %61, %62, %63}, %64, %65, accumulate, %67, 1, 0, 1;}\n"
        : EIGHT(sum[0]), EIGHT(sum[1]), EIGHT(sum[2]), EIGHT(sum[3]), EIGHT(sum[4]), EIGHT(sum[5]), EIGHT(sum[6]), EIGHT(sum[7])
        : "l"(a), "l"(b), "r"((int)accumulate), "n"(SIGN));
}

// The same with half the columns.
template <int SIGN>
__device__ __forceinline__ void multiply_warpgroup(float (&sum)[4][8], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{.reg .pred accumulate; setp.ne.b32 accumulate, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
        "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, accumulate, "
        "%35, 1, 0, 1;}\n"
        : EIGHT(sum[0]), EIGHT(sum[1]), EIGHT(sum[2]), EIGHT(sum[3])
        : "l"(a), "l"(b), "r"((int)accumulate), "n"(SIGN));
}
#undef EIGHT

// Before the first product of a row of them.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Wait for all that were started. Nothing that reads the sums may move before it.
template <int ROWS>
__device__ __forceinline__ void end_products(float (&sum)[ROWS][8]) {
    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < ROWS * 8; ++i) asm volatile("" : "+f"(sum[i / 8][i % 8])::"memory");
}

// What this thread wrote to shared memory can be read by products from now on.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warps of one kernel that do different things -------------------------------------------------------------------

// All warps of a warpgroup: from now on each thread has COUNT registers, less or more than at launch.
template <int COUNT>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

#endif  // ESPALIER_WARPGROUP

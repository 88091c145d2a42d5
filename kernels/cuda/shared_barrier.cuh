// Barriers at which warps of a thread block need not wait: some arrive and go on, others wait for them.
//
// Defines, for racecheck of compute-sanitizer only: EVERY_LANE_ARRIVES. Else one lane arrives for its warp, after all of
// them have met (`__syncwarp`), which orders what all of them wrote; but racecheck follows each lane by itself.
#ifndef ESPALIER_SHARED_BARRIER
#define ESPALIER_SHARED_BARRIER

#include "codebook.cuh"

#ifdef EVERY_LANE_ARRIVES
constexpr int ARRIVING_LANES = 32;
#else
constexpr int ARRIVING_LANES = 1;
#endif

// One mbarrier in shared memory, of 8 bytes. It is used again and again: use n is over when as many warps as `make` was
// told have arrived for the (n + 1)-th time. What a warp wrote before it arrived is seen by those that have waited.
struct SharedBarrier {
    u32 address;

    // By one thread, and a barrier of the whole block before anything else.
    __device__ __forceinline__ void make(int warps) const {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(warps * ARRIVING_LANES) : "memory");
    }
    // All lanes.
    __device__ __forceinline__ void arrive(int lane) const {
        __syncwarp();
        if (lane < ARRIVING_LANES)
            asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(address) : "memory");
    }
    // Until `use` is over; it must be the present use or the one before.
    __device__ __forceinline__ void wait(int use) const {
        u32 over;
        do {
#if __CUDA_ARCH__ >= 900  // sleeps a while instead of asking again at once
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
#else
            asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
#endif
                         : "=r"(over)
                         : "r"(address), "r"(use & 1)
                         : "memory");
        } while (!over);
    }
};

#endif  // ESPALIER_SHARED_BARRIER

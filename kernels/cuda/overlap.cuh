// Kernels that overlap with their neighbours in a stream, where the launch allows that (kernels/cuda/launch.py).
#ifndef ESPALIER_OVERLAP
#define ESPALIER_OVERLAP

// A kernel may start before the one that stands before it in its stream has ended. It must not read what that one may
// write, weights too, nor write, before this. No thread block may end without: the next kernel waits for this one alone.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel start. That one waits for this one, so that this may stand before wait_for_previous.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#endif  // ESPALIER_OVERLAP

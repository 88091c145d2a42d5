"""CUDA kernels, compiled on the user's machine by NVRTC: no toolkit, no host compiler.

- `compiler`: text of a kernel and macros to a cubin for one architecture; needs no GPU. Compiled code is kept on disk.
- `loading`: a compiled kernel on a device. `launch`: onto torch's current stream.
- `macros`: what a codebook is to the device code (``codebook.cuh``).
- `operands`: what every operation checks before it launches. `workspace`: counters that kernels share.
- `decode`, `matmul` (cut up by `matmul_plan`), `expert_bank` and `viterbi`: one operation each, beside its ``.cu``.
  Each has ``variants()``, which lists the ways in which its kernels are specialised; the tests compile them for
  `compiler.ARCHITECTURES`.

Importing this package, or any module of it, imports neither cuda-core nor a driver: that happens when the first kernel
is needed. The operations themselves are reached through `espalier_format.kernels.ops`.
"""

"""Decoders of trellis-quantized weights, and products with them.

Which one to use:

- `numpy_decoder`: the default. Bit-exact codes, **correctly rounded** weights, bounded memory, threads; needs only
  numpy. ``decode_weight`` and ``decode_rows`` give Hugging Face's (out, in) orientation.
- `torch_decoder`: for torch tensors on any device, in plain torch. Bit-exact codes, weights within a proved tolerance
  (`torch_decoder.TOLERANCE`).
- `ops`: the same and products as torch operators, for runtimes: `ops.decode_codes`, `ops.decode_weight`, `ops.matmul`,
  `ops.linear` (a quantized linear layer) and `ops.expert_bank` (experts of mixed width). On a CUDA device they launch
  the kernels of `cuda`, which `ops.prepare` compiles ahead of them, elsewhere plain torch.
- `reference`: the specification in numpy, to be read and to be compared with. Float64, transposed and padded
  as stored; it holds whole matrices.
- `digest`: the decode digest of a module.

Importing this package imports none of them.
"""

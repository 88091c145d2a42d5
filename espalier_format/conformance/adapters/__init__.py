"""The project's own decoders in the form that the kit calls: examples of an adapter, and what the kit is tried on.

Each module has functions named like kinds, so ``--decoder espalier_format.conformance.adapters.numpy_adapter`` takes
all of them: `numpy_adapter`, for numpy arrays; `torch_adapter` and `operators_adapter`, for torch tensors on any
device (``--device``).
"""

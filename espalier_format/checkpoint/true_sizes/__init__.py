"""True sizes of EXL3 modules, which EXL3 stores only rounded up to multiples of 128 (spec/exl3.md §4)."""

from espalier_format.checkpoint.true_sizes.resolver import TrueSize, resolve_true_sizes, size_warnings

__all__ = ["TrueSize", "resolve_true_sizes", "size_warnings"]

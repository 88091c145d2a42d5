"""The number side of the format: codebooks, trellis packing, rotation, rounding and packed signs.

Nothing here opens a file or imports more than numpy. The decoders that put these parts together are
in `espalier_format.kernels`.
"""

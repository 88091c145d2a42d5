"""Adapters that let other programs run Espalier checkpoints. Each host has a package of its own; none imports another.

`espalier_format.runtimes.tensor_parallel`, which needs no host, says which tiles of a module a rank holds.
"""

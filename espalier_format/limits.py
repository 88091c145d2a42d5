"""Upper bounds on what a reader accepts (spec/errors.md, code ``limit``).

They bound the memory and time that a hostile file can cost, and are far above what real checkpoints
need.
"""

from __future__ import annotations

from typing import Final

MAX_HEADER_BYTES: Final = 100_000_000
"""Largest safetensors header that is read, in bytes (the safetensors library has the same bound)."""

MAX_WRITTEN_HEADER_BYTES: Final = 25_000_000
"""Largest safetensors header that is written, in bytes: what the Hub's client still reads."""

MAX_JSON_BYTES: Final = 100_000_000
"""Largest JSON document (config, index, manifest) that is read, in bytes."""

MAX_JSON_CONTAINERS: Final = 8_000_000
"""Most bytes ``{`` and ``[``, also those inside strings, in any JSON document or header.

A parsed object costs thirty times its two bytes. A header of ``MAX_TENSORS`` tensors has 6,000,001 of them.
"""

MAX_JSON_DEPTH: Final = 64
"""Deepest nesting of objects and arrays in any JSON document or header."""

MAX_HEADER_STRING_BYTES: Final = 64 * 1024
"""Longest string, keys included, in a safetensors header, in UTF-8 bytes."""

MAX_CONFIG_STRING_BYTES: Final = 1024 * 1024
"""Longest string, keys included, in any other JSON document, in UTF-8 bytes."""

MAX_TENSORS: Final = 2_000_000
"""Most tensors in one checkpoint, all shards together."""

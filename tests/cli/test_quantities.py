"""How numbers are written."""

from __future__ import annotations

import pytest

from espalier_format.cli import quantities


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_999, "10.0 kB"),
        (99_990, "100 kB"),
        (999_400, "999 kB"),
        (999_500, "1.00 MB"),
        (8_310_000_000, "8.31 GB"),
        (10**19, "10000 PB"),
    ],
)
def test_size(number: int, written: str) -> None:
    """Three digits, never four, up to the largest unit."""
    assert quantities.size(number) == written


def test_weights_and_counts() -> None:
    assert quantities.weights(32_212_254_720) == "32.2 B"
    assert quantities.weights(512) == "512"
    assert quantities.count(30_720) == "30,720"
    assert quantities.plural(1, "shard") == "1 shard"
    assert quantities.plural(2_000, "shard") == "2,000 shards"
    assert quantities.bits(None) == quantities.NOTHING
    assert quantities.bits(2.0625) == "2.062"

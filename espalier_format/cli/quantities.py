"""How numbers and formats are written for people: counts, bytes, times, bits per weight."""

from __future__ import annotations

NOTHING = "–"
"""What stands in a table where there is no number."""

FORMATS = {
    "espalier": "Espalier",
    "exl3": "EXL3",
    "compressed-tensors": "compressed-tensors",
    "plain": "plain safetensors",
    "hf": "Hugging Face",
}
"""Names of formats."""


def count(number: int) -> str:
    """Return a count with thousands separators: ``30,720``."""
    return f"{number:,}"


def weights(number: int) -> str:
    """Return a number of weights as people quote it: ``724 K``, ``32.2 B``."""
    return _scaled(number, ("", " K", " M", " B", " T"))


def size(number: int) -> str:
    """Return a number of bytes in decimal units: ``8.31 GB``."""
    return _scaled(number, (" B", " kB", " MB", " GB", " TB", " PB"))


def duration(seconds: float) -> str:
    """Return a time as people tell it: ``45 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{minutes} min" if not hours else f"{hours} h" + (f" {rest} min" if rest else "")


def bits(number: float | None) -> str:
    """Return bits per weight with three decimals, or a dash for None."""
    return NOTHING if number is None else f"{number:.3f}"


def plural(number: int, singular: str, many: str | None = None) -> str:
    """Return ``1 shard``, ``2 shards``."""
    return f"{count(number)} {singular if number == 1 else many or singular + 's'}"


def _scaled(number: int, units: tuple[str, ...]) -> str:
    value, step = float(number), 0
    # 999.5 would be shown as 1000, which has one digit too many.
    while value >= 999.5 and step < len(units) - 1:
        value /= 1000
        step += 1
    if step == 0:
        return f"{number}{units[0]}"
    # Three digits: "1.00", "10.0", and "100." without its point; more only beyond the largest unit.
    digits = f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")
    return f"{digits}{units[step]}"

"""Write spec/vectors/kit.json, the hashes of all files of the kit: ``python tests/conformance/make_pins.py``."""

from __future__ import annotations

from pathlib import Path

from espalier_format.conformance.kit import KIT_FILE, kit_files

PINS = Path(__file__).parents[2] / "spec" / "vectors" / KIT_FILE

if __name__ == "__main__":
    PINS.write_bytes(dict(kit_files())[KIT_FILE])

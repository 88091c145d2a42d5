"""Run the command line as ``python -m espalier_format``."""

from __future__ import annotations

import sys

from espalier_format.cli import main

if __name__ == "__main__":
    sys.exit(main())

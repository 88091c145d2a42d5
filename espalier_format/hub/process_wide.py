"""A lock for what belongs to the whole process: standard output, filters of warnings and logs, progress bars."""

from __future__ import annotations

import threading
from typing import Final

PROCESS_WIDE: Final = threading.RLock()
"""Held by whoever changes such a thing and puts it back.

Two threads that did so at once would put back what the other had changed, for good. What other threads print or warn
of in the meantime is lost or changed, too; no lock of ours can help that.
"""

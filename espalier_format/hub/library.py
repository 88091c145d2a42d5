"""What is used of huggingface_hub beyond its top level; the type checker is told here that it is public.

Importing this module imports the HTTP client: it costs a third of a second.
"""

from __future__ import annotations

from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    hf_raise_for_status,
    httpx,  # the HTTP library of the installed release: httpx or httpx2
)

__all__ = [
    "are_progress_bars_disabled",
    "build_hf_headers",
    "disable_progress_bars",
    "enable_progress_bars",
    "get_session",
    "hf_raise_for_status",
    "httpx",
]

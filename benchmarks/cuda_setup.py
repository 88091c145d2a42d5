"""What the benchmarks of a CUDA device were run with."""

from __future__ import annotations

import datetime as dt
import subprocess
from importlib.metadata import PackageNotFoundError, version


def setup() -> str:
    """Name the device, its driver, the versions of all that takes part in a measurement, and the day."""
    import torch
    from cuda.bindings import nvrtc

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    _, major, minor = nvrtc.nvrtcVersion()
    names = [f"driver {driver}", f"torch {torch.__version__}", f"cuda-core {version('cuda-core')}"]
    names.append(f"NVRTC {major}.{minor}")
    try:
        names.append(f"exllamav3 {version('exllamav3')}")
    except PackageNotFoundError:
        names.append("without exllamav3")
    return f"One {torch.cuda.get_device_name()}; {', '.join(names)}; {dt.datetime.now(dt.UTC):%Y-%m-%d}."

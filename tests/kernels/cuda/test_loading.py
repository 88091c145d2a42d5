"""What can be known of loading and of the decoding kernels' shape without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from espalier_format.codec.codebook import CODEBOOKS
from espalier_format.codec.rotation import BLOCKS
from espalier_format.errors import UsageError

torch = pytest.importorskip("torch")
from espalier_format.kernels.cuda import decode, loading  # noqa: E402


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A function that makes torch believe in a device of that compute capability."""
    loading.architecture.cache_clear()

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (major, minor))

    return pretend


@pytest.mark.parametrize(("major", "minor", "name"), [(8, 0, "sm_80"), (9, 0, "sm_90"), (10, 0, "sm_100")])
def test_architecture(major: int, minor: int, name: str, capability: Callable[[int, int], None]) -> None:
    capability(major, minor)
    assert loading.architecture(0) == name


def test_an_old_device_is_refused(capability: Callable[[int, int], None]) -> None:
    capability(7, 5)
    with pytest.raises(UsageError, match=r"8\.0"):
        loading.architecture(0)


@pytest.mark.parametrize("multiprocessor", [100 << 10, 164 << 10, 228 << 10])
@pytest.mark.parametrize("name", CODEBOOKS)
def test_shared_memory(name: str, multiprocessor: int) -> None:
    """There is a form of the weight kernel for every codebook and rotation that fits, as often as it says."""
    for rotation_in in BLOCKS:
        for rotation_out in BLOCKS:
            macros, size = decode.weight_macros(
                CODEBOOKS[name], rotation_in, rotation_out, False, multiprocessor - 1024, multiprocessor
            )
            assert int(macros["RESIDENT"]) * (size + 1024) <= multiprocessor
            if multiprocessor == 228 << 10 and 256 not in (rotation_in, rotation_out):
                assert (macros["STAGED"], int(macros["RESIDENT"]) >= 2) == (1, True)

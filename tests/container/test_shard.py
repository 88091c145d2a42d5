from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from espalier_format.container.header import DTYPE_BITS
from espalier_format.container.shard import Shard
from espalier_format.errors import (
    MalformedError,
    MissingFileError,
    PathError,
    ShapeError,
    SourceError,
    TruncatedError,
    UsageError,
)

MakeShard = Callable[..., Path]


def test_agrees_with_the_safetensors_library(llama_exl3: Path, qmoe_exl3: Path) -> None:
    """All tensors numpy has a type for; the rest (BF16) is compared in test_header_properties."""
    for folder in (llama_exl3, qmoe_exl3):
        path = folder / "model.safetensors"
        with Shard(path) as shard, safe_open(path, "np") as theirs:
            assert set(theirs.keys()) == shard.header.tensors.keys()
            for name, info in shard.header.tensors.items():
                if info.dtype != "BF16":
                    expected, got = theirs.get_tensor(name), shard.array(info)
                    assert got.dtype == expected.dtype
                    assert got.shape == expected.shape
                    assert got.tobytes() == expected.tobytes()


def test_all_ways_give_the_same_bytes(qmoe_exl3: Path) -> None:
    path = qmoe_exl3 / "model.safetensors"
    raw = path.read_bytes()
    with Shard(path) as shard:
        for info in shard.header.tensors.values():
            expected = raw[shard.header.data_start + info.start : shard.header.data_start + info.end]
            assert bytes(shard.bytes_of(info)) == expected
            assert shard.read(info) == expected
            pieces = list(shard.chunks(info.start, info.end, 1000))
            assert b"".join(pieces) == expected
            assert all(len(piece) == 1000 for piece in pieces[:-1])
            assert shard.array(info).tobytes() == expected


def test_unaligned_data_is_readable_at_every_offset(make_shard: MakeShard) -> None:
    values = np.arange(7, dtype="<f4") - 3
    for shift in range(9):
        header = {
            "shift": {"dtype": "U8", "shape": [shift], "data_offsets": [0, shift]},
            "x": {"dtype": "F32", "shape": [7, 1], "data_offsets": [shift, shift + 28]},
        }
        with Shard(make_shard(header, bytes(shift) + values.tobytes())) as shard:
            array = shard.array(shard.header.tensors["x"])
            assert array.shape == (7, 1)
            assert array.flags.aligned
            assert array.tobytes() == values.tobytes()
            view = shard.view(shard.header.tensors["x"])
            assert view.tobytes() == values.tobytes()
            assert view.flags.aligned == ((shard.header.data_start + shard.header.tensors["x"].start) % 4 == 0)
            assert np.shares_memory(view, shard.view(shard.header.tensors["x"]))


def test_arrays_are_read_only(make_shard: MakeShard) -> None:
    header = {
        "a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]},
        "b": {"dtype": "I8", "shape": [1], "data_offsets": [4, 5]},
        "c": {"dtype": "F16", "shape": [1], "data_offsets": [5, 7]},
    }
    with Shard(make_shard(header, bytes(7))) as shard:
        for info in shard.header.tensors.values():
            assert not shard.array(info).flags.writeable
            assert not shard.view(info).flags.writeable
            assert shard.bytes_of(info).readonly


def test_numpy_dtypes(make_shard: MakeShard) -> None:
    """BF16 and 8-bit floats are bit patterns; narrower ones are flat bytes."""
    unsigned = {"BF16": "u2", "F8_E5M2": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1", "F8_E4M3FNUZ": "u1"}
    for dtype, bits in DTYPE_BITS.items():
        header = {"a": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, bits]}}
        with Shard(make_shard(header, bytes(range(1, bits + 1)) if dtype != "BOOL" else bytes([1] * bits))) as shard:
            array = shard.array(shard.header.tensors["a"])
        if bits < 8:
            assert (array.dtype, array.shape) == (np.uint8, (bits,))
        else:
            assert array.shape == (2, 4)
            assert array.itemsize * 8 == bits
            if dtype in unsigned:
                assert array.dtype == unsigned[dtype]


def test_empty_and_scalar_tensors(make_shard: MakeShard) -> None:
    header = {
        "empty": {"dtype": "F64", "shape": [0, 3], "data_offsets": [0, 0]},
        "scalar": {"dtype": "I32", "shape": [], "data_offsets": [0, 4]},
    }
    with Shard(make_shard(header, (-877912083).to_bytes(4, "little", signed=True))) as shard:
        assert shard.array(shard.header.tensors["empty"]).shape == (0, 3)
        assert shard.array(shard.header.tensors["scalar"]).item() == -877912083
        assert shard.read(shard.header.tensors["empty"]) == b""


def test_arrays_outlive_the_shard(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.arange(6, dtype="<i2")}, path)
    shard = Shard(path)
    array, view = shard.array(shard.header.tensors["a"]), shard.view(shard.header.tensors["a"])
    shard.close()
    shard.close()
    assert array.tolist() == view.tolist() == [0, 1, 2, 3, 4, 5]


def test_unaligned_views_outlive_the_shard(make_shard: MakeShard) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "I16", "shape": [2], "data_offsets": [1, 5]},
        "c": {"dtype": "U8", "shape": [1], "data_offsets": [5, 6]},
        "d": {"dtype": "I16", "shape": [2], "data_offsets": [6, 10]},
    }
    shard = Shard(make_shard(header, bytes(range(10))))
    views = [shard.view(shard.header.tensors[name]) for name in "bd"]
    shard.close()
    assert [view.tobytes() for view in views] == [bytes(range(1, 5)), bytes(range(6, 10))]
    assert {view.flags.aligned for view in views} == {True, False}


def test_name(make_shard: MakeShard) -> None:
    path = make_shard({}, name="b.safetensors")
    with Shard(path) as shard, Shard(path, name="sub/b.safetensors") as named:
        assert (shard.name, named.name) == ("b.safetensors", "sub/b.safetensors")


def test_truncated_error_when_the_file_is_cut_after_opening(make_shard: MakeShard) -> None:
    header = {"a": {"dtype": "U8", "shape": [9000], "data_offsets": [0, 9000]}}
    path = make_shard(header, bytes(9000))
    with Shard(path) as shard:
        info = shard.header.tensors["a"]
        assert len(shard.bytes_of(info)) == 9000
        os.truncate(path, 5000)
        with pytest.raises(TruncatedError):
            shard.bytes_of(info)
        with pytest.raises(TruncatedError):
            shard.array(info)
        with pytest.raises(TruncatedError):
            shard.read(info)


def test_missing_file_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError) as caught:
        Shard(tmp_path / "x.safetensors")
    assert isinstance(caught.value, FileNotFoundError)
    (tmp_path / "file").touch()
    with pytest.raises(MissingFileError):
        Shard(tmp_path / "file" / "x.safetensors")


def test_malformed_error_for_what_is_no_regular_file(tmp_path: Path) -> None:
    """None of these may wait for a writer or for data."""
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "device.safetensors").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        # A socket's path is limited to about 100 bytes: bound from within its folder.
        descriptor = os.open(tmp_path, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{descriptor}/socket.safetensors")
        finally:
            os.close(descriptor)
        for name in ("fifo", "folder", "device", "socket"):
            with pytest.raises(MalformedError, match="regular file"):
                Shard(tmp_path / f"{name}.safetensors")


def test_path_error_for_circular_links_and_nul(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(PathError):
        Shard(tmp_path / "a")
    with pytest.raises(PathError):
        Shard(Path(f"{tmp_path}/a\0b"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_source_error_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.touch(mode=0o000)
    with pytest.raises(SourceError):
        Shard(path)


def test_no_descriptor_leaks_on_refusal(make_shard: MakeShard) -> None:
    path = make_shard({"a": 1})
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(MalformedError):
            Shard(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_usage_error_after_close(make_shard: Callable[..., Path]) -> None:
    shard = Shard(make_shard({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"ab"))
    info = shard.header.tensors["a"]
    shard.close()
    for read in (shard.array, shard.bytes_of, shard.read):
        with pytest.raises(UsageError, match="closed"):
            read(info)


def test_shape_error_for_more_dimensions_than_numpy_has(make_shard: Callable[..., Path]) -> None:
    with Shard(make_shard({"a": {"dtype": "U8", "shape": [1] * 70, "data_offsets": [0, 1]}}, b"a")) as shard:
        with pytest.raises(ShapeError, match="70 dimensions"):
            shard.array(shard.header.tensors["a"])
        assert shard.read(shard.header.tensors["a"]) == b"a"

"""Every spelling of a dtype means the same wherever one is given; only bad ones are told apart, by an error."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from espalier_format.codec.dtype_names import STORED_AS, DtypeChoice, DtypeName, parse_choice, parse_dtype
from espalier_format.codec.rounding import OutputDtype
from espalier_format.errors import UsageError

SPELLINGS = {
    "float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16", "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}  # fmt: skip
BAD: list[Any] = ["", "source ", "float64", "fp8", "BF16", "torch.bfloat16", "bfloat", 16, None, ["bf16"]]


def test_both_spellings() -> None:
    assert {name: parse_dtype(name) for name in SPELLINGS} == SPELLINGS
    assert {name: parse_choice(name) for name in SPELLINGS} == SPELLINGS
    assert parse_choice("source") == "source"


def test_types_and_tables_name_the_same() -> None:
    assert set(get_args(DtypeName)) == set(SPELLINGS)
    assert set(get_args(DtypeChoice)) == {"source", *SPELLINGS}
    assert set(STORED_AS) == set(get_args(OutputDtype)) == set(SPELLINGS.values())


@pytest.mark.parametrize("name", BAD)
def test_anything_else_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match=r"no such output dtype \(expected bfloat16, float16, float32, got "):
        parse_dtype(name)
    with pytest.raises(UsageError, match=r"\(expected source, bfloat16, float16, float32, got "):
        parse_choice(name)
    with pytest.raises(UsageError):
        parse_dtype("source")

"""What `plan` and `Plan.rank` are called with by mistake: each is named, and none means something else."""

from __future__ import annotations

from typing import Any

import pytest
from builders import Module, espalier_draft

from espalier_format.errors import UsageError
from espalier_format.planning import Plan, plan


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(espalier_draft([Module("lm_head", 128, 128, "int5@3", (32, 32))], []).config or {})


@pytest.mark.parametrize("config", [[], None, 5, b"x", {1}])
def test_what_is_no_config(config: Any) -> None:
    with pytest.raises(UsageError, match=f"plan takes .* got {type(config).__name__}"):
        plan(config)


@pytest.mark.parametrize(
    ("rank", "world", "match"),
    [
        (1.5, 4, r"the rank must be an integer \(got 1\.5\)"),
        (1.0, 4, "the rank must be an integer"),
        (True, 4, "the rank must be an integer"),
        (0, 4.0, "the number of ranks must be an integer"),
        (0, "4", "the number of ranks must be an integer"),
        (0, 0, r"the number of ranks must be positive \(got 0\)"),
        (0, -1, "the number of ranks must be positive"),
        (4, 4, r"no such rank \(expected 0 to 3, got 4\)"),
        (-1, 4, "no such rank"),
    ],
)
def test_what_is_no_rank(made: Plan, rank: Any, world: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        made.rank(rank, world)


@pytest.mark.parametrize("kind", ["diagonal", None, "", 1, ["row"], "Row"])
def test_what_is_no_parallelism(made: Plan, kind: Any) -> None:
    with pytest.raises(UsageError, match=r"lm_head: no such parallelism .*column or row or replicated"):
        made.rank(0, 2, lambda _name: kind)


def test_a_parallelism_that_is_no_function(made: Plan) -> None:
    with pytest.raises(UsageError, match="parallelism must be a callable"):
        made.rank(0, 2, "row")  # type: ignore[arg-type]

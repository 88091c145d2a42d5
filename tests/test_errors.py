"""The one line that a person reads of an error."""

from __future__ import annotations

import pytest

from espalier_format.errors import ShapeError


@pytest.mark.parametrize(
    ("tensor", "message", "line"),
    [
        ("m.weight", "an empty weight", "m.weight: an empty weight"),
        ("a", "an empty weight", "a: an empty weight"),  # part of a word is no name
        ("layers.1", "layers.11 has no bias", "layers.1: layers.11 has no bias"),
        ("up.weight", "mlp.up.weight differs", "up.weight: mlp.up.weight differs"),
        ("hessian", "hessian has another shape", "hessian has another shape"),
        ("m.weight", "the shape of 'm.weight' differs", "the shape of 'm.weight' differs"),
        ("m.weight", "this is m.weight.", "this is m.weight."),
        ("m", "the parts m.suh and m.svh differ", "m: the parts m.suh and m.svh differ"),
        ("a", "a weight is too large", "a: a weight is too large"),  # nor is a word
        ("a", "'a' is too large", "'a' is too large"),
        ("a(b", "it is odd", "a(b: it is odd"),
    ],
)
def test_a_tensor_is_named_once(tensor: str, message: str, line: str) -> None:
    assert str(ShapeError(message, tensor=tensor)) == line

"""The comparison of a model's parameters with what it says it has loaded, on small models; it needs torch alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from espalier_format.errors import MissingTensorError

torch: Any = pytest.importorskip("torch")  # before the next import, which needs it
from espalier_format.runtimes.vllm.loaded_names import LoadedNames, unloaded  # noqa: E402

NAMES = {"inner.norm.weight", "inner.layers.0.weight", "inner.layers.1.weight", "head.weight"}


class Layer(torch.nn.Module):
    """What the plugin computes: it announces itself, as `EspalierConfig.get_quant_method` does."""

    def __init__(self, names: LoadedNames) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 2))
        names.expect(self)


class Norm(torch.nn.Module):
    """What only the comparison can see."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))


class Inner(torch.nn.Module):
    """A model within the model: vLLM calls its ``load_weights`` once for each run of tensors that it is to have."""

    def __init__(self, names: LoadedNames) -> None:
        super().__init__()
        self.norm = Norm()
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            self.layers.append(Layer(names))

    def load_weights(self, names: Iterable[str]) -> set[str]:
        return set(names)


class Model(torch.nn.Module):
    """Loads what it is given; ``tells`` says whether it returns the names."""

    def __init__(self, names: LoadedNames, *, tells: bool = True) -> None:
        super().__init__()
        self.inner = Inner(names)
        self.head = Norm()
        self.tells = tells

    def load_weights(self, names: Iterable[str]) -> set[str] | None:
        found: set[str] = set()
        for name in names:
            if name.startswith("inner."):
                found |= {f"inner.{rest}" for rest in self.inner.load_weights([name.removeprefix("inner.")])}
            else:
                found.add(name)
        return found if self.tells else None


class Other(torch.nn.Module):
    """A model that the plugin has nothing to do with, and that leaves its norm as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def load_weights(self, names: Iterable[str]) -> set[str]:
        return set(names)


@pytest.fixture
def names() -> Iterator[LoadedNames]:
    made = LoadedNames()
    yield made
    if made._hook is not None:
        made._hook.remove()


def test_a_model_that_is_loaded_in_full(names: LoadedNames) -> None:
    """Nothing stays behind: neither in the model, nor in the next one."""
    model = Model(names)
    assert model.load_weights(sorted(NAMES)) == NAMES
    assert model.load_weights(["head.weight"]) == {"head.weight"}  # a later update of one weight
    assert not any("load_weights" in vars(module) for module in model.modules())
    assert "load_weights" not in vars(Other())


@pytest.mark.parametrize("missing", sorted(NAMES))
def test_what_was_not_loaded_is_named(names: LoadedNames, missing: str) -> None:
    model = Model(names)
    with pytest.raises(
        MissingTensorError, match=rf"^{missing}: vLLM has found nothing for this parameter of the model"
    ):
        model.load_weights(sorted(NAMES - {missing}))


def test_several_that_were_not_loaded(names: LoadedNames) -> None:
    with pytest.raises(MissingTensorError, match=r"^head\.weight: .* \(and 2 more\)$"):
        Model(names).load_weights(["inner.layers.0.weight"])


@pytest.mark.parametrize("late", [False, True])
def test_children_in_any_order(names: LoadedNames, late: bool) -> None:
    """A module may get its children after its parent has got it, and that parent its own after the last layer."""

    class Outer(Model):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.tells = True
            self.inner = Inner.__new__(Inner)
            if late:
                torch.nn.Module.__init__(self.inner)
                self.inner.layers = torch.nn.ModuleList([Layer(names), Layer(names)])
                self.inner.norm = Norm()
            else:
                self.inner.__init__(names)
            self.head = Norm()

    assert Outer().load_weights(sorted(NAMES)) == NAMES
    with pytest.raises(MissingTensorError, match=r"inner\.norm\.weight"):
        Outer().load_weights(sorted(NAMES - {"inner.norm.weight"}))


def test_a_model_that_does_not_tell(names: LoadedNames, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(names, tells=False)
    with caplog.at_level(logging.WARNING):
        assert model.load_weights([]) is None
    assert "Model does not tell vLLM what it has loaded" in caplog.text
    assert "not norms and biases" in caplog.text


def test_a_model_that_is_loaded_in_another_way(names: LoadedNames, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, and not of a model that was compared."""
    compared = Model(names)
    compared.load_weights(sorted(NAMES))
    model = Model(names)
    with caplog.at_level(logging.WARNING):
        for layer in [*compared.inner.layers, *model.inner.layers]:
            names.warn_unless_compared(layer)
    assert len(caplog.records) == 1
    assert "in an unknown way" in caplog.text


def test_another_model_after_one_that_could_not_be_built(names: LoadedNames) -> None:
    Layer(names)
    assert Other().load_weights([]) == set()


def _tied(model: Any) -> None:
    model.head.weight = model.inner.layers[0].weight


def _shared(model: Any) -> None:
    model.head = model.inner.norm


def _empty(model: Any) -> None:
    model.head.weight = torch.nn.Parameter(torch.empty(0))


def _quantized(model: Any) -> None:
    model.head.espalier = object()


def _loaded_quietly(model: Any) -> None:
    model.head.espalier_spoiled = frozenset({"weight"})


@pytest.mark.parametrize("change", [_tied, _shared, _empty, _quantized, _loaded_quietly])
def test_what_need_not_be_named(names: LoadedNames, change: Callable[[Any], None]) -> None:
    model = Model(names)
    assert unloaded(model, NAMES - {"head.weight"}) == ["head.weight"]
    change(model)
    assert unloaded(model, NAMES - {"head.weight"}) == []


def test_one_name_of_a_tied_weight_is_enough(names: LoadedNames) -> None:
    """The first or the second; with none, the first is reported."""
    model = Model(names)
    _tied(model)
    assert unloaded(model, NAMES - {"inner.layers.0.weight"}) == []
    assert unloaded(model, NAMES - {"inner.layers.0.weight", "head.weight"}) == ["inner.layers.0.weight"]


def test_what_is_still_as_it_was_made(names: LoadedNames) -> None:
    """A plain weight that is NaN, and the bias of a quantized layer, which has no check of its own."""
    model = Model(names)
    model.head.espalier_spoiled = frozenset({"weight"})
    model.head.weight.data.fill_(math.nan)
    model.inner.layers[1].espalier = object()
    model.inner.layers[1].bias = torch.nn.Parameter(torch.zeros(2))
    assert unloaded(model, NAMES - {"head.weight"}) == ["inner.layers.1.bias", "head.weight"]

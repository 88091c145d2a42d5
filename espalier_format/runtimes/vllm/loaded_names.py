"""A comparison at the end of loading: the parameters of vLLM's model with those that it says it has loaded.

vLLM compares them for models without quantization only. What a layer's own method checks is finer, part by part and
expert by expert; this finds what has no such method: norms, convolutions, routers, biases.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakSet

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from espalier_format.errors import MissingTensorError

_LOGGER = logging.getLogger(__name__)
_METHOD: Final = "load_weights"


class LoadedNames:
    """Waits for vLLM to load the model that some layers belong to, and compares then.

    vLLM hands the model to no plugin. So it is found while it is built: of the modules that have ``load_weights``, the
    one that holds the layers and is held by none. Its ``load_weights`` is replaced by one that compares, until it has
    been called once.
    """

    def __init__(self) -> None:
        self._layers: WeakSet[torch.nn.Module] = WeakSet()
        self._held: WeakSet[torch.nn.Module] = WeakSet()
        self._hook: RemovableHandle | None = None

    def expect(self, layer: torch.nn.Module) -> None:
        """Compare the model that this layer becomes part of. Call it while the layer is being made."""
        self._layers.add(layer)
        if self._hook is None:
            self._hook = register_module_module_registration_hook(self._registered)

    def warn_unless_compared(self, layer: torch.nn.Module) -> None:
        """Log a warning, once for a model, if vLLM has loaded an expected layer without the comparison."""
        if layer in self._layers:
            self._warn("vLLM has loaded the model in an unknown way")

    def load(self, model: torch.nn.Module, *arguments: Any, **options: Any) -> set[str] | None:
        """Load the weights with the model's own method, return what it returns, and compare.

        Raises:
            MissingTensorError: names a parameter that got nothing.
        """
        for module in model.modules():  # all: a module may have been put into its parent before the hook was there
            _restore(module)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        found: Iterable[str] | None = getattr(model, _METHOD)(*arguments, **options)
        names = None if found is None else set(found)
        if not self._layers.isdisjoint(model.modules()):  # else it is another model, after one that could not be built
            self._compare(model, names)
        return names

    def _registered(self, parent: torch.nn.Module, _name: str, child: torch.nn.Module | None) -> None:
        if child is not None:
            self._held.add(child)
            _restore(child)
        # Asked of the class: a stand-in for a module that is on another rank may have the attributes of that module.
        if parent not in self._held and callable(getattr(type(parent), _METHOD, None)):
            vars(parent)[_METHOD] = _Loading(self, parent)

    def _compare(self, model: torch.nn.Module, names: set[str] | None) -> None:
        if names is None:
            self._warn(f"{type(model).__name__} does not tell vLLM what it has loaded")
            return
        self._layers.difference_update(model.modules())
        missing = unloaded(model, names)
        if missing:
            more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
            raise MissingTensorError(
                f"vLLM has found nothing for this parameter of the model{more}", tensor=min(missing)
            )

    def _warn(self, reason: str) -> None:
        self._layers.clear()
        _LOGGER.warning(
            "%s, so that only quantized tensors and the plain weights of layers are checked, not norms and biases",
            reason,
        )


class _Loading:
    """Stands in a model for its ``load_weights``."""

    def __init__(self, names: LoadedNames, model: torch.nn.Module) -> None:
        self._names = names
        self._model = model

    def __call__(self, *arguments: Any, **options: Any) -> set[str] | None:
        return self._names.load(self._model, *arguments, **options)


def _restore(module: torch.nn.Module) -> None:
    """Give a module its own ``load_weights`` back."""
    if isinstance(vars(module).get(_METHOD), _Loading):
        del vars(module)[_METHOD]


def unloaded(model: torch.nn.Module, names: set[str]) -> list[str]:
    """Return the parameters that are not among the ``names`` of those that were loaded, each by its first name.

    A parameter of several names, such as that of a tied head, is loaded if one of them is. Left out are empty
    parameters, those that quantized layers check themselves, and plain weights that are no longer as they were made:
    some models load them without saying so.
    """
    first: dict[int, str] = {}
    settled: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{own}" if prefix else own
            first.setdefault(id(parameter), name)
            if name in names or not parameter.numel() or _is_checked(module, own, parameter):
                settled.add(id(parameter))
    return [name for parameter, name in first.items() if parameter not in settled]


def _is_checked(module: Any, name: str, parameter: torch.Tensor) -> bool:
    if getattr(module, "espalier", None) is not None:
        return name != "bias"
    spoiled: frozenset[str] = getattr(module, "espalier_spoiled", frozenset())
    return name in spoiled and not bool(parameter.data[(0,) * parameter.dim()].isnan())


LOADED_NAMES: Final = LoadedNames()
"""That of this process: torch has one hook for all modules."""

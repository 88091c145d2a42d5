"""Refuse a model of which transformers could not load everything, before anybody gets it.

transformers only reports what was missing and goes on with random numbers. Its own account of the loading, which counts
what it has renamed and joined, is read where it is made; a release that makes none there is refused too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from espalier_format.errors import (
    DependencyError,
    EspalierError,
    MissingTensorError,
    ShapeError,
    UnexpectedTensorError,
)
from espalier_format.runtimes.transformers.names import IgnoredNames, canonical

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from torch import nn

_ACCOUNT: Final = "_adjust_missing_and_unexpected_keys"
"""The method of a model that gets the account, to strike out what the model class expects to differ."""


class LoadingCheck:
    """Sees the account of one loading, and raises if something is missing, unexpected or of another shape."""

    def __init__(self, model: nn.Module, folder: Path, accounted: Collection[str]) -> None:
        self._model = model
        self._folder = folder
        self._accounted = accounted
        self._ignored = IgnoredNames(model)
        self.passed = False
        self._own: Any = getattr(model, _ACCOUNT, None)
        if not callable(self._own):
            raise _unknown_release()
        setattr(model, _ACCOUNT, self._check)

    def finish(self, *, named: bool) -> None:
        """Raise DependencyError if transformers has made no account, or named nothing: nobody knows what it loaded."""
        if not (self.passed and named):
            raise _unknown_release()

    def _check(self, account: Any) -> None:
        delattr(self._model, _ACCOUNT)
        self._own(account)
        account.unexpected_keys = {
            name
            for name in account.unexpected_keys
            if canonical(name) not in self._accounted and name not in self._ignored
        }
        for name, got, expected in sorted(account.mismatched_keys, key=str):
            raise ShapeError(
                "does not fit the model", path=self._folder, tensor=name, expected=list(expected), got=list(got)
            )
        self._refuse(MissingTensorError, account.missing_keys, "the model needs this tensor, but no shard holds it")
        self._refuse(UnexpectedTensorError, account.unexpected_keys, "the model has no place for this tensor")
        self.passed = True

    def _refuse(self, error: type[EspalierError], names: Collection[str], message: str) -> None:
        if names:
            more = f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
            raise error(f"{message}{more}", path=self._folder, tensor=min(names))


def _unknown_release() -> DependencyError:
    from transformers import __version__  # noqa: PLC0415 - in this case only

    return DependencyError(
        f"transformers {__version__} does not tell what it has loaded; releases 5.17 to 5.24 are known to do so"
    )

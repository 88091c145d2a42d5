"""Mappings of objects that do not change: a dict that refuses to be written to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ReadOnlyDict(dict[K, V]):
    """A dict whose entries stay: writing raises TypeError, and ``dict(it)`` is a copy that can be changed.

    Unlike a ``MappingProxyType`` it can be dumped as JSON, pickled and copied; what it holds is not made read-only.

    >>> sizes = ReadOnlyDict({"a": 1})
    >>> sizes["b"] = 2
    Traceback (most recent call last):
    TypeError: this mapping is read-only: dict(mapping) is a copy that is not
    >>> sizes == {"a": 1}
    True
    """

    __slots__ = ()

    @classmethod
    def fromkeys(cls, keys: Iterable[Any], value: Any = None) -> ReadOnlyDict[Any, Any]:
        """Return a mapping of all keys to one value."""
        return cls(dict.fromkeys(keys, value))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this mapping is read-only: dict(mapping) is a copy that is not")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Callable[..., ReadOnlyDict[K, V]], tuple[dict[K, V]]]:
        return type(self), (dict(self),)

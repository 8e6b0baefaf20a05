"""`PythonState`: what modules hold besides tensors of their own, and what of it a run of `forward` changes."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

MOST_VALUES = 20_000
"""How many collections and objects are looked into, nearest first: an attribute may hold a whole data set."""

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_OPAQUE = sys.stdlib_module_names | {"torch", "numpy"}
"""Packages whose objects are not looked into: loggers, locks, generators."""


@dataclass(frozen=True)
class Change:
    """Something that is not what it was.

    Attributes:
        name: as the user writes it, `encoder.calls` or `encoder.stats['n']`.
        value: what it is now; None where it is gone.
        is_growth: whether a collection has another number of values.
    """

    name: str
    value: object
    is_growth: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in it."""
        return [leaf for leaf in pytree.tree_leaves(self.value) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class _Kept:
    """A collection, or the attributes of an object, with what it held."""

    name: str
    now: Any
    before: Any
    has_attributes: bool

    def below(self, key: object) -> str:
        """The name of what it holds under `key`."""
        if not self.has_attributes:
            return f"{self.name}[{key!r}]"
        return self.name if key in _REGISTRIES else f"{self.name}.{key}".strip(".")


class PythonState:
    """Attributes of modules, and the lists, dicts, sets and plain objects in them, as they are now.

    Args:
        modules: with their paths.
        has_hooks: whether hooks of modules are part of it.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], *, has_hooks: bool = True) -> None:
        self._kept: dict[int, _Kept] = {}
        left: deque[tuple[str, object, bool]] = deque((path, module, False) for path, module in modules)
        while left and len(self._kept) < MOST_VALUES:
            name, value, is_registry = left.popleft()
            if isinstance(value, tuple):
                left.extend((f"{name}[{index}]", item, False) for index, item in enumerate(value))
                continue
            now, has_attributes = _collection(value)
            if now is None or id(now) in self._kept:
                continue
            kept = _Kept(name, now, _copied(now), has_attributes or is_registry)
            self._kept[id(now)] = kept
            if isinstance(now, dict):
                is_module = isinstance(value, nn.Module)
                for key, each in now.items():
                    if has_hooks or not is_module or "_hooks" not in key:
                        left.append((kept.below(key), each, is_module and key in _REGISTRIES))
            elif not isinstance(now, set):
                left.extend((kept.below(index), each, False) for index, each in enumerate(now))

    @property
    def names(self) -> set[str]:
        """Of all that it looks into, as a `Change` has them."""
        found = {kept.name for kept in self._kept.values()}
        for kept in self._kept.values():
            if not isinstance(kept.now, set):
                found.update(map(kept.below, kept.now if isinstance(kept.now, dict) else range(len(kept.now))))
        return found

    def changes(self) -> list[Change]:
        """What is not as it was, by name."""
        found: dict[str, Change] = {}
        for kept in self._kept.values():
            now, before = kept.now, kept.before
            if isinstance(before, dict):
                for key in [*before, *(key for key in now if key not in before)]:
                    is_growth = key not in now or key not in before
                    if is_growth or not _alike(before[key], now[key]):
                        found.setdefault(kept.below(key), Change(kept.below(key), now.get(key), is_growth))
            elif len(now) != len(before):
                found.setdefault(kept.name, Change(kept.name, list(now), True))
            elif now != before if isinstance(now, set) else not all(map(_alike, before, now)):
                found.setdefault(kept.name, Change(kept.name, list(now)))
        return list(found.values())

    def restore(self) -> None:
        """Makes all of it what it was."""
        for kept in self._kept.values():
            if isinstance(kept.before, dict):
                plain: Any = OrderedDict if isinstance(kept.now, OrderedDict) else dict  # whatever its own class allows
                for key in [key for key in kept.now if key not in kept.before]:
                    plain.__delitem__(kept.now, key)
                for key, value in kept.before.items():
                    if key not in kept.now or kept.now[key] is not value:
                        plain.__setitem__(kept.now, key, value)
            elif isinstance(kept.before, set):
                kept.now.clear()
                kept.now.update(kept.before)
            elif len(kept.now) != len(kept.before) or any(a is not b for a, b in zip(kept.now, kept.before)):
                kept.now.clear()
                kept.now.extend(kept.before)


def _collection(value: object) -> tuple[Any, bool]:
    """What can be changed in a value, and whether that is its attributes; None where nothing can, or is known of it."""
    if isinstance(value, nn.Module):
        return vars(value), True
    if isinstance(value, (dict, list, set, deque)):
        return value, False
    package = type(value).__module__.partition(".")[0]
    is_opaque = package in _OPAQUE and not isinstance(value, SimpleNamespace)
    if is_opaque or isinstance(value, (type, FunctionType, ModuleType, enum.Enum)):
        return None, False
    return getattr(value, "__dict__", None), True


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _alike(one: object, other: object) -> bool:
    """Whether two values say the same; tensors and modules only where they are one."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (Tensor, nn.Module)):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_alike, one, other))
    try:
        return bool(one == other)
    except Exception:  # of the user's type, e.g. an array, which has many truths
        return False

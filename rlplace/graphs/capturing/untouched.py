"""`untouched`: a model and its loss are after a trace what they were before, and what would be lost is refused.

`check_steps_alike`: refuses a step whose next one would be another, as Python state that it changes says.

`PythonState`: what modules hold besides tensors of their own, and what of it a run of `forward` changes.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import logging
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, GeneratorType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError, UnknownName
from rlplace.graphs.capturing.constants import forwards, referenced


@contextlib.contextmanager
def untouched(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Iterator[None]:
    """Afterwards all that `forward` or the loss set (attributes, collections in them, caches) is what it was.

    While active it would hold traces. What `forward` writes to the model's buffers is part of the step.

    Raises:
        CaptureError: a plain tensor attribute was written in place, or the loss changed a buffer of its own, which the
            graph would take for constants.
    """
    of_model = list(model.named_modules())
    of_loss = modules_of_loss(model, loss_fn)
    state = PythonState((*of_model, *of_loss))
    # functions under `functools.lru_cache` that a model or its loss calls keep traces afterwards
    called = [value for _, value in referenced([*forwards(model), loss_fn])]
    caches = [(each, each.cache_info().misses) for each in called if isinstance(each, functools._lru_cache_wrapper)]
    shared, parametrize._cache = parametrize._cache, {}  # of `parametrize.cached()` around the capture
    plain = [
        (_joined(path, name), value, value._version, value.detach().clone())
        for path, module in (*of_model, *of_loss)
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not value.is_inference()
    ]
    held = [
        (_joined(path, name), module, name, value, value._version, value.detach().clone())
        for path, module in of_loss
        for name, value in module._buffers.items()
        if value is not None and not value.is_inference()
    ]
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    finally:
        written = [(name, value, was) for name, value, version, was in plain if value._version != version]
        changed = [
            (path, value, was)
            for path, module, name, value, version, was in held
            if value._version != version or module._buffers.get(name) is not value
        ]
        state.restore()
        parametrize._cache = shared
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        with torch.no_grad():
            for _, tensor, was in (*written, *changed):
                tensor.copy_(was)
    if changed:
        raise CaptureError(
            f"the loss changes its buffer {changed[0][0]!r}, which every placed step would take for a constant. Hint: "
            "change a buffer of the model in its `forward` and return it, or pass the value as a target; a network "
            "with batch norm that the loss reads must be in `eval()` mode."
        ) from failure
    if failure is not None:
        raise failure
    if written:
        raise CaptureError(
            f"`forward` writes to {written[0][0]!r} in place, a tensor in a plain attribute, which the graph would "
            f"hold as a constant; make it a buffer (`register_buffer`)."
        )


def call_with(model: nn.Module, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `model` returns with other parameters and buffers, which are its own again afterwards.

    `torch.func.functional_call` does the same, but for modules with two names (`self.b = self.a`): there it takes the
    tensors of the call for those of the module, and leaves them in it.

    Args:
        model: called.
        state: every parameter and buffer, by its first dotted name; buffers that `forward` replaces are replaced in it.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    first: dict[int, str] = {}
    names: dict[str, str] = {}  # of every place of a tensor, the first of its tensor
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is not None:
                    place = _joined(path, name)
                    names[place] = first.setdefault(id(value), place)
    given = {place: state[name] for place, name in names.items()}
    try:
        return torch.func.functional_call(model, given, args, kwargs, tie_weights=False)
    finally:
        state.update({name: given[name] for name in state})


def modules_of_loss(model: nn.Module, loss_fn: Callable[..., Any] | None) -> list[tuple[str, nn.Module]]:
    """The modules that a loss is or reaches, with their paths, but for those of the model."""
    others = {id(module) for module in model.modules()}
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in referenced([] if loss_fn is None else [loss_fn]):
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                if id(module) not in others:
                    found.setdefault(id(module), (_joined(name, path), module))
    return list(found.values())


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")


_log = logging.getLogger(__name__)

_OF_RECURRENT_LAYERS = {"_flat_weights", "_flat_weight_refs"}
"""Lists that PyTorch keeps of parameters, and makes anew where these are swapped."""
_HINT = (
    "Hint: keep what changes from step to step in a buffer (`register_buffer`), return it, or count outside of the "
    "model and pass it as a tensor among the inputs"
)


def watched_state(model: nn.Module, loss_fn: Callable[..., Any] | None) -> PythonState:
    """The Python state of a model and of the modules that its loss reaches, as it is now."""
    return PythonState((*model.named_modules(), *modules_of_loss(model, loss_fn)))


def check_frozen(model: nn.Module, loss_fn: Callable[..., Any] | None, frozen: Collection[str]) -> None:
    """Refuses names of nothing that a model or its loss has or, as their code tells, may set.

    Args:
        model: that is captured.
        loss_fn: of its output.
        frozen: names of what may change.

    Raises:
        UnknownName: a name of nothing.
    """
    modules = [*model.modules(), *(module for _, module in modules_of_loss(model, loss_fn))]
    paths, known = {path for path, _ in model.named_modules()}, watched_state(model, loss_fn).names
    methods = [
        each for kind in {cls for module in modules for cls in type(module).__mro__} for each in vars(kind).values()
    ]
    read = {word for each in (*methods, loss_fn) for word in getattr(getattr(each, "__code__", None), "co_names", ())}
    for name in frozen:
        root = name.partition("[")[0]
        owner, _, last = root.rpartition(".")
        if not (name in known or root in known or last in read or (owner in known and owner not in paths)):
            raise UnknownName("attribute in `frozen`", name, (each for each in known if _is_own(each)))


def _is_own(name: str) -> bool:
    """Whether a name is one that a user knows, and none of PyTorch's private ones."""
    return bool(name) and "[" not in name and not any(part.startswith("_") for part in name.split("."))


def check_steps_alike(
    model: nn.Module,
    traced: GraphModule,
    again: Callable[[], GraphModule],
    before: PythonState,
    after: PythonState,
    frozen: Collection[str],
) -> None:
    """Compares a step with the one that follows it, where it left something changed.

    A cache that the first step fills and the next one only reads is no change of the step.

    Args:
        model: that runs.
        traced: the graph of the step.
        again: traces the next step.
        before: the state that the step began with.
        after: the state that it left.
        frozen: names of what may change.

    Raises:
        CaptureError: the next step changes the same again, reads what this one left, or computes something else.
    """
    changed = [change for change in before.changes() if not _is_free(change.name, frozen)]
    if not changed:
        return
    try:
        following = again()
    except Exception as error:  # it reads what the first step left: tensors of a graph that is gone
        raise _refusal(changed, "and the next step reads that") from error
    more = [change for change in after.changes() if not _is_free(change.name, frozen)]
    growing = [change for change in more if change.is_growth or not change.tensors]
    if growing:
        raise _refusal(growing, "in every step")
    read = {id(value) for value in _constants(following)}
    carried = [change for change in changed if any(id(tensor) in read for tensor in change.tensors)]
    renewed = {change.name for change in more}
    if carried := [change for change in carried if change.name in renewed]:
        raise _refusal(carried, "in every step, and the next one reads that")
    if list(_work(traced)) != list(_work(following)):
        raise _refusal(changed, "and the next step then computes something else")
    if renewed := renewed - set(_norms_of_weights(model)):
        _log.warning(
            "`forward` sets %s to tensors of the step; a placed step leaves them as they are: return what is needed",
            ", ".join(sorted(renewed)),
        )


def _is_free(name: str, frozen: Collection[str]) -> bool:
    if name.rpartition(".")[2] in _OF_RECURRENT_LAYERS:
        return True
    return any(name == each or name.startswith((f"{each}.", f"{each}[")) for each in frozen)


def _norms_of_weights(model: nn.Module) -> Iterator[str]:
    """The weights that hooks of `torch.nn.utils.weight_norm` and its like make for every call."""
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils"):
                yield f"{path}.{getattr(hook, 'name', '')}".strip(".")


def _refusal(changed: Sequence[Change], why: str) -> CaptureError:
    names = ", ".join(f"`{change.name}`" for change in changed)
    given = ", ".join(repr(change.name) for change in changed)
    return CaptureError(
        f"cannot capture the model: `forward` (or the loss) changes {names} {why}. It is Python's, not a tensor of the "
        f"graph: placed steps would leave it as it is now. {_HINT}. Where it may stay so: `frozen=[{given}]`."
    )


def _constants(module: GraphModule) -> Iterator[Tensor]:
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, Tensor):
            yield value


def _work(module: GraphModule) -> Iterator[tuple[Any, ...]]:
    """What a step computes from its inputs and parameters or draws: ops with their plain arguments, in order."""
    dependent: set[Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            dependent.add(node)
        elif node.op == "call_function":
            is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if is_random or any(each in dependent for each in node.all_input_nodes):
                dependent.add(node)
                plain = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each in dependent)
                yield str(node.target), repr(plain)


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


class _Stream:
    """A generator of numbers, or an iterator, as it is now: it gives something else after each draw.

    Attributes:
        name: as the user writes it.
        holder: what holds it, and `key` under which.
    """

    def __init__(self, name: str, holder: Any, key: Any, value: Any) -> None:
        self.name, self.holder, self.key, self._value = name, holder, key, value
        self._before = _progress(value)
        self._twin = None
        if self._before is not None and isinstance(value, Iterator) and not isinstance(value, GeneratorType):
            with contextlib.suppress(Exception):  # of the objects in it
                self._twin = copy.deepcopy(value)

    @property
    def is_changed(self) -> bool:
        """Whether it was drawn from."""
        return not _alike(self._before, _progress(self._value))

    def restore(self) -> None:
        """Makes it give what it would have given; a generator function cannot be wound back."""
        if not self.is_changed:
            return
        value = self._value
        if isinstance(value, random.Random):
            value.setstate(self._before)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = self._before
        elif isinstance(value, np.random.RandomState):
            value.set_state(self._before)
        elif self._twin is not None and isinstance(self.holder, (dict, list)):
            self.holder[self.key] = self._twin


def _progress(value: object) -> Any:
    """Where a generator of numbers or an iterator is; None where nothing tells."""
    try:
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.Generator):
            return copy.deepcopy(value.bit_generator.state)
        if isinstance(value, np.random.RandomState):
            name, keys, *rest = value.get_state(legacy=True)
            return (name, np.array(keys).tolist(), *rest)
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            return None if frame is None else (frame.f_lasti, dict(frame.f_locals))
        if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            made: Any = value.__reduce__()
            return tuple(_listed(each) for each in made[1:])
    except Exception:  # it has no state, or none that can be told
        return None
    return None


def _listed(value: object) -> Any:
    """The parts of the state of an iterator, with iterators in it as theirs, and a list as it is now."""
    if isinstance(value, (tuple, list)):
        return [_listed(each) for each in value[:MOST_VALUES]]
    inner = _progress(value)
    return value if inner is None else inner


class PythonState:
    """Attributes of modules and of their classes, and what is in them: lists, dicts, sets, plain objects, streams.

    Args:
        modules: with their paths.
        has_hooks: whether hooks of modules are part of it.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], *, has_hooks: bool = True) -> None:
        self._kept: dict[int, _Kept] = {}
        self._streams: dict[int, _Stream] = {}
        modules = list(modules)
        left: deque[tuple[str, object, bool]] = deque((path, module, False) for path, module in modules)
        self._classes = [(kind, _attributes(kind)) for kind in _own_classes(module for _, module in modules)]
        for kind, before in self._classes:
            left.extend((f"{kind.__name__}.{key}", value, False) for key, value in before.items())
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
                    self._watch(kept.below(key), now, key, each)
                    if has_hooks or not is_module or "_hooks" not in key:
                        left.append((kept.below(key), each, is_module and key in _REGISTRIES))
            elif not isinstance(now, set):
                for index, each in enumerate(now):
                    self._watch(kept.below(index), now, index, each)
                    left.append((kept.below(index), each, False))

    def _watch(self, name: str, holder: Any, key: Any, value: object) -> None:
        is_stream = isinstance(value, (random.Random, np.random.Generator, np.random.RandomState, Iterator))
        if is_stream and id(value) not in self._streams:
            self._streams[id(value)] = _Stream(name, holder, key, value)

    @property
    def names(self) -> set[str]:
        """Of all that it looks into, as a `Change` has them."""
        found = {kept.name for kept in self._kept.values()} | {each.name for each in self._streams.values()}
        found |= {f"{kind.__name__}.{key}" for kind, before in self._classes for key in before}
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
        for each in self._streams.values():
            if each.is_changed:
                found.setdefault(each.name, Change(each.name, None))
        for kind, before in self._classes:
            after = _attributes(kind)
            for key in {**before, **after}:
                name, is_growth = f"{kind.__name__}.{key}", key not in before or key not in after
                if is_growth or not _alike(before[key], after[key]):
                    found.setdefault(name, Change(name, after.get(key), is_growth))
        return list(found.values())

    def restore(self) -> None:
        """Makes all of it what it was."""
        for kind, before in self._classes:
            after = _attributes(kind)
            for key in after.keys() - before.keys():
                delattr(kind, key)
            for key, value in before.items():
                if key not in after or after[key] is not value:
                    setattr(kind, key, value)
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
        for each in self._streams.values():
            each.restore()


def _own_classes(modules: Iterable[nn.Module]) -> list[type]:
    """The classes of modules that are the user's own."""
    kinds = {kind: None for module in modules for kind in type(module).__mro__}
    return [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing")]


def _attributes(kind: type) -> dict[str, Any]:
    """What a class holds besides methods, descriptors and what Python puts there."""
    return {
        key: value
        for key, value in vars(kind).items()
        if not key.startswith(("__", "_abc")) and not callable(value) and not hasattr(type(value), "__get__")
    }


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
    with contextlib.suppress(Exception):  # a proxy may raise; of a C library, `__dict__` is something else
        attributes = getattr(value, "__dict__", None)
        return (attributes if type(attributes) is dict else None), True
    return None, False


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

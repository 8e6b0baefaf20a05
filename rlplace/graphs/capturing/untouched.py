"""`untouched`: a model and its loss are the same after a trace as before, and changes that would be lost are refused.

`check_steps_alike`: refuses a step whose next one would be another, as Python state that it changes says.

`PythonState`: entries of modules besides tensors of their own, and those that a run of `forward` changes.

`ReadState`: these, and what the functions of a step read besides, to be compared before every later step.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import logging
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils import parametrize, stateless
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError, UnknownName
from rlplace.graphs.capturing.constants import draw_of, forwards, module_of, own_classes, places_of, read_by, referenced
from rlplace.graphs.capturing.refusals import is_installed
from rlplace.graphs.program import tensors_in
from rlplace.graphs.random_streams import DrawKey


@contextlib.contextmanager
def untouched(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Iterator[None]:
    """Afterwards everything that `forward` or the loss changed (attributes, collections in them, caches) has its old
    value.

    While active it would hold traces. Writes of `forward` to the model's buffers are part of the step.

    Raises:
        CaptureError: a plain tensor attribute was written in place, or the loss changed a buffer of its own, which the
            graph would take for constants.
    """
    of_model, of_loss = list(model.named_modules()), modules_of_loss(model, loss_fn)
    state = PythonState((*of_model, *of_loss), has_closures=True)
    # functions under `functools.lru_cache` that a model or its loss calls keep traces afterwards
    called = [value for _, value in referenced([*forwards(model), loss_fn])]
    caches = [(each, each.cache_info().misses) for each in called if isinstance(each, functools._lru_cache_wrapper)]
    shared, parametrize._cache = parametrize._cache, {}  # of `parametrize.cached()` around the capture
    plain = [
        (dotted(path, name), value, value._version, value.detach().clone())
        for path, module in (*of_model, *of_loss)
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not value.is_inference()
    ]
    held = [
        (dotted(path, name), module, name, value, value._version, value.detach().clone())
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
        if (read := recorded.get()) is not None:
            read.free.update(
                each.name.rpartition("[")[0] if each.is_growth and each.name.endswith("]") else each.name
                for each in state.changes()
            )
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


@contextlib.contextmanager
def holding(model: nn.Module, state: dict[str, Tensor]) -> Iterator[None]:
    """While active, `model` has other parameters and buffers: for its forward, and for the one that a backward repeats.

    `torch.func.functional_call` does the same for a forward alone, and not for modules with two names
    (`self.b = self.a`): there it takes the tensors of the call for those of the module, and leaves them in it.

    Args:
        model: has its own again afterwards.
        state: every parameter and buffer, by its first dotted name; buffers that `forward` replaces are replaced in it.
    """
    first: dict[int, str] = {}  # by id of a tensor, the first of its places
    given = {
        place: state[first.setdefault(id(value), place)]
        for path, module in model.named_modules()
        for name, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None and (place := dotted(path, name))
    }
    for name, _ in model.named_parameters():
        state[name]._is_param = True  # `self.weight /= 2` sets it, which takes a `Parameter`
    try:
        with stateless._reparametrize_module(model, given, tie_weights=False):
            yield
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
                    found.setdefault(id(module), (dotted(name, path), module))
    return list(found.values())


def dotted(path: str, name: str) -> str:
    """The name of what a module at `path` has under `name`."""
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
        frozen: names of entries that may change.

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
            users = (each for each in known if each and "[" not in each and "._" not in f".{each}")  # none of PyTorch's
            raise UnknownName("attribute in `frozen`", name, users)


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
        frozen: names of entries that may change.

    Raises:
        CaptureError: the next step changes the same again, reads the values that this one left, or computes something
            else.
    """
    changed = [change for change in before.changes() if not _is_free(change.name, frozen)]
    if not changed:
        return
    try:
        following = again()
    except Exception as error:  # it reads what the first step left: tensors of a graph that is gone
        raise _refusal(changed, "and the next step reads that") from error
    more = [change for change in after.changes() if not _is_free(change.name, frozen)]
    if growing := [change for change in more if change.is_growth or not change.tensors]:
        raise _refusal(growing, "in every step")
    renewed = {change.name for change in more}
    read = {id(getattr(following, str(node.target), None)) for node in following.graph.find_nodes(op="get_attr")}
    if carried := [each for each in changed if each.name in renewed and not read.isdisjoint(map(id, each.tensors))]:
        raise _refusal(carried, "in every step, and the next one reads that")
    if list(_work(traced)) != list(_work(following)):
        raise _refusal(changed, "and the next step then computes something else")
    if renewed := renewed - _norms_of_weights(model):
        _log.warning(
            "`forward` sets %s to tensors of the step; a placed step leaves them as they are: return what is needed",
            ", ".join(sorted(renewed)),
        )


def check_draws_alike(traced: GraphModule, again: Callable[[], GraphModule], *, is_left: bool) -> None:
    """Refuses draws from states of random generators that are set in the step, and not alike in every step.

    Args:
        traced: the graph of the step, whose random ops know their draws.
        again: traces the next step.
        is_left: whether the step leaves PyTorch's own generator in such a state.

    Raises:
        CaptureError: the next step draws from other states, or begins in the one that this step has left.
    """
    draws = _draws(traced)
    own = next((node for node, _, key in draws if key.fixed is None), None)
    if all(key.fixed is None for *_, key in draws):
        return
    pairs = zip(draws, [*_draws(again()), *draws], strict=False)
    unlike = next((one[0] for one, other in pairs if one[1:] != other[1:]), None)
    if unlike is None and not (is_left and own):
        return
    found: Any = unlike or own
    why = (
        "PyTorch's generator as an earlier step left it, which seeds it later on (`torch.manual_seed`)"
        if unlike is None
        else "a random state that goes on from step to step (a `torch.Generator` of its own), or from a seed that is "
        "another in each step (`torch.seed`)"
    )
    raise CaptureError(
        f"cannot capture the model: op {found.target} in module {module_of(found) or 'the root'} draws from {why}. No "
        f"graph holds that state. Leave `generator=` out: draws are seeded by the step. Or seed the generator in every "
        f"step with the same number, `torch.manual_seed` within `torch.random.fork_rng()`.",
        op=str(found.target),
    )


def _draws(module: GraphModule) -> list[tuple[Node, Any, DrawKey]]:
    """The random ops of a trace, with what they are and which draws they make."""
    return [(node, node.target, key) for node in module.graph.nodes if (key := draw_of(node)) is not None]


def _is_free(name: str, frozen: Collection[str]) -> bool:
    if name.rpartition(".")[2] in _OF_RECURRENT_LAYERS:
        return True
    return any(name == each or name.startswith((f"{each}.", f"{each}[")) for each in frozen)


def _norms_of_weights(model: nn.Module) -> set[str]:
    """The weights that hooks of `torch.nn.utils.weight_norm` and its like make for every call."""
    return {
        dotted(path, getattr(hook, "name", ""))
        for path, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if type(hook).__module__.startswith("torch.nn.utils")
    }


def _refusal(changed: Sequence[Change], why: str) -> CaptureError:
    names = ", ".join(f"`{change.name}`" for change in changed)
    given = ", ".join(repr(change.name) for change in changed)
    return CaptureError(
        f"cannot capture the model: `forward` (or the loss) changes {names} {why}. It is Python's, not a tensor of the "
        f"graph: placed steps would leave it as it is now. {_HINT}. Where it may stay so: `frozen=[{given}]`."
    )


def _work(module: GraphModule) -> Iterator[tuple[Any, ...]]:
    """Values that a step computes from its inputs and parameters or draws: ops with their plain arguments, in order."""
    dependent: set[Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            dependent.add(node)
        elif (key := draw_of(node)) or any(each in dependent for each in node.all_input_nodes):
            dependent.add(node)
            plain = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each in dependent)
            yield str(node.target), repr(plain), key


MOST_VALUES = 20_000
"""How many collections and objects are looked into besides modules, nearest first: one may be a whole data set."""

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_STREAMS = (random.Random, np.random.Generator, np.random.RandomState, Iterator)
_INTERNALS = {
    "_weakrefset", "asyncio", "builtins", "concurrent", "contextlib", "ctypes", "functools", "importlib", "inspect",
    "itertools", "logging", "multiprocessing", "numpy", "queue", "random", "rlplace", "socket", "subprocess",
    "tempfile", "threading", "torch", "typing", "unittest", "weakref",
}  # fmt: skip
"""Packages whose objects have a life of their own (loggers, locks, generators, placed steps) and are not looked into;
other objects of Python's library hold what the user put there (`argparse.Namespace`)."""


@dataclass(frozen=True)
class Change:
    """An entry that has changed.

    Attributes:
        name: as the user writes it, `encoder.calls` or `encoder.stats['n']`.
        value: its value now; None where it is gone.
        is_growth: whether a collection has another number of values.
        before: its earlier value; None where it is new.
    """

    name: str
    value: object
    is_growth: bool = False
    before: object = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in it."""
        return tensors_in(self.value)


@dataclass(frozen=True)
class Kept:
    """A collection, the attributes of an object, a class, or a parameter with hooks, with its earlier entries."""

    name: str
    owner: Any
    before: Any
    has_attributes: bool

    @property
    def now(self) -> Any:
        """The collection as it is; of a class, a function or a parameter, a copy of what it has or reads."""
        return _copied(self.owner) if isinstance(self.owner, type | FunctionType | nn.Parameter) else self.owner

    def below(self, key: object) -> str:
        """The name of its entry under `key`."""
        if not self.has_attributes:
            return f"{self.name}[{key!r}]"
        return self.name if key in _REGISTRIES else f"{self.name}.{key}".strip(".")

    @property
    def items(self) -> Iterable[tuple[Any, Any]]:
        """Its entries, by key or position; nothing of a set, which holds plain values."""
        now = self.now
        return now.items() if isinstance(now, dict) else () if isinstance(now, set) else enumerate(now)

    def changes(self) -> Iterator[Change]:
        """The entries that have changed."""
        now, before = self.now, self.before
        if isinstance(before, dict):
            for key in {**before, **now}:
                is_growth = key not in now or key not in before
                if is_growth or not _alike(before[key], now[key]):
                    yield Change(self.below(key), now.get(key), is_growth, before.get(key))
        elif len(now) != len(before):
            yield Change(self.name, list(now), True, before)
        elif now != before if isinstance(now, set) else not all(map(_alike, before, now)):
            yield Change(self.name, list(now), before=before)

    def restore(self) -> None:
        """Restores its earlier entries."""
        now, before, owner = self.now, self.before, self.owner
        if isinstance(before, dict):
            plain: Any = OrderedDict if isinstance(owner, OrderedDict) else dict  # whatever its own class allows
            put, delete = (setattr, delattr) if isinstance(owner, type) else (plain.__setitem__, plain.__delitem__)
            for key in [key for key in now if key not in before]:
                delete(owner, key)
            for key, value in before.items():
                if key not in now or now[key] is not value:
                    put(owner, key, value)
        elif isinstance(before, set) or len(now) != len(before) or any(map(operator.is_not, now, before)):
            add = now.update if isinstance(before, set) else now.extend
            now.clear()
            add(before)


class _Stream:
    """A generator of numbers, or an iterator, as it is now: it gives something else after each draw."""

    def __init__(self, name: str, holder: Any, key: Any, value: Any) -> None:
        self.name, self._holder, self._key, self._value = name, holder, key, value
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
        """Makes it yield the items that it would have yielded; a generator function cannot be wound back."""
        if not self.is_changed:
            return
        value = self._value
        if isinstance(value, random.Random):
            value.setstate(self._before)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = self._before
        elif isinstance(value, np.random.RandomState):
            value.set_state(self._before)
        elif self._twin is not None and isinstance(self._holder, (dict, list)):
            self._holder[self._key] = self._twin


def _progress(value: object) -> Any:
    """Where a generator of numbers or an iterator is; None where nothing tells."""
    with contextlib.suppress(Exception):  # it has no state, or none that can be told
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.Generator):
            return pytree.tree_map_only(np.ndarray, np.ndarray.tolist, value.bit_generator.state)
        if isinstance(value, np.random.RandomState):
            return pytree.tree_map_only(np.ndarray, np.ndarray.tolist, value.get_state(legacy=False))
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            return None if frame is None else (frame.f_lasti, dict(frame.f_locals))
        if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            made: Any = value.__reduce__()
            return tuple(_listed(each) for each in made[1:])
    return None


def _listed(value: object) -> Any:
    """The parts of the state of an iterator, with iterators in it as theirs, and a list as it is now."""
    if isinstance(value, (tuple, list)):
        return [_listed(each) for each in value[:MOST_VALUES]]
    inner = _progress(value)
    return value if inner is None else inner


class PythonState:
    """Attributes of modules and of their classes, and the entries in them: lists, dicts, sets, plain objects, streams.

    Args:
        modules: with their paths.
        has_hooks: whether hooks of modules are part of it.
        has_closures: whether what functions among the attributes, hooks for one, hold of their own is part of it.
        others: what is part of it besides, with its names: functions, whose variables are.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        *,
        has_hooks: bool = True,
        has_closures: bool = False,
        others: Iterable[tuple[str, object]] = (),
    ) -> None:
        self._has_closures, self._entered_once = has_closures, set[object]()
        self.kept: dict[int, Kept] = {}
        self._streams: dict[int, _Stream] = {}
        modules = list(modules)
        self._kinds = own_classes(module for _, module in modules)
        self._left = left = deque[tuple[str, object, bool]]((path, module, False) for path, module in modules)
        left.extend((kind.__name__, kind, False) for kind in self._kinds)
        left.extend((name, other, False) for name, other in others)
        while left and len(self.kept) < MOST_VALUES + 20 * len(modules):  # these have 14 registries each
            name, value, is_registry = left.popleft()
            if isinstance(value, tuple):
                left.extend((f"{name}[{index}]", item, False) for index, item in enumerate(value))
                continue
            if id(value) in self.kept:
                continue
            owner, has_attributes = self._entered(name, value)
            if owner is None or id(owner) in self.kept:
                continue
            prefix = "" if isinstance(owner, FunctionType) else name  # its variables have names of their own
            self.kept[id(owner)] = kept = Kept(prefix, owner, _copied(owner), has_attributes or is_registry)
            is_module = isinstance(value, nn.Module)
            for key, each in kept.items:
                below = kept.below(key)
                if isinstance(each, _STREAMS) and id(each) not in self._streams and not isinstance(self, ReadState):
                    self._streams[id(each)] = _Stream(below, owner, key, each)
                if has_hooks or not is_module or "_hooks" not in key:
                    left.append((below, each, is_module and key in _REGISTRIES))

    def _entered(self, name: str, value: object) -> tuple[Any, bool]:
        """As `collection_of` has it; what else belongs to the value is added to those that are left."""
        if self._has_closures and isinstance(value, (FunctionType, MethodType)) and value not in self._entered_once:
            self._entered_once.add(value)  # a function may hold itself
            self._left.extend((name, each, False) for each in _held_by(value))
        return (value, True) if isinstance(value, type) and value in self._kinds else collection_of(value)

    @property
    def names(self) -> set[str]:
        """Of all that it looks into, as a `Change` has them."""
        kept = [each for each in self.kept.values() if not isinstance(each.owner, type)]
        below = {
            each.below(key)
            for each in self.kept.values()
            for key, value in each.items
            if not (isinstance(each.owner, type) and callable(value))
        }
        return below | {each.name for each in kept} | {each.name for each in self._streams.values()}

    def changes(self) -> list[Change]:
        """The entries that have changed, by name."""
        found = [change for kept in self.kept.values() for change in kept.changes()]
        found += [Change(each.name, None) for each in self._streams.values() if each.is_changed]
        return list({change.name: change for change in reversed(found)}.values())[::-1]

    def restore(self) -> None:
        """Restores all of it."""
        for kept in self.kept.values():
            kept.restore()
        for stream in self._streams.values():
            stream.restore()


def _held_by(function: FunctionType | MethodType) -> Iterator[object]:
    """What a function holds: the object that it belongs to, and its closure."""
    if isinstance(function, MethodType):
        yield function.__self__
        return
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing was assigned to it yet
            yield cell.cell_contents


recorded: ContextVar[ReadState | None] = ContextVar("recorded", default=None)
"""While it is set, entries that a trace itself sets (a mask that is made once) become free in it."""

_WRAPPERS = (functools.partial, MethodType, functools._lru_cache_wrapper, staticmethod, classmethod, property)
_WRAPPED = ("__wrapped__", "__func__", "__self__", "func", "fget", "args", "keywords")


class ReadState(PythonState):
    """The Python state that a step reads, as it was when the step was traced.

    Besides the state of modules, it is what their methods, the loss, and functions that these reach read of closures
    and globals, and the classes and objects there. Code of installed packages is not looked into.

    Args:
        model: of the step.
        loss_fn: likewise.
        free: names of entries that may change.
        hooked: the parameters, with their names, whose hooks the trace runs; those of the model by default.

    Attributes:
        free: these, and entries that the trace itself sets.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        free: Iterable[str] = (),
        *,
        hooked: Iterable[tuple[str, nn.Parameter]] | None = None,
    ) -> None:
        self.free, hooked = {*free}, [*(model.named_parameters() if hooked is None else hooked)]
        self._hooked = {id(each) for _, each in hooked}
        super().__init__((*model.named_modules(), *modules_of_loss(model, loss_fn)), others=(("", loss_fn), *hooked))
        owners = [each.owner for each in self.kept.values()]
        self._variables = [functools.partial(getattr, each, "_backward_hooks") for _, each in hooked] + [
            functools.partial(getattr, holder, "cell_contents")
            if isinstance(holder, CellType)
            else functools.partial(dict.get, holder, key)
            for each in owners
            if isinstance(each, FunctionType)
            for _, holder, key in places_of(each)
        ]
        plain = [each for each in owners if not isinstance(each, FunctionType | nn.Parameter)]
        held = (vars(each) if isinstance(each, type) else each for each in plain)
        self._collections = [each.values() if hasattr(each, "values") else each for each in held]
        self.accept()

    def accept(self) -> None:
        """`is_same` compares with the state of now."""
        self._empty = [each for each in self._collections if not each]  # most are: 11 of the hooks of every module
        self._filled = [each for each in self._collections if each]
        self._values = self._now()

    def is_same(self) -> bool:
        """Whether every entry is the object that it was; if not, `differences` tells whether it says the same."""
        sizes, values = self._now()  # and no code of Python's in between: every value costs some 20 ns
        return not any(self._empty) and sizes == self._values[0] and all(map(operator.is_, values, self._values[1]))

    def _now(self) -> tuple[list[int], list[object]]:
        try:
            values = chain(chain.from_iterable(self._filled), map(operator.call, self._variables))
            return [*map(len, self._filled)], [*values]
        except (ValueError, RuntimeError):  # a variable is gone; another thread changes a collection
            return [-1], []

    def differences(self, free: Collection[str] = ()) -> list[Change]:
        """Entries that now say something else than in the trace; tensors for tensors aside, which steps follow.

        Args:
            free: names of further entries that may change.
        """
        return [
            each
            for each in self.changes()
            if each.name not in free and not _is_free(each.name, self.free)
            if not (isinstance(each.value, Tensor) and isinstance(each.before, Tensor))
        ]

    def _entered(self, name: str, value: object) -> tuple[Any, bool]:
        owner, has_attributes = collection_of(value)
        more: list[Any] = own_classes([value]) if has_attributes else []
        if isinstance(value, _WRAPPERS):
            more = [getattr(value, each, None) for each in _WRAPPED]
        elif id(value) in self._hooked or (
            isinstance(value, FunctionType | type) and (value in self._kinds or not is_installed(value.__module__))
        ):
            owner, has_attributes = value, True
            held = (*value.__bases__, *vars(value).values()) if isinstance(value, type) else ()
            more = [each for each in held if isinstance(each, (type, FunctionType, *_WRAPPERS))]
        self._left.extend((each.__name__ if isinstance(each, type) else "", each, False) for each in more)
        # a larger collection is data
        is_data = isinstance(owner, Sized) and not isinstance(owner, Tensor) and len(owner) > MOST_VALUES
        return (None if is_data else owner), has_attributes


def _attributes(kind: type) -> dict[str, Any]:
    """The entries of a class besides those of Python itself."""
    return {key: value for key, value in vars(kind).items() if not key.startswith(("__", "_abc"))}


def collection_of(value: object) -> tuple[Any, bool]:
    """The part of a value that can be changed, and whether that is its attributes; None where nothing can, or is known
    of it."""
    if isinstance(value, nn.Module):
        return vars(value), True
    if isinstance(value, (dict, list, set, deque)):
        return value, False
    of_training = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    is_opaque = type(value).__module__.partition(".")[0] in _INTERNALS and not isinstance(value, of_training)
    if is_opaque or isinstance(value, (type, FunctionType, ModuleType, enum.Enum)):
        return None, False
    with contextlib.suppress(Exception):  # a proxy may raise; of a C library, `__dict__` is something else
        attributes = getattr(value, "__dict__", None)
        return (attributes if type(attributes) is dict else None), True
    return None, False


def _copied(owner: Any) -> Any:
    if isinstance(owner, type | FunctionType):
        return _attributes(owner) if isinstance(owner, type) else dict(read_by(owner))
    if isinstance(owner, nn.Parameter):
        return {"_backward_hooks": owner._backward_hooks}
    return dict(owner) if isinstance(owner, dict) else set(owner) if isinstance(owner, set) else list(owner)


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
    with contextlib.suppress(Exception):  # of the user's type, e.g. an array, which has many truths
        return bool(one == other)
    return False

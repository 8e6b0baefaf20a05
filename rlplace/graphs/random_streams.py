"""`Streams`: the draws of a step by their places in streams of random state, so that a draw made again is the same one.

PyTorch's random ops take numbers from a generator, whose state moves on with each of them. `manual_seed`, `fork_rng`,
`get_rng_state`, `set_rng_state` and the recomputation of `torch.utils.checkpoint` seed, save and restore that state. A
placed step draws in another order and on other devices, so each of its draws is named by the state that it begins with:
`DrawKey`. Draws that begin with equal states have equal keys; these, not the numbers themselves, are as in eager.

`seeded`: a random op that draws by its key, wherever it is placed.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rlplace import cuda

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DrawKey:
    """Where a draw stands in its stream; a step makes equal draws of equal keys.

    Attributes:
        place: how many draws of its stream came before it.
        fixed: of a stream that the step itself seeds (`manual_seed(7)`), and that is the same in every step: its seed,
            or a number for the state that it begins with. None for the step's own stream, another in each step.
        micro_batch: the one that it belongs to; -1 for a draw of the whole batch, which all of them may share.
        shard: of an op that is split: which part draws; -1 for a whole draw.
    """

    place: int
    fixed: int | None = None
    micro_batch: int = -1
    shard: int = -1

    def seed(self, seed: int, step: int) -> int:
        """What the generator is seeded with for this draw.

        Args:
            seed: of the placed model.
            step: number of the step.
        """
        if self.fixed is not None and (self.micro_batch, self.shard, self.place) == (-1, -1, 0):
            return self.fixed  # on a CPU, the first draw after `manual_seed` has the very numbers of eager
        base = (seed, step) if self.fixed is None else (self.fixed, -1)
        return _mix(*base, self.micro_batch, self.shard, self.place)


Draw = Callable[[DrawKey, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Makes the result of a random op: called with its key, the op, its arguments and its keyword arguments."""


class Streams(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a step so that each of its draws has a key: the state of every generator is a place in a stream.

    It is PyTorch's own generators that are moved, and those that the step makes or holds (`torch.Generator`): code that
    saves, restores or seeds their states, in the forward or in a backward, needs no help. Afterwards all of them are as
    they were before.

        with Streams(draw).step():
            loss = loss_fn(model(x), target)
            loss.backward()

    calls `draw` for every random op, with the keys that a trace of the same code gives them. For that the ops have to
    come apart as in the trace: run the step under `portable(model)`, with the model in the mode that it was captured
    in, on devices of the same type, and not under `torch.inference_mode`. An eager op may be the in-place form
    (`bernoulli_`) of the one in the program (`bernoulli.p`), and takes no `generator` any more.

    Args:
        draw: makes the results of random ops; `make` by default.
        seed: of a placed model, for `make`.

    Attributes:
        is_left: whether the last step left PyTorch's generators in a stream that it had seeded itself.
    """

    supports_higher_order_operators = True  # they are refused later, by name

    def __init__(self, draw: Draw | None = None, *, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw, self._seed, self._number, self.is_left = draw or self.make, seed, 0, False
        self._keys: dict[bytes, DrawKey] = {}  # by a hash of the generator's state
        self._before: dict[torch.Generator, torch.Tensor] = {}  # states of all generators that were drawn from
        self._count = itertools.count()

    @contextmanager
    def step(self, number: int = 0) -> Iterator[None]:
        """While active, one step runs; no other thread draws for a placed step meanwhile.

        Args:
            number: of the step, for `make`.
        """
        self._number, own = number, cuda.default_generators()
        with _lock, self:
            self._before = {each: each.get_state() for each in (*own, *self._before)}
            self.begin()
            try:
                yield
            finally:
                self.is_left = any(self._key(each).fixed is not None for each in own)
                for generator, state in self._before.items():
                    generator.set_state(state)

    def begin(self, micro_batch: int = -1) -> None:
        """The own stream of the step begins, or that of one of its micro-batches, from its first place on.

        Its states are others each time: a state that a step makes a seed of, or a generator of the user's that goes on
        from step to step, gives keys that the next step does not have again.
        """
        nonce = next(self._count)
        for index, generator in enumerate(self._before):
            self._move(generator, _mix(nonce, index), DrawKey(index << 32, None, micro_batch))

    def make(self, key: DrawKey, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a random op as a placed step draws it."""
        return _seeded(func, place_of(args, kwargs), key.seed(self._seed, self._number), args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs):
            first = args[0] if args else None
            if type(first) is torch.Tensor and first.dtype is torch.uint8 and self._is_state(first):
                with _disable_current_modes():  # a copy of a saved state stays real among fake tensors
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Generator)]
        generator = given[0] if given else _default(place_of(args, kwargs))
        before = generator.get_state()
        self._before.setdefault(generator, before)
        key = self._key(generator)
        args, kwargs = pytree.tree_map_only(torch.Generator, lambda _: None, (args, kwargs))
        try:
            return self._draw(key, func, args, kwargs)
        finally:
            self._move(generator, int.from_bytes(_hash(before)) >> 1, replace(key, place=key.place + 1))

    def _is_state(self, value: torch.Tensor) -> bool:
        return any(value.shape == state.shape for state in self._before.values())

    def _key(self, generator: torch.Generator) -> DrawKey:
        """The key of the generator's next draw; a state that is not known yet begins a stream."""
        name, seed = _hash(generator.get_state()), generator.initial_seed()
        if name not in self._keys:
            is_fresh = generator.device == CPU and name == _hash(torch.Generator().manual_seed(seed).get_state())
            self._keys[name] = DrawKey(0, seed if is_fresh else int.from_bytes(name) >> 1)
        return self._keys[name]

    def _move(self, generator: torch.Generator, seed: int, key: DrawKey) -> None:
        self._keys[_hash(generator.manual_seed(seed).get_state())] = key


def is_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op takes random numbers: an attention kernel without dropout has the tag of one, and takes none."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):  # an op that runs a graph has none
        return False
    arguments = func._schema.arguments
    position = next((place for place, each in enumerate(arguments) if each.name == "dropout_p"), None)
    if position is None:
        return True
    given = args[position] if position < len(args) else kwargs.get("dropout_p", arguments[position].default_value)
    return bool(given)


_lock = threading.RLock()


def seeded(
    target: Callable[..., Any], place: torch.device, *, seed: int, key: DrawKey, source: torch.device | None = None
) -> Callable[..., Any]:
    """`target` as a function of the step and its arguments that draws by its key, for `place`.

    Args:
        target: a random op.
        place: the device of its arguments and results.
        seed: of the placed model.
        key: of the draw.
        source: the device whose generator makes the numbers; `place` by default.
    """

    def run(step: int, *args: Any, **kwargs: Any) -> Any:
        if source is not None:
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda each: each.to(source), (args, kwargs))
            kwargs |= {"device": source} if kwargs.get("device") is not None else {}
        with _lock:  # the generator belongs to the whole process: others must not notice
            drawn = _seeded(target, source or place, key.seed(seed, step), args, kwargs)
        return drawn if source is None else pytree.tree_map_only(torch.Tensor, lambda each: each.to(place), drawn)

    return run


def _seeded(target: Callable[..., Any], place: torch.device, seed: int, args: Any, kwargs: Any) -> Any:
    """The result of a random op that draws from a seed of its own; the generator of `place` is as before."""
    generator = cuda.generator(place)
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        return target(*args, **kwargs)
    finally:
        generator.set_state(before)


def _default(place: torch.device) -> torch.Generator:
    """The generator of a device; that of the CPU where a fake tensor is on a GPU that is not there."""
    generators = cuda.default_generators()
    index = 1 + (place.index or 0) if place.type == "cuda" else 0
    return generators[index if index < len(generators) else 0]


def place_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device that a random op runs on."""
    first = next((each.device for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)), CPU)
    return torch.device(kwargs.get("device") or first)


def _hash(state: torch.Tensor) -> bytes:
    """A number for a generator's state; read from memory, as no mode of dispatch has to see it."""
    return hashlib.blake2b(ctypes.string_at(state.data_ptr(), state.numel()), digest_size=8).digest()


def _mix(*values: int) -> int:
    """A 63-bit hash of integers (splitmix64's finaliser, Steele et al. 2014)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1

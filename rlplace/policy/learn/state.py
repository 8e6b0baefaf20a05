"""`LearnerState`: all that a learner and its policy need to go on to the bit, as tensors and plain data.

`LearnerFile`: a learner's state in one file, from time to time, for a process that goes on with it.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from rlplace.errors import FileProblem, InvalidValue
from rlplace.files import jsonable, parse_json, read_plain, write_bytes_atomic
from rlplace.policy.base import Policy
from rlplace.policy.checkpoint import SCHEMA, load_checkpoint, save_checkpoint

KIND = "learner"
"""What its files say they are of."""


@dataclass(frozen=True)
class LearnerState:
    """Tensors by name, and plain data by name, as JSON holds it.

    A learner's state is made of parts, each under a name of its own.

    Example:
        >>> state = LearnerState({}, {"baseline": -0.5}).with_part("elites", LearnerState({}, {"counts": [2, 1]}))
        >>> state.facts
        {'baseline': -0.5, 'elites.counts': [2, 1]}
        >>> state.part("elites").facts
        {'counts': [2, 1]}
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def with_part(self, name: str, part: LearnerState) -> LearnerState:
        """This state with another one in it, whose names begin with `name`."""
        return LearnerState(
            {**self.tensors, **{f"{name}.{key}": tensor for key, tensor in part.tensors.items()}},
            {**self.facts, **{f"{name}.{key}": value for key, value in part.facts.items()}},
        )

    def part(self, name: str) -> LearnerState:
        """The part that `with_part` put under `name`."""
        begin = f"{name}."
        return LearnerState(
            {key.removeprefix(begin): tensor for key, tensor in self.tensors.items() if key.startswith(begin)},
            {key.removeprefix(begin): value for key, value in self.facts.items() if key.startswith(begin)},
        )


@runtime_checkable
class Resumable(Protocol):
    """A learner that can be stopped, and gone on with to the bit."""

    def state(self) -> LearnerState:
        """All that it and its policy need to go on: weights, optimizer, baseline, generators, best placements."""

    def load_state(self, state: LearnerState) -> None:
        """Goes on from the state of another one, made for the same problem with the same options."""


def save_learner(path: str | os.PathLike[str], learner: Resumable) -> None:
    """Writes a learner's state, its policy's with it, to `path` (safetensors) and beside it (`.json`).

    Raises:
        FileProblem: a file cannot be written.
        InvalidValue: its policy is no `torch.nn.Module` with a `generator`.
    """
    state = learner.state()
    about = {"schema": SCHEMA, "kind": KIND, "learner": type(learner).__name__, "facts": dict(state.facts)}
    save_checkpoint(path, about, state.tensors)


def resume_learner(path: str | os.PathLike[str], learner: Resumable) -> None:
    """Puts a learner, and its policy, where `save_learner` left one made for the same problem with the same options.

    Raises:
        FileProblem: a file is missing, malformed, or of another learner or policy.
    """
    about, tensors = load_checkpoint(path, KIND)
    about_path = Path(path).with_suffix(".json")
    if about.get("learner") != type(learner).__name__ or not isinstance(about.get("facts"), dict):
        raise FileProblem(about_path, f"the state of a {about.get('learner')}, expected of a {type(learner).__name__}.")
    try:
        learner.load_state(LearnerState(tensors, about["facts"]))
    except _STRANGE as error:
        raise FileProblem(path, f"not the state of this learner and its policy: {error}.") from error


def policy_state(policy: object) -> LearnerState:
    """Weights, buffers and generator of a policy.

    Raises:
        InvalidValue: it is no `torch.nn.Module` with a `generator`.
    """
    module, generator = _parts(policy)
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return LearnerState({"generator": generator.get_state()}).with_part("module", LearnerState(weights))


def load_policy_state(policy: object, state: LearnerState) -> None:
    """Takes what `policy_state` gave, but for the buffers that describe the problem: these stay.

    Raises:
        KeyError, RuntimeError, ValueError: it is of another policy.
    """
    module, generator = _parts(policy)
    own = module.state_dict()
    fixed = {name: own[name] for name in getattr(policy, "problem_buffers", ())}
    for name, tensor in state.part("module").tensors.items():
        if name not in fixed and name in own and bool(torch.isfinite(own[name]).all()):
            check_finite(name, tensor)
    module.load_state_dict({**state.part("module").tensors, **fixed})
    if isinstance(policy, Policy):
        check_devices("its best guess", torch.from_numpy(policy.mode()), policy)
    _check_generator(state.tensors["generator"])
    generator.set_state(state.tensors["generator"])


def optimizer_state(optimizer: torch.optim.Optimizer) -> LearnerState:
    """Moments and counts of an optimizer, and its learning rates."""
    state = optimizer.state_dict()
    tensors = {
        f"{index}.{name}": torch.as_tensor(value).detach().clone()
        for index, moments in state["state"].items()
        for name, value in moments.items()
    }
    return LearnerState(tensors, {"learning_rates": [group["lr"] for group in state["param_groups"]]})


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: LearnerState) -> None:
    """Takes what `optimizer_state` gave of an optimizer of the same kind, over parameters of the same shapes.

    Raises:
        KeyError, ValueError: it is of another optimizer.
    """
    moments: dict[int, dict[str, Tensor]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, tensor in state.tensors.items():
        index, _, name = key.partition(".")
        if not 0 <= int(index) < len(parameters) or tensor.shape not in (parameters[int(index)].shape, ()):
            raise ValueError(f"the moment {key} of {tuple(tensor.shape)} is of no parameter")
        check_finite(key, tensor)
        moments.setdefault(int(index), {})[name] = tensor.clone()
    groups = optimizer.state_dict()["param_groups"]
    for group, learning_rate in zip(groups, state.facts["learning_rates"], strict=True):
        if not 0.0 < float(learning_rate) < math.inf:
            raise ValueError(f"a learning rate of {learning_rate}")
        group["lr"] = float(learning_rate)
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def finite(value: float) -> float:
    """A number of a state's facts.

    Raises:
        TypeError, ValueError: it is none, or not finite.
    """
    if not math.isfinite(value):
        raise ValueError(f"a number that is {value}")
    return float(value)


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuses infinities and NaN."""
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} holds numbers that are not finite")


def check_devices(name: str, tensor: Tensor, policy: object) -> None:
    """Refuses what is no placement, or several, of the policy's groups (..., G)."""
    num_groups, num_devices = getattr(policy, "num_groups", None), getattr(policy, "num_devices", 0)
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not is_whole or tensor.shape[-1:] != (num_groups,) or not bool(((tensor >= 0) & (tensor < num_devices)).all()):
        raise ValueError(f"{name} is no placement of {num_groups} groups on {num_devices} devices")


def _check_generator(state: Tensor) -> None:
    """Refuses a place in the Mersenne twister's 624 numbers from which PyTorch would read behind them.

    Its state begins with the seed (8 bytes), how many numbers are left and whether it was seeded (4 each), and the
    next one's place (8).
    """
    if state.dtype != torch.uint8 or len(state) < _TWISTER_BYTES:
        return  # `set_state` knows
    _, left, _, following = struct.unpack_from("=QiiQ", state[:24].numpy().tobytes())
    if left < 1 or left + following > 625:
        raise ValueError(f"a generator at number {following} with {left} left")


def _parts(policy: object) -> tuple[nn.Module, torch.Generator]:
    generator = getattr(policy, "generator", None)
    if not isinstance(policy, nn.Module) or not isinstance(generator, torch.Generator):
        expected = "a torch.nn.Module with a torch.Generator called `generator`"
        raise InvalidValue("policy", type(policy).__name__, expected, where="state of a learner")
    return policy, generator


_TWISTER_BYTES = 5000
"""The state of a generator on the CPU is longer, that of one on a GPU shorter."""
_STRANGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a state of something else raises."""
EVERY_S = 5.0
"""So long at least between two writes ..."""
SHARE = 0.05
"""... and as long as keeps their share of the time below this."""
LARGEST_BYTES = 1 << 30
"""A larger file is not read: that of a policy with its optimizer has some ten megabytes."""
RECORDS = "records"
"""The tensor that holds the facts, as JSON: one file is written whole or not at all, two are not."""


class LearnerFile:
    """Keeps the state of a learner, and its policy's with it, and gives it to the next one of its kind.

    A learner that is not `Resumable` is left alone: it begins anew.

    Args:
        path: of the file, safetensors.
        is_resumed: whether a learner goes on from what is there; otherwise that is replaced.
        say: told what cannot be gone on from.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        path: Path,
        *,
        is_resumed: bool,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._is_resumed, self._say, self._clock = path, is_resumed, say, clock
        self._next_s = clock() + EVERY_S

    def restore(self, learner: object) -> None:
        """Puts a learner that was just made where the last one was, if that was of its kind."""
        begun = _state(learner) if self._is_resumed and self._path.is_file() else None
        if begun is None or not isinstance(learner, Resumable):
            return
        try:
            learner.load_state(self._read(type(learner).__name__))
        except FileProblem as error:
            self._say(f"warning: {error} The learner begins anew.")
        except _STRANGE as error:
            learner.load_state(begun)
            self._say(f"warning: {self._path}: not the state of this learner ({error}). It begins anew.")

    def keep(self, learner: object) -> None:
        """Writes the learner's state, if the last time was long enough ago.

        Raises:
            FileProblem: the file cannot be written.
        """
        begin_s = self._clock()
        state = _state(learner) if begin_s >= self._next_s else None
        if state is None:
            return
        facts = {"learner": type(learner).__name__, "facts": dict(state.facts)}
        text = json.dumps(jsonable(facts), allow_nan=False).encode("utf-8")
        records = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        tensors = {name: tensor.detach().contiguous() for name, tensor in state.tensors.items()}
        write_bytes_atomic(self._path, save({RECORDS: records, **tensors}))
        self._next_s = self._clock() + max(EVERY_S, (self._clock() - begin_s) / SHARE)

    def _read(self, learner: str) -> LearnerState:
        try:
            tensors = load(read_plain(self._path, largest_bytes=LARGEST_BYTES, holds="a learner's state"))
            text = tensors.pop(RECORDS).numpy().tobytes().decode("utf-8")
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FileProblem(self._path, f"not the state of a learner: {error}.") from error
        about = parse_json(text, self._path)
        if not isinstance(about, dict) or not isinstance(about.get("facts"), dict) or about.get("learner") != learner:
            raise FileProblem(self._path, f"not the state of a {learner}.")
        return LearnerState(tensors, about["facts"])


def _state(learner: object) -> LearnerState | None:
    """The state of a learner; None of one that cannot be gone on with."""
    if not isinstance(learner, Resumable):
        return None
    try:
        return learner.state()
    except InvalidValue:  # of a policy that does not say what it draws from
        return None

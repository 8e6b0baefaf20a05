"""`LearnerState`: everything that a learner and its policy need to go on to the bit, as tensors and plain data.

`save_learner` and `resume_learner` keep it in one file; `LearnerFile` does so from time to time.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from rlplace.errors import FileProblem, InvalidValue
from rlplace.files import check_header, jsonable, parse_json, read_plain, write_bytes_atomic
from rlplace.policy.base import Policy, refusing


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
        """Weights, optimizer, baseline, generators and best placements: of the learner and its policy."""

    def load_state(self, state: LearnerState) -> None:
        """Goes on from the state of another one, made for the same problem with the same options."""


def policy_state(policy: object) -> LearnerState:
    """Weights, buffers and generator of a policy.

    Raises:
        InvalidValue: it is no `torch.nn.Module` with a `generator`.
    """
    module, generator = _parts(policy)
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return LearnerState({"generator": generator.get_state()}).with_part("module", LearnerState(weights))


def load_policy_state(policy: object, state: LearnerState) -> None:
    """Takes the state of `policy_state`, but for the buffers that describe the problem: these stay.

    Raises:
        KeyError, RuntimeError, ValueError: it is of another policy.
    """
    module, generator = _parts(policy)
    own, kept = module.state_dict(), state.part("module").tensors
    fixed = {name: own[name] for name in getattr(policy, "problem_buffers", ())}
    for name, tensor in kept.items():
        if name not in fixed and name in own and bool(torch.isfinite(own[name]).all()):
            check_finite(name, tensor)
    module.load_state_dict({**kept, **fixed})
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
    """Takes the state of an optimizer of the same kind, over parameters of the same shapes.

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
    """Refuses tensors that are not placements (..., G) of the policy's groups."""
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
        return  # `set_state` refuses it
    _, left, _, following = struct.unpack_from("=QiiQ", state[:24].numpy().tobytes())
    if left < 1 or left + following > 625:
        raise ValueError(f"a generator at number {following} with {left} left")


def _parts(policy: object) -> tuple[nn.Module, torch.Generator]:
    generator = getattr(policy, "generator", None)
    if not isinstance(policy, nn.Module) or not isinstance(generator, torch.Generator):
        raise InvalidValue(
            "policy",
            type(policy).__name__,
            "a torch.nn.Module with a torch.Generator called `generator`",
            where="state of a learner",
        )
    return policy, generator


_TWISTER_BYTES = 5000
"""The state of a generator on the CPU is longer, that of one on a GPU shorter."""
RECORDS = "records"
"""The tensor that holds the facts, as JSON: one file is written whole or not at all, two are not."""


def save_learner(path: str | os.PathLike[str], learner: Resumable) -> None:
    """Writes the state of a learner and its policy to `path` (safetensors).

    Raises:
        FileProblem: the file cannot be written.
        InvalidValue: the policy is not a `torch.nn.Module` with a `generator`.
    """
    write_bytes_atomic(path, _packed(learner, learner.state()))


def _packed(learner: Resumable, state: LearnerState) -> bytes:
    facts = jsonable({"learner": type(learner).__name__, "facts": dict(state.facts)})
    text = json.dumps(facts, allow_nan=False).encode("utf-8")
    records = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    tensors = {name: tensor.detach().contiguous() for name, tensor in state.tensors.items()}
    return save({RECORDS: records, **tensors})


def resume_learner(path: str | os.PathLike[str], learner: Resumable) -> None:
    """Restores a learner and its policy from a file of `save_learner`, for the same problem and options.

    Raises:
        FileProblem: the file is missing, malformed, or of another learner or policy.
    """
    _unpack(read_plain(path, largest_bytes=LARGEST_BYTES, holds="a learner's state"), path, learner)


def _unpack(data: bytes, path: str | os.PathLike[str], learner: Resumable) -> None:
    name = type(learner).__name__
    with refusing(path, "not the state of this learner and its policy"):
        check_header(data, path)
        tensors = load(data)
        about = parse_json(tensors.pop(RECORDS).numpy().tobytes().decode("utf-8"), path)
        if about["learner"] != name:
            raise FileProblem(path, f"the state of a {about['learner']}, expected of a {name}.")
        learner.load_state(LearnerState(tensors, about["facts"]))


LARGEST_BYTES = 1 << 30
"""A larger file is not read: that of a policy with its optimizer has some ten megabytes."""
EVERY_S = 5.0
"""Least time between two writes ..."""
SHARE = 0.05
"""... and the largest share of the time that they take."""


class Files(Protocol):
    """Where files are kept by name: the session of a run."""

    def file(self, name: str) -> bytes | None:
        """The contents of a file; None where there is none."""

    def keep_files(self, files: Mapping[str, bytes]) -> None:
        """Keeps files, all or none."""


class LearnerFile:
    """Keeps the state of a learner and its policy, and gives it to the next one of its kind.

    A learner that is not `Resumable` is left alone: it begins anew.

    Args:
        files: where it is kept, as safetensors.
        name: of the file.
        is_resumed: whether a learner goes on from the file; otherwise the file is replaced.
        say: told why a learner begins anew.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        files: Files,
        name: str,
        *,
        is_resumed: bool,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._name, self._is_resumed, self._say, self._clock = files, name, is_resumed, say, clock
        self._next_s = clock() + EVERY_S

    def restore(self, learner: object) -> None:
        """Puts a learner that was just made where the last one was, if that was of its kind."""
        data = self._files.file(self._name) if self._is_resumed else None
        begun = None if data is None else _state(learner)
        if data is None or begun is None or not isinstance(learner, Resumable):
            return
        try:
            _unpack(data, self._name, learner)
        except FileProblem as error:
            learner.load_state(begun)
            self._say(f"warning: {error} The learner begins anew.")

    def keep(self, learner: object) -> None:
        """Writes the learner's state, if the last time was long enough ago.

        Raises:
            FileProblem: the file cannot be written.
        """
        begin_s = self._clock()
        state = _state(learner) if begin_s >= self._next_s else None
        if state is not None and isinstance(learner, Resumable):
            self._files.keep_files({self._name: _packed(learner, state)})
            self._next_s = self._clock() + max(EVERY_S, (self._clock() - begin_s) / SHARE)


def _state(learner: object) -> LearnerState | None:
    """The state of a learner; None if it, or its policy, has none."""
    if not isinstance(learner, Resumable):
        return None
    try:
        return learner.state()
    except InvalidValue:  # of a policy without a generator of its own
        return None

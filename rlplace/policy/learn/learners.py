"""Learners that clone placements, and REINFORCE.

`Elites`: the best placements seen. `EliteLearner`: a base class of learners that keep them. `CloneLearner`: clones
them, and nothing else. `Reinforce`: the learner of Mirhoseini et al. 2017, for any policy with log-probabilities.
`imitate`: teaches a policy a placement before it learns from step times.
`LearnerState`: everything that a learner and its policy need to go on to the bit, as tensors and plain data.
`save_learner` and `resume_learner` keep it in one file; `LearnerFile` does so from time to time.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from rlplace.errors import FileProblem, InvalidValue
from rlplace.files import check_header, jsonable, parse_json, read_plain, write_bytes_atomic
from rlplace.policy.base import (
    GroupPolicy,
    LearnedPolicy,
    Policy,
    StartsSomewhere,
    Straying,
    at_temperature_1,
    refusing,
)
from rlplace.policy.options import CloneConfig, ReinforceConfig


class Elites:
    """The `capacity` distinct placements with the highest mean reward, best first.

    A placement that comes again counts with the mean of its rewards: on a host whose answers vary, one lucky answer
    does not stay on top.

    Example:
        >>> elites = Elites(capacity=2)
        >>> elites.add(np.array([[0, 1], [1, 1], [0, 0]]), np.array([-2.0, -1.0, -3.0]))
        >>> elites.group_devices.tolist(), elites.rewards.tolist()
        ([[1, 1], [0, 1]], [-1.0, -2.0])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def __len__(self) -> int:
        return len(self.rewards)

    def clear(self) -> None:
        """Forgets everything, as when rewards come to mean something else."""
        self.group_devices: NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self.rewards: NDArray[np.float64] = np.zeros(0)
        self._counts: dict[bytes, int] = {}

    def add(self, group_devices_BG: NDArray[np.integer], rewards_B: NDArray[np.floating]) -> None:
        """Takes note of B placements (B, G) and their rewards (B,)."""
        mean = {row.tobytes(): reward for row, reward in zip(self.group_devices, self.rewards.tolist(), strict=True)}
        rows = np.ascontiguousarray(group_devices_BG, dtype=np.int32)
        for row, reward in zip(rows, np.asarray(rewards_B, dtype=np.float64).tolist(), strict=True):
            key = row.tobytes()
            count = self._counts.get(key, 0) + 1
            self._counts[key] = count
            mean[key] = mean.get(key, 0.0) + (reward - mean.get(key, 0.0)) / count
        kept = sorted(mean, key=lambda key: -mean[key])[: self.capacity]
        self._counts = {key: self._counts[key] for key in kept}
        self.rewards = np.array([mean[key] for key in kept])
        self.group_devices = np.array([np.frombuffer(key, dtype=np.int32) for key in kept], dtype=np.int32)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The placements, their rewards, and how often each came."""
        counts = np.array([self._counts[row.tobytes()] for row in self.group_devices], dtype=np.int64)
        return {"group_devices": self.group_devices, "rewards": self.rewards, "counts": counts}

    def load(self, tensors: Mapping[str, Tensor], policy: object) -> None:
        """Goes on from the `arrays` of another one, of placements of this policy.

        Raises:
            KeyError, ValueError: they are no such arrays.
        """
        devices, rewards, counts = (tensors[name] for name in ("group_devices", "rewards", "counts"))
        if len(devices):
            check_devices("group_devices", devices, policy)
        if len(devices) > self.capacity or not len(devices) == len(rewards) == len(counts):
            raise ValueError(f"{len(devices)} placements, {len(rewards)} rewards and {len(counts)} counts")
        if counts.is_floating_point() or counts.dim() != 1 or rewards.dim() != 1 or bool((counts < 1).any()):
            raise ValueError("rewards or counts that are none")
        self.group_devices, self.rewards = devices.numpy().astype(np.int32), rewards.numpy().astype(np.float64)
        self._counts = dict(zip((row.tobytes() for row in self.group_devices), counts.tolist(), strict=True))


class EliteLearner:
    """A base of learners: a policy, an optimizer of its weights, and the best placements seen; all can be resumed.

    What inherits it defines `update`, and `facts` and `load_facts` for a state of its own.

    Args:
        policy: learns, in place.
        learning_rate: of Adam.
        num_elites: how many placements are kept.
        flips: groups in which samples differ from the best guess, where the policy can be told; None leaves it.
        optimizer: of the policy's parameters, where several learners share them; an Adam of its own by default.
    """

    def __init__(
        self,
        policy: LearnedPolicy,
        *,
        learning_rate: float,
        num_elites: int,
        flips: float | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.policy: Any = policy
        self.elites, self._flips = Elites(num_elites), flips
        self._optimizer = optimizer or Adam(policy.parameters(), lr=learning_rate)

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Clones placements of groups, (G,) or (M, G), before learning from rewards."""
        imitate(self.policy, group_devices)
        settle(self.policy, self._flips)

    def forget(self) -> None:
        """Forgets the best placements, as when rewards come to mean something else."""
        self.elites.clear()

    def facts(self) -> dict[str, Any]:
        """Plain data that the learner needs to go on, besides weights, optimizer and best placements."""
        return {}

    def load_facts(self, facts: Mapping[str, Any]) -> None:
        """Restores the `facts` of another learner."""

    def state(self) -> LearnerState:
        """Everything that the learner and its policy need to go on.

        Raises:
            InvalidValue: the policy is no `torch.nn.Module` with a `generator`.
        """
        module, generator = _module_and_generator(self.policy)
        moments = self._optimizer.state_dict()["state"]
        tensors = {
            "generator": generator.get_state(),
            **{f"policy.{name}": tensor for name, tensor in module.state_dict().items()},
            **{f"optimizer.{k}.{name}": moment for k, of in moments.items() for name, moment in of.items()},
            **{f"elites.{name}": torch.from_numpy(array) for name, array in self.elites.arrays().items()},
        }
        return LearnerState({name: tensor.detach().clone() for name, tensor in tensors.items()}, self.facts())

    def load_state(self, state: LearnerState) -> None:
        """Goes on from the state of another one, made for the same problem with the same options.

        Raises:
            KeyError, RuntimeError, TypeError, ValueError: it is of another learner or policy.
        """
        module, generator = _module_and_generator(self.policy)
        own = {f"policy.{name}": tensor for name, tensor in module.state_dict().items()}
        for name, tensor in state.tensors.items():  # a policy's own buffers may be infinite, where it bars devices
            if not bool(torch.isfinite(tensor).all()) and bool(torch.isfinite(own.get(name, torch.zeros(()))).all()):
                raise ValueError(f"{name} holds numbers that are not finite")
        kept = {name: own[f"policy.{name}"] for name in getattr(module, "problem_buffers", ())}
        module.load_state_dict({**state.part("policy"), **kept})
        if isinstance(module, Policy):
            check_devices("its best guess", torch.from_numpy(module.mode()), module)
        _load_moments(self._optimizer, state.part("optimizer"))
        _load_generator(generator, state.tensors["generator"])
        self.elites.load(state.part("elites"), self.policy)
        self.load_facts(state.facts)


class CloneLearner(EliteLearner):
    """The cross-entropy method with a network as its distribution (Rubinstein 1999; de Boer et al. 2005)."""

    policy: GroupPolicy

    def __init__(self, policy: GroupPolicy, config: CloneConfig | None = None) -> None:
        options = self.config = config or CloneConfig()
        super().__init__(
            policy, learning_rate=options.learning_rate, num_elites=options.num_elites, flips=options.flips
        )

    def update(
        self, group_devices: NDArray[np.integer], rewards: NDArray[np.floating], *, progress: float = 0.0
    ) -> dict[str, float]:
        """Adds the best of placements (B, G) by rewards (B,) to the elites, and clones the elites."""
        self.elites.add(group_devices, rewards)
        loss = torch.zeros(())
        for _ in range(self.config.num_steps):
            loss = cloning_loss(self.policy, self.elites.group_devices, self.config.smoothing).mean()
            descend(self._optimizer, loss)
        settle(self.policy, self._flips, self.elites)
        return {"elite_loss": loss.item(), "best_reward": float(self.elites.rewards[0])}


def descend(optimizer: Optimizer, loss: Tensor, max_norm: float = math.inf) -> float:
    """Takes a gradient step along a gradient of at most `max_norm`; returns its norm before, if there is a most."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = 0.0
    if math.isfinite(max_norm):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    optimizer.step()
    return norm


LEAST_WEIGHT = 0.5
"""Weight of a group without cost against the mean group: it may hold a large parameter all the same."""
CERTAIN = 1e-6
"""A device whose log-probability is above minus this is not told from one that is certain."""


def imitate(
    policy: GroupPolicy,
    group_devices: NDArray[np.integer],
    *,
    num_steps: int = 60,
    learning_rate: float = 3e-3,
    smoothing: float = 0.06,
) -> float:
    """The loss left after cloning a teacher's placement (behaviour cloning; Pomerleau 1991).

    Where the policy gives costs of its groups (`group_cost`, (G, D)), each counts by it. A policy that starts from a
    placement just starts from the first teacher's, and has nothing left to learn.

    Args:
        policy: learns, in place.
        group_devices: (G,) devices of groups, or (M, G) for several teachers to be followed alike.
        num_steps: gradient steps (Adam).
        learning_rate: of Adam.
        smoothing: probability that is left for other devices than the teacher's, so that the policy keeps trying them.

    Raises:
        InvalidValue: the wrong number of groups, or a device that does not exist or that pins bar.
    """
    teachers_MG = np.atleast_2d(np.asarray(group_devices))
    if teachers_MG.shape[1:] != (policy.num_groups,):
        raise InvalidValue("group_devices", teachers_MG.shape, f"{policy.num_groups} devices, one a group")
    if teachers_MG.size and not 0 <= teachers_MG.min() <= teachers_MG.max() < policy.num_devices:
        raise InvalidValue("device", int(teachers_MG.max()), f"0..{policy.num_devices - 1}", where="imitate")
    with torch.no_grad():
        if torch.isneginf(policy.evaluate(teachers_MG)[0]).any():
            raise InvalidValue("group_devices", "a group on a device where it may not be", "allowed devices only")
    if isinstance(policy, StartsSomewhere):
        policy.start_from(teachers_MG[0])
        return 0.0
    cost_GD, weight_G = getattr(policy, "group_cost", None), torch.ones(())
    if cost_GD is not None:
        cost_G = cost_GD.mean(dim=1)
        weight_G = LEAST_WEIGHT + (1 - LEAST_WEIGHT) * cost_G / cost_G.mean().clamp(min=1e-12)
    optimizer = Adam(policy.parameters(), lr=learning_rate)
    loss = torch.zeros(())
    for _ in range(num_steps):
        loss = (cloning_loss(policy, teachers_MG, smoothing) * weight_G).mean()
        descend(optimizer, loss)
    return loss.item()


def cloning_loss(policy: GroupPolicy, group_devices: NDArray[np.integer], smoothing: float) -> Tensor:
    """(G,) mean cross-entropy, in nats, towards placements (M, G) with a probability of `1 - smoothing`.

    It is label smoothing with two labels, the known device and all others: a policy that became certain would try
    nothing else. It holds at a temperature of 1, however the policy samples.
    """
    with at_temperature_1(policy):
        log_prob_MG, _ = policy.evaluate(group_devices)
    log_other_MG = torch.log1p(-log_prob_MG.clamp(max=-CERTAIN).exp())
    return -((1 - smoothing) * log_prob_MG + smoothing * log_other_MG).mean(dim=0)


def settle(policy: object, flips: float | None = None, elites: Elites | None = None) -> None:
    """Has a policy that can be told propose around the best placement seen, and stay near its best guess.

    Args:
        policy: any; one that is neither `StartsSomewhere` nor `Straying` is left alone.
        flips: groups in which samples differ from the best guess on average; None leaves that as it is.
        elites: the best placements seen.
    """
    if elites is not None and len(elites) and isinstance(policy, StartsSomewhere):
        policy.start_from(elites.group_devices[0])
    if flips is not None and isinstance(policy, Straying):
        policy.set_flips(flips)


IMITATION_STEPS, IMITATION_RATE = 100, 1e-2
"""Most gradient steps (Adam) of an imitation, and their learning rate."""
IMITATED = 0.05
"""Cross-entropy of a group, in nats, at which a placement is known well enough."""
ELITE_SMOOTHING = 0.02
"""Probability that cloning the best placement leaves to other devices."""


@runtime_checkable
class Noisy(Protocol):
    """A policy whose samples can be drawn with noise on the logits."""

    logit_noise: float


class Reinforce(EliteLearner):
    """REINFORCE (Williams 1992), as in Mirhoseini et al. 2017 (section 3.1).

    The gradient is that of the batch mean of (reward - baseline) * log-probability. The baseline is a moving average of
    rewards. The gradient is clipped to a norm of 1, and Adam makes the steps. A placement that fails also has a reward,
    the failing signal. After a share of the training (5,000 steps in the paper) failed placements are ignored, so that
    the policy does not unlearn placements that run. At first, samples are drawn with noise on the logits. Its size is
    half that of the logits, as in the program that the authors released later. Without this noise the policy soon puts
    everything on one device.

    Differences from the paper: the baseline begins with the mean of the first batch, because with the failing signal
    all first samples would look good; and one process samples, not twenty.

    If groups are sampled independently, the expected reward has a local optimum for each placement that no single move
    improves (20 of 729 placements on a problem of six groups and three devices). The gradient ends in one of them, and
    then the policy samples only this placement. `flips` keeps the samples different. `elite_coef` also trains the
    policy to imitate the best placement seen (self-imitation, Oh et al. 2018). `GroupPPO` has both by default, the
    paper has neither.

    Attributes:
        baseline: moving average of the rewards so far; None before the first.
    """

    policy: LearnedPolicy

    def __init__(self, policy: Policy, config: ReinforceConfig | None = None) -> None:
        """A learner for `policy`, which learns in place.

        Args:
            policy: a policy with log-probabilities and parameters; its `logit_noise`, if it has one, is set.
            config: the options.

        Raises:
            InvalidValue: the policy has no parameters, or lacks log-probabilities by group that `config` needs.
        """
        if not isinstance(policy, LearnedPolicy):
            raise InvalidValue("policy", type(policy).__name__, "one with `parameters()`", where="learner reinforce")
        self.config = config or ReinforceConfig()
        for name in ("ent_coef", "elite_coef"):
            if (value := getattr(self.config, name)) and not isinstance(policy, GroupPolicy):
                raise InvalidValue(name, value, "0 for a policy without `evaluate`", where="learner reinforce")
        super().__init__(policy, learning_rate=self.config.learning_rate, num_elites=1, flips=self.config.flips)
        self.baseline: float | None = None
        self._set_noise(0.0)

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Trains the policy to imitate placements (G,) or (M, G), with their cross-entropy; a policy with a start
        placement starts there.

        Raises:
            InvalidValue: a placement with probability 0, for example because pins forbid it.
        """
        rows = np.atleast_2d(group_devices)
        if isinstance(self.policy, StartsSomewhere):
            self.policy.start_from(rows[0])
            return
        optimizer = Adam(self.policy.parameters(), lr=IMITATION_RATE)
        for _ in range(IMITATION_STEPS):
            loss = -self.policy.log_prob(rows).mean() / max(rows.shape[1], 1)
            if not torch.isfinite(loss):
                raise InvalidValue("group_devices", "impossible", "placements that have a probability", where="imitate")
            if loss.item() < IMITATED:
                break
            descend(optimizer, loss)

    def update(
        self,
        group_devices: NDArray[np.integer],
        rewards: NDArray[np.floating],
        *,
        progress: float = 0.0,
        ran: NDArray[np.bool_] | None = None,
    ) -> dict[str, float]:
        """One gradient step on placements (B, G), sampled from the policy, and their rewards (B,).

        Args:
            group_devices: devices of groups.
            rewards: of each placement; for a failed placement, the failing signal.
            progress: finished share of the training, 0 to 1.
            ran: (B,) whether each placement ran; all by default.
        """
        self._set_noise(progress)
        rewards_B = np.asarray(rewards, dtype=np.float64)
        ran_B = np.ones(len(rewards_B), dtype=np.bool_) if ran is None else np.asarray(ran)
        self.elites.add(group_devices, rewards_B)
        figures = {"mean_reward": float(rewards_B.mean()), "failed": float(1.0 - ran_B.mean())}
        if progress >= self.config.failing_until:
            group_devices, rewards_B = np.asarray(group_devices)[ran_B], rewards_B[ran_B]
        if not len(rewards_B):
            return figures
        mean = float(rewards_B.mean())
        baseline = mean if self.baseline is None else self.baseline
        loss, parts = self._loss(group_devices, torch.from_numpy(rewards_B - baseline))
        norm = descend(self._optimizer, loss, self.config.max_grad_norm)
        settle(self.policy, self._flips, self.elites)
        self.baseline = self.config.baseline_decay * baseline + (1.0 - self.config.baseline_decay) * mean
        return figures | parts | {"loss": loss.item(), "baseline": self.baseline, "gradient_norm": norm}

    def forget(self) -> None:
        """Forgets the baseline and the best placement, for example after the meaning of rewards has changed."""
        super().forget()
        self.baseline = None

    def facts(self) -> dict[str, Any]:
        """The baseline, and the noise of the policy's samples."""
        return {"baseline": self.baseline, "logit_noise": getattr(self.policy, "logit_noise", None)}

    def load_facts(self, facts: Mapping[str, Any]) -> None:
        """Restores the `facts` of another learner."""
        self.baseline = None if facts["baseline"] is None else finite(facts["baseline"])
        if isinstance(self.policy, Noisy):
            self.policy.logit_noise = finite(facts["logit_noise"])

    def _loss(self, group_devices: NDArray[np.integer], advantages_B: Tensor) -> tuple[Tensor, dict[str, float]]:
        """-(R - b) log p, the mean over the batch, with an entropy bonus and self-imitation, and their values."""
        config, figures = self.config, dict[str, float]()
        if not isinstance(self.policy, GroupPolicy) or not (config.ent_coef or config.elite_coef):
            return -(advantages_B * self.policy.log_prob(group_devices)).mean(), figures
        log_prob_BG, entropy_BG = self.policy.evaluate(group_devices)
        loss = -(advantages_B * log_prob_BG.sum(dim=-1)).mean()
        if config.ent_coef:
            entropy = entropy_BG.mean()
            loss = loss - config.ent_coef * entropy
            figures["entropy"] = entropy.item()
        if config.elite_coef:
            elite_loss = cloning_loss(self.policy, self.elites.group_devices, ELITE_SMOOTHING).mean()
            loss = loss + config.elite_coef * elite_loss
            figures["elite_loss"] = elite_loss.item()
        return loss, figures

    def _set_noise(self, progress: float) -> None:
        if isinstance(self.policy, Noisy):
            self.policy.logit_noise = self.config.logit_noise if progress < self.config.noise_until else 0.0


@dataclass(frozen=True)
class LearnerState:
    """Tensors by name (`policy.NAME`, `optimizer.PARAMETER.NAME`, `elites.NAME`), and plain data as JSON holds it."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `name`, without that."""
        begin = f"{name}."
        return {key.removeprefix(begin): one for key, one in self.tensors.items() if key.startswith(begin)}


@runtime_checkable
class Resumable(Protocol):
    """A learner that can be stopped, and gone on with to the bit."""

    def state(self) -> LearnerState:
        """Weights, optimizer, baseline, generators and best placements: of the learner and its policy."""

    def load_state(self, state: LearnerState) -> None:
        """Goes on from the state of another one, made for the same problem with the same options."""


def _load_moments(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Takes the moments and counts of an optimizer of the same kind, over parameters of the same shapes."""
    moments: dict[int, dict[str, Tensor]] = defaultdict(dict)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        if not 0 <= int(index) < len(parameters) or tensor.shape not in (parameters[int(index)].shape, ()):
            raise ValueError(f"the moment {key} of {tuple(tensor.shape)} is of no parameter")
        moments[int(index)][name] = tensor.clone()
    optimizer.load_state_dict({"state": dict(moments), "param_groups": optimizer.state_dict()["param_groups"]})


def _load_generator(generator: torch.Generator, state: Tensor) -> None:
    """Sets a generator, but not to a place in the Mersenne twister's 624 numbers from which it would read behind them.

    The state begins with the seed (8 bytes), how many numbers are left and whether it was seeded (4 each), and the
    next one's place (8). One that is shorter than that of a generator on the CPU is refused by `set_state`.
    """
    if state.dtype == torch.uint8 and len(state) >= _TWISTER_BYTES:
        _, left, _, following = struct.unpack_from("=QiiQ", state[:24].numpy().tobytes())
        if left < 1 or left + following > 625:
            raise ValueError(f"a generator at number {following} with {left} left")
    generator.set_state(state)


def finite(value: float) -> float:
    """A number of a state's facts, or a TypeError or ValueError where it is none, or not finite."""
    if not math.isfinite(value):
        raise ValueError(f"a number that is {value}")
    return float(value)


def check_devices(name: str, tensor: Tensor, policy: object) -> None:
    """Refuses tensors that are not placements (..., G) of the policy's groups."""
    num_groups, num_devices = getattr(policy, "num_groups", None), getattr(policy, "num_devices", 0)
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not is_whole or tensor.shape[-1:] != (num_groups,) or not bool(((tensor >= 0) & (tensor < num_devices)).all()):
        raise ValueError(f"{name} is no placement of {num_groups} groups on {num_devices} devices")


def _module_and_generator(policy: object) -> tuple[nn.Module, torch.Generator]:
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
    return save({RECORDS: records, **{name: tensor.contiguous() for name, tensor in state.tensors.items()}})


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
EVERY_S, SHARE = 5.0, 0.05
"""Least time between two writes, and the largest share of the time that they take."""


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
        if data is None or not isinstance(learner, Resumable) or (begun := _state(learner)) is None:
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
        if begin_s < self._next_s or not isinstance(learner, Resumable) or (state := _state(learner)) is None:
            return
        self._files.keep_files({self._name: _packed(learner, state)})
        self._next_s = self._clock() + max(EVERY_S, (self._clock() - begin_s) / SHARE)


def _state(learner: Resumable) -> LearnerState | None:
    """The state of a learner; None where its policy has none."""
    try:
        return learner.state()
    except InvalidValue:  # of a policy without a generator of its own
        return None

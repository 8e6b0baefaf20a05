"""`POLICIES` and `LEARNERS`: functions that make a policy for a problem, and a learner for a policy, by name.

`checked_policy` and `checked_learner` make those that a `LearnConfig` names, and check their results: they may come
from another package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, refuse_if
from rlplace.graphs import OpGraph
from rlplace.measure import Problem, resolve_host
from rlplace.policy.base import GroupPolicy, Learner, Loadable, Policy, load_checkpoint, pretrained_path
from rlplace.policy.gnn import GnnPolicy, make_policy
from rlplace.policy.improver import ImproverPolicy
from rlplace.policy.learn.learners import CloneLearner, LearnerFile, Reinforce
from rlplace.policy.learn.ppo import GroupPPO
from rlplace.policy.options import WEIGHTS_ENDING, LearnConfig
from rlplace.policy.schedule import SchedulePolicy
from rlplace.policy.schedule_network import new_network
from rlplace.policy.seq2seq import Seq2SeqPolicy, seq2seq_inputs
from rlplace.registry import Registry

MakePolicy = Callable[[Problem, LearnConfig, int], Policy]
"""From a problem, the options and a seed to an untrained policy."""
MakeLearner = Callable[[Policy, LearnConfig, int], Learner]
"""From a policy, the options and a seed to its learner."""


def make_placer(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """A graph neural network and a table of logits, every group by itself."""
    return make_policy(problem, config.placer, seed=seed)


def make_gnn(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """A graph network over groups and devices that fits any problem, every group by itself."""
    return GnnPolicy(problem, config.gnn, seed=seed)


def make_improver(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """Passes over the best placement known that move a group here and there; the network fits any problem."""
    return ImproverPolicy(problem, config.improver, seed=seed)


def make_seq2seq(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """The sequence-to-sequence network of Mirhoseini et al. 2017, for one problem."""
    return Seq2SeqPolicy(seq2seq_inputs(problem), config.seq2seq, seed=seed)


def make_schedule(problem: Problem, config: LearnConfig, seed: int) -> Policy:
    """A network over the partial schedule, that begins as a list scheduler with known weights."""
    return SchedulePolicy(problem, new_network(config.schedule, seed=seed), config.schedule, seed=seed)


def make_ppo(policy: Policy, config: LearnConfig, seed: int) -> Learner:
    """Proximal policy optimisation with a ratio for every group, and self-imitation."""
    return GroupPPO(_by_group(policy, "ppo"), config.ppo, seed=seed)


def make_clone(policy: Policy, config: LearnConfig, seed: int) -> Learner:
    """Cloning of the best placements seen."""
    return CloneLearner(_by_group(policy, "clone"), config.clone)


def make_reinforce(policy: Policy, config: LearnConfig, seed: int) -> Learner:
    """REINFORCE with a moving-average baseline, as in Mirhoseini et al. 2017; it draws nothing, so needs no seed."""
    return Reinforce(policy, config.reinforce)


POLICIES: Registry[MakePolicy] = Registry(
    "policy",
    {
        "placer": make_placer,
        "gnn": make_gnn,
        "improver": make_improver,
        "schedule": make_schedule,
        "seq2seq": make_seq2seq,
    },
    group="rlplace.policies",
)
"""Policies by name; installed packages bring more as entry points of `rlplace.policies`."""
LEARNERS: Registry[MakeLearner] = Registry(
    "learner", {"ppo": make_ppo, "reinforce": make_reinforce, "clone": make_clone}, group="rlplace.learners"
)
"""Learners by name; installed packages bring more as entry points of `rlplace.learners`."""


def _by_group(policy: Policy, learner: str) -> GroupPolicy:
    if not isinstance(policy, GroupPolicy):
        raise InvalidValue(
            "policy",
            type(policy).__name__,
            "one with `evaluate`, log-probabilities by group, and `parameters`",
            where=f"learner {learner}",
            hint="Choose another learner with it.",
        )
    return policy


class CheckedPolicy:
    """A policy whose placements are checked; errors name the policy.

    Attributes:
        policy: the policy itself.
    """

    def __init__(self, policy: Policy, name: str, problem: Problem) -> None:
        self.policy = policy
        self._name, self._problem = name, problem

    def sample(self, num_samples: int) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, drawn.

        Raises:
            InvalidValue: another shape, no integers, or devices that are not there or that pins bar.
        """
        return self._checked(self.policy.sample(num_samples), "sample", num_samples)

    def mode(self) -> NDArray[np.int32]:
        """(G,) the policy's best guess.

        Raises:
            InvalidValue: another shape, no integers, or devices that are not there or that pins bar.
        """
        return self._checked(self.policy.mode(), "mode")

    def check_guess(self) -> None:
        """Checks that the policy's own best guess has a log-probability; after a NaN gradient it has none.

        Raises:
            InvalidValue: `mode` or `log_prob` returns something else.
        """
        guess = self.mode()
        with torch.no_grad():
            log_prob = torch.as_tensor(self.policy.log_prob(guess[None]))
        where = f"policy {self._name!r}: log_prob"
        refuse_if(log_prob.shape != (1,), "shape", tuple(log_prob.shape), "(1,) for one placement", where=where)
        if bool(torch.isnan(log_prob)):
            raise InvalidValue(
                "value",
                log_prob.item(),
                "a number, for the policy's own mode",
                where=where,
                hint="Its weights may have become NaN: look at the learner's loss and learning rate.",
            )

    def _checked(self, devices: NDArray[Any], function: str, *batch: int) -> NDArray[np.int32]:
        shape = (*batch, self._problem.grouping.num_groups)
        where = f"policy {self._name!r}: {function}"
        refuse_if(
            np.shape(devices) != shape, "shape", np.shape(devices), f"{shape}, a device for each group", where=where
        )
        checked = self._problem.check_groups(devices, where=where)
        allowed = self._problem.group_allowed
        barred = ~allowed[np.arange(shape[-1]), checked].reshape(-1, shape[-1])
        if barred.any():
            row, group = np.argwhere(barred)[0].tolist()
            raise InvalidValue(
                "device",
                f"{checked.reshape(barred.shape)[row, group]} for group {group}",
                f"one of {np.flatnonzero(allowed[group]).tolist()}, where pins and exclusions allow it",
                where=where,
                hint="`problem.group_allowed` says where each group may be: give other devices no probability.",
            )
        return checked


class CheckedLearner:
    """A learner whose figures are checked; errors name the learner.

    Args:
        learner: the learner itself.
        name: of the learner.
        file: gives back the state of an earlier one, and keeps that of this one; None for nothing.
    """

    def __init__(self, learner: Learner, name: str, file: LearnerFile | None = None) -> None:
        self._learner, self._name, self._file = learner, name, file
        self.imitate, self.forget = learner.imitate, learner.forget
        if file is not None:
            file.restore(learner)
        self._is_told_what_ran = "ran" in inspect.signature(learner.update).parameters

    def update(
        self,
        group_devices: NDArray[np.integer],
        rewards: NDArray[np.floating],
        *,
        progress: float = 0.0,
        ran: NDArray[np.bool_] | None = None,
    ) -> Mapping[str, float]:
        """Figures of the learner's update; it is told `ran`, (B,) bool, if it has such a keyword.

        Raises:
            InvalidValue: they are no mapping.
        """
        more: dict[str, Any] = {"ran": ran} if self._is_told_what_ran else {}
        figures: object = self._learner.update(group_devices, rewards, progress=progress, **more)
        if not isinstance(figures, Mapping):
            raise InvalidValue(
                "value", figures, "figures by name, {} where there are none", where=f"learner {self._name!r}: update"
            )
        return figures

    def keep(self) -> None:
        """Writes the learner's state, if it is time."""
        if self._file is not None:
            self._file.keep(self._learner)


def checked_policy(problem: Problem, config: LearnConfig, seed: int) -> CheckedPolicy:
    """The policy that `config` names, made for `problem`, with the weights that `config` names.

    Raises:
        UnknownName: there is none of that name.
        InvalidValue: the result is no policy, or one for another number of groups or devices, or it takes no
            weights.
        FileProblem: the file of weights is missing, malformed, or not for this policy.
    """
    name = config.recipe.policy
    policy = POLICIES[name](problem, config, seed)
    _check_members(policy, "policy", name, ("num_groups", "num_devices", "sample", "log_prob", "mode", "save"))
    sizes = (policy.num_groups, policy.num_devices)
    refuse_if(
        sizes != problem.group_allowed.shape,
        "(num_groups, num_devices)",
        sizes,
        f"{problem.group_allowed.shape}, the problem's",
        where=f"policy {name!r}",
    )
    if weights := _initial_weights(policy, config.recipe.init):
        weights[0].load(weights[1])
    return CheckedPolicy(policy, name, problem)


def checked_learner(policy: Policy, config: LearnConfig, seed: int, file: LearnerFile | None = None) -> CheckedLearner:
    """The learner that `config` names, made for `policy`, where `file` says that an earlier one was.

    Raises:
        UnknownName: there is none of that name.
        InvalidValue: it cannot teach this policy, or the result is no learner.
    """
    name = config.recipe.learner
    learner = LEARNERS[name](policy, config, seed)
    _check_members(learner, "learner", name, ("imitate", "update", "forget"))
    return CheckedLearner(learner, name, file)


def check_fit(config: LearnConfig) -> None:
    """Makes the policy and its learner for a graph of two ops: a mistake is refused before a model is built.

    Raises:
        UnknownName: there is no such policy or learner.
        InvalidValue: the learner cannot teach the policy, or the policy takes no weights.
        FileProblem: the file of weights is missing, malformed, or of another kind of policy.
    """
    name = config.recipe.policy
    graph = OpGraph.from_networkx(nx.DiGraph([(0, 1)]))
    policy = POLICIES[name](Problem.estimate(graph, resolve_host("2xK80"), grouping="none"), config, 0)
    checked_learner(policy, config, 0)
    if weights := _initial_weights(policy, config.recipe.init):
        load_checkpoint(weights[1], weights[0].kind)


def _initial_weights(policy: Policy, init: str) -> tuple[Loadable, Path] | None:
    """The policy and the file that `init` names; None where it names none (`starts`, `none`)."""
    if init != "pretrained" and not init.endswith(WEIGHTS_ENDING):
        return None
    if not isinstance(policy, Loadable):
        raise InvalidValue(
            "init",
            init,
            "starts or none",
            where=f"policy {type(policy).__name__}",
            hint="It has no `kind` and no `load`.",
        )
    return policy, pretrained_path(policy.kind) if init == "pretrained" else Path(init)


def _check_members(made: object, kind: str, name: str, members: tuple[str, ...]) -> None:
    missing = [member for member in members if not hasattr(made, member)]
    refuse_if(
        missing,
        "type",
        f"{type(made).__name__} without {', '.join(missing)}",
        f"a {kind}",
        where=f"{kind} {name!r}",
        hint="docs/extending.md says what each of them does.",
    )

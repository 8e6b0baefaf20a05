"""Weights that a policy begins with: what `--init pretrained` and `--init FILE` stand for."""

from __future__ import annotations

from pathlib import Path

from rlplace.errors import InvalidValue
from rlplace.policy.checkpoint import load_checkpoint
from rlplace.policy.config import WEIGHTS_ENDING
from rlplace.policy.pretrained import pretrained_path
from rlplace.policy.protocols import Loadable, Policy

PRETRAINED = "pretrained"


def load_initial_weights(policy: Policy, init: str) -> None:
    """Gives the policy the weights that `init` names; those of `starts` and `none` are the ones that it has.

    Raises:
        InvalidValue: the policy takes no weights.
        UnknownName: there are no pretrained ones for it.
        FileProblem: the file is missing, malformed, or not for this policy.
    """
    if _names_weights(init):
        loadable = _loadable(policy, init)
        loadable.load(_path(loadable, init))


def check_initial_weights(policy: Policy, init: str) -> None:
    """Refuses weights that `policy` cannot begin with, whatever the problem; the policy stays as it is.

    Raises:
        InvalidValue, UnknownName, FileProblem: as `load_initial_weights`.
    """
    if _names_weights(init):
        loadable = _loadable(policy, init)
        load_checkpoint(_path(loadable, init), loadable.kind)


def _names_weights(init: str) -> bool:
    return init == PRETRAINED or init.endswith(WEIGHTS_ENDING)


def _loadable(policy: Policy, init: str) -> Loadable:
    if not isinstance(policy, Loadable):
        hint = "It has no `kind` and no `load`."
        raise InvalidValue("init", init, "starts or none", where=f"policy {type(policy).__name__}", hint=hint)
    return policy


def _path(policy: Loadable, init: str) -> Path:
    return pretrained_path(policy.kind) if init == PRETRAINED else Path(init)

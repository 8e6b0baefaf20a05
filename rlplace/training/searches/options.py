"""What each method of a run is given, and what one that was interrupted goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import HostKnowledge, Prior
from rlplace.policy.learn.state import LearnerFile
from rlplace.session.calibrate import Known
from rlplace.session.folder import RunFolder
from rlplace.training.config import TrainConfig
from rlplace.training.methods import GUIDED, LEARNED, POLICY, PORTFOLIO, SCHEDULE
from rlplace.training.resume.journal import Journal
from rlplace.training.searches.on_cluster import agent_for

LEARNER = "learner.safetensors"
"""Where the state of a method's learner is kept, in a run folder."""


def options_of(
    methods: tuple[str, ...],
    config: TrainConfig,
    evaluator: Evaluator,
    start: NDArray[np.int32] | None,
    known: Known | None,
    prior: Prior,
    knowledge: HostKnowledge | None,
) -> dict[str, dict[str, Any]]:
    """The options of each method.

    Args:
        methods: that search.
        config: of the run.
        evaluator: measures for them.
        start: (N,) a placement that those which can may go on from.
        known: what was measured to calibrate.
        prior: how far the host may be from its figures.
        knowledge: what other workloads taught about the host.
    """
    own: dict[str, dict[str, Any]] = {
        LEARNED: {
            "config": agent_for(config.agent, evaluator),
            "known": known,
            "prior": prior,
            "guide": config.guide,
            "start": start,
            "knowledge": knowledge,
        },
        POLICY: {"config": config.learn, "start": start},
        SCHEDULE: {"config": config.learn},
        GUIDED: {"config": config.guide or config.learn, "start": start},
        PORTFOLIO: {"start": start},
    }
    return {name: own.get(name, {}) for name in methods}


def resumed_options(
    methods: Mapping[str, Mapping[str, Any]],
    run: RunFolder | None,
    config: TrainConfig,
    journal: Journal,
    *,
    is_resumed: bool,
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """The options of methods, with what those that were interrupted go on from: a placement, and their learner's state.

    Under a budget of evaluations that is nothing: such a method begins again, and finds the same.
    """
    options = {name: dict(given) for name, given in methods.items()}
    if config.evaluations is not None:
        return options
    for name, given in options.items():
        if run is not None and (name in (POLICY, GUIDED, SCHEDULE) or (name == LEARNED and config.guide is not None)):
            given["learner_file"] = LearnerFile(run.path(LEARNER), is_resumed=is_resumed, say=say)
        state = journal.of(name, 0.0)
        if state is None or "start" not in given:
            continue
        begun = state.start if name != LEARNED or state.plan is None else state.plan.devices
        given["start"] = given["start"] if begun is None else begun
    return options

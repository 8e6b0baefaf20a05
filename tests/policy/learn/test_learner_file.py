"""A learner's state in a file: the next learner is where the last one was, and a strange file is no harm."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from search_problems import fork_problem

from rlplace.policy import LEARNERS, POLICIES, LearnConfig, Learner, PlacerArchitecture
from rlplace.policy.learn.learners import EVERY_S, LearnerFile

PROBLEM = fork_problem(0)
CONFIG = LearnConfig(policy="placer", learner="ppo", placer=PlacerArchitecture(hidden=8, num_layers=1))
NAME = "learner.safetensors"
ROWS = np.array([[0, 1, 0, 1, 0, 1], [1, 1, 0, 0, 0, 1]], dtype=np.int32)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def learner(seed: int, name: str = "ppo") -> Learner:
    return LEARNERS[name](POLICIES["placer"](PROBLEM, CONFIG, seed), CONFIG, seed)


def taught(learner: Learner) -> bytes:
    """All that a learner has, as bytes, after one more update."""
    learner.update(ROWS, np.array([-1.0, -2.0]))
    state = learner.state()  # type: ignore[attr-defined]
    return b"".join(state.tensors[name].numpy().tobytes() for name in sorted(state.tensors))


class Files(dict[str, bytes]):
    """Files in memory, as a session keeps them."""

    def file(self, name: str) -> bytes | None:
        return self.get(name)

    def keep_files(self, files: Mapping[str, bytes]) -> None:
        self.update(files)


def kept(files: Files, one: Learner) -> None:
    clock = Clock()
    file = LearnerFile(files, NAME, is_resumed=False, say=print, clock=clock)
    clock.now_s = EVERY_S
    file.keep(one)


def test_the_next_one_goes_on_to_the_bit() -> None:
    files = Files()
    first, second = learner(0), learner(1)
    first.update(ROWS, np.array([-3.0, -1.0]))
    kept(files, first)
    LearnerFile(files, NAME, is_resumed=True, say=print).restore(second)
    assert taught(second) == taught(first)


def test_it_is_written_from_time_to_time_only() -> None:
    clock, files = Clock(), Files()
    file, one = LearnerFile(files, NAME, is_resumed=False, say=print, clock=clock), learner(0)
    file.keep(one)
    assert not files
    clock.now_s = EVERY_S
    file.keep(one)
    first = files[NAME]
    one.update(ROWS, np.array([-3.0, -1.0]))
    clock.now_s = 1.5 * EVERY_S
    file.keep(one)
    assert files[NAME] == first
    clock.now_s = 2.0 * EVERY_S
    file.keep(one)
    assert files[NAME] != first


def test_a_run_that_begins_takes_nothing() -> None:
    files = Files()
    kept(files, learner(0))
    one, other = learner(1), learner(1)
    LearnerFile(files, NAME, is_resumed=False, say=print).restore(one)
    assert taught(one) == taught(other)


@pytest.mark.parametrize("strange", ["nothing", "cut", "other", "missing"])
def test_what_is_not_of_this_learner_is_said_and_left(strange: str) -> None:
    files, said = Files(), list[str]()
    kept(files, learner(0, "clone" if strange == "other" else "ppo"))
    if strange == "nothing":
        files[NAME] = b""
    if strange == "cut":
        files[NAME] = files[NAME][:-7]
    if strange == "missing":
        bare = learner(0)
        state = bare.state()  # type: ignore[attr-defined]
        tensors = dict(list(state.tensors.items())[:1])
        bare.state = lambda: type(state)(tensors, state.facts)  # type: ignore[attr-defined]
        kept(files, bare)
    one, other = learner(1), learner(1)
    torch.manual_seed(0)
    LearnerFile(files, NAME, is_resumed=True, say=said.append).restore(one)
    assert len(said) == 1
    assert "egins anew" in said[0]
    assert taught(one) == taught(other)


def test_a_learner_without_a_state_is_left_alone() -> None:
    files = Files()
    kept(files, object())  # type: ignore[arg-type]
    assert not files

"""Every call that keeps what GPUs do in order is needed: without it, some run of a small set fails.

A new call of this kind is a new mutant by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpus.late_queues import POLICIES
from fake_gpus.mutant_runs import catches, runs
from fake_gpus.mutants import MODULES, ORDERING, Mutant, find_mutants
from fake_gpus.plan_runs import judged

import rlplace

ELSEWHERE = {
    "rlplace.cuda": "which has them",
    "rlplace.measure.timing.eager_step": "waits for all of the GPU, for its own times alone",
    "rlplace.measure.profiling.profile": "sends what is there for long, by the same channels; waits for what it times",
    "rlplace.measure.execute.spmd": "likewise, results between ranks",
    "rlplace.measure.profiling.machine_links": "likewise, between two ranks",
    "rlplace.compare.replicas": "likewise, in processes with one GPU each",
}
"""Modules that call these functions for no order between threads or streams."""


@pytest.mark.parametrize("name", runs())
def test_the_code_as_it_is_passes(name: str) -> None:
    for policy in POLICIES:
        verdict = judged(runs()[name], policy, 1)
        assert not verdict.caught_by, f"{policy}: {verdict}"


@pytest.mark.parametrize("mutant", find_mutants(), ids=str)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    assert catches(mutant, is_first=True)


def test_mutants_are_sought_wherever_there_may_be_some() -> None:
    root = Path(rlplace.__file__).parent
    calls = [f"cuda.{name}(" for name in (*ORDERING, "settled")]
    users = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for path in root.rglob("*.py")
        if any(call in path.read_text(encoding="utf-8") for call in calls)
    }
    assert users - ELSEWHERE.keys() <= {module.__name__ for module in MODULES}

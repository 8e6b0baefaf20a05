"""The base classes: a policy that defines its logits alone has everything that learners and files need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_measurer import TimingMeasurer, chain_problem

from rlplace.errors import FileProblem
from rlplace.measure.problem import Problem
from rlplace.policy import GroupPolicy, GroupPPO, IndependentPolicy
from rlplace.policy.base import Loadable


class TablePolicy(IndependentPolicy):
    """A logit for each group and device."""

    kind = "table"

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem.group_allowed, seed)
        self.table_GD = torch.nn.Parameter(torch.from_numpy(np.where(problem.group_allowed, 0.0, -np.inf)))

    def logits(self) -> torch.Tensor:
        return self.table_GD


def test_logits_are_enough_to_learn() -> None:
    measurer = TimingMeasurer(chain_problem(4), wanted=[0, 1, 1, 0])
    policy = TablePolicy(measurer.problem, 0)
    assert isinstance(policy, GroupPolicy)
    learner = GroupPPO(policy)
    for _ in range(60):
        rows = policy.sample(16)
        learner.update(rows, -np.sqrt(measurer.step_times(rows)))
    assert policy.mode().tolist() == [0, 1, 1, 0]


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    path, policy = tmp_path / "policy.safetensors", TablePolicy(chain_problem(3), 0)
    assert isinstance(policy, Loadable)
    with torch.no_grad():
        policy.table_GD += torch.arange(6).reshape(3, 2)
    policy.save(path)
    again = TablePolicy(chain_problem(3), 1)
    again.load(path)
    assert torch.equal(again.logits(), policy.logits())
    with pytest.raises(FileProblem, match="another size"):
        TablePolicy(chain_problem(4), 0).load(path)

"""Runs of plans on made-up GPUs: what they compute, and what the machine has against them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from placed_steps import NUM_STEPS, Run
from torch import Tensor

from fake_gpus.fake_cuda import install
from fake_gpus.fake_tensors import FakeTensor
from fake_gpus.gpu_plans import Setting, expected_run
from fake_gpus.late_queues import Policy
from fake_gpus.machine import Machine
from fake_gpus.vector_clocks import Violation
from rlplace.errors import RunnerError
from rlplace.graphs.interpreter import require_program
from rlplace.measure.run.placed_step import PlacedStep
from rlplace.measure.run.residents import Residents
from rlplace.measure.run.workers import Crew

LATEST_S = 300.0
"""After which a step counts as stuck; steps that wait for each other are found out at once."""


@dataclass
class Verdict:
    """What a run came to.

    Attributes:
        violations: of order, memory and place.
        wrong: what came out otherwise than on one CPU core.
        error: what ended the run.
    """

    violations: list[Violation] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def is_fine(self) -> bool:
        return not (self.violations or self.wrong or self.error)

    def __str__(self) -> str:
        first = "; ".join(violation.why for violation in self.violations[:3])
        return f"{len(self.violations)} violations ({first}), wrong: {self.wrong[:3]}, error: {self.error!r}"


@contextlib.contextmanager
def machine_installed(policy: Policy = "now", seed: int = 0) -> Iterator[Machine]:
    """A machine behind `rlplace.cuda` while active."""
    machine = Machine(policy=policy, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        install(machine, patch)
        try:
            yield machine
        finally:
            machine.close()


def plain(tensor: Tensor) -> Tensor:
    """The values of a machine's tensor, as plain PyTorch has them; waits as `cpu()` does."""
    here = tensor.detach().cpu()
    return here.inner.clone() if isinstance(here, FakeTensor) else here.clone()


def run_setting(setting: Setting, policy: Policy = "now", *, seed: int = 0, is_traced: bool = False) -> Verdict:
    """Trains some steps with the setting's plans in turn, on one set of tensors and threads."""
    expected = expected_run(setting.model, setting.optimizer)
    verdict = Verdict()
    with machine_installed(policy, seed) as machine:
        crew = Crew(setting.host.devices)
        try:
            actual = _train(setting, crew, is_traced=is_traced)
            verdict.wrong = differences(actual, expected)
        except (RunnerError, TimeoutError, RuntimeError) as error:
            verdict.error = error
        finally:
            crew.stop()
        verdict.violations = machine.order.violations
    return verdict


def _train(setting: Setting, crew: Crew, *, is_traced: bool) -> Run:
    residents = Residents(setting.graph, setting.host)
    steps = [
        PlacedStep(setting.graph, setting.host, plan, residents, crew, is_traced=is_traced) for plan in setting.plans
    ]
    run = Run()
    for number in range(NUM_STEPS):
        step = steps[number % len(steps)]
        step.run(number, deadline_s=LATEST_S)
        run.losses.append(plain(step.result).reshape(()))
        if is_traced:
            step.timeline()
    run.state = state_of(setting, residents)
    return run


def state_of(setting: Setting, residents: Residents) -> dict[str, Tensor]:
    """Parameters and buffers where the first plan keeps them."""
    devices = setting.plans[0].devices
    return {
        source.key: plain(residents.tensor(op, int(devices[op])))
        for op, source in require_program(setting.graph).sources.items()
        if source.kind in ("parameter", "buffer")
    }


def differences(actual: Run, expected: Run) -> list[str]:
    """What is not the same to the bit."""
    wrong = [f"loss {k}" for k in range(len(actual.losses)) if not _same(actual.losses[k], expected.losses[k])]
    return wrong + [name for name, value in expected.state.items() if not _same(actual.state[name], value)]


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)


def run_all(settings: Sequence[Setting], policy: Policy = "now") -> list[Verdict]:
    return [run_setting(setting, policy) for setting in settings]

"""Runs of plans on made-up GPUs: what they compute, and what the machine has against them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
from rlplace import cuda
from rlplace.graphs.interpreter import require_program
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents

LATEST_S = 300.0
"""After which a step counts as stuck; threads that wait for each other are found out at once."""

Body = Callable[[Machine], list[str]]
"""Runs something and says what came out otherwise than on one CPU core."""


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
    error: Exception | None = None

    @property
    def caught_by(self) -> str:
        """What is wrong with it: `order`, `values` or `error`, or several of them; `""` if nothing is."""
        found = {"order": self.violations, "values": self.wrong, "error": self.error}
        return " ".join(name for name, what in found.items() if what)

    def __str__(self) -> str:
        first = "; ".join(f"{each.kind}: {each.why}" for each in self.violations[:3])
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


def judged(body: Body, policy: Policy = "now", seed: int = 0) -> Verdict:
    """What `body` came to on a new machine."""
    verdict = Verdict()
    with machine_installed(policy, seed) as machine:
        try:
            verdict.wrong = body(machine)
        except Exception as error:
            verdict.error = error
    verdict.violations = machine.order.violations
    verdict.error = next(iter(machine.queues.failures), verdict.error)
    return verdict


@contextlib.contextmanager
def crew_of(setting: Setting) -> Iterator[Crew]:
    crew = Crew(setting.host.devices)
    try:
        yield crew
    finally:
        crew.stop()


def trained(setting: Setting, *, is_traced: bool = False) -> Body:
    """Some steps with the setting's plans in turn, on one set of tensors and threads."""

    def body(_: Machine) -> list[str]:
        with crew_of(setting) as crew:
            residents = Residents(setting.graph, setting.host)
            steps = placed_steps(setting, residents, crew, is_traced=is_traced)
            return train(setting, residents, steps, is_traced=is_traced)

    return body


def placed_steps(setting: Setting, residents: Residents, crew: Crew, *, is_traced: bool = False) -> list[PlacedStep]:
    """One for each plan, loaded."""
    steps = [
        PlacedStep(setting.graph, setting.host, plan, residents, crew, is_traced=is_traced) for plan in setting.plans
    ]
    for step in steps:
        step.load()
    return steps


def train(setting: Setting, residents: Residents, steps: list[PlacedStep], *, is_traced: bool = False) -> list[str]:
    """What differs from one CPU core after some steps, none of which may make the host wait but for whole parts."""
    run = Run()
    for number in range(NUM_STEPS):
        step = steps[number % len(steps)]
        with cuda.forbid_waits():
            step.run(number, deadline_s=LATEST_S)
        run.losses.append(plain(step.result).reshape(()))
        if is_traced:
            step.timeline()
    devices = setting.plans[0].devices
    for op, source in require_program(setting.graph).sources.items():
        if source.kind in ("parameter", "buffer"):
            run.state[source.key] = plain(residents.tensor(op, int(devices[op])))
    return differences(run, expected_run(setting.model, setting.optimizer))


def plain(tensor: Tensor) -> Tensor:
    """The values of a machine's tensor, as plain PyTorch has them; waits as `cpu()` does."""
    here = tensor.detach().cpu().clone()
    return here.inner if isinstance(here, FakeTensor) else here


def differences(actual: Run, expected: Run) -> list[str]:
    """What is not the same to the bit."""
    pairs = {f"loss {k}": pair for k, pair in enumerate(zip(actual.losses, expected.losses, strict=True))}
    pairs |= {name: (actual.state[name], value) for name, value in expected.state.items()}
    return [name for name, (one, other) in pairs.items() if not torch.equal(one, other)]

"""What else is done with plans on GPUs: failures, models that are loaded and read between steps, clocks, gangs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from placed_steps import GANG_HOST, NUM_STEPS, Run, single
from small_models import random
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fake_gpus.gpu_plans import Setting, expected_run, gpu_host
from fake_gpus.machine import Machine
from fake_gpus.plan_runs import Body, crew_of, differences, placed_steps, plain, train
from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.export.placed.graphs import carried_plan
from rlplace.export.placed.placed_model import PlacedModel
from rlplace.export.placed.placed_module import ModuleGraph, backward_ops
from rlplace.graphs import capture
from rlplace.graphs.capturing.capture import capture_module
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.device_threads import Crew, CudaChannel, CudaClock
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan

TWO_GPUS = gpu_host(("cuda:0", "cuda:1"))
FIRST_GPU, LAST_GPU = torch.device("cuda", 0), torch.device("cuda", 1)


def failed_and_run_again(setting: Setting, allocation: int) -> Body:
    """No memory is left at one allocation of a step; then everything is set anew and trains as if nothing had been.

    Of the step that failed only memory counts: its threads were told to go on without what they waited for.
    """

    def body(machine: Machine) -> list[str]:
        with crew_of(setting) as crew:
            residents = Residents(setting.graph, setting.host)
            steps = placed_steps(setting, residents, crew)
            machine.fails_at = machine.num_allocations + allocation
            with pytest.raises(RunnerError, match="out of memory"):
                steps[0].run()
            machine.fails_at = None
            machine.order.forgive("race", "wait")
            residents.reset()
            return train(setting, residents, steps)

    return body


def timed_out_and_run_again(setting: Setting) -> Body:
    """What the first step sends never arrives."""

    def body(machine: Machine) -> list[str]:
        with crew_of(setting) as crew:
            residents = Residents(setting.graph, setting.host)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CudaChannel, "send", lambda channel, tensor: None)
                steps = placed_steps(setting, residents, crew)
            with pytest.raises(TimeoutError):
                steps[0].run()
            machine.order.forgive("race", "wait", "deadlock")
            residents.reset()
            steps[1:] = placed_steps(setting, residents, crew)[1:]
            return train(setting, residents, steps)

    return body


def placed_model(setting: Setting, reads: tuple[str, ...] = ("state_dict", "copy_to", "load_state_dict")) -> Body:
    """A model on GPUs whose inputs and state come from a GPU and go there.

    Args:
        setting: its first plan is run; steps of it that change their input start from the same one every time.
        reads: what is called between all steps; with `constants`, these are written again.
    """

    def body(machine: Machine) -> list[str]:
        with machine.attached():
            args, kwargs, targets = _on_gpu(_origin(setting))
        placed = PlacedModel(_from_gpu(setting.graph, machine), setting.host, setting.plans[0])
        run = Run()
        try:
            for _ in range(NUM_STEPS):
                with another_caller(machine):
                    run.losses.append(placed(*args, targets=targets or None, **kwargs))
                if "state_dict" in reads:
                    with another_caller(machine):
                        run.state = placed.state_dict()
                if "copy_to" in reads:
                    with another_caller(machine):
                        run.state = _zeros(setting)
                        placed.copy_to(_Model(run.state))  # type: ignore[arg-type]
                if "load_state_dict" in reads:
                    with another_caller(machine):
                        placed.load_state_dict(run.state)
                for source in require_program(setting.graph).sources.values() if "constants" in reads else ():
                    if source.held is not None:
                        source.held.add_(0)  # written again, so that its copies are renewed
            run.state = run.state or placed.state_dict()
        finally:
            placed.close()
        run.losses = [plain(loss).reshape(()) for loss in run.losses]
        run.state = {name: plain(value) for name, value in run.state.items()}
        return differences(run, expected_run(setting.model, setting.optimizer))

    return body


def parameters_read(setting: Setting) -> Body:
    """A model on GPUs whose parameters the caller reads after every step, as on a CPU core."""

    def trained_on(host: Host, plan: Plan, machine: Machine) -> Run:
        with machine.attached():
            args, kwargs, targets = _on_gpu(_origin(setting))
        placed, run = PlacedModel(_from_gpu(setting.graph, machine), host, plan), Run()
        try:
            for _ in range(NUM_STEPS):
                run.losses.append(plain(placed(*args, targets=targets or None, **kwargs)).reshape(()))
                with machine.attached():
                    run.state = {name: plain(value) for name, value in placed.named_parameters()}
        finally:
            placed.close()
        return run

    def body(machine: Machine) -> list[str]:
        expected = trained_on(core_host(1), single(setting.graph), machine)
        return differences(trained_on(setting.host, setting.plans[0], machine), expected)

    return body


@contextlib.contextmanager
def another_caller(machine: Machine) -> Iterator[None]:
    """While active, the calling thread launches on streams of its own, as other threads do that share a model."""
    with contextlib.ExitStack() as streams:
        for place in (FIRST_GPU, LAST_GPU):
            streams.enter_context(machine.using(machine.new_stream(place.index, is_urgent=False, name="caller")))
        yield


def gradients_out(setting: Setting) -> Body:
    """A model on GPUs that leaves gradients, and the caller's own update of its parameters on the caller's streams.

    Args:
        setting: of plain SGD; its first plan is run.
    """
    spec = require_program(setting.graph).optimizer
    assert spec is not None

    def body(machine: Machine) -> list[str]:
        with machine.attached():
            args, kwargs, targets = _on_gpu(_origin(setting))
        placed = PlacedModel(_from_gpu(setting.graph, machine), setting.host, setting.plans[0])
        run = Run()
        try:
            for _ in range(NUM_STEPS):
                run.losses.append(placed.backward(*args, targets=targets or None, **kwargs))
                with machine.attached(), torch.no_grad():
                    for parameter in placed.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad * spec.lr)
                placed.zero_grad()
            run.state = placed.state_dict()
        finally:
            placed.close()
        run.losses = [plain(loss).reshape(()) for loss in run.losses]
        run.state = {name: plain(value) for name, value in run.state.items()}
        return differences(run, expected_run(setting.model, setting.optimizer))

    return body


def _module_graph(
    machine: Machine, model: nn.Module, x: Tensor, crew: Crew, *, has_backward: bool
) -> tuple[ModuleGraph, dict[str, Tensor]]:
    """A model in two parts on two GPUs, and its parameters and buffers there."""
    captured = capture_module(model, (x,), {}, has_backward=has_backward)
    graph, generator = captured.graph, np.random.default_rng(0)
    start = naive_plan(graph, random_devices(graph, 2, generator))
    plan = carried_plan(graph, start, graph, last=backward_ops(graph))
    state = {}
    for op, source in require_program(graph).sources.items():
        if source.kind in ("parameter", "buffer"):
            with machine.attached():
                state[source.key] = source.value.detach().to(torch.device("cuda", int(plan.devices[op])))
    return ModuleGraph(captured, TWO_GPUS, plan, crew, state, seed=0), state


def module(machine: Machine) -> list[str]:
    """Forward and backward of a model in two parts, its loss and updates on the caller's streams between them."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double(), random(3, 4)
    eager, crew = copy.deepcopy(model), Crew(TWO_GPUS.devices)
    wrong = []
    try:
        placed, state = _module_graph(machine, model, x, crew, has_backward=True)
        with machine.attached():
            given = x.to(FIRST_GPU)
        for step in range(NUM_STEPS):
            output = eager(x)
            expected = torch.autograd.grad((output**2).sum(), list(eager.parameters()))
            (ours,), kept = placed.forward([given], step, {})
            with machine.attached():
                seed = ours * 2
            found = placed.backward([seed], kept, step)
            with machine.attached(), torch.no_grad():
                for name, gradient in zip(dict(eager.named_parameters()), found, strict=True):
                    state[name].sub_(gradient * 0.1)
                for parameter, gradient in zip(eager.parameters(), expected, strict=True):
                    parameter.sub_(gradient * 0.1)
            if not torch.allclose(plain(ours), output.detach()):
                wrong.append(f"output {step}")
    finally:
        crew.stop()
    named = dict(eager.named_parameters())
    return [*wrong, *(name for name, value in state.items() if not torch.allclose(plain(value), named[name].detach()))]


class _Twice(nn.Module):
    """Returns one tensor twice, as two of their own, and one once."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(x)
        return hidden, hidden, torch.sin(x)


def module_of_several_callers(machine: Machine) -> list[str]:
    """Each computes with the outputs on streams of its own and drops them; nobody waits for anybody."""
    x, crew = random(3, 4), Crew(TWO_GPUS.devices)
    try:
        placed, _ = _module_graph(machine, _Twice(), x, crew, has_backward=False)
        with machine.attached():
            given = x.to(FIRST_GPU)
        found, streams = [], []
        for number in range(NUM_STEPS):
            with another_caller(machine):
                found.append([output * 2 for output in placed.forward([given], number, {})[0]])
                streams += [cuda.current_stream(place) for place in (FIRST_GPU, LAST_GPU)]
        for stream in streams:
            cuda.await_stream(stream)
    finally:
        crew.stop()
    expected = [output * 2 for output in _Twice()(x)]
    return [
        f"output {k} of call {number}"
        for number, outputs in enumerate(found)
        for k, (output, right) in enumerate(zip(outputs, expected, strict=True))
        if not torch.equal(plain(output), right)
    ]


def inference(machine: Machine) -> list[str]:
    """A model from one GPU whose parameters are on another; nothing there is set or updated."""
    model, x = nn.Linear(4, 2, dtype=torch.float64), random(3, 4)
    graph, host = capture(model, x), gpu_host(("cuda:0", "cuda:1"))
    is_parameter = np.array([target == "parameter" for target in graph.targets])
    plan = naive_plan(graph, np.where(is_parameter, 1, 0).astype(np.int32))
    crew = Crew(host.devices)
    try:
        graph = _from_gpu(graph, machine)
        step = PlacedStep(graph, host, plan, Residents(graph, host), crew)
        step.run()
        return [] if torch.equal(plain(step.result), model(x)) else ["result"]
    finally:
        crew.stop()


def clock_alone(machine: Machine) -> list[str]:
    """Marks that nobody but the clock waits for, after work that its start must not count."""
    clock, stream = CudaClock(FIRST_GPU), machine.current_stream(0)
    with machine.attached():
        torch.zeros(1, device=FIRST_GPU)
        clock.start()
        wrong = [] if machine.order.knows_all(machine.host, stream.actor) else ["the host's time at the start"]
        marks = [clock.mark()]
        torch.zeros(1, device=FIRST_GPU)
        marks.append(clock.mark())
    first, second = map(clock.seconds, marks)
    return wrong if first < second else [*wrong, "time does not pass"]


def gang(setting: Setting) -> Body:
    """Cores and a gang of them, to which tensors are handed over; no GPU."""
    graph = setting.graph
    devices = (torch.arange(graph.num_ops) % 3).int().numpy()
    devices[graph.colocation >= 0] = 0
    on_cores = dataclasses.replace(setting, host=GANG_HOST, plans=(naive_plan(graph, devices),))

    def body(_: Machine) -> list[str]:
        crew = Crew(GANG_HOST.devices)
        try:
            residents = Residents(graph, GANG_HOST)
            return train(on_cores, residents, placed_steps(on_cores, residents, crew))
        finally:
            crew.stop()

    return body


def _origin(setting: Setting) -> Any:
    origin = require_program(setting.graph).origin
    return origin.args, origin.kwargs, origin.targets


def _zeros(setting: Setting) -> dict[str, Tensor]:
    """Memory for the state, on a GPU where no input is."""
    state = [each for each in require_program(setting.graph).sources.values() if each.kind in ("parameter", "buffer")]
    return {each.key: torch.zeros(each.value.shape, dtype=each.value.dtype, device=LAST_GPU) for each in state}


def _on_gpu(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to(FIRST_GPU), values)


def _from_gpu(graph: OpGraph, machine: Machine) -> OpGraph:
    """The graph as if the model had been on a GPU when it was captured."""
    program = require_program(graph)
    with machine.attached():
        sources = {op: dataclasses.replace(each, value=_on_gpu(each.value)) for op, each in program.sources.items()}
    return dataclasses.replace(graph, program=dataclasses.replace(program, sources=sources))


class _Model(SimpleNamespace):
    """What `copy_to` needs of a model, on a GPU."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(named_parameters=tensors.items, named_buffers=lambda: ())

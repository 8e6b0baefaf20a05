"""Own loops over processes: equal to those of threads to the bit; a process that is gone is named; none stays."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_hosts import core_host, process_host
from faulty_ops import GO, TOLD, Told
from loops import apart, batches, captured, classifier, in_a_fork
from naive_plan import naive_plan
from placed_steps import alternating
from rank_threads import rank_threads
from small_models import mean_square
from torch import Tensor, nn
from torch.nn import functional

from rlplace.errors import FileProblem, RunnerError, UserError
from rlplace.export import PlacedModel, to_module
from rlplace.graphs import OpGraph, capture
from rlplace.measure import Host, Placement
from rlplace.measure.execute.device_threads import GRACE_S, Worker
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.rank_processes import RankWorker
from rlplace.measure.isolate.own_ranks import OwnCrew
from rlplace.measure.isolate.worker import CannotIsolate, WorkerProcess

Loop = Callable[[OpGraph, Host, Path], list[Tensor]]


def captured_loop(graph: OpGraph, host: Host, path: Path) -> list[Tensor]:
    """The captured optimizer, a schedule of it, evaluations; a file goes to a second model, which continues."""
    seen = []
    with PlacedModel(graph, host, apart(graph)) as step, PlacedModel(graph, host, apart(graph)) as other:
        schedule = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
        for number in range(3):
            seen += [step(x, targets=labels) for x, labels in batches(2, seed=number)]
            schedule.step()
            seen.append(step.evaluate(batches(1, size=3)[0][0]))
        step.save(path)
        other.load(path)
        for each in (step, other):
            seen += [each(x, targets=labels) for x, labels in batches(2)]
        seen += other.state_dict().values()
    return seen


def own_optimizer_loop(graph: OpGraph, host: Host, path: Path) -> list[Tensor]:
    """Accumulated gradients, clipped over all ranks; parameters with other memory; gradients of one's own."""
    seen = []
    with PlacedModel(graph, host, apart(graph)) as step:
        parameters = [each for each in step.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for number in range(4):
            optimizer.zero_grad()
            if number == 2:
                torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(parameters) * 2, parameters)
                parameters[0].grad = torch.ones_like(parameters[0])
            seen += [step.backward(x, targets=labels, loss_scale=0.5) for x, labels in batches(2, seed=number)]
            seen.append(torch.nn.utils.clip_grad_norm_(parameters, 0.1))
            seen += [each.grad.clone() for each in parameters if each.grad is not None]
            optimizer.step()
        seen += step.state_dict().values()
    return seen


def module_loop(graph: OpGraph, host: Host, path: Path) -> list[Tensor]:
    """Two forwards wait for their backwards, one never has any; evaluations; tensors that were assigned."""
    names = tuple(device.name for device in host.devices)
    placement = Placement(apart(graph), graph.fingerprint, host.fingerprint, names)
    module, seen = to_module(model_of(graph), graph, placement, host=host), []
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        losses = [functional.cross_entropy(module(x), labels) for x, labels in batches(2, seed=number)]
        module(batches(1)[0][0])
        gc.collect()
        for loss in reversed(losses):
            loss.backward()
        seen += [loss.detach() for loss in losses]
        seen.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1))
        optimizer.step()
        module.eval()
        with torch.no_grad():
            seen.append(module(batches(1, size=3)[0][0]))
        module.train()
    module.load_state_dict({name: 2 * value for name, value in module.state_dict().items()}, assign=True)
    seen.append(module(batches(1)[0][0]).detach())
    module.close()
    return [*seen, *module.state_dict().values()]


def model_of(graph: OpGraph) -> Any:
    assert graph.program is not None
    return graph.program.origin.model


@pytest.mark.parametrize("loop", [captured_loop, own_optimizer_loop, module_loop])
def test_a_loop_is_that_of_threads_to_the_bit(loop: Loop, tmp_path: Path) -> None:
    found = [
        loop(captured(classifier(dropout=0.5), "adam"), host, tmp_path / host.name)
        for host in (core_host(2), process_host(2))
    ]
    assert len(found[0]) == len(found[1])
    for threads, ranks in zip(*found, strict=True):
        assert torch.equal(threads, ranks)


def test_a_process_that_is_gone_is_named_and_the_state_stays(tmp_path: Path) -> None:
    graph, ((x, labels),) = captured(classifier(), "adam"), batches(1)
    step = PlacedModel(graph, process_host(2), apart(graph))
    step(x, targets=labels)
    before = step.state_dict()
    (victim,) = pids(step)
    os.kill(victim, signal.SIGKILL)
    words = r"the process of cpu:1 was ended from outside \(SIGKILL\)"
    with pytest.raises(RunnerError, match=f"{words}.*op '"):
        step(x, targets=labels)
    with pytest.raises(RunnerError, match=words):
        step.evaluate(x)
    assert before.keys() == step.state_dict().keys()
    step.save(tmp_path / "state")
    step.close()
    step.close()
    assert not Path(f"/proc/{victim}").exists()


def test_no_process_stays_without_its_model() -> None:
    graph = captured(classifier())
    step = PlacedModel(graph, process_host(2), apart(graph))
    (there,) = pids(step)
    assert Path(f"/proc/{there}").exists()
    del step
    gc.collect()
    assert not Path(f"/proc/{there}").exists()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[PlacedModel, PlacedModel]:
    """A model on four processes, one of them with an op that is told what to do; and the same on threads."""
    monkeypatch.setenv(GO, str(tmp_path / "go"))
    torch.manual_seed(0)
    graph = capture(Told(), (torch.ones(6, 4), torch.tensor(0)), mean_square, "adam")
    devices = alternating(graph, 4)
    (op,) = (op for op, target in enumerate(graph.targets) if target.startswith("rlplace_tests_faults.told"))
    devices[op] = 3
    plan = naive_plan(graph, devices)
    return PlacedModel(graph, process_host(4), plan), PlacedModel(graph, core_host(4), plan)


@pytest.mark.slow
def test_faults_among_four_ranks_of_a_loop(
    alone: tuple[PlacedModel, PlacedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is named, with the rank and the op, and the loop goes on as if it had not been, to the bit."""
    ranks, threads = alone
    num_files, processes = num_open_files(), pids(ranks)
    assert len(processes) == 3

    def fails(what: str, error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            ranks(torch.ones(6, 4), torch.tensor(TOLD.index(what)))

    def goes_on() -> None:
        x = torch.randn(6, 4)
        assert torch.equal(ranks(x, torch.tensor(0)), threads(x, torch.tensor(0)))
        for ours, theirs in zip(ranks.parameters(), threads.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    goes_on()
    op = r"op 'told' \(rlplace_tests_faults.told.default\) on cpu:3"
    fails("raise", RunnerError, f"{op}: ValueError: boom")
    goes_on()
    fails("memory", RunnerError, f"{op}: .*allocate")
    goes_on()

    # a full disk: nothing more can be written to files
    folder = tmp_path / "states"
    folder.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(FileProblem, match="written"):
            ranks.save(folder / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(folder.iterdir()) == []
    goes_on()
    ranks.save(folder / "state")

    # an op that does not end in time: no step runs until it has ended
    with monkeypatch.context() as patch:
        patch.setitem(PlacedStep.run.__kwdefaults__, "deadline_s", 1.0)
        fails("wait", TimeoutError, f"the step did not end within 1 s: {op}")
        fails("nothing", RunnerError, f"cpu:3 is still busy .* in {op}.*`save`.*new placed model.*`close`")
        ranks.save(folder / "state")
    (tmp_path / "go").touch()
    for _ in range(600):
        with contextlib.suppress(RunnerError):
            ranks.evaluate(torch.ones(6, 4), torch.tensor(0))
            break
        time.sleep(0.05)
    threads.evaluate(torch.ones(6, 4), torch.tensor(0))
    goes_on()

    words = r"the process of cpu:3 was ended from outside \(SIGKILL\)"
    fails("kill", RunnerError, f"{words}; meanwhile in the transfer of")
    fails("nothing", RunnerError, words)
    for name, tensor in ranks.state_dict().items():
        assert torch.equal(tensor, threads.state_dict()[name])
    assert all(is_gone(pid) for pid in processes), "the others ended with it"
    ranks.close()
    threads.close()
    gc.collect()
    assert num_open_files() < num_files


def test_nobody_waits_for_a_process_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was told to give up has a second for it; a dead process needs none."""
    waited: list[float] = []
    wait = Worker.wait

    def note(worker: Worker, timeout_s: float, *given: Any) -> bool:
        waited.extend([timeout_s] * isinstance(worker, RankWorker))
        return wait(worker, timeout_s, *given)

    graph, ((x, labels),) = captured(classifier(), "adam"), batches(1)
    step = PlacedModel(graph, process_host(2), apart(graph))
    step(x, targets=labels)
    monkeypatch.setattr(Worker, "wait", note)
    step(x, targets=labels)
    assert max(waited) > 1
    (victim,) = pids(step)
    kill = step._crew.workers[1].start  # type: ignore[attr-defined]

    def start_and_kill(*given: Any) -> None:
        os.kill(victim, signal.SIGSTOP)
        kill(*given)
        waited.clear()
        os.kill(victim, signal.SIGKILL)

    monkeypatch.setattr(step._crew.workers[1], "start", start_and_kill)
    with pytest.raises(RunnerError, match=r"the process of cpu:1 was ended from outside \(SIGKILL\)"):
        step(x, targets=labels)
    assert waited[-1] == 0.0
    assert GRACE_S not in waited
    step.close()


def test_the_thread_of_the_first_rank_is_not_replaced_while_it_is_stuck() -> None:
    """It would go on with the signals of a later step."""
    graph, stuck = capture(nn.ReLU(), torch.ones(3)), threading.Event()
    with rank_threads(graph, core_host(2)) as crew:
        (first, second), woken = crew.workers, threading.Event()
        jobs = [lambda _: stuck.wait(60) and None, lambda _: None]
        with pytest.raises(TimeoutError):
            crew.run(jobs, 0, on_error=woken.set, deadline_s=0.05)  # type: ignore[arg-type]
        assert crew.workers == [first, second]
        with pytest.raises(RunnerError, match="still busy"):
            crew.run([lambda _: None] * 2, 1, on_error=woken.set, deadline_s=60)
        stuck.set()
        while first.is_busy:
            crew.settle()
        crew.run([lambda _: None] * 2, 2, on_error=woken.set, deadline_s=60)


def test_a_fork_reads_the_state_and_ends_no_process() -> None:
    graph, ((x, labels),) = captured(classifier(), "adam"), batches(1)
    step = PlacedModel(graph, process_host(2), apart(graph))
    step(x, targets=labels)
    error, message = in_a_fork(lambda: step(x, targets=labels))
    assert error is UserError
    assert "forked" in message
    assert in_a_fork(lambda: step.state_dict()["second.weight"]) == step.state_dict()["second.weight"].tolist()

    def close() -> Tensor:
        step.close()
        return torch.zeros(1)

    assert in_a_fork(close) == [0.0]
    step(x, targets=labels)
    step.close()


def test_a_process_that_cannot_start_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three does not get ready."""
    started: list[WorkerProcess] = []
    await_ready = WorkerProcess.await_ready

    def fail(process: WorkerProcess, *given: Any) -> None:
        started.append(process)
        if len(started) == 2:
            raise CannotIsolate("no room")
        await_ready(process, *given)

    monkeypatch.setattr(WorkerProcess, "await_ready", fail)
    graph, num_files = captured(classifier()), num_open_files()
    with pytest.raises(CannotIsolate, match="no room"):
        PlacedModel(graph, process_host(4), apart(graph))
    gc.collect()
    assert len(started) == 2
    assert all(is_gone(process.pid) for process in started)
    assert num_open_files() <= num_files


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def pids(step: PlacedModel) -> list[int]:
    assert isinstance(step._crew, OwnCrew)
    return [rank.pid for rank in step._crew.fleet.ranks]

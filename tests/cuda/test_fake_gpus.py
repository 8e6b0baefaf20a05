"""The made-up GPUs by themselves: each thing that they hold against a program, in the shortest program that does it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType

import pytest
import torch
from fake_gpus.fake_cuda import AS_THEY_ARE, NOT_FAKED, FakeCuda
from fake_gpus.late_queues import POLICIES
from fake_gpus.machine import Machine
from fake_gpus.plan_runs import judged, machine_installed, plain
from torch import Tensor

from rlplace import cuda
from rlplace.measure.execute import device_threads

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


def test_every_function_of_the_module_is_faked_or_named() -> None:
    public = {
        name
        for name, value in vars(cuda).items()
        if isinstance(value, FunctionType) and value.__module__ == cuda.__name__ and name[0] != "_"
    }
    faked = {name for name in vars(FakeCuda) if name[0] != "_"} - {"unsettled"}
    assert public == faked | set(NOT_FAKED) | set(AS_THEY_ARE)
    for name in faked:
        real = list(inspect.signature(getattr(cuda, name)).parameters)
        assert list(inspect.signature(getattr(FakeCuda, name)).parameters)[1:] == real, name


def kinds(body: Callable[[Machine], list[str]]) -> list[str]:
    verdict = judged(body, "lazy")
    assert verdict.error is None
    return [violation.kind for violation in verdict.violations]


@pytest.mark.parametrize("waits", [True, False])
def test_streams_are_in_order_where_one_waits_for_the_other(waits: bool) -> None:
    def body(_: Machine) -> list[str]:
        one, other, event = cuda.stream(FIRST), cuda.stream(FIRST), cuda.event()
        with cuda.using(one):
            ones = torch.ones(3, device=FIRST)
            cuda.record(event, one)
        with cuda.using(other):
            if waits:
                cuda.wait(other, event)
            total = ones.sum()
            cuda.await_stream(other)
            assert plain(total).item() == 3.0 or not waits
        cuda.await_stream(one)
        return []

    assert kinds(body) == ([] if waits else ["race"])


@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_lives_on_for_another_stream_where_it_is_kept(is_kept: bool) -> None:
    """The stream that owns the memory runs first, so that its next op is given what the other still has to read."""

    def body(_: Machine) -> list[str]:
        owner, reader, event = cuda.stream(FIRST), cuda.stream(FIRST, is_urgent=True), cuda.event()
        with cuda.using(owner):
            ones = torch.ones(3, device=FIRST)
            cuda.record(event, owner)
        with cuda.using(reader):
            cuda.wait(reader, event)
            total = ones.sum()
        if is_kept:
            cuda.keep_for(ones, reader)
        del ones
        cuda.await_stream(owner)
        with cuda.using(reader):
            return [] if plain(total).item() == 3.0 else ["sum"]

    verdict = judged(body, "compute")
    assert verdict.caught_by == ("" if is_kept else "order values")
    assert [each.kind for each in verdict.violations] == ([] if is_kept else ["freed"])


def test_an_event_that_was_not_recorded_yet() -> None:
    assert kinds(lambda _: cuda.wait(cuda.stream(FIRST), cuda.event()) or []) == ["wait"]


def test_tensors_of_two_gpus_in_one_op() -> None:
    def body(machine: Machine) -> list[str]:
        with machine.attached():
            one, other = torch.ones(1, device=FIRST), torch.ones(1, device=SECOND)
        with pytest.raises(RuntimeError, match="on the same device"):
            one + other
        return []

    assert kinds(body) == ["place"]


def test_pinned_memory_is_overwritten_while_it_is_copied() -> None:
    def body(machine: Machine) -> list[str]:
        with machine.attached():
            pinned = cuda.pinned_like(torch.ones(3))
            pinned.fill_(1.0)
            copy = cuda.copy(pinned, FIRST)
            pinned.fill_(2.0)
        return [] if torch.equal(plain(copy), torch.ones(3)) else ["copy"]

    verdict = judged(body, "lazy")
    assert verdict.caught_by == "order values"


def test_two_threads_on_one_stream() -> None:
    def body(machine: Machine) -> list[str]:
        stream = cuda.stream(FIRST)

        def run() -> None:
            with cuda.using(stream):
                torch.ones(1, device=FIRST)

        thread = device_threads.threading.Thread(target=run, name="another", daemon=True)
        thread.start()
        thread.join()
        run()
        return []

    assert kinds(body) == ["premise"]


def test_threads_that_wait_for_each_other_end_at_once() -> None:
    def body(_: Machine) -> list[str]:
        never, done = device_threads.threading.Lock(), device_threads.threading.Lock()
        never.acquire()
        done.acquire()
        device_threads.threading.Thread(target=never.acquire, name="stuck", daemon=True).start()
        return [] if not done.acquire(timeout=300.0) else ["acquired"]

    assert kinds(body) == ["deadlock"]


@pytest.mark.parametrize("policy", POLICIES)
def test_views_show_what_was_written_later(policy: str) -> None:
    def body(machine: Machine) -> list[str]:
        with machine.attached():
            whole = torch.zeros(2, 3, device=FIRST)
            row, column = whole.select(0, 1), whole.t().select(0, 2)
            whole.add_(1)
            row.mul_(5)
            return [] if plain(column).tolist() == [1.0, 5.0] and column.device == FIRST else ["view"]

    assert not judged(body, policy).caught_by  # type: ignore[arg-type]


def test_random_numbers_are_those_of_the_seed_at_launch() -> None:
    def drawn(machine: Machine) -> Tensor:
        with machine.attached():
            cuda.generator(FIRST).manual_seed(3)
            values = torch.rand(4, device=FIRST)
            cuda.generator(FIRST).manual_seed(4)
            return plain(values)

    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    before = torch.get_rng_state()
    for policy in ("now", "lazy"):
        with machine_installed(policy) as machine:  # type: ignore[arg-type]
            assert torch.equal(drawn(machine), expected)
    assert torch.equal(torch.get_rng_state(), before)

"""Crews: one thread a device, one job each, and no way to hang; channels between them, and clocks."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import plain_gpus
import pytest
import torch
from core_hosts import core_device

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.measure.execute import device_threads
from rlplace.measure.execute.device_threads import (
    Channel,
    Crew,
    CudaChannel,
    CudaClock,
    HostClock,
    Job,
    Streams,
    Worker,
    cycles_to_launch,
)
from rlplace.measure.hosts.host import Device
from rlplace.measure.timing.threads import usable_cores


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew((core_device("cpu:0"), core_device("cpu:1")))
    yield made
    made.stop()


def nothing() -> None:
    pass


def run(crew: Crew, *jobs: Job, step: int = 0, on_error: object = nothing, deadline_s: float = 120.0) -> None:
    crew.run(list(jobs), step, on_error=on_error, deadline_s=deadline_s)  # type: ignore[arg-type]


def test_each_job_runs_on_its_own_thread_and_always_the_same(crew: Crew) -> None:
    seen: list[tuple[int, int, int]] = []

    def job(device: int) -> Job:
        return lambda step: seen.append((step, device, threading.get_ident()))

    for step in range(3):
        run(crew, job(0), job(1), step=step)
    assert sorted(entry[:2] for entry in seen) == [(step, device) for step in range(3) for device in range(2)]
    threads = [{thread for _, device, thread in seen if device == d} for d in range(2)]
    assert [len(found) for found in threads] == [1, 1]
    assert threads[0] != threads[1]
    assert threading.get_ident() not in threads[0] | threads[1]


def test_a_thread_is_pinned_runs_ops_alone_and_records_no_gradients() -> None:
    cores = usable_cores()[:1]
    crew = Crew((core_device("cpu:0", cores=cores),))
    seen: dict[str, object] = {}

    def job(_: int) -> None:
        seen["cores"] = os.sched_getaffinity(0)
        seen["threads"] = torch.get_num_threads()
        seen["inference"] = torch.is_inference_mode_enabled()

    before = os.sched_getaffinity(0)
    run(crew, job)
    crew.stop()
    assert seen == {"cores": set(cores), "threads": 1, "inference": True}
    assert os.sched_getaffinity(0) == before


def test_jobs_run_at_the_same_time(crew: Crew) -> None:
    barrier = threading.Barrier(2, timeout=120)
    run(crew, lambda _: barrier.wait() and None, lambda _: barrier.wait() and None)


def test_the_first_failure_is_the_cause_and_wakes_the_others(crew: Crew) -> None:
    woken, calls = threading.Event(), []

    def waits(_: int) -> None:
        assert woken.wait(timeout=120)
        raise AssertionError("a consequence")

    def fails(_: int) -> None:
        raise ValueError("boom")

    def on_error() -> None:
        calls.append(1)
        woken.set()

    with pytest.raises(RunnerError, match=r"^ValueError: boom$") as failed:
        run(crew, waits, fails, on_error=on_error)
    assert isinstance(failed.value.__cause__, ValueError)
    assert calls == [1]
    finished = []
    run(crew, finished.append, finished.append)
    assert finished == [0, 0]


def test_an_assertion_of_a_job_is_a_cause_like_any_other(crew: Crew) -> None:
    def fails(_: int) -> None:
        raise AssertionError("of the user")

    with pytest.raises(RunnerError, match="AssertionError: of the user"):
        run(crew, fails, lambda _: None)


def never_waited_for(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that `worker` has is up at once; the others have all of theirs, however busy the machine."""
    monkeypatch.setattr(worker, "wait", lambda *_: False)


def test_when_the_time_is_up_the_first_that_has_not_ended_is_named(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_threads, "GRACE_S", 0.01)
    stuck = threading.Event()
    before = list(crew.workers)
    with pytest.raises(TimeoutError, match=r"device cpu:0 did not end its part within 0\.05 s"):
        run(crew, lambda _: stuck.wait() and None, lambda _: stuck.wait() and None, deadline_s=0.05)
    assert not set(before) & set(crew.workers)
    stuck.set()


def test_a_stuck_job_is_a_timeout_and_its_thread_is_left_behind(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, ended, calls = threading.Event(), [], []
    before = list(crew.workers)
    never_waited_for(before[1], monkeypatch)
    with pytest.raises(TimeoutError, match=r"device cpu:1 did not end its part within 120 s"):
        run(crew, ended.append, lambda _: stuck.wait() and None, on_error=lambda: calls.append(1))
    assert crew.workers[0] is before[0]
    assert crew.workers[1] is not before[1]
    assert calls == [1]
    run(crew, ended.append, ended.append, step=1)
    assert ended == [0, 1, 1]
    stuck.set()
    before[1]._thread.join(timeout=120)
    assert not before[1]._thread.is_alive(), "it ends once it gets free"


def test_a_job_that_gives_up_in_time_keeps_its_thread(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_threads, "GRACE_S", 120.0)
    woken = threading.Event()
    before = list(crew.workers)
    with pytest.raises(TimeoutError):
        run(crew, lambda _: None, lambda _: woken.wait(timeout=120) and None, on_error=woken.set, deadline_s=0.05)
    assert crew.workers == before


def test_a_failure_beside_a_stuck_job_is_the_cause(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    never_waited_for(crew.workers[1], monkeypatch)

    def fails(_: int) -> None:
        raise ValueError("boom")

    with pytest.raises(RunnerError, match="boom"):
        run(crew, fails, lambda _: stuck.wait() and None)
    stuck.set()


def test_an_interrupt_leaves_the_crew_usable(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    woken = threading.Event()

    def interrupted(timeout_s: float) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(crew.workers[0], "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(crew, lambda _: woken.wait(timeout=120) and None, lambda _: None, on_error=woken.set)
    finished: list[int] = []
    for step in range(3):
        run(crew, finished.append, finished.append, step=step)
    assert finished == [0, 0, 1, 1, 2, 2]


def test_a_core_that_is_not_there_fails_every_job_instead_of_hanging() -> None:
    crew = Crew((core_device("cpu:0", cores=(100_000,)), core_device("cpu:1")))
    for _ in range(2):
        with pytest.raises(RunnerError):
            run(crew, lambda _: None, lambda _: None)
    crew.stop()


def test_nothing_is_run_over_a_gpu_that_is_still_busy_with_a_failed_step(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_done = False
    monkeypatch.setattr(crew.streams, "settle", lambda timeout_s: is_done)

    def fails(_: int) -> None:
        raise ValueError("boom")

    finished: list[int] = []
    with pytest.raises(RunnerError, match="boom"):
        run(crew, fails, finished.append)
    with pytest.raises(RunnerError, match="still busy with a step"):
        run(crew, finished.append, finished.append)
    is_done, before = True, len(finished)
    run(crew, finished.append, finished.append)
    assert len(finished) == before + 2


def test_a_stopped_crew_says_so_and_may_be_stopped_again(crew: Crew) -> None:
    crew.stop()
    crew.stop()
    for worker in crew.workers:
        worker._thread.join(timeout=120)
        assert not worker._thread.is_alive()
    with pytest.raises(RunnerError, match="closed"):
        run(crew, lambda _: None, lambda _: None)


def test_an_idle_crew_keeps_nothing_of_its_last_jobs_alive(crew: Crew) -> None:
    import gc
    import weakref

    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    run(crew, lambda _, kept=big: None, lambda _: None)  # type: ignore[misc]
    del big
    gc.collect()
    assert gone() is None


def test_the_thread_of_a_gpu_runs_ops_of_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_gpus.install(monkeypatch)
    described = dataclasses.replace(plain_gpus.gpu_host(1, 1000).devices[0], cores=usable_cores())
    crew = Crew((described,))
    threads: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(crew, lambda _: threads.append(torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
        crew.stop()
    assert threads == [1]


def test_a_gpu_is_held_back_longer_than_launches_take_but_never_for_long() -> None:
    assert cycles_to_launch(1e-3) == 2_250_000, "half as long again at 1.5 GHz"
    assert cycles_to_launch(60.0) == 150_000_000
    assert cycles_to_launch(0.0) == 0


def test_a_host_marks_seconds() -> None:
    clock = HostClock()
    clock.start()
    before, mark, after = time.perf_counter(), clock.mark(), time.perf_counter()
    assert before <= clock.seconds(mark) <= after


class Event:
    """Records the time, in milliseconds, of a stream that only the test moves."""

    now_ms = 100.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = -1.0
        self.is_awaited = False

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        self.is_awaited = True

    def elapsed_time(self, other: Event) -> float:
        assert self.is_awaited
        assert other.is_awaited
        return other.at_ms - self.at_ms


def test_a_gpu_marks_events_that_are_resolved_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "event", lambda *, is_timed=False: Event(enable_timing=is_timed))
    monkeypatch.setattr(cuda, "current_stream", lambda device: f"stream of {device}")
    host_s = iter([50.0, 70.0])
    monkeypatch.setattr("rlplace.measure.execute.device_threads.time.perf_counter", lambda: next(host_s))
    clock = CudaClock(torch.device("cuda:1"))
    for start_s in (50.0, 70.0):  # every step starts anew
        clock.start()
        Event.now_ms += 250.0
        mark: Any = clock.mark()
        Event.now_ms += 1000.0
        later: Any = clock.mark()
        assert clock.seconds(mark) == start_s + 0.25
        assert clock.seconds(later) == start_s + 1.25


def test_a_copy_is_a_tensor_of_its_own() -> None:
    channel = Channel(is_copy=True)
    original = torch.arange(6.0).reshape(2, 3).t()
    for step in range(3):  # used once a step, again and again
        channel.send(original)
        channel.wait_ready()
        copy = channel.take()
        original.add_(1)
        assert torch.equal(copy + 1, original), step
        assert copy.stride() == original.stride()


def test_a_hand_over_is_the_tensor_itself() -> None:
    channel = Channel(is_copy=False)
    original = torch.zeros(3)
    channel.send(original)
    channel.wait_ready()
    assert channel.take() is original


def test_taking_waits_for_sending_and_overwriting_for_the_acknowledgement() -> None:
    channel = Channel(is_copy=True)
    events: list[str] = []
    may_send, may_acknowledge = threading.Event(), threading.Event()

    def producer() -> None:
        may_send.wait()
        events.append("sent")
        channel.send(torch.zeros(1))
        channel.wait_copied()
        events.append("overwrites")

    def consumer() -> None:
        channel.wait_ready()
        channel.take()
        events.append("taken")
        may_acknowledge.wait()
        events.append("acknowledged")
        channel.acknowledge()

    threads = start(producer, consumer)
    may_send.set()
    may_acknowledge.set()
    join(threads)
    assert events == ["sent", "taken", "acknowledged", "overwrites"]


def test_giving_up_wakes_both_sides_and_may_come_twice() -> None:
    channel = Channel(is_copy=True)
    failed: list[str] = []

    def receiver() -> None:
        channel.wait_ready()
        try:
            channel.take()
        except AssertionError:
            failed.append("receiver")

    threads = start(receiver, lambda: channel.wait_copied() and None)
    channel.abort()
    channel.abort()
    join(threads)
    assert failed == ["receiver"]


def test_cores_get_channels_without_a_gpu() -> None:
    source, destination = core_device("cpu:0"), core_device("cpu:1")
    for is_copy in (True, False):
        channel = Streams().channel(source, destination, is_copy=is_copy)
        assert not isinstance(channel, CudaChannel)
        tensor = torch.zeros(1)
        channel.send(tensor)
        channel.wait_ready()
        assert (channel.take() is tensor) != is_copy


GPU = Device("cuda:0", "gpu", "cuda", memory_bytes=1 << 30)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("to_gpu", [True, False])
def test_a_gpu_copies_on_its_own_stream_and_tells_when(to_gpu: bool) -> None:
    core = core_device("cpu")
    source, destination = (core, GPU) if to_gpu else (GPU, core)
    clock = CudaClock(torch.device("cuda:0"))
    clock.start()
    channel = Streams().channel(source, destination, is_traced=True)
    assert isinstance(channel, CudaChannel)
    original = torch.arange(5.0, device="cpu" if to_gpu else "cuda")
    for _ in range(2):
        begin = clock.mark()
        channel.send(original)
        channel.wait_ready()
        copy = channel.take()
        channel.wait_arrived()
        channel.acknowledge()
        channel.wait_copied()
        original.add_(1)
        end = clock.mark()
        assert copy.device.type == ("cuda" if to_gpu else "cpu")
        assert torch.equal(copy.cpu() + 1, original.cpu())
        assert channel.began is not None
        times = [clock.seconds(mark) for mark in (begin, channel.began, channel.arrived, end)]
        assert times[1] <= times[2] <= times[3]


def start(*functions: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()

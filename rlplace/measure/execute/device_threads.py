"""The worker threads, one a device: each stays pinned, keeps its settings, and runs that device's part of a step.

Clocks tell when an item of a traced step began and ended, on a core or on a GPU's compute stream.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import torch

from rlplace import cuda
from rlplace.errors import RunnerError, UserError
from rlplace.measure.execute.channels import Streams
from rlplace.measure.hosts.host import Device
from rlplace.measure.timing.race import LOOKS_EVERY_S, Suspensions
from rlplace.measure.timing.threads import pin_current_thread, set_intra_op_threads

Job = Callable[[int], None]
Report = Callable[[BaseException], None]

GRACE_S = 1.0
"""How long a thread that was told to give up may take before it is left behind."""


class Worker:
    """The thread of one device.

    Attributes:
        device: where it runs.
        is_busy: whether it has a job whose end was not waited for yet.
        suspended_s: seconds for which this process was suspended during the last `wait`.
    """

    def __init__(self, device: Device, streams: Streams) -> None:
        self.device = device
        self._streams = streams
        self.is_busy = False
        self.suspended_s = 0.0
        self._job: Job | None = None
        self._report: Report | None = None
        self._step = 0
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._thread = threading.Thread(target=self._loop, name=f"rlplace {device.name}", daemon=True)
        self._thread.start()

    @property
    def is_calling(self) -> bool:
        """Whether the calling thread is this worker's."""
        return threading.get_ident() == self._thread.ident

    def start(self, job: Job, step: int, report: Report) -> None:
        """Starts `job(step)`; `report` is called on the worker's thread with what it raises.

        Raises:
            RunnerError: the last job has not ended.
        """
        if self.is_busy:
            raise RunnerError(f"the thread of {self.device.name} is still busy with a step that did not end in time")
        self.is_busy = True
        self._job, self._step, self._report = job, step, report
        self._go.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether the job ended within `timeout_s`; a suspension of this process does not count."""
        until_s, suspensions = time.monotonic() + timeout_s, Suspensions()
        while True:
            has_ended = self._done.acquire(timeout=min(max(until_s - time.monotonic(), 0.0), LOOKS_EVERY_S))
            until_s += suspensions.look()
            if has_ended or time.monotonic() >= until_s:
                break
        self.suspended_s = suspensions.seconds
        self.is_busy = self.is_busy and not has_ended
        return has_ended

    def stop(self) -> None:
        """Ends the thread once it is idle."""
        self._job = None
        with contextlib.suppress(RuntimeError):  # it was stopped before
            self._go.release()

    def _loop(self) -> None:
        with contextlib.ExitStack() as settings:
            unfit: BaseException | None = None
            stream: cuda.Stream | None = None
            try:
                stream = settings.enter_context(_settled(self.device, self._streams))
            except BaseException as error:  # a core that this process may not use, a GPU that is gone: every job fails
                unfit = error
            while True:
                self._go.acquire()
                job, report = self._job, self._report
                if job is None or report is None:
                    return
                try:
                    if unfit is not None:
                        raise unfit
                    job(self._step)
                    if stream is not None:
                        cuda.await_stream(stream)
                except BaseException as error:
                    report(error)
                finally:
                    self._job = self._report = job = report = None  # or an idle thread would keep a plan's tensors
                    self._done.release()


class Crew:
    """The workers of all devices of a host, working through one step together.

    Attributes:
        workers: one a device.
        streams: of its GPUs.
    """

    def __init__(self, devices: tuple[Device, ...]) -> None:
        self.streams = Streams()
        self.workers = [Worker(device, self.streams) for device in devices]
        self._is_stopped = False
        self._is_settled = True  # False: what a failed step launched may still run
        self._process, self._turns = os.getpid(), threading.Lock()
        self._caller: int | None = None  # the thread whose turn it is

    @contextlib.contextmanager
    def turn(self, *, runs: bool = True) -> Iterator[None]:
        """While active, the calling thread alone uses the crew and what it works on; other threads wait.

        Args:
            runs: whether a step is run. What only reads or sets state may also be done within a turn of the same
                thread, and in a forked process.

        Raises:
            UserError: a step is run within another one, by a hook, a loss or an op; or in a forked process, which has
                none of the threads.
        """
        if os.getpid() != self._process:
            if runs:
                raise UserError(
                    "a placed model was called in a process that was forked from its own: threads do not survive a "
                    "fork. Make it in the process that calls it (in `worker_init_fn` of a DataLoader, in `post_fork` "
                    "of a server), or call it in the process that made it."
                )
            yield
            return
        is_within = threading.get_ident() == self._caller
        if is_within and not runs:
            yield
            return
        if is_within or any(worker.is_calling for worker in self.workers):
            raise UserError(
                "a placed model was called within a call of itself, by a hook, a loss or an op of it. Call it after "
                "that call has returned, or make a second placed model for the inner calls."
            )
        with self._turns:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = None

    def run(self, jobs: list[Job], step: int, *, on_error: Callable[[], None], deadline_s: float) -> None:
        """Runs one job a device and returns when all have ended.

        Args:
            jobs: in the order of the devices.
            step: each job's argument.
            on_error: called once, as soon as a job raised or the time is up: it must wake jobs that wait for others.
            deadline_s: seconds that all of it may take; a suspension of this process does not count.

        Raises:
            RunnerError: a job raised: the first cause, chained. Or a GPU still runs what a failed step launched.
            TimeoutError: a job did not end within `deadline_s` seconds; its thread is left behind if it is stuck.
        """
        if self._is_stopped:
            raise RunnerError("its threads were ended (`close`), so nothing can run on them any more; make a new one")
        if not self._is_settled and not self._settle():
            raise RunnerError("a GPU is still busy with a step that did not end in time, in memory that this one needs")
        self._leave_behind([worker for worker in self.workers if worker.is_busy])
        failure = _Failure(on_error)
        until_s = time.monotonic() + deadline_s
        running = list(self.workers)
        try:
            for worker, job in zip(self.workers, jobs, strict=True):
                worker.start(job, step, failure.report)
            while running and running[0].wait(until_s - time.monotonic()):
                until_s += running.pop(0).suspended_s
            if running:
                late = running[0].device.name
                failure.report(_Late(f"device {late} did not end its part within {deadline_s:g} s"))
        except BaseException as error:  # Ctrl-C while waiting
            failure.report(error)
            raise
        finally:
            self._leave_behind([worker for worker in running if not worker.wait(GRACE_S)])
            if failure.cause is not None:  # what was launched goes on, in memory that is about to be set anew
                self._settle()
        if isinstance(failure.cause, _Late):
            raise TimeoutError(str(failure.cause))
        if failure.cause is not None:
            raise RunnerError(f"{type(failure.cause).__name__}: {failure.cause}") from failure.cause

    def _settle(self) -> bool:
        self._is_settled = self.streams.settle(GRACE_S)
        return self._is_settled

    def _leave_behind(self, stuck: list[Worker]) -> None:
        """Threads stuck in native code cannot be ended: go on with fresh ones."""
        for worker in stuck:
            worker.stop()
            self.workers[self.workers.index(worker)] = Worker(worker.device, self.streams)

    def stop(self) -> None:
        """Ends all threads, once the turn of another thread has ended."""
        with self.turn(runs=False):
            self._is_stopped = True
            for worker in self.workers:
                worker.stop()


class _Late(Exception):
    """The time was up."""


class _Failure:
    """What went wrong first: everything that is reported after it is a consequence."""

    def __init__(self, on_error: Callable[[], None]) -> None:
        self.cause: BaseException | None = None
        self._on_error = on_error
        self._lock = threading.Lock()

    def report(self, error: BaseException) -> None:
        with self._lock:
            if self.cause is None:
                self.cause = error
                self._on_error()


@contextlib.contextmanager
def _settled(device: Device, streams: Streams) -> Iterator[cuda.Stream | None]:
    """While active, the calling thread runs ops as `device` does; gives the stream that a GPU's run on."""
    pin_current_thread(device.cores)
    is_gpu = device.backend == "cuda"
    # a GPU's thread copies to pinned memory: a team for that, on few cores, would slow the CPU's
    set_intra_op_threads(1 if is_gpu else max(len(device.cores), 1))
    with torch.inference_mode():
        if is_gpu:
            stream = streams.renew_compute(device)
            with cuda.using(stream):
                yield stream
        else:
            yield None


CLOCK_HZ = 1.5e9
"""Of a GPU, about."""
SPARE = 1.5
LONGEST_HOLD_S = 0.1


def cycles_to_launch(launch_s: float) -> int:
    """Clock cycles to hold a GPU back for, so that launches that take `launch_s` seconds get ahead of it."""
    return int(min(launch_s * SPARE, LONGEST_HOLD_S) * CLOCK_HZ)


class HostClock:
    """The clock of a core: marks are `time.perf_counter` seconds.

    Traced code calls `mark` at the beginning and end of every item; `seconds` tells afterwards when that was.
    """

    mark = staticmethod(time.perf_counter)

    def start(self) -> None:
        pass

    def seconds(self, mark: float) -> float:
        return mark


class CudaClock:
    """The clock of a GPU: marks are events on the calling thread's stream, as work ends long after it was launched.

    Their times are made comparable with the host's by one event whose end the host has seen, at the start of the job.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = cuda.event(is_timed=True)
        self._base_s = 0.0

    def start(self) -> None:
        cuda.record(self._base, cuda.current_stream(self._device))
        cuda.await_event(self._base)
        self._base_s = time.perf_counter()

    def mark(self) -> cuda.Event:
        event = cuda.event(is_timed=True)
        cuda.record(event, cuda.current_stream(self._device))
        return event

    def seconds(self, mark: cuda.Event) -> float:
        """Seconds on `time.perf_counter` at which the device passed `mark`; waits for it."""
        cuda.await_event(mark)
        return self._base_s + cuda.elapsed_s(self._base, mark)


Clock = HostClock | CudaClock

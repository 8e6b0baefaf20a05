"""The worker threads of a step, one for each device, and the channels that carry tensors between them.

A thread stays pinned, keeps its settings, and runs its device's part of a step. A channel carries one tensor of a plan
from the device that made it to one that reads it, while both run. `Streams` holds the streams of a crew's GPUs: one to
compute on for each device, and a pair for copies from each device to each other. Clocks tell when an item of a traced
step began and ended, on a core or on a GPU's compute stream.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from rlplace import cuda
from rlplace.errors import RunnerError, UserError
from rlplace.measure.execute.rank_programs import RankPrograms
from rlplace.measure.execute.shared_heap import SharedHeap
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.problem import Plan
from rlplace.measure.timing.race import LOOKS_EVERY_S, Suspensions
from rlplace.measure.timing.threads import pin_current_thread, set_intra_op_threads

if TYPE_CHECKING:
    from rlplace.graphs import OpGraph, OptimizerSpec


class Transport(Protocol):
    """One transfer of a plan: code calls its methods by the names of `CHANNEL_METHODS`, as far as it has them."""

    def send(self, tensor: torch.Tensor) -> None:
        """Gives the tensor to the destination, which `wait_ready` waits for."""

    def take(self) -> torch.Tensor:
        """The tensor at the destination."""

    def abort(self) -> None:
        """Wakes all that wait in the step, which is given up."""


Held = Mapping[int, Any]
"""By op, what all processes share: the tensor of a source, or the state of an update."""


class Asked(NamedTuple):
    """Gradients that are asked for.

    Attributes:
        into: by dotted name of their parameters: tensors that they are added to; None where they go to updates.
        fresh: names of those tensors that hold nothing yet: they are overwritten.
        loss_scale: the gradients are those of the loss times this.
    """

    into: Mapping[str, torch.Tensor] | None = None
    fresh: Collection[str] = ()
    loss_scale: float = 1.0


class Channel:
    """One transfer of a plan, used once a step: the producer sends, the destination waits, then takes.

    Between cores, the thread of the destination makes the copy; a hand-over is the reference itself.

    It has a slot for the tensor and two signals: the tensor is ready, and the original was copied. A signal is a lock
    that starts locked: one side releases it, the other takes it and so leaves it locked for the next step.

    `wait_ready` returns when the tensor may be taken. `acknowledge` tells the producer that the original was copied.

    Args:
        is_copy: False hands the tensor itself over.
    """

    def __init__(self, *, is_copy: bool = True) -> None:
        self._is_copy = is_copy
        self._slot: torch.Tensor | None = None
        self._is_aborted = False
        self._ready, self._copied = locked(), locked()
        self.wait_ready = self._ready.acquire
        self.acknowledge = self._copied.release

    def send(self, tensor: torch.Tensor) -> None:
        """Hands the tensor to the destination's thread."""
        self._slot = tensor
        if self._is_aborted:  # looked at after the slot was filled, as `abort` clears it after it said so
            self._slot = None
            return
        self._ready.release()

    def _taken(self) -> torch.Tensor:
        tensor, self._slot = self._slot, None
        assert tensor is not None, "nothing was sent"
        return tensor

    def take(self) -> torch.Tensor:
        """The tensor on the destination, where nothing may read it before `wait_arrived`."""
        tensor = self._taken()
        return tensor.clone() if self._is_copy else tensor

    def wait_arrived(self) -> None:
        """Makes the next work of the calling thread wait for the copy; between cores, the tensor is already there."""

    def wait_copied(self) -> bool:
        """Returns when the destination no longer reads the original, which an op is about to overwrite."""
        return self._copied.acquire()

    def abort(self) -> None:
        """Wakes the threads that wait, so that a failed step ends; a channel is not used again after it."""
        self._is_aborted = True
        self._slot = None
        release_all((self._ready, self._copied))


class CudaChannel(Channel):
    """A copy on a stream of its own: it waits for the producer by an event and holds up neither device's compute.

    Launches of the destination between `take` and `wait_arrived` run beside the copy.

    Host memory that a GPU copies from or to is pinned: from pageable memory the call would wait for the copy.

    Attributes:
        device: whose events `began` and `arrived` are.
        began: recorded when a traced copy may begin: its stream is free and the tensor is there.
        arrived: recorded when the copy is done.
    """

    def __init__(self, source: Device, destination: Device, streams: CopyStreams, *, is_traced: bool = False) -> None:
        super().__init__()
        self._source, self._destination = torch_device(source), torch_device(destination)
        self._streams = streams
        self._staging: torch.Tensor | None = None  # of a copy from the host; its last one is done before the next step
        self._produced = cuda.event() if source.backend == "cuda" else None
        self.device = destination if destination.backend == "cuda" else source
        self.began = cuda.event(is_timed=True) if is_traced else None
        self.arrived = cuda.event(is_timed=is_traced)

    def send(self, tensor: torch.Tensor) -> None:
        if self._produced is not None:  # before the tensor is there: a thread that `abort` wakes may take it at once
            cuda.record(self._produced, cuda.current_stream(self._source))
        super().send(tensor)

    def take(self) -> torch.Tensor:
        tensor, streams = self._taken(), self._streams
        if self._source.type == "cpu":
            self._staging = cuda.pinned_like(tensor) if self._staging is None else self._staging
            tensor = self._staging.copy_(tensor)
        with cuda.using(streams.outgoing), cuda.using(streams.incoming):
            if self._produced is not None:
                cuda.wait(streams.incoming, self._produced)
                cuda.keep_for(tensor, streams.outgoing)
            copy = self._copied_on_stream(tensor)
        if self._destination.type == "cuda":
            cuda.keep_for(copy, cuda.current_stream(self._destination))
        return copy

    def _copied_on_stream(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy, which the current stream makes between the two events."""
        if self.began is not None:
            cuda.record(self.began, self._streams.incoming)
        if self._destination.type == "cuda":
            copy = cuda.copy(tensor, self._destination)
        else:
            copy = cuda.pinned_like(tensor)
            cuda.copy_into(copy, tensor)
        cuda.record(self.arrived, self._streams.incoming)
        return copy

    def wait_arrived(self) -> None:
        if self._destination.type == "cuda":
            cuda.wait(cuda.current_stream(self._destination), self.arrived)
        else:
            cuda.await_event(self.arrived)

    def wait_copied(self) -> bool:
        super().wait_copied()
        if self._produced is not None and not self._is_aborted:
            cuda.wait(cuda.current_stream(self._source), self.arrived)
        return True


def locked() -> threading.Lock:
    """A signal: a lock that starts locked, which one side releases and the other takes."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def release_all(locks: Iterable[threading.Lock]) -> None:
    """Wakes the threads that wait for `locks`."""
    for lock in locks:
        with contextlib.suppress(RuntimeError):  # no thread waits, or the other side was faster
            lock.release()


POLL_S = 1e-3
"""Between two looks at whether a stream is done."""


def torch_device(device: Device) -> torch.device:
    """The PyTorch device behind a `Device`: every CPU core is `cpu`, every part of a GPU is that GPU."""
    parsed = cuda.parse_name(device.local_name) if device.backend == "cuda" else None
    return torch.device("cpu") if parsed is None else torch.device("cuda", parsed[0])


class CopyStreams(NamedTuple):
    """Where copies from one device to another run, at least one of them a GPU.

    Between two GPUs PyTorch copies on a stream of the source and makes one of the destination wait for it, and the
    other way round: both must be streams that nothing else runs on.
    """

    incoming: cuda.Stream
    """Of the destination; of the source where that alone is a GPU. It owns the copies' memory on a GPU."""
    outgoing: cuda.Stream
    """It reads the original: of the source where the two are different GPUs, else `incoming`."""


class Streams:
    """Streams of the GPUs among some devices, made when first asked for: each device and each pair has its own.

    Those for copies come from the pool of high priority, where no compute stream comes from. A pool holds 32 a GPU and
    hands them out in turn: a GPU with more pairs (in seven parts or more) has some share a stream, and run in order.
    """

    def __init__(self) -> None:
        self._compute: dict[str, cuda.Stream] = {}
        self._left: list[cuda.Stream] = []  # of threads that were left behind: what they launched may still run
        self._copies: dict[tuple[str, str], CopyStreams] = {}
        self._lock = threading.Lock()

    def renew_compute(self, device: Device) -> cuda.Stream:
        """A stream for the thread that computes on a GPU from now on."""
        stream = cuda.stream(torch_device(device))
        with self._lock:
            if device.name in self._compute:
                self._left.append(self._compute[device.name])
            self._compute[device.name] = stream
        return stream

    def channel(self, source: Device, destination: Device, *, is_copy: bool = True, is_traced: bool = False) -> Channel:
        """A channel between two devices; copies of one pair with a GPU run in order.

        Args:
            source: sends.
            destination: receives.
            is_copy: between cores, False hands the tensor itself over: both see the same memory.
            is_traced: a copy by a GPU keeps the events of its beginning and end.
        """
        if "cuda" not in (source.backend, destination.backend):
            return Channel(is_copy=is_copy)
        pair, here, there = (source.name, destination.name), torch_device(source), torch_device(destination)
        with self._lock:
            if pair not in self._copies:
                is_between = here.type == there.type == "cuda" and here != there
                incoming = cuda.stream(there if there.type == "cuda" else here, is_urgent=True)
                self._copies[pair] = CopyStreams(
                    incoming, cuda.stream(here, is_urgent=True) if is_between else incoming
                )
            return CudaChannel(source, destination, self._copies[pair], is_traced=is_traced)

    def settle(self, timeout_s: float) -> bool:
        """Whether all that was launched on them ended within `timeout_s`, be it with an error."""
        with self._lock:
            pending = [*self._left, *self._compute.values(), *(each for pair in self._copies.values() for each in pair)]
        until_s = time.monotonic() + timeout_s
        for stream in pending:
            while not _is_done(stream):
                if time.monotonic() > until_s:
                    return False
                time.sleep(POLL_S)
        with self._lock:
            self._left = [stream for stream in self._left if stream not in pending]
        return True


def _is_done(stream: cuda.Stream) -> bool:
    try:
        return cuda.is_done(stream)
    except RuntimeError:  # what went wrong on it: nothing of it runs any more
        return True


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
        self._task: tuple[Job, int, Report] | None = None
        self._go, self._done = locked(), locked()
        self._thread = threading.Thread(target=self._loop, name=f"rlplace {device.name}", daemon=True)
        self._thread.start()

    @property
    def is_calling(self) -> bool:
        """Whether the calling thread is this worker's."""
        return threading.get_ident() == self._thread.ident

    def start(self, job: Job, step: int, report: Report) -> None:
        """Starts `job(step)`; `report` is called on the worker's thread with its error.

        Raises:
            RunnerError: the last job has not ended.
        """
        self._refuse_if_busy()
        self.is_busy = True
        self._task = job, step, report
        self._go.release()

    def wait(self, timeout_s: float, is_hopeless: Callable[[], bool] = bool) -> bool:
        """Whether the job ended within `timeout_s`; a suspension of this process does not count.

        Args:
            timeout_s: seconds.
            is_hopeless: whether it will hardly end any more: then it has `GRACE_S` left.
        """
        until_s, suspensions = time.monotonic() + timeout_s, Suspensions()
        while True:
            has_ended = self._done.acquire(timeout=min(max(until_s - time.monotonic(), 0.0), LOOKS_EVERY_S))
            until_s += suspensions.look()
            if not has_ended and is_hopeless():
                until_s, is_hopeless = min(until_s, time.monotonic() + GRACE_S), bool
            if has_ended or time.monotonic() >= until_s:
                break
        self.suspended_s = suspensions.seconds
        self.is_busy = self.is_busy and not has_ended
        return has_ended

    def replacement(self) -> Worker:
        """A worker in the place of this one, whose thread is stuck and left behind."""
        self.stop()
        return Worker(self.device, self._streams)

    def _refuse_if_busy(self) -> None:
        if self.is_busy:
            raise RunnerError(f"{self.device.name} is still busy with a step that did not end in time")

    def stop(self) -> None:
        """Ends the thread once it is idle."""
        self._task = None
        with contextlib.suppress(RuntimeError):  # it was stopped before
            self._go.release()

    def _loop(self) -> None:
        with contextlib.ExitStack() as settings:
            unfit: BaseException | None = None
            stream: cuda.Stream | None = None
            try:
                stream = settings.enter_context(as_device(self.device, self._streams))
            except BaseException as error:  # a core that this process may not use, a GPU that is gone: every job fails
                unfit = error
            while True:
                self._go.acquire()
                if self._task is None:
                    return
                job, step, report = self._task
                try:
                    if unfit is not None:
                        raise unfit
                    job(step)
                    if stream is not None:
                        cuda.await_stream(stream)
                except BaseException as error:
                    report(error)
                finally:
                    self._task = None
                    del job, report  # or an idle thread would keep a plan's tensors
                    self._done.release()


class Crew:
    """The workers of all devices of a host, working through one step together.

    Attributes:
        workers: one a device.
        streams: of its GPUs.
        here: the devices whose code runs in this process.
        has_slots: whether tensors go from device to device through slots, which the plan assigns.
        is_wired: whether they go as messages.
        heap: memory that other processes of the host see; None where there are none.
        sends_wait: whether a send may wait for its receive.
        is_spent: whether it can run nothing any more: another one is needed.
    """

    has_slots = is_wired = sends_wait = is_spent = False
    heap: SharedHeap | None = None

    def __init__(self, devices: Sequence[Device]) -> None:
        self.streams = Streams()
        self.workers = [Worker(device, self.streams) for device in devices]
        self.here: Sequence[int] = range(len(devices))
        self._is_stopped = False
        self._is_settled = True  # False: what a failed step launched may still run
        self._process, self._turns = os.getpid(), threading.Lock()
        self._caller: int | None = None  # the thread whose turn it is

    @contextlib.contextmanager
    def turn(self, *, runs: bool = True) -> Iterator[None]:
        """While active, the calling thread alone uses the crew and its tensors; other threads wait.

        Args:
            runs: whether a step is run. Reading and setting of state may also be done within a turn of the same
                thread, and in a forked process.

        Raises:
            UserError: a step is run within another one, by a hook, a loss or an op; or in a forked process, which has
                none of the threads.
        """
        is_forked, is_within = os.getpid() != self._process, threading.get_ident() == self._caller
        if is_forked and runs:
            raise UserError(
                "a placed model was called in a process that was forked from its own: threads do not survive a "
                "fork. Make it in the process that calls it (in `worker_init_fn` of a DataLoader, in `post_fork` "
                "of a server), or call it in the process that made it."
            )
        if not runs and (is_forked or is_within):
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
            RunnerError: a job raised: the first cause, chained. Or a GPU still runs launches of a failed step.
            TimeoutError: a job did not end within `deadline_s` seconds; its thread is left behind if it is stuck.
        """
        self.look()
        if not self._is_settled and not self.settle():
            raise RunnerError(
                "a device is still busy with a step that did not end in time, in memory that this one needs"
            )
        self._leave_behind([worker for worker in self.workers if worker.is_busy])
        causes: list[BaseException] = []  # what went wrong first: all that is reported after it is a consequence
        reporting = threading.Lock()

        def report(error: BaseException) -> None:
            with reporting:
                if not causes:
                    causes.append(error)
                    on_error()
                elif isinstance(causes[0], Woken):  # another process has the cause
                    causes[0] = error

        until_s = time.monotonic() + deadline_s
        running = list(self.workers)
        try:
            for worker, job in zip(self.workers, jobs, strict=True):
                worker.start(job, step, report)
            while running and running[0].wait(until_s - time.monotonic(), self.is_hopeless):
                until_s += running.pop(0).suspended_s
            running = [worker for worker in running if not (self.is_hopeless() and worker.wait(0.0))]
            if running:
                report(_Late(f"device {running[0].device.name} did not end its part within {deadline_s:g} s"))
        except BaseException as error:  # Ctrl-C while waiting
            report(error)
            raise
        finally:
            self._leave_behind([worker for worker in running if not worker.wait(GRACE_S)])
            if causes:  # what was launched goes on, in memory that is about to be set anew
                self.settle()
        if causes and isinstance(causes[0], _Late):
            raise TimeoutError(str(causes[0]))
        if causes and isinstance(causes[0], RankFailed):
            raise causes[0]
        if causes:
            raise RunnerError(f"{type(causes[0]).__name__}: {causes[0]}") from causes[0]

    def channels(self, made: RankPrograms, host: Host, *, is_traced: bool = False) -> dict[int, Transport]:
        """Channels for the transfers of a plan, those that this process has an end of.

        Raises:
            InvalidValue: the crew has no way for one.
        """
        ends = zip(made.sources, made.plan.transfer_destination.tolist(), strict=True)
        return {
            k: self.streams.channel(
                host.devices[source], host.devices[to], is_copy=not made.is_handover[k], is_traced=is_traced
            )
            for k, (source, to) in enumerate(ends)
        }

    def look(self) -> None:
        """Sees that steps can run.

        Raises:
            RunnerError: they cannot any more, and why.
        """
        if self._is_stopped:
            raise RunnerError("it was closed (`close`), so nothing can run on it any more; make a new one")

    def load(self, key: int, graph: OpGraph, plan: Plan, options: dict[str, Any], held: Held) -> None:
        """Loads a step in the other processes, where the crew has some."""

    def unload(self, key: int) -> None:
        """Unloads it there."""

    def follow(self, spec: OptimizerSpec | None, asked: Asked) -> None:
        """Tells the other processes the options of updates, and where gradients go, in the steps to come."""

    def results(self, key: int, makers: Mapping[int, int], made: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Of a step, by index, results that other processes made.

        Args:
            key: of the step.
            makers: by index of the results that are wanted, the device that makes each.
            made: all results, as far as this process has them.
        """
        return {}

    def held(self, host: Host) -> Sequence[int]:
        """The devices whose parameters and states are in the memory of this process."""
        return range(host.num_devices)

    def ask(self, *message: Any) -> list[Any]:
        """The answers of the other processes to a message."""
        return []

    def marks(self, key: int) -> list[tuple[dict[int, float], dict[int, float]]]:
        """Of a traced step, when items began and ended in each other process, by the clock of this one."""
        return []

    def is_hopeless(self) -> bool:
        """Whether the step was given up, and cannot wake all that wait in it.

        Raises:
            RunnerError: a process of it is gone.
        """
        return False

    def part(self, run: Job, channels: Mapping[int, Transport]) -> Job:
        """One device's part of a step, from its code and its channels."""
        return run

    def job(self, device: int, key: int, part: int = 0) -> Job:
        """What another process runs of a loaded step; of one in two parts, in the first (0) or the second (1)."""
        raise NotImplementedError

    def settle(self) -> bool:
        """Whether nothing of a failed step runs any more."""
        self._is_settled = self.streams.settle(GRACE_S)
        return self._is_settled

    def _leave_behind(self, stuck: list[Worker]) -> None:
        """Threads stuck in native code cannot be ended: go on with fresh ones."""
        for worker in stuck:
            self.workers[self.workers.index(worker)] = worker.replacement()

    def stop(self) -> None:
        """Ends all threads, once the turn of another thread has ended."""
        with self.turn(runs=False):
            self._is_stopped = True
            for worker in self.workers:
                worker.stop()


class _Late(Exception):
    """The time was up."""


class Woken(Exception):
    """The step was given up elsewhere; it says nothing about this device."""


class RankFailed(RunnerError):
    """A part of a step failed in another process, as its message tells."""


@contextlib.contextmanager
def as_device(device: Device, streams: Streams) -> Iterator[cuda.Stream | None]:
    """While active, the calling thread runs ops as `device` does; gives the stream that a GPU's run on."""
    pin_current_thread(device.cores)
    is_gpu = device.backend == "cuda"
    # a GPU's thread copies to pinned memory: a team for that, on few cores, would slow the CPU's
    set_intra_op_threads(1 if is_gpu else max(len(device.cores), 1))
    stream = streams.renew_compute(device) if is_gpu else None
    with torch.inference_mode(), contextlib.nullcontext() if stream is None else cuda.using(stream):
        yield stream


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
    Each job uses the events of the one before: to make one costs more than to record it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = cuda.event(is_timed=True)
        self._base_s = 0.0
        self._events: list[cuda.Event] = []
        self._used = 0

    def start(self) -> None:
        self._stream, self._used = cuda.current_stream(self._device), 0
        cuda.record(self._base, self._stream)
        cuda.await_event(self._base)
        self._base_s = time.perf_counter()

    def mark(self) -> cuda.Event:
        if self._used == len(self._events):
            self._events.append(cuda.event(is_timed=True))
        event = self._events[self._used]
        self._used += 1
        cuda.record(event, self._stream)
        return event

    def seconds(self, mark: cuda.Event) -> float:
        """Seconds on `time.perf_counter` at which the device passed `mark`; waits for it."""
        cuda.await_event(mark)
        return self._base_s + cuda.elapsed_s(self._base, mark)


Clock = HostClock | CudaClock


def clock_of(device: Device) -> Clock:
    """The clock that traced steps of a device are timed by."""
    return CudaClock(torch_device(device)) if device.backend == "cuda" else HostClock()

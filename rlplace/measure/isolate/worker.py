"""A worker process: its start, its work, and the explanation of its end.

The worker holds a `HostRunner`, answers requests, and announces its actions on its board. `WorkerProcess` is its
handle in the parent. Its end is explained by its exit status and by the stacks that Python wrote on the way out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.graphs import OpGraph
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Origin
from rlplace.measure.execute import distributed, shared_memory
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.distributed import Wires, connect, store_in, torchrun_store
from rlplace.measure.execute.launch_code import WAITING, StepCode
from rlplace.measure.execute.rank_processes import RankCrew, serve_rank
from rlplace.measure.execute.residents import Residents, limited_memory
from rlplace.measure.execute.shared_memory import Arena
from rlplace.measure.hosts.host import Host
from rlplace.measure.isolate import memory_watch
from rlplace.measure.isolate.memory_watch import Room
from rlplace.measure.isolate.messages import (
    IDLE,
    Ask,
    Board,
    Done,
    Fault,
    Race,
    Request,
    Said,
    Setup,
    Step,
    Trace,
    apply_settings,
)
from rlplace.measure.isolate.packing import Packed, Section, Unpacked
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.profiling.profile import profile_costs
from rlplace.measure.timing.eager_step import MAKING_S
from rlplace.measure.timing.host_runner import HostRunner, status_of
from rlplace.measure.timing.race import LOOKS_EVERY_S, Timer, Watch, looks
from rlplace.measure.timing.threads import keep_freed_memory, one_thread_here, pin_current_thread
from rlplace.process_settings import close_own, keep_from_children

STARTS_WITHIN_S = 600.0
"""Seconds for a worker to import PyTorch and the user's modules, on a machine that is busy."""
_ENDS_WITHIN_S = 10.0
_STACKS_WITHIN_S = 0.2
_CODE = """
import runpy
import sys
runpy.run_path({lifeline!r})["end_with"]({alive!r})
sys.path[:] = {first!r}
import torch
from rlplace.measure.isolate.worker import main
sys.path[:] = {path!r}
main({ends!r}, {index!r}, {link!r}, meeting={meeting!r}, cores={cores!r})
"""
"""The lifeline comes first, as importing takes long; then PyTorch, before all else of ours: so OpenMP has the settings
of this process, which the worker inherits, and no others. PyTorch and others ask for packages that need not be there
(`triton`): none of them comes from the current folder, which may be a stranger's."""
LIFELINE = str(Path(__file__).with_name("lifeline.py"))
ALIVE = 1
"""Place of the pipe of the lifeline among the descriptors that a worker inherits."""
Link = tuple[int, ...]
"""Of a rank: its index, then descriptors: of the `Arena` of its machine, of the memory in which ranks find each other
(`_wires`; -1 on another machine than the first rank's), and of messages between the first rank and the others."""
Meeting = tuple[str, str] | tuple[()]
"""Where ranks of several machines find each other: a prefix of keys in torchrun's store, and the network interface of
this machine; empty where all are on one machine."""


class CannotIsolate(RunnerError):
    """No worker can be started for this program, and why."""

    is_from_outside = False
    """Whether another process ended it while it started."""


class WorkerProcess:
    """A fresh interpreter that holds a `HostRunner`; it is started by a command, so nothing of this process is forked.

    The user's main module is not run there: objects that it defined travel by value. The worker ends with this process.

    Args:
        packed: the setup of the worker.
        link: to other ranks, if there are any.
        meeting: of the ranks.
        messages: descriptor of the connection to the process that asks, where that is not this one.
        cores: that it may use; by default those of its setup.
        has_folder: whether modules of the current folder can be imported there; by default if any was here.

    Attributes:
        name: for messages.
        board: the board of the worker.
        connection: for messages.
        limit_bytes: memory that it may hold, placements included; infinite until it is ready.
        held_bytes: its memory at the last look.

    Raises:
        OSError: there is no memory for the tensors, or no process can be started.
    """

    name = "the worker"

    def __init__(
        self,
        packed: Packed,
        link: Link = (),
        *,
        meeting: Meeting = (),
        messages: int | None = None,
        cores: tuple[int, ...] = (),
        has_folder: bool | None = None,
    ) -> None:
        shared = packed.seal()
        self.board = Board.new()
        self.limit_bytes = float("inf")
        self.held_bytes = 0
        self._num_killed = memory_watch.num_killed()
        self._stacks = tempfile.TemporaryFile(prefix="rlplace-")  # noqa: SIM115  # closed with the process
        ours, theirs = socket.socketpair()
        alive, lifeline = os.pipe()
        self._lifeline = keep_from_children(lifeline)
        messages = theirs.fileno() if messages is None else messages
        ends = (messages, alive, shared, self.board.file, self._stacks.fileno())
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _code(ends, packed.index, has_folder, link=link, meeting=meeting, cores=cores),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what ops print must not mix with what a command prints there
                pass_fds=(*ends, *(file for file in link[1:] if file >= 0)),
                env=_environment(),
            )
        except BaseException:
            close_own(self._lifeline)
            ours.close()
            self._stacks.close()
            self.board.close()
            raise
        finally:
            theirs.close()
            os.close(alive)
        self.connection: Connection[Any, Any] = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def await_ready(self, look: Callable[[], None] = lambda: None) -> None:
        """Waits until it can be asked.

        Args:
            look: called now and then; what it raises ends the waiting.

        Raises:
            CannotIsolate: it cannot read its setup, or it ended.
        """
        try:
            for _ in looks(STARTS_WITHIN_S):
                if self.connection.poll(LOOKS_EVERY_S):
                    break
                look()
            else:
                raise CannotIsolate(f"the worker was not ready within {STARTS_WITHIN_S:g} s")
            message = self.connection.recv()
        except (EOFError, OSError) as error:
            self.end()
            raise self.ended_early() from error
        if isinstance(message, Fault):
            raise CannotIsolate(message.why)
        self.limit_bytes = self.look_at_memory() + message.result

    def ended_early(self) -> CannotIsolate:
        """The error of one that ended before it was ready."""
        is_from_outside, how = -self.return_code in FROM_OUTSIDE, ending(self.return_code)
        words = "was ended from outside" if is_from_outside else "ended"
        error = CannotIsolate(f"{self.name} {words} ({how}) while it started")
        error.is_from_outside = is_from_outside
        return error

    def look_at_memory(self) -> int:
        """Its memory now."""
        self.held_bytes = memory_watch.resident_bytes(self.pid) or self.held_bytes
        return self.held_bytes

    def write_stacks(self) -> None:
        """Makes it write the stacks of its threads, also if it hangs in native code; returns once it has."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)
        until_s, size = time.monotonic() + _STACKS_WITHIN_S, -1
        while time.monotonic() < until_s and (size <= 0 or os.fstat(self._stacks.fileno()).st_size != size):
            size = os.fstat(self._stacks.fileno()).st_size
            time.sleep(_STACKS_WITHIN_S / 10)

    def stacks(self) -> str:
        """The stacks of its threads, once: at its end, older ones would be taken for the last."""
        file = self._stacks.fileno()
        text = os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", errors="replace")
        os.ftruncate(file, os.lseek(file, 0, os.SEEK_SET))  # the worker's end has the same position
        return text

    def has_lost_siblings(self) -> bool:
        """Whether the kernel ended a process for want of memory since this one began, perhaps this one."""
        return memory_watch.num_killed() > self._num_killed

    @property
    def return_code(self) -> int:
        """Its exit code; of a worker that a signal ended, below 0."""
        return self._process.returncode or 0

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._process.poll() is not None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped it, and none has continued it."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except (AttributeError, ChildProcessError):  # a system without that call, or it has ended
            return False

    def end(self) -> None:
        """Ends it at once, if it is there, and waits until it is gone."""
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self.has_closed():
                    self._process.wait(_ENDS_WITHIN_S)
        if self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, for as long as its device takes
                self._process.wait(_ENDS_WITHIN_S)

    def kill(self) -> None:
        """Ends it at once, if it is there."""
        self._process.kill()

    def close(self) -> None:
        """Ends it and lets go of everything."""
        self.end()
        self.connection.close()
        close_own(self._lifeline)
        self._stacks.close()
        self.board.close()

    def has_closed(self) -> bool:
        """Whether it closed its end of the socket: it is on its way out, and its exit status tells why."""
        try:
            while self.connection.poll():
                self.connection.recv_bytes()
        except (EOFError, OSError):
            return True
        return False


def _code(ends: Sequence[int], index: Section, has_folder: bool | None, **given: Any) -> str:
    """The command of the worker: with this process's path, once all is imported that is not the user's."""
    here = os.getcwd()
    path = list(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))
    # a checkout in the current folder, say
    homes = {str(Path(str(sys.modules[name].__file__)).parents[1]) for name in ("rlplace", "torch")}
    first = [entry for entry in path if entry != here or entry in homes]
    if here not in path and (has_run(here) if has_folder is None else has_folder):
        path.append(here)
    given |= {"ends": tuple(ends), "index": index}
    return _CODE.format(lifeline=LIFELINE, alive=ends[ALIVE], first=first, path=path, **given)


def has_run(folder: str) -> bool:
    """Whether a module of the folder was imported here, as that of a user's function is: it will be there, too."""
    facts = [vars(each) for name, each in list(sys.modules.items()) if "." not in name and isinstance(each, ModuleType)]
    places = [place for each in facts for place in each.get("__path__") or [each.get("__file__") or ""]]
    return folder in {os.path.dirname(place) for place in places}


def _environment() -> dict[str, str]:
    """That of this process; an empty or relative entry of PYTHONPATH would be of the folder that is current now."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in entries if os.path.isabs(entry))}


FROM_OUTSIDE = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
"""Signals that other processes send; faults of an op raise others."""
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_PLACED = re.compile(r"<placed step, device (?P<device>\d+)>\Z")
_TRANSPORTS = (distributed.__file__, shared_memory.__file__)
"""They wait and copy as the line of an op does."""

Frame = tuple[str, int, str]
"""File, line and function."""


def ending(return_code: int) -> str:
    """How a process ended, in words.

    >>> ending(-6), ending(3)
    ('SIGABRT', 'exit code 3')
    """
    if return_code >= 0:
        return f"exit code {return_code}"
    try:
        return signal.Signals(-return_code).name
    except ValueError:
        return f"signal {-return_code}"


def stacks_of(text: str) -> list[list[Frame]]:
    """The stack of each thread that `faulthandler` wrote, innermost frame first; the thread at fault comes first.

    Args:
        text: its output: one dump, or several, of which the last counts.
    """
    threads = list(_THREAD.finditer(text))
    spans = pairwise([*(match.start() for match in threads), len(text)])
    stacks = [[(at["file"], int(at["line"]), at["name"]) for at in _FRAME.finditer(text, *span)] for span in spans]
    first = max((k for k, match in enumerate(threads) if match["current"].startswith("Current")), default=0)
    return stacks[first : first + 1] + stacks[:first] + stacks[first + 1 :]


def ops_at_fault(
    texts: Sequence[str], graph: OpGraph, host: Host, plan: Plan, *, is_stuck: bool = False, **options: Any
) -> list[str]:
    """The op that ran in each process, with its device and the user's line below it, in words; "" where the stacks do
    not tell.

    Args:
        texts: of `faulthandler`.
        graph: with its program.
        host: the devices.
        plan: the plans that ran.
        is_stuck: whether the step hung: then threads that wait for another's tensor are not at fault.
        options: of its code, which has other lines where it was traced, say.
    """
    ways: dict[str, Any] = {"has_slots": host.processes, "is_wired": host.is_wired}
    made = partial(StepCode, graph, host, plan, sends_wait=host.sends_wait, **(ways | options))
    code = cache(made)  # takes long, if there are many ops
    return [_op_at_fault(text, host, code, is_stuck) for text in texts]


def _op_at_fault(text: str, host: Host, code: Callable[[], StepCode], is_stuck: bool) -> str:
    for stack in stacks_of(text):
        frames: list[Frame] = []  # above, but for those of transports
        waits = False
        for file, line, name in stack:
            placed = _PLACED.match(file)
            if file in _TRANSPORTS:  # what runs a whole program is below it, and no wait
                waits = file == distributed.__file__
            elif placed is None:
                frames.append((file, line, name))
            elif is_stuck and (waits or not (frames or host.processes)):
                break
            else:
                _, words = code().item_words(int(placed["device"]), line)
                if is_stuck and not frames and words.startswith(WAITING):
                    break
                within = (each for each in frames if not ("/torch/" in each[0] or each[0].startswith("<")))
                own = (", {}:{} in {}".format(*each) for each in within)
                if waits and words and not words.startswith(WAITING):
                    words = f"the wait for an input of {words}"
                return f"{words}{next(own, '')}" if words else ""
    return ""


SETUP, ORIGIN = range(2)
"""Numbers of the packed parts."""


def main(
    ends: tuple[int, int, int, int, int],
    index: Section,
    link: Link = (),
    *,
    meeting: Meeting = (),
    cores: tuple[int, ...] = (),
) -> None:
    """Runs a worker until its parent closes the connection.

    Args:
        ends: descriptors: of the messages, of a pipe that ends with the process that asks (`end_with`), of the packed
            parts, of the board, and of the file for stacks.
        index: of the packed parts.
        link: of a rank.
        meeting: of the ranks.
        cores: that it may use; by default those of its setup.
    """
    for file in (*ends, *(each for each in link[1:] if each >= 0)):  # a process that an op starts must not keep them
        os.set_inheritable(file, False)
    messages, _, shared, board, stacks = ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; who asks decides
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    memory_watch.volunteer_to_die()
    connection: Connection[Any, Any] = Connection(messages)
    with (
        contextlib.ExitStack() as threads,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),  # the parent is gone
    ):
        try:
            unpacked = Unpacked(shared, index)
            setup: Setup = unpacked.get(SETUP)
            pin_current_thread(cores or setup.cores)
            apply_settings(setup.settings)
            threads.enter_context(one_thread_here())
            worker: _Worker | _Rank
            if link and link[0]:
                worker = _Rank(setup, link, meeting)
            else:
                worker = _Worker(setup, lambda: unpacked.get(ORIGIN), connection, Board.on(board), link, meeting)
            ready = Done(worker.room_bytes())
        except Exception as error:
            connection.send(Fault(IDLE, "error", f"{type(error).__name__}: {error}"))
            return
        connection.send(ready)
        worker.serve()


def _problem(setup: Setup) -> Problem:
    graph = dataclasses.replace(setup.problem.graph, program=setup.program)
    return dataclasses.replace(setup.problem, graph=graph)


def _wires(host: Host, rank: int, store: int, meeting: Meeting) -> Wires | None:
    """The wires of a rank to others that it has no memory in common with; the ranks find each other in a file, or in
    torchrun's store."""
    if not host.is_wired:
        return None
    if meeting:
        return connect(host, rank, torchrun_store(meeting[0]), interface=meeting[1], is_sparse=True)
    return connect(host, rank, store_in(store, host.num_devices), is_sparse=True)


class _Rank:
    """One device that is not the first: it is told what to run by the process of the first."""

    def __init__(self, setup: Setup, link: Link, meeting: Meeting) -> None:
        keep_freed_memory()
        self._setup, self._problem, self._room = setup, _problem(setup), Room(Watch())
        self._rank, arena, store, messages = link
        self._arena = Arena(arena)
        self._wires = _wires(self._problem.host, self._rank, store, meeting)
        self._limits = contextlib.ExitStack()
        self._limits.enter_context(limited_memory([self._problem.host.devices[self._rank]]))
        self._link: Connection[Any, Any] = Connection(messages)

    def room_bytes(self) -> float:
        """As of `_Worker`."""
        device = self._problem.host.devices[self._rank]
        room = memory_watch.room_bytes(self._problem.host, self._setup.memory_limit_bytes, machine=device.machine)
        if device.backend == "cpu":
            self._room.limit(room)
        self._arena.limit_bytes = room
        return room

    def serve(self) -> None:
        """Runs its parts of steps until the other process is gone."""
        graph, host, seed = self._problem.graph, self._problem.host, self._setup.seed
        served = self._arena, self._link
        serve_rank(graph, host, self._rank, *served, seed=seed, watch=self._room, wires=self._wires)


class _Worker:
    """One `HostRunner`, and its requests."""

    def __init__(
        self,
        setup: Setup,
        origin: Callable[[], Origin],
        connection: Connection[Any, Any],
        board: Board,
        link: Link,
        meeting: Meeting,
    ) -> None:
        problem = _problem(setup)
        self._arena = Arena(link[1]) if link else None
        crew, residents = Crew(problem.host.devices), Residents(problem.graph, problem.host, seed=setup.seed)
        if self._arena is not None:
            others = [Connection(file) for file in link[3:]]
            wires = _wires(problem.host, 0, link[2], meeting)
            ranks = RankCrew(problem.host, self._arena, links=others, wires=wires)
            residents = Residents(problem.graph, problem.host, seed=setup.seed, is_apart=True, ask=ranks.ask)
            crew = ranks
        self._problem, self._crew, self._memory_limit_bytes = problem, crew, setup.memory_limit_bytes
        self._origin, self._connection, self._board = origin, connection, board
        self._room = Room(board)
        self._has_gpus = any(device.backend == "cuda" for device in problem.host.devices)
        self._plans = _SentPlans()
        self._steps: dict[str, Timer] = {}  # by fingerprint of the plan
        self._runner = HostRunner(
            problem,
            self._plans,
            step_timeout_s=2 * MAKING_S,  # who asks ends the worker before: a thread that hangs disturbs the others
            seed=setup.seed,
            crew=crew,
            residents=residents,
            watch=self._room,
            is_fatal=self._is_fatal,
            with_model=lambda: self._with_model,
        )

    def room_bytes(self) -> float:
        """The bytes that placements may take from now on; where there are no GPUs, allocations beyond it fail."""
        machine = self._problem.host.devices[0].machine
        room = memory_watch.room_bytes(self._problem.host, self._memory_limit_bytes, machine=machine)
        if not self._has_gpus:
            self._room.limit(room)
        if self._arena is not None:
            self._arena.limit_bytes = room
        return room

    def serve(self) -> None:
        """Answers requests until the parent closes the connection."""
        while True:
            try:
                request: Request = self._connection.recv()
            except (EOFError, OSError):
                raise
            except Exception as error:  # what was sent cannot be read here
                self._board.reset()
                self._connection.send(self._fault(error))
                continue
            self._board.reset()
            try:
                self._connection.send(Done(self._answer(request)))
            except Exception as error:
                self._connection.send(self._fault(error))

    def _fault(self, error: Exception) -> Fault:
        return Fault(self._board.contender, status_of(error), str(error), is_usable=not self._is_fatal(error))

    def _answer(self, request: Request) -> Any:
        if isinstance(request, Step):
            return self._step(request)
        self._steps = {}
        if isinstance(request, Race | Trace):
            self._plans.peaks = request.peaks
        if isinstance(request, Race):
            return self._race(request)
        if isinstance(request, Trace):
            return self._runner.trace(
                request.plan, num_steps=request.num_steps, warmup=request.warmup, step_s=request.step_s
            )
        return profile_costs(
            self._problem.graph,
            self._problem.host,
            num_steps=request.num_steps,
            warmup=request.warmup,
            most_s=request.most_s,
            on_progress=lambda line: self._connection.send(Said(line)),
            watch=self._room,
        )

    def _step(self, request: Step) -> float:
        self._room.begin(0)
        if request.plan.fingerprint not in self._steps:
            self._steps[request.plan.fingerprint] = self._runner.timer(request.plan)
        seconds = self._steps[request.plan.fingerprint]()
        self._room.end()
        return seconds

    def _race(self, request: Race) -> list[Measurement]:
        self._runner.reference = request.reference
        others = [other or _asking(self._connection, k) for k, other in enumerate(request.others)]
        return self._runner.measure_plans(
            request.plans, protocol=request.protocol, others=others, deadline_s=request.deadline_s
        )

    def _is_fatal(self, error: Exception) -> bool:
        """Whether others cannot be measured here after it: a GPU or a transfer is lost, or memory is still held."""
        if isinstance(error, _OutOfMemoryElsewhere):
            return False
        return cuda.is_lost(error) or self._crew.is_spent or (not self._has_gpus and cuda.is_out_of_memory(error))

    @cached_property
    def _with_model(self) -> OpGraph:
        """The graph with the user's model."""
        program = dataclasses.replace(require_program(self._problem.graph), origin=self._origin())
        return dataclasses.replace(self._problem.graph, program=program)


class _OutOfMemoryElsewhere(MemoryError):
    """A timer ran out of memory that is not this process's."""


class _SentPlans:
    """The planner of a worker: it plans nothing, and knows of each plan the figures that it was sent."""

    def __init__(self) -> None:
        self.peaks: Mapping[str, Sequence[int]] = {}  # (D,) of each plan, by its fingerprint

    def plan(self, devices: NDArray[np.int32]) -> Plan:
        """Plans travel with each request."""
        raise NotImplementedError

    def retime(self, plan: Plan) -> Measurement:
        """A measurement of which only the peaks are known."""
        return Measurement("ok", 0.0, peak_bytes=tuple(self.peaks[plan.fingerprint]))


def _asking(connection: Connection[Any, Any], other: int) -> Timer:
    """A timer that has the process that asks run one of its own."""

    def timer() -> float:
        connection.send(Ask(other))
        answer = connection.recv()
        if isinstance(answer, float):
            return answer
        error = answer.as_error()
        raise _OutOfMemoryElsewhere(str(error)) if isinstance(error, MemoryError) else error

    return timer

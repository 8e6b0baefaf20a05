"""`keep`: a process of torchrun that starts, looks at and ends workers of its machine for the process of rank 0.

`Keeper` is its other side, for the workers of one fleet on one machine, and `FarWorker` one of them. The process of
rank 0 makes all connections, to the address of the chosen interface; both sides prove that they know the secret of
`Nodes`:

    rank 0's process                             keeper of a machine
      |  ---- "" ---------------------------->  |   for each fleet: it ends its workers there with this connection
      |  ---- a name ------------------------>  |   for each worker: connections that it inherits, for messages
      |  ---- number, one of `ASKED`, args -->  |   on the connection of the fleet, any number of times
      |  <------------- number, True, result --  |
      |  <------------- number, False, why ----  |

All of these are JSON: a keeper reads no packed object, and runs no op. Whatever a placement does ends a worker, and not
its keeper. Only a worker reads programs, from connections that were proved before it inherited them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple
from uuid import uuid4

from rlplace.errors import DeviceLost, RunnerError, check_known
from rlplace.measure.execute.shared_memory import Arena
from rlplace.measure.hosts.nodes import Nodes, accept_all, join
from rlplace.measure.isolate.messages import Board
from rlplace.measure.isolate.packing import Packed, Section, shared_file
from rlplace.measure.isolate.worker import Meeting, WorkerProcess, has_run
from rlplace.measure.timing.race import LOOKS_EVERY_S, Suspensions, looks
from rlplace.measure.timing.threads import usable_cores

ANSWERS_WITHIN_S = 20.0
"""A machine whose keeper does not answer for so long is lost."""
_CUT_S = 1.0
"""After which it is cut off: its network may come back."""
_ENDS_EVERY_S = 0.5
_CHUNK_BYTES = 1 << 22
_MOST_BYTES = 1 << 26
"""Of a message, the stacks of a worker included."""
ASKED = ("lacks", "fill", "start", "look", "write_stacks", "stacks", "end")
"""Methods of `_Kept` that the other side may ask for."""
_PORT = "port of the keeper/{}"
"""Its key in the store."""
_FAILURES = (OSError, EOFError, AuthenticationError, AssertionError)
"""Of a connection; the last is how Python's proof refuses what is none."""


class State(NamedTuple):
    """A worker, as its keeper sees it; plain data."""

    held_bytes: int = 0
    return_code: int | None = None
    is_stopped: bool = False
    has_lost_siblings: bool = False
    board: str = ""
    """Its bytes, as hexadecimal digits."""
    clock_s: float = 0.0
    """`time.monotonic` of its machine; of a state that was received, how much less that shows than this one's."""


def keep(nodes: Nodes) -> None:
    """Returns when the command of rank 0 is over; for processes of other ranks.

    The first one of each machine is its keeper meanwhile. If it ends, its workers end, too.
    """
    if nodes.rank == nodes.ranks_of(nodes.machine)[0]:
        family = socket.AF_INET6 if ":" in nodes.address else socket.AF_INET
        server = socket.create_server((nodes.address, 0), family=family)
        keeping = _Keeping(nodes.secret_of(nodes.machine))
        threading.Thread(target=keeping.serve, args=(server,), daemon=True).start()
        nodes.store.set(_PORT.format(nodes.machine), str(server.getsockname()[1]))
    while not nodes.is_over:
        time.sleep(_ENDS_EVERY_S)


class _Keeping:
    """A keeper's connections, and the packed setup that it was sent last.

    Attributes:
        waiting: connections that a worker will inherit, by name.
        packed: the setup.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.waiting: dict[str, Connection[Any, Any]] = {}
        self.packed = Packed()

    def serve(self, server: socket.socket) -> None:
        """Returns when the server is closed."""
        accept_all(server, self.admit)

    def admit(self, accepted: socket.socket, is_known: Callable[[], None]) -> None:
        """Serves a connection that proves itself, as `accept_all` asks for."""
        with contextlib.suppress(*_FAILURES, RuntimeError):  # the last: no thread for its deadline
            connection = _proved(accepted, self._secret, asks_first=True)
            is_known()
            if name := _received(connection):
                self.waiting[name] = connection
                _send(connection, name)
                return
            with contextlib.closing(connection), contextlib.closing(_Kept(self, connection)) as kept:
                kept.serve()


class _Kept:
    """The workers of one fleet on this machine: the other side asks for what its methods do, by name."""

    def __init__(self, keeping: _Keeping, connection: Connection[Any, Any]) -> None:
        self._keeping, self._connection = keeping, connection
        self._packed = keeping.packed
        self._arena = Arena.new(0)  # their signals to start are messages
        self._workers: dict[int, _KeptWorker] = {}

    def serve(self) -> None:
        """Answers until the other side closes the connection, or is gone."""
        while True:
            number, name, *given = _received(self._connection)
            answer: tuple[int, bool, Any]
            try:
                check_known("question", name, ASKED)
                answer = number, True, getattr(self, name)(*given)
            except Exception as error:
                answer = number, False, f"{type(error).__name__}: {error}"
            _send(self._connection, answer)

    def lacks(self, name: str, index: Section) -> bool:
        """Whether a packed setup has to be sent: `fill` comes next then."""
        if is_new := name != self._keeping.packed.name:
            self._keeping.packed.close()
            self._keeping.packed = Packed.of(shared_file(sum(index)), index)
        self._packed = self._keeping.packed
        return is_new

    def fill(self, name: str) -> None:
        """Receives it."""
        size, at = sum(self._packed.index), 0
        with mmap.mmap(self._packed.seal(), size) as memory:
            while at < size:
                at += self._connection.recv_bytes_into(memory, at)
        self._packed.name = name

    def start(self, rank: int, ends: Sequence[str], meeting: Meeting, has_folder: bool) -> int:
        """Starts a worker, which inherits these connections: to who asks, and to the first rank if it is another. All
        ranks of a fleet on this machine share a memory."""
        with contextlib.ExitStack() as taken:
            messages, *link = [taken.enter_context(self._keeping.waiting.pop(end)).fileno() for end in ends]
            self._workers[rank] = _KeptWorker(
                self._packed,
                (rank, self._arena.file, -1, *link) if link else (),
                meeting=(str(meeting[0]), str(meeting[1])) if meeting else (),
                messages=messages,
                cores=usable_cores(),
                has_folder=has_folder,
            )
        return self._workers[rank].pid

    def look(self) -> list[tuple[int, State]]:
        """The state of each worker."""
        return [
            (
                rank,
                State(
                    worker.look_at_memory(),
                    worker.return_code if worker.has_ended else None,
                    worker.is_stopped,
                    worker.has_lost_siblings(),
                    bytes(worker.board).hex(),
                    time.monotonic(),
                ),
            )
            for rank, worker in self._workers.items()
        ]

    def write_stacks(self, rank: int) -> None:
        self._workers[rank].write_stacks()

    def stacks(self, rank: int) -> str:
        return self._workers[rank].stacks()

    def end(self, rank: int, is_closing: bool) -> None:
        """Ends a worker; one that closed its connection is given time to end by itself."""
        self._workers[rank].is_closing = is_closing
        self._workers[rank].end()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._arena.close()


class _KeptWorker(WorkerProcess):
    """A worker whose messages do not come here.

    Attributes:
        is_closing: whether it closed its connection, as the other side saw.
    """

    is_closing = False

    def has_closed(self) -> bool:
        return self.is_closing


class Keeper:
    """The keeper of another machine, as the process of rank 0 sees it.

    Args:
        machine: its name.
        devices: names of the host's devices there.

    Attributes:
        lost: once it does not answer: the error that says so.

    Raises:
        DeviceLost: it cannot be reached.
    """

    def __init__(self, machine: str, devices: Sequence[str]) -> None:
        self._nodes, self._machine, self._devices = join(), machine, devices
        self._address = self._nodes.facts[self._nodes.ranks_of(machine)[0]].address
        self.lost: DeviceLost | None = None
        self._states: dict[int, State] = {}
        self._looked_s = 0.0
        self._num_asked, self._look = 0, 0  # the number of the look that was not answered yet; 0: it was
        self._suspensions = Suspensions()
        self._connection = self._open("")

    def connect(self) -> tuple[Connection[Any, Any], str]:
        """A further connection, and its name, by which a worker inherits the other end.

        Raises:
            DeviceLost: it cannot be reached.
        """
        name = uuid4().hex
        return self._open(name), name

    def start(self, packed: Packed, rank: int, ends: Sequence[str], prefix: str) -> int:
        """Starts a worker; gives the number of its process.

        Args:
            packed: its setup, which is sent if the machine does not have it from the last fleet.
            rank: its own.
            ends: names of its connections.
            prefix: of keys in torchrun's store, where the ranks of its fleet find each other.

        Raises:
            DeviceLost: the machine does not answer.
            RunnerError: no process can be started there.
        """
        file = packed.seal()
        if self.ask("lacks", packed.name, packed.index):
            with mmap.mmap(file, sum(packed.index), access=mmap.ACCESS_READ) as memory:
                chunks = (memory[at : at + _CHUNK_BYTES] for at in range(0, len(memory), _CHUNK_BYTES))
                self.ask("fill", packed.name, then=chunks)
        interface = self._nodes.facts[self._nodes.ranks_of(self._machine)[0]].interface
        pid = self.ask("start", rank, list(ends), (prefix, interface), has_run(os.getcwd()))
        if self.lost is not None:
            raise self.lost
        return int(pid)

    def ask(self, name: str, *given: Any, then: Iterable[bytes] = ()) -> Any:
        """What a method of `_Kept` returns; None if the machine is lost.

        Raises:
            RunnerError: it failed.
        """
        if self.lost is not None:
            return None
        try:
            number = self._send(name, *given)
            for each in then:
                self._connection.send_bytes(each)
            return self._answer(number)
        except _FAILURES as error:
            self.lost = self._loss(error)
            return None

    def state(self, rank: int) -> State:
        """A worker, as it was a moment ago: this waits for nothing, but asks for the next time."""
        now_s = time.monotonic()
        if self.lost is None:
            try:
                self._looked_s += self._suspensions.look()
                if self._look and self._connection.poll():
                    self._answer(self._look)
                if not self._look and now_s > self._looked_s + LOOKS_EVERY_S / 2:
                    self._look, self._looked_s = self._send("look"), now_s
                elif self._look and now_s > self._looked_s + ANSWERS_WITHIN_S:
                    raise TimeoutError(f"no answer within {ANSWERS_WITHIN_S:g} s")
            except _FAILURES as error:
                self.lost = self._loss(error)
        return self._states.get(rank, State())

    @property
    def is_cut(self) -> bool:
        """Whether it has not answered for a while, when it was last looked at."""
        return self._look > 0 and time.monotonic() > self._looked_s + _CUT_S

    def look(self) -> None:
        """Waits for the present state of its workers."""
        self._note(self.ask("look") or [])

    def close(self) -> None:
        """Lets go of it: it ends its workers."""
        self._connection.close()

    def _send(self, name: str, *given: Any) -> int:
        self._num_asked += 1
        _send(self._connection, (self._num_asked, name, *given))
        return self._num_asked

    def _note(self, told: Sequence[tuple[int, Sequence[Any]]]) -> None:
        now_s, states = time.monotonic(), {rank: State(*each) for rank, each in told}
        self._states |= {rank: each._replace(clock_s=now_s - each.clock_s) for rank, each in states.items()}

    def _answer(self, wanted: int) -> Any:
        """What was answered to this number; Ctrl-C may have left other answers unread."""
        number = 0
        while number != wanted:
            _await(self._connection)
            number, is_done, result = _received(self._connection)
            if number == self._look:
                self._look = 0
                self._note(result if is_done else [])
        if not is_done:
            raise RunnerError(f"machine {self._machine!r}: {result}")
        return result

    def _open(self, name: str) -> Connection[Any, Any]:
        try:
            port = int(self._nodes.store.get(_PORT.format(self._machine)))
            opened = socket.create_connection((self._address, port), timeout=ANSWERS_WITHIN_S)
            connection = _proved(opened, self._nodes.secret_of(self._machine), asks_first=False)
            _send(connection, name)
            if name:  # it is known there from now on
                _await(connection)
                _received(connection)
        except (*_FAILURES, RuntimeError) as error:  # of torchrun's store: RuntimeError
            raise self._loss(error) from error
        return connection

    def _loss(self, error: BaseException) -> DeviceLost:
        why = str(error) or "its connection was closed"
        said = f"machine {self._machine!r} ({self._address}) does not answer, or torchrun ended there: {why}"
        return DeviceLost(self._devices, said)


class FarWorker(WorkerProcess):
    """A worker of another machine, for the process of rank 0.

    Args:
        keeper: of that machine.
        packed: the setup of the worker.
        rank: its own.
        link: name of its connection to the first rank; none where it is that.
        prefix: as of `Keeper.start`.

    Raises:
        DeviceLost: the machine does not answer.
        RunnerError: no process can be started there.
    """

    def __init__(self, keeper: Keeper, packed: Packed, rank: int, link: Sequence[str], prefix: str) -> None:
        self._keeper, self._rank = keeper, rank
        self.limit_bytes, self.held_bytes = float("inf"), 0
        self.connection, name = keeper.connect()
        try:
            self._pid = keeper.start(packed, rank, [name, *link], prefix)
        except BaseException:
            self.connection.close()
            raise
        self.board = Board.new()

    @property
    def pid(self) -> int:
        """On its machine."""
        return self._pid

    def look_at_memory(self) -> int:
        self.held_bytes = self._state().held_bytes or self.held_bytes
        return self.held_bytes

    def write_stacks(self) -> None:
        self._keeper.ask("write_stacks", self._rank)

    def stacks(self) -> str:
        return self._keeper.ask("stacks", self._rank) or ""

    def has_lost_siblings(self) -> bool:
        return self._state().has_lost_siblings

    @property
    def return_code(self) -> int:
        return self._state().return_code or 0

    @property
    def has_ended(self) -> bool:
        """Whether it is gone, or its machine is lost."""
        return self._state().return_code is not None or self._keeper.lost is not None

    @property
    def is_stopped(self) -> bool:
        return self._state().is_stopped

    def end(self) -> None:
        self._keeper.ask("end", self._rank, self.has_closed())
        self._keeper.look()
        self._state()

    def close(self) -> None:
        self.end()
        self.connection.close()
        self.board.close()

    def _state(self) -> State:
        state = self._keeper.state(self._rank)
        if state.board:
            self.board.follow(bytes.fromhex(state.board), later_s=state.clock_s)
        return state


def _proved(opened: socket.socket, secret: bytes, *, asks_first: bool) -> Connection[Any, Any]:
    """A connection of which both sides have proved that they know the secret.

    Small messages go at once, and a connection to a machine that is gone does not live for hours.
    """
    # one deadline for all of the proof: a byte now and then must not keep it going
    late = threading.Timer(ANSWERS_WITHIN_S, _cut, (opened,))
    late.daemon = True
    with opened:
        opened.settimeout(None)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 5),
            (socket.TCP_USER_TIMEOUT, int(ANSWERS_WITHIN_S * 1e3)),
        ):
            opened.setsockopt(socket.IPPROTO_TCP, option, value)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection: Connection[Any, Any] = Connection(os.dup(opened.fileno()))
        try:
            late.start()
            for step in (deliver_challenge, answer_challenge) if asks_first else (answer_challenge, deliver_challenge):
                step(connection, secret)
        except BaseException:
            connection.close()
            raise
        finally:
            late.cancel()
    return connection


def _cut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        opened.shutdown(socket.SHUT_RDWR)


def _send(connection: Connection[Any, Any], message: object) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _received(connection: Connection[Any, Any]) -> Any:
    """A message."""
    try:
        return json.loads(connection.recv_bytes(_MOST_BYTES))
    except ValueError as error:
        raise OSError(f"not a message: {error}") from error


def _await(connection: Connection[Any, Any]) -> None:
    """Returns when there is something to receive; a suspension of this process does not count."""
    if not any(connection.poll(LOOKS_EVERY_S) for _ in looks(ANSWERS_WITHIN_S)):
        raise TimeoutError(f"no answer within {ANSWERS_WITHIN_S:g} s")

"""Ranks with one made-up GPU each, as threads of one process: nothing but messages orders what two of them do.

Each rank has a clock of its own. Signals by which ranks are told to start and tell their end are no locks of the
machine, so that no clock goes over with them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import safetensors.torch
import torch
from placed_steps import NUM_STEPS
from rank_threads import rank_residents, rank_threads
from torch import Tensor

from fake_gpus.fake_tensors import FakeTensor, fakes_in, plainly
from fake_gpus.gpu_plans import Setting, expected_run
from fake_gpus.late_queues import FakeEvent, FakeStream, Position
from fake_gpus.machine import Machine
from fake_gpus.plan_runs import LATEST_S, Body, placed_steps, plain
from fake_gpus.vector_clocks import Clock
from rlplace import cuda
from rlplace.measure.execute import distributed
from rlplace.measure.execute.device_threads import Woken
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.rank_processes import RankCrew

COMES_WITHIN_S, LOOKS_EVERY_S = 20.0, 0.02
"""When a message comes that is sent at all; otherwise the ranks wait for each other."""


class Message:
    """What was sent: what is ordered before it, and the values, once the stream of the sender has come to it."""

    def __init__(self, num_bytes: int, clock: Clock) -> None:
        self.num_bytes, self.clock = num_bytes, clock
        self.position: Position | None = None
        self.values: Tensor | None = None

    def fill(self, values: Tensor) -> None:
        self.values = values.clone()

    def copy_to(self, target: Tensor) -> None:
        assert self.values is not None, "received before it was sent"
        if self.values.shape == target.shape:
            target.copy_(self.values)


class Mailbox:
    """The messages of one directed pair, in order: NCCL has no tags."""

    def __init__(self, machine: Machine) -> None:
        self.sent: list[Message] = []
        self.num_received = 0
        self.condition = threading.Condition(machine.mutex)


class FakeGroup:
    """An end of a process group of NCCL: it has a stream of its own, which waits for the current one at each call.

    A message is ordered after what its sender launched before it. That the receive was posted proves nothing to the
    sender: a small message may be sent without it. The host of a receiver waits until the message is sent, which a real
    one does not; it learns nothing from that.

    Args:
        machine: of its GPU.
        mailbox: shared by both ends.
        gpu: of this end.
        is_given_up: whether the step is.
    """

    def __init__(self, machine: Machine, mailbox: Mailbox, gpu: int, is_given_up: Callable[[], bool]) -> None:
        self._machine, self._mailbox, self._gpu, self._is_given_up = machine, mailbox, gpu, is_given_up
        self._stream = machine.new_stream(gpu, is_urgent=True, name="group")

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> FakeWork:
        machine, stream = self._machine, self._stream
        (row,) = fakes_in(tensors)
        with machine.mutex, plainly():
            self._begin(row)
            machine.order.launch(machine.host, stream.actor, [row.block.memory], [], "send")
            message, inner = Message(row.numel(), dict(stream.actor.clock)), row.inner
            machine.queues.launch(stream, lambda: message.fill(inner))
            message.position = Position(stream)
            self._mailbox.sent.append(message)
            self._mailbox.condition.notify_all()
        return FakeWork(machine, stream)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> FakeWork:
        machine, stream, mailbox = self._machine, self._stream, self._mailbox
        (row,) = fakes_in(tensors)
        with machine.mutex, plainly():
            self._begin(row)
            number = mailbox.num_received
            mailbox.num_received += 1
            until_s = time.monotonic() + COMES_WITHIN_S
            while len(mailbox.sent) <= number:
                mailbox.condition.wait(LOOKS_EVERY_S)
                if self._is_given_up():  # a real rank sees that at the end of its part
                    raise Woken
                if time.monotonic() > until_s:
                    machine.order.blame("deadlock", f"{machine.host} receives what is not sent")
                    raise RuntimeError("nothing was sent")
            message, inner = mailbox.sent[number], row.inner
            if message.num_bytes != row.numel():
                machine.order.blame("order", f"{row.numel()} bytes are received, {message.num_bytes} were sent")
            stream.actor.learn(message.clock)
            machine.queues.wait(stream, message.position)
            machine.order.launch(machine.host, stream.actor, [], [row.block.memory], "receive")
            machine.queues.launch(stream, lambda: message.copy_to(inner))
        return FakeWork(machine, stream)

    def _begin(self, row: FakeTensor) -> None:
        assert row.block.gpu == self._gpu
        assert row.is_contiguous()
        _barrier(self._machine, self._machine.current_stream(self._gpu), self._stream)


class FakeWork:
    """A message on its way."""

    def __init__(self, machine: Machine, stream: FakeStream) -> None:
        self._machine, self._stream = machine, stream

    def wait(self) -> None:
        _barrier(self._machine, self._stream, self._machine.current_stream(self._stream.gpu))


def _barrier(machine: Machine, first: FakeStream, then: FakeStream) -> None:
    event = FakeEvent("an event of the group", is_timed=False)
    machine.record(event, first)
    machine.wait(then, event)


@contextlib.contextmanager
def fake_ranks(machine: Machine, setting: Setting) -> Iterator[RankCrew]:
    """A crew of ranks with a GPU each."""
    mailboxes: dict[tuple[int, int], Mailbox] = {}
    crews: list[RankCrew] = []

    def make_group(pair: tuple[int, int], rank: int, place: torch.device, store: object, *_: object) -> FakeGroup:
        with machine.mutex:
            mailbox = mailboxes.setdefault(pair, Mailbox(machine))
        return FakeGroup(machine, mailbox, place.index, lambda: any(crew._arena.is_aborted for crew in crews))

    save = safetensors.torch.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "make_group", make_group)
        patch.setattr(safetensors.torch, "save", lambda found: save({name: plain(found[name]) for name in found}))
        with rank_threads(
            setting.graph,
            setting.host,
            wires=lambda rank: distributed.connect(setting.host, rank, None),  # type: ignore[arg-type]
        ) as crew:
            crews.append(crew)
            try:
                yield crew
            finally:
                crews.clear()  # groups, which the crew keeps, would keep it


def rank_steps(setting: Setting, crew: RankCrew, *, is_traced: bool = False) -> list[PlacedStep]:
    """One for each plan, loaded, with parameters as they were at capture."""
    residents = rank_residents(setting.graph, setting.host, crew)
    residents.reset()
    return placed_steps(setting, residents, crew, is_traced=is_traced)


def processes(setting: Setting, *, is_traced: bool = False) -> Body:
    """Some steps with the setting's plans in turn, each GPU a process; none may make the host wait."""

    def body(machine: Machine) -> list[str]:
        with fake_ranks(machine, setting) as crew:
            steps = rank_steps(setting, crew, is_traced=is_traced)
            losses, wrong = [], []
            for number in range(NUM_STEPS):
                step = steps[number % len(steps)]
                with cuda.forbid_waits():
                    step.run(number, deadline_s=LATEST_S)
                losses.append(plain(step.result).reshape(()))
                if is_traced:
                    timeline = step.timeline()  # its times are made up, of each GPU by itself
                    if not (timeline.transfer_start_s != 0).all() or not (timeline.transfer_end_s != 0).all():
                        wrong.append("timeline")
        expected = expected_run(setting.model, setting.optimizer).losses
        pairs = enumerate(zip(losses, expected, strict=True))
        return [*wrong, *(f"loss {k}" for k, (one, other) in pairs if not torch.equal(one, other))]

    return body

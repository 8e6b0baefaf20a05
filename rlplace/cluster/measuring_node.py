"""`MeasuringNode`: the actor on a node that measures plans there, with a runner of its own.

`Machine`: the facts in which two machines must agree before their step times are compared.

`Believed`: which measurements of a node the driver may keep: those that the node's own `Evaluator` believes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import RlplaceError, RunnerError, UserError
from rlplace.graphs import Program
from rlplace.graphs.interpreter import require_program
from rlplace.locks import machine_id, measuring_alone
from rlplace.measure import Host, Measurement, Plan, Problem, RaceProtocol, Simulator, Timeline
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.resolve import check_present
from rlplace.measure.isolate.isolated_runner import without_model
from rlplace.measure.isolate.messages import apply_settings, torch_settings
from rlplace.measure.isolate.packing import Packed, Section, Unpacked, shared_file
from rlplace.measure.measurement import MeasurementKey, MeasurementLog, versions_line
from rlplace.store.rows import machine_facts

FOREVER_S = 1e12
"""Seconds that stand for no deadline."""


@dataclass(frozen=True)
class Sent:
    """All that a node needs before it is asked anything; it travels packed, its tensors beside it.

    Attributes:
        problem: the problem that is measured; its graph travels without its program.
        program: of its graph, without the user's model.
        reference: (N,) placement that every plan is timed beside.
        seed: of random ops.
        settings: of PyTorch in the process that asks.
        is_isolated: whether plans run in a worker process on the node.
        driver: the machine that asks.
    """

    problem: Problem
    program: Program
    reference: NDArray[np.int32]
    seed: int
    settings: tuple[object, ...]
    is_isolated: bool
    driver: Machine


def pack(
    problem: Problem, reference: NDArray[np.int32], *, seed: int, is_isolated: bool, driver: Machine
) -> tuple[bytes, Section]:
    """The argument of `MeasuringNode.prepare`: all bytes, and where their index is.

    Raises:
        RunnerError: a part of the captured step belongs to this process alone, or memory does not suffice.
    """
    program = require_program(problem.graph)
    program = dataclasses.replace(program, origin=without_model(program.origin))
    sent = Sent(problem, program, reference, seed, torch_settings(), is_isolated, driver)
    packed = Packed()
    try:
        packed.add(sent)
        with mmap.mmap(packed.seal(), sum(packed.index), access=mmap.ACCESS_READ) as memory:
            return bytes(memory), packed.index
    except Exception as error:
        raise RunnerError(f"the captured step cannot be sent to nodes: {type(error).__name__}: {error}") from error
    finally:
        packed.close()


class MeasuringNode:
    """Measures plans on the machine that it runs on, one race after the other; a Ray actor.

    It holds the machine's lock (`measuring_alone`) until it ends, except on the machine that asks, which holds it.
    """

    def __init__(self) -> None:
        self._evaluator: Evaluator | None = None
        self._believed = Believed()
        self._held = contextlib.ExitStack()

    def prepare(self, data: bytes, index: Section, path: Sequence[str]) -> str:
        """Makes the node ready for `measure`; returns why it cannot measure for the driver, empty where it can.

        Args:
            data: of `pack`.
            index: likewise.
            path: import path of the driver; folders that are here too are searched last.
        """
        sys.path += [entry for entry in path if entry not in sys.path and os.path.exists(entry)]
        try:
            sent: Sent = _unpacked(data, index)
            if refused := refusal(sent.problem.host, sent.driver):
                return refused
            apply_settings(sent.settings)
            if not Machine.here().is_same(sent.driver):
                self._held.enter_context(measuring_alone(sent.problem.host, say=lambda line: None, is_waiting=False))
            graph = dataclasses.replace(sent.problem.graph, program=sent.program)
            problem = dataclasses.replace(sent.problem, graph=graph)
            self._evaluator = Evaluator(
                problem,
                Simulator(problem, threads=1),
                sent.reference,
                seed=sent.seed,
                log=self._believed,
                isolated=sent.is_isolated,
            )
        except RlplaceError as error:
            self._held.close()
            return str(error)
        return ""

    def measure(self, plans: Sequence[Plan], protocol: RaceProtocol, left_s: float) -> list[Measurement]:
        """A measurement for each plan, all in one race beside the reference; one that is not believed has no key.

        Args:
            plans: exactly the plan that runs.
            protocol: rounds of the race.
            left_s: seconds after which it ends, with the round that is running then.

        Raises:
            RunnerError: the reference failed, or nothing can be measured here any more.
        """
        if self._evaluator is None:
            raise RunnerError("the node is not prepared")
        outcomes = self._evaluator.measure_plans(plans, protocol, deadline_s=time.monotonic() + left_s)
        return self._believed.marked(plans, outcomes)


def _unpacked(data: bytes, index: Section) -> Sent:
    """The object that was packed; its tensors are private to this process.

    Raises:
        RunnerError: a module of the user cannot be imported here, or memory does not suffice.
    """
    try:
        file = shared_file(len(data))
        try:
            with mmap.mmap(file, len(data)) as memory:
                memory[:] = data
            sent: Sent = Unpacked(file, index).get(0)
        finally:
            os.close(file)
    except Exception as error:
        raise RunnerError(f"the captured step cannot be read here: {type(error).__name__}: {error}") from error
    return sent


@dataclass(frozen=True)
class Machine:
    """A machine, as another one is told of it.

    Attributes:
        name: its host name.
        start: names the start of its system, which tells machines of one name apart.
        versions: of rlplace, PyTorch and Python.
        facts: its processor, number of cores and memory, by name.
        host: the devices that are found there.
        fingerprint: of that host.
    """

    name: str
    start: str
    versions: str
    facts: tuple[tuple[str, str], ...]
    host: str
    fingerprint: str

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        host = Host.detect()
        return cls(socket.gethostname(), machine_id(), versions_line(), machine_facts(), repr(host), host.fingerprint)

    def is_same(self, other: Machine) -> bool:
        """Whether the two are one machine, and one container of it."""
        return (self.name, self.start) == (other.name, other.start)

    def differences(self, other: Machine) -> list[str]:
        """The facts in which `other` differs from this machine, in words."""
        found = [] if self.versions == other.versions else [f"{other.versions}, here {self.versions}"]
        theirs = dict(other.facts)
        found += [f"{name} {theirs.get(name)}, here {fact}" for name, fact in self.facts if theirs.get(name) != fact]
        if self.fingerprint != other.fingerprint:
            found.append(f"devices {other.host} [{other.fingerprint}], here {self.host} [{self.fingerprint}]")
        return found


def refusal(host: Host, driver: Machine) -> str:
    """Why this machine cannot measure in the place of `driver`'s; empty where it can.

    Args:
        host: that is to be measured.
        driver: the machine that asks.
    """
    found = driver.differences(Machine.here())
    try:
        check_present(host)
    except UserError as error:
        found.append(str(error))
    return "; ".join(found)


class Believed(MeasurementLog):
    """A log that answers nothing and keeps only which plans it was told of: an `Evaluator` says which figures it
    believes."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def recall(self, key: MeasurementKey, reference: str) -> Measurement | None:
        """Nothing: the driver has asked its own log before."""
        return None

    def keep(self, plan: Plan, outcome: Measurement, reference: str, *, is_whole: bool) -> None:
        """Takes note of the plan."""
        self._told.add(plan.fingerprint)

    def keep_trace(self, problem: Problem, plan: Plan, timeline: Timeline) -> None:
        """Does nothing."""

    def marked(self, plans: Sequence[Plan], outcomes: Sequence[Measurement]) -> list[Measurement]:
        """The outcomes of a race; those that were not believed without a key. Then it forgets its reference."""
        told, self._told = self._told, set()
        return [
            outcome if plan.fingerprint in told else dataclasses.replace(outcome, key=None)
            for plan, outcome in zip(plans, outcomes, strict=True)
        ]

"""`PlacedStep`: a plan bound to its tensors and threads, ready to run again and again."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.errors import RlplaceError, RunnerError
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Ref, Update
from rlplace.measure.hosts.host import Host
from rlplace.measure.plan import Plan
from rlplace.measure.run.codegen.generate import generate
from rlplace.measure.run.codegen.step_code import StepCode
from rlplace.measure.run.crew.channels import Channel, make_channel, release_all
from rlplace.measure.run.crew.streams import torch_device
from rlplace.measure.run.crew.workers import Crew, Job
from rlplace.measure.run.failures import advice, is_late
from rlplace.measure.run.placed.binding import order_names, program_names
from rlplace.measure.run.placed.gradients_out import GradientsOut
from rlplace.measure.run.placed.residents import Resident, Residents
from rlplace.measure.run.placed.step_timeline import Marks, clocks_of, step_timeline
from rlplace.measure.timeline import Timeline


class PlacedStep:
    """One step of a graph, run as `plan` says.

    It is loaded when it first runs, or by `load`: then it holds its residents, channels and code. `unload` lets go of
    them, so that other plans have the memory; the step can be loaded again.

    Args:
        graph: with its program.
        host: a host of this machine.
        plan: made for both.
        residents: where parameters and state are kept; plans over the same host may share them.
        crew: the host's threads.
        seed: of random ops; each draws from (seed, op, step), the same numbers on all devices of one kind: a CPU and a
            GPU make different ones of one seed.
        is_traced: record the times of ops and transfers (see `timeline`).
        hold_every: if above 0, a GPU is held back for `hold_cycles` at the start and every so many ops, so that
            launches run ahead of it: for tracing, never for step times.
        gradients: where it leaves gradients when they are asked for; None for a step that is never asked.
        second: items of the second part of a step in two parts (`TwoPartStep`).

    Attributes:
        plan: what runs.
        needs: its residents.
        launch_s: by device: seconds in which the last step's part was launched; of traced steps.
        hold_cycles: clock cycles of the GPU.
    """

    def __init__(
        self,
        graph: OpGraph,
        host: Host,
        plan: Plan,
        residents: Residents,
        crew: Crew,
        *,
        seed: int = 0,
        is_traced: bool = False,
        hold_every: int = 0,
        gradients: GradientsOut | None = None,
        second: Collection[int] | None = None,
    ) -> None:
        self.plan = plan
        self._graph, self._host, self._residents, self._crew = graph, host, residents, crew
        self._seed, self._is_traced = seed, is_traced
        self._program = require_program(graph)
        self._gradients = gradients
        self._code: StepCode = generate(
            graph,
            host,
            plan,
            is_traced=is_traced,
            hold_every=hold_every,
            hands_out=gradients is not None,
            second=second,
        )
        self._marks = Marks(clocks_of(host, is_traced=is_traced))
        self._routes = {(route.source, route.destination): route for route in host.routes}
        self.needs = frozenset(self._needs())
        self.launch_s = [0.0] * host.num_devices
        self.hold_cycles = 0
        self._compiled = [
            compile(source, _file_name(device), "exec") for device, source in enumerate(self._code.sources)
        ]
        self._namespaces: list[dict[str, Any]] = []
        self._jobs: list[Job] = []
        self._channels: list[Channel] = []
        self._signals: list[threading.Lock] = []
        self._results: list[Any] = []
        self._kept: list[list[tuple[Any, ...]]] = []  # by device: tensors between the parts of a step
        self._is_loaded = self._is_broken = False

    @property
    def is_loaded(self) -> bool:
        """Whether it can run as it is; a step that failed is to be loaded anew."""
        return self._is_loaded and not self._is_broken

    def load(self) -> None:
        """Makes its channels and what of its residents is not there yet, and binds the code to them.

        Raises:
            RunnerError: a device has no memory for them; nothing is held then.
        """
        self.unload()  # the channels of a failed step are in no known state, and a thread left behind may use them
        self._marks.renew(self._graph.num_ops + self.plan.num_transfers)
        self._results = [None] * self._code.num_results
        self._kept = [[] for _ in self._host.devices]
        try:
            self._channels = [self._channel(k) for k in range(self.plan.num_transfers)]
            self._signals = [threading.Lock() for _ in range(self._code.num_signals)]
            for signal in self._signals:  # a lock that starts locked: released by the one side, taken by the other
                signal.acquire()
            self._jobs = [self._bind(device) for device in range(self._host.num_devices)]
        except BaseException as error:
            self.unload()
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            if isinstance(error, RlplaceError) or not isinstance(error, Exception):
                raise
            what = f"{type(error).__name__}: {error}{advice(error)}"
            raise RunnerError(f"the step could not be loaded: {what}") from error
        self._is_loaded = True

    def unload(self) -> None:
        """Lets go of residents, channels and results; the last timeline and `result` are gone with them."""
        for names in self._namespaces:  # a function and the names that it runs with hold each other
            names.clear()
        self._namespaces, self._jobs, self._channels, self._signals = [], [], [], []
        self._marks.renew(0)
        self._results, self._kept = [], []
        self._is_loaded = self._is_broken = False

    def run(self, step: int = 0, *, deadline_s: float = 600.0) -> float:
        """Seconds that one step took, from start to the end of its last op.

        Raises:
            RunnerError: an op failed; says which and why.
            TimeoutError: the step did not end within `deadline_s`.
        """
        if not self.is_loaded:
            self.load()
        return self._run(self._jobs, step, deadline_s)

    def _run(self, jobs: Sequence[Job], step: int, deadline_s: float) -> float:
        self._marks.started_s = time.perf_counter()
        try:
            self._crew.run(list(jobs), step, on_error=self._abort, deadline_s=deadline_s)
        except RunnerError as error:
            raise self._explained(error) from error.__cause__
        return time.perf_counter() - self._marks.started_s

    @property
    def result(self) -> Any:
        """What the last step returned: the loss, or the model's output.

        Raises:
            RunnerError: the step is not loaded.
        """
        self._require_loaded()
        values = iter(self._results)
        return pytree.tree_map_only(Ref, lambda _: next(values), self._program.result)

    def timeline(self) -> Timeline:
        """Start and end of every op and transfer of the last step; the step must be traced.

        Raises:
            RunnerError: the step is not loaded.
        """
        self._require_loaded()
        return step_timeline(self._graph, self._host, self.plan, self._code, self._marks, self._channels)

    def _channel(self, transfer: int) -> Channel:
        plan, host = self.plan, self._host
        source = host.devices[int(plan.devices[self._graph.tensor_op[plan.transfer_tensor[transfer]]])]
        destination = host.devices[int(plan.transfer_destination[transfer])]
        is_copy = bool(self._routes[source.name, destination.name].links)
        return make_channel(
            source,
            destination,
            self._crew.streams.copies(source, destination),
            is_copy=is_copy,
            is_traced=self._is_traced,
        )

    def _abort(self) -> None:
        self._is_broken = True
        for channel in self._channels:
            channel.abort()
        release_all(self._signals)

    def _explained(self, error: RunnerError) -> RunnerError:
        """The error with the op that failed, and without the tensors that its traceback holds."""
        cause, n = error.__cause__, self._graph.num_ops
        if cause is None:
            return error
        devices = {_file_name(device): device for device in range(self._host.num_devices)}
        for frame, line in traceback.walk_tb(cause.__traceback__):
            device = devices.get(frame.f_code.co_filename, -1)
            item = self._code.line_items[device][line - 1] if device >= 0 else -1
            if item >= 0:
                tensor = int(self.plan.transfer_tensor[item - n]) if item >= n else -1
                op = item if item < n else int(self._graph.tensor_op[tensor])
                what = "op" if item < n else "the transfer of op"
                name, place = self._graph.names[op], self._host.devices[device].name
                where = f"reported at {what}" if is_late(cause) else what
                error = RunnerError(f"{where} {name!r} ({self._graph.targets[op]}) on {place}: {error}", op=name)
        traceback.clear_frames(cause.__traceback__)
        said = advice(cause)
        return RunnerError(f"{error}{said}", op=error.op) if said else error

    def _require_loaded(self) -> None:
        if not self._is_loaded:
            raise RunnerError("the step is not loaded, so there is no last step to tell about: run it first")

    def _needs(self) -> Iterator[Resident]:
        for device, items in enumerate(self._code.items):
            for item in items:
                call = self._program.calls.get(item)
                if item in self._program.sources or isinstance(call, Update):
                    yield self._residents.at(item, device)
                if isinstance(call, Update):
                    yield self._residents.at(int(self._graph.tensor_op[call.parameter.id]), device)

    def _bind(self, device: int) -> Job:
        clock = self._marks.clocks[device]
        names: dict[str, Any] = {
            "clock": clock.mark,
            "hold": lambda: self._hold_back(device),
            "B": self._marks.begin,
            "E": self._marks.end,
            "O": self._results,
            "S": self._kept[device],
            **program_names(
                self._graph,
                self._host,
                self._code,
                device,
                self._residents,
                seed=self._seed,
                gradients=self._gradients,
            ),
            **order_names(self._channels, self._signals),
        }
        self._namespaces.append(names)
        exec(self._compiled[device], names)
        run: Job = names["run"]
        if not self._is_traced:
            return run

        def traced(step: int) -> None:
            clock.start()
            begin_s = time.perf_counter()
            run(step)
            self.launch_s[device] = time.perf_counter() - begin_s

        return traced

    def _hold_back(self, device: int) -> None:
        if self.hold_cycles > 0:
            cuda.hold_back(cuda.current_stream(torch_device(self._host.devices[device])), self.hold_cycles)


def _file_name(device: int) -> str:
    return f"<placed step, device {device}>"

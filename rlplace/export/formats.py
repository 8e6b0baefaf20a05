"""`FORMATS`: the formats that a run's placement can be exported to; each is a row here, the long ones in other files.

`CapturedRun`: the model that a run placed, built and captured again from its folder.

`rank_devices`: which devices of a host are processes of `torch.distributed`, for formats that run in several.

`csv`: one row an op, for spreadsheets and data frames.

`export_run`: the command `rlplace export` on a run folder: it writes a format, or checks the placed step.

`program_of_run`: what one device does in a step of a run's placement.

`check_export`: does the placed model train as plain PyTorch does? `SeededDraws` has plain PyTorch draw the random
numbers of a placed step, so that the two can be compared.
"""

from __future__ import annotations

import copy
import csv
import io
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rlplace.errors import InvalidValue
from rlplace.export.placed.graphs import matching_host
from rlplace.export.placed.placed_model import PlacedModel
from rlplace.files import write_text_atomic
from rlplace.graphs import Grouping, OpGraph, OptimizerSpec
from rlplace.graphs.capturing.capture import capture_step
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.optimizers import resolve_optimizer
from rlplace.graphs.program import LossByName, Origin, opened, tensors_in
from rlplace.graphs.random_streams import DrawKey, Streams
from rlplace.measure import Host, Placement, Plan, Problem, resolve_host
from rlplace.measure.execute.device_threads import torch_device
from rlplace.measure.execute.rank_programs import rank_programs
from rlplace.measure.timing.eager_step import EagerStep
from rlplace.measure.timing.threads import one_thread_here
from rlplace.registry import Registry
from rlplace.say import clean, say
from rlplace.session.folder import EXPORTED, RUN_FILES, RunFolder
from rlplace.session.prepare import capture_workload, only_simulated
from rlplace.session.session import Session
from rlplace.session.step_script import script
from rlplace.workloads import Workload, WorkloadSpec, build_for, parse_kept_workload


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The argument of a format: a run and its placement."""

    run: RunFolder
    """Its folder."""
    session: Session
    """The state of the run: its request, problem, host, costs, and more."""
    placement: Placement
    """The best placement that was measured."""
    workload: str | None = None
    """The workload, passed again by the user; needed if the workload is the user's function."""
    cache_tokens: int = 0
    """Number of tokens of each sequence whose keys and values count as memory; for formats with this option."""

    @property
    def spec(self) -> WorkloadSpec:
        """The workload of the run, ready to build.

        Raises:
            InvalidValue: the workload is a graph file; or it is the user's function, and `workload` does not name it
                again.
        """
        kept, where = self.session.request.workload, str(self.session.path)
        spec = parse_kept_workload(kept, self.workload, where=where, command=shlex.join(["--workload", kept]))
        if spec.is_file:
            raise only_simulated(spec)
        return spec

    @property
    def is_simulated(self) -> bool:
        """Whether the host of the run is simulated, so that its placement cannot run here."""
        return self.session.host.is_simulated


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of a format that also reports figures."""

    text: str
    """The content of the file."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Further entries of `--json`, by name."""


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """One format.

    Raises:
        InvalidValue: `file` is not a plain file name, or is the name of another file of a run.
    """

    file: str
    """Name of the exported file in the run folder."""
    summary: str
    """A description in a few words."""
    text: Callable[[ExportRequest], str | Exported]
    """Makes the content of the file, with or without figures; messages are printed to stderr."""
    options: tuple[str, ...] = ()
    """The additional fields of `ExportRequest` that the format uses."""

    def __post_init__(self) -> None:
        if PurePath(self.file).name != self.file or self.file in ("", ".."):
            raise InvalidValue("file", self.file, "a plain file name", where="export format")
        if self.file in RUN_FILES and self.file not in EXPORTED:
            raise InvalidValue("file", self.file, "another name: runs keep something else in it", where="export format")


@dataclass(frozen=True, eq=False)
class CapturedRun:
    """A run's workload and its step.

    Attributes:
        request: of the export.
        host: with the figures that were measured for the run.
        workload: without memory behind it where the host is simulated.
        graph: with its program; the placement's.
    """

    request: ExportRequest
    host: Host
    workload: Workload
    graph: OpGraph

    @classmethod
    def of(cls, request: ExportRequest) -> CapturedRun:
        """The workload of a run, captured as it was.

        Raises:
            UserError: the run lacks a file or is malformed, or its workload cannot be built again.
            FingerprintMismatch: the workload is another one now.
        """
        session, host = request.session, request.session.host
        workload = build_for(request.spec, host, session.request.workload_seed)
        graph = capture_workload(workload, *session.cut)
        request.placement.require_graph(graph)
        return cls(request, host, workload, graph)

    def problem(self) -> Problem:
        """The run's problem with the seconds that it found, every op a group of its own.

        Raises:
            FileProblem, InvalidValue: the session has no such seconds.
        """
        single_ops = Grouping(np.arange(self.graph.num_ops, dtype=np.int32))
        return Problem(self.graph, self.host, self.request.session.costs, single_ops)


def rank_devices(host: Host, where: str) -> dict[int, str]:
    """By index of a device, in order of ranks, PyTorch's name of it on its own machine: `cuda:N`, or `cpu`.

    GPUs are ranks; where there is none, cores are, gangs of them excepted.

    Args:
        host: whose devices they are.
        where: the format that asks, for messages.

    Raises:
        InvalidValue: a device is a part of a GPU, which cannot have a process of its own.
    """
    plain = [index for index, device in enumerate(host.devices) if not device.members]
    names = [device.name for device in host.devices]
    gpus = [index for index in plain if host.devices[index].backend != "cpu" and not names[index].startswith("cpu")]
    for index in gpus:
        if re.search(r"cuda:\d+/\d+$", names[index]):
            raise InvalidValue("device", names[index], "a whole GPU: each has one process", where=where)
    nodes = [names[index].rpartition("/")[0] for index in gpus]
    of_gpu = {index: f"cuda:{nodes[:rank].count(nodes[rank])}" for rank, index in enumerate(gpus)}
    return of_gpu or dict.fromkeys(plain, "cpu")


def trained_by(workload: Workload, where: str) -> OptimizerSpec:
    """The optimizer of a workload that trains.

    Raises:
        InvalidValue: it is an inference, or has no optimizer.
    """
    spec = resolve_optimizer(workload.optimizer)
    if workload.loss_fn is None or spec is None:
        found = "an inference" if workload.loss_fn is None else "a step without an optimizer"
        raise InvalidValue("workload", found, "a training step with an optimizer", where=where)
    return spec


def in_docstring(text: str) -> str:
    """The text as part of a docstring: names of a stranger's devices must not end it."""
    return text.replace("\\", "/").replace('"', "'")


COLUMNS = ("op", "module", "group", "device", "op_time_s")


def _csv(request: ExportRequest) -> str:
    """The placement as CSV in the order of the graph: each op with its module, group, device and seconds there."""
    session, devices, written = request.session, request.placement.devices, io.StringIO()
    names = [request.placement.device_names[device] for device in devices.tolist()]
    times_s = session.costs.op_time_s[np.arange(devices.size), devices].tolist()
    rows = zip(session.facts.names, session.facts.modules, session.op_group.tolist(), names, times_s, strict=True)
    csv.writer(written, lineterminator="\n").writerows([COLUMNS, *rows])
    return written.getvalue()


def _step_script(request: ExportRequest) -> str:
    """The text of `step.py`."""
    asked = request.session.request
    return script(
        str(request.spec),
        default_size=asked.default_size,
        seed=asked.workload_seed,
        cut=request.session.cut,
        host=asked.host,
        is_simulated=request.is_simulated,
    )


FORMATS = Registry[ExportFormat](
    "export format",
    {
        "script": ExportFormat("step.py", "a short program that trains as placed", _step_script),
        "csv": ExportFormat("placement.csv", "one row an op: its module, group, device and seconds there", _csv),
        "device_map": "rlplace.export.device_map:DEVICE_MAP",
        "dtensor": "rlplace.export.dtensor:DTENSOR",
        "pipeline": "rlplace.export.pipeline:PIPELINE",
        "torchrec": "rlplace.export.device_map:TABLES",
        "torchrun": "rlplace.export.torchrun:TORCHRUN",
    },
    group="rlplace.export_formats",
    entry_type=ExportFormat,
)


LIST = "list"
"""The word for all formats."""


@one_thread_here()
def export_run(
    folder: Path, *, workload: str | None, is_check: bool, format: str = "script", cache_tokens: int = 0
) -> dict[str, Any]:
    """Writes a run's placement in a format, or compares its placed step with eager; returns the object of `--json`.

    Args:
        folder: of the run.
        workload: the workload again, where the run is of a user's function.
        is_check: compare, and write nothing.
        format: a name of `FORMATS`; or `list`, which writes nothing and names the formats.
        cache_tokens: tokens of each sequence whose keys and values a format counts.

    Raises:
        UnknownName: there is no such format.
        FileProblem: no run there, or a malformed one; or the file cannot be written.
        FingerprintMismatch: its placement is for another graph or host.
        InvalidValue: the run is of a user's function, and `workload` does not name it again; or of a graph file, and
            the format needs the model; or `is_check` with another format than `script`; or the format takes no
            `cache_tokens`, or they are negative.
    """
    if format == LIST:
        return listed()
    chosen = FORMATS[format]
    if is_check and format != "script":
        raise InvalidValue(
            "format",
            format,
            "none with a check",
            where="export",
            hint="A check runs the placed step and writes nothing: leave one of the two out.",
        )
    if cache_tokens < 0 or (cache_tokens and "cache_tokens" not in chosen.options):
        raise InvalidValue(
            "cache_tokens",
            cache_tokens,
            "0 or more" if cache_tokens < 0 else f"0 with {format}",
            where="export",
            hint="The format `device_map` counts keys and values.",
        )
    run = RunFolder.open(folder)
    path = run.root / chosen.file
    with Session.read(folder) as session:
        request = ExportRequest(run, session, session.best_placement(), workload, cache_tokens)
        _warn_of_unchecked_loss(session)
        if is_check:
            return _check(request)
        made = chosen.text(request)
        exported = made if isinstance(made, Exported) else Exported(made)
        if workload is not None:  # it may be another one, or have changed since
            CapturedRun.of(request)
        write_text_atomic(path, exported.text)
        simulated = f"the run is of {clean(session.request.host)}, which was simulated: it runs on such a host only"
        how = f"{simulated}, not on this machine" if request.is_simulated else f"run it with python {path}"
    say(f"wrote {path}: {how if format == 'script' else chosen.summary}")
    return {"schema": 1, "format": format, "path": str(path)} | exported.figures


def program_of_run(folder: Path, rank: int, *, workload: str | None = None) -> dict[str, Any]:
    """What a device does in a step of a run's placement, in order; the object of `rlplace explain --rank --json`.

    Args:
        folder: of the run.
        rank: index of the device.
        workload: the workload again, where the run is of a user's function.

    Raises:
        InvalidValue: the host has no such device; or as for `export_run`.
        FileProblem, FingerprintMismatch: as for `export_run`.
    """
    with Session.read(folder) as session:
        request = ExportRequest(RunFolder.open(folder), session, session.best_placement(), workload)
        host = session.host
        if not 0 <= rank < host.num_devices:
            raise InvalidValue("rank", rank, f"0..{host.num_devices - 1}, a device of the run's host", where="explain")
        ranks = rank_programs(CapturedRun.of(request).graph, host, request.placement.plan, sends_wait=host.sends_wait)
    return {
        "schema": 1,
        "rank": rank,
        "device": host.devices[rank].name,
        "slot_bytes": list(ranks.slots.num_bytes),
        "program": ranks.rows(rank, host),
    }


def listed() -> dict[str, Any]:
    """Every format with its file and its purpose, printed on stderr; returns the object of `--format list --json`."""
    formats, width = dict(FORMATS.items()), max(map(len, FORMATS))
    say("\n".join(f"{name:{width}}  {one.file}: {one.summary}" for name, one in formats.items()))
    return {"schema": 1, "formats": {name: {"file": one.file, "is": one.summary} for name, one in formats.items()}}


def _warn_of_unchecked_loss(session: Session) -> None:
    verdict = session.facts.verdict
    if verdict is not None and not verdict.is_checked:
        say(
            f"warning: the loss of the run's {session.facts.num_micro_batches} micro-batches was not checked, it is "
            f"taken as {verdict.kind} ({clean(verdict.why)}): the step may be refused where it is captured with "
            "values, or be another than was searched. Train again on a host of this machine, which checks it, or with "
            "`--loss accumulated`, which needs no check."
        )


def _check(request: ExportRequest) -> dict[str, Any]:
    placement = request.placement
    if request.is_simulated:
        raise InvalidValue(
            "host",
            request.session.request.host,
            "one of this machine",
            where="export --check",
            hint="A check runs the placed step: train on a host of this machine (`--host auto`) first.",
        )
    graph, host = CapturedRun.of(request).graph, matching_host(placement)
    placement.require(graph, host)
    checked = check_export(graph, host, placement.plan)
    slices = f" gradient accumulation over {graph.num_micro_batches} slices" if checked.is_accumulation else ""
    eager = f"eager{slices}"
    verdict = f"agrees with {eager}" if checked.ok else f"DIFFERS from {eager}"
    seeded = f", {checked.num_random_ops} random ops given the same seeds" if checked.num_random_ops else ""
    say(
        f"{checked.num_steps} placed steps{seeded}: {verdict}; largest relative difference of the loss "
        f"{checked.max_loss_rel_diff:.2e}, of parameters {checked.max_param_rel_diff:.2e} (float64)"
    )
    return checked.to_dict()


LOSS_TOLERANCE, PARAMETER_TOLERANCE = 1e-5, 1e-4
SMALLEST_SCALE = 1e-3


@dataclass(frozen=True)
class CheckResult:
    """Largest relative differences over the steps; per tensor max |a - b| / max(max |a|, 1e-3).

    Attributes:
        max_loss_rel_diff: of the losses, or of the outputs of an inference.
        max_param_rel_diff: of parameters and buffers after the last step.
        num_steps: how many steps were compared.
        num_random_ops: ops of a step that draw random numbers; both steps were given the same.
        is_accumulation: whether plain PyTorch accumulated gradients over the same micro-batches, as the placed step is
            no step of the whole batch (batch norm, an accumulated loss).
    """

    max_loss_rel_diff: float
    max_param_rel_diff: float
    num_steps: int
    num_random_ops: int = 0
    is_accumulation: bool = False

    @property
    def ok(self) -> bool:
        """Whether both are within tolerance."""
        return self.max_loss_rel_diff <= LOSS_TOLERANCE and self.max_param_rel_diff <= PARAMETER_TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        """The object that `rlplace export --check --json` prints."""
        return {
            "schema": 1,
            "max_loss_rel_diff": self.max_loss_rel_diff,
            "max_param_rel_diff": self.max_param_rel_diff,
            "num_steps": self.num_steps,
            "num_random_ops": self.num_random_ops,
            "compared_with": "gradient accumulation" if self.is_accumulation else "the whole batch",
            "ok": self.ok,
        }


def check_export(graph: OpGraph, host: Host | str, plan: Plan, *, num_steps: int = 5) -> CheckResult:
    """Compares `num_steps` placed steps with eager steps on one device, both in float64 with equal intra-op threads.

    In float64, rounding differences are far below the tolerances, so a larger difference is an error of the placed
    step. The random ops of the eager step (dropout) use the seeds of the placed step. A step in micro-batches is
    compared with a step of the whole batch. If the two must differ (batch norm, an accumulated loss, random ops), it is
    compared with eager steps in the same micro-batches.

    Args:
        graph: with its program.
        host: a host of this machine, or a HOST word for it.
        plan: the plan to run.
        num_steps: steps from the same start.

    Raises:
        InvalidValue: in float64 the captured model has other ops; it was captured under autocast; or it draws random
            numbers with ops, or on a kind of device, that plain PyTorch does not use.
    """
    host = resolve_host(host)
    origin, optimizer = require_program(graph).origin, require_program(graph).optimizer
    if origin.autocast is not None:
        raise InvalidValue(
            "model",
            "captured under autocast",
            "one that can run in float64",
            where="export check",
            hint="Capture it without autocast to check it: what is placed and what runs where is the same.",
        )
    # The same step, captured in float64: types by default and by name are float64 where they were float32.
    model, loss_fn = copy.deepcopy(origin.model).double(), origin.loss_fn
    if isinstance(loss_fn, LossByName) and isinstance(loss_fn.func, nn.Module):
        loss_fn = LossByName(copy.deepcopy(loss_fn.func).double(), loss_fn.names)
    elif isinstance(loss_fn, nn.Module):
        loss_fn = copy.deepcopy(loss_fn).double()
    args, kwargs, targets = pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.double() if tensor.dtype.is_floating_point else tensor,
        (origin.args, origin.kwargs, origin.targets),
    )
    with _double_by_default(), _Double():
        again = Origin(
            model, args, kwargs, loss_fn, targets, micro=origin.micro, frozen=origin.frozen, split=origin.split
        )
        double = capture_step(again, optimizer)
    if double.targets != graph.targets:
        raise InvalidValue(
            "model",
            "other ops in float64",
            "the ops of the placed graph",
            where="export check",
            hint="Autocast inside of `forward`, and casts to a type by its name, do: turn them off to check.",
        )
    # Both run step after step from the same start, and plain PyTorch draws what the placed step draws.
    labels = {"targets": origin.as_given(targets)} if targets else {}
    drawing = [op for ops in require_program(double).draws.values() for op in ops]
    loss_difference = 0.0
    is_accumulation = origin.micro is not None and not origin.micro.equals_whole
    eager = EagerStep(
        double,
        host,
        num_threads=max(len(host.devices[0].cores), 1),
        in_micro_batches=is_accumulation or (origin.micro is not None and bool(drawing)),
    )
    draws = SeededDraws(double) if drawing else None
    eager.begin = int if draws is None else draws.begin
    with PlacedModel(double, host, plan) as placed:
        _check_kinds(drawing, host, plan, eager.place)
        for number in range(num_steps):
            with _double_by_default():
                result = placed(*args, **kwargs, **labels)
                with _Double(), nullcontext() if draws is None else draws.of_step(number):
                    eager()
            pairs = zip(_tensors(eager.loss), _tensors(result), strict=True)
            loss_difference = max([loss_difference, *(_difference(a, b) for a, b in pairs)])
        expected, actual = eager.state_dict(), placed.state_dict()
        state_difference = max((_difference(expected[name], actual[name]) for name in actual), default=0.0)
        return CheckResult(loss_difference, state_difference, num_steps, len(drawing), is_accumulation)


def _check_kinds(drawing: list[int], host: Host, plan: Plan, place: torch.device) -> None:
    """Refuses random ops on another kind of device than plain PyTorch runs on: they draw other numbers there."""
    others = {host.devices[plan.devices[op]].name for op in drawing} - {
        device.name for device in host.devices if torch_device(device).type == place.type
    }
    if others:
        raise InvalidValue(
            "placement",
            f"random ops (dropout) on {', '.join(sorted(others))}",
            f"all of them on devices of type {place.type}, as in plain PyTorch",
            where="export check",
            hint="Check it with `model.eval()`, or with p=0.",
        )


@contextmanager
def _double_by_default() -> Iterator[None]:
    """While active, tensors that are made without a type (`torch.zeros(shape)`) are float64 where they were float32."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(_double_of(default))
    try:
        yield
    finally:
        torch.set_default_dtype(default)


class _Double(TorchFunctionMode):
    """While active, float32 means float64: models that compute parts in float32 for any input stay alike."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = pytree.tree_map_only(torch.dtype, _double_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def _double_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float32 else dtype


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    expected, actual = expected.detach().double().cpu(), actual.detach().double().cpu()
    if not expected.numel():
        return 0.0
    if not bool(torch.isfinite(expected).all()) or not bool(torch.isfinite(actual).all()):
        return float("inf")
    return float((expected - actual).abs().max()) / max(float(expected.abs().max()), SMALLEST_SCALE)


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors among a model's outputs, which may hold None and plain constants too."""
    return tensors_in(opened(output))


class SeededDraws(Streams):  # type: ignore[no-untyped-call]
    """Has the random ops of eager steps draw as those of placed steps do.

    On CPUs, and between alike GPUs, equal seeds give equal numbers.

    Args:
        graph: the placed one, with its program.
        seed: of the placed step.
    """

    def __init__(self, graph: OpGraph, seed: int = 0) -> None:
        super().__init__(self._made_once, seed=seed)
        self._calls, self._draws = require_program(graph).calls, require_program(graph).draws
        self._left = Counter[DrawKey]()

    @contextmanager
    def of_step(self, number: int) -> Iterator[None]:
        """While active, one eager step draws as the placed one with that number does.

        Raises:
            InvalidValue: plain PyTorch calls other random ops than the graph has, or more or fewer of them.
        """
        self._left = Counter({key: len(ops) for key, ops in self._draws.items()})
        total = self._left.total()
        with self.step(number):
            yield
        if left := self._left.total():
            raise _unlike(f"{total - left} random ops in plain PyTorch", f"{total}, as in the graph")

    def _made_once(self, key: DrawKey, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = key if key in self._left else replace(key, micro_batch=-1)  # of a draw that micro-batches share
        call = self._calls[self._draws[key][0]] if self._left[key] else None
        wanted = "no other one" if call is None else _name(call.target)  # type: ignore[union-attr]
        if _name(func) != wanted:
            raise _unlike(f"{_name(func)} in plain PyTorch", f"{wanted}, as in the graph")
        self._left[key] -= 1
        return self.make(key, func, args, kwargs)


def _name(target: Callable[..., Any]) -> str:
    """An op without its overload, also of its in-place form."""
    return str(getattr(getattr(target, "overloadpacket", None), "__name__", target)).removesuffix("_")


def _unlike(actual: str, expected: str) -> InvalidValue:
    return InvalidValue(
        "model",
        actual,
        expected,
        where="export check",
        hint="Check it with `model.eval()`, or with p=0: what is placed, and what runs where, is the same.",
    )

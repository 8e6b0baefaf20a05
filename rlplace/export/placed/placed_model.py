"""`PlacedModel`: a captured step that runs as placed, in a training loop; `to_step` makes one of a placement."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, get_args

import torch
from safetensors.torch import save
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import FileProblem, InvalidValue, UnknownName, UserError, check_known
from rlplace.export.placed.graphs import (
    Call,
    Flags,
    PlacedGraph,
    as_cast,
    captured_again,
    captured_evaluation,
    carried_plan,
    host_of,
)
from rlplace.export.placed.model_state import (
    SCHEMA,
    CapturedOptimizer,
    Option,
    optimizer_state,
    read_step,
    set_options,
)
from rlplace.export.placed.step_arguments import Arguments
from rlplace.files import write_bytes_atomic
from rlplace.graphs import OpGraph
from rlplace.graphs.capturing.portable import original_of, uncompiled
from rlplace.graphs.capturing.untouched import dotted, holding
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import LossVerdict, Program, loss_of
from rlplace.measure import Host, Placement, Plan, resolve_host
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.isolate.own_ranks import crew_of
from rlplace.measure.placement import check_plan
from rlplace.measure.timing.threads import keep_freed_memory

if TYPE_CHECKING:
    from rlplace.training.outputs import Table

_log = logging.getLogger(__name__)

OtherShapes = Literal["capture", "eager", "refuse"]
"""The way in which a placed step handles inputs of other shapes than captured."""

_SETTABLE = ("lr", "betas", "eps", "momentum", "weight_decay", "num_steps")


class PlacedModel(AbstractContextManager["PlacedModel"]):
    """A captured step on the devices of its plan: a training step that updates its own parameters, or an inference.

    Parameters, buffers and optimizer state are on the devices of the plan; `state_dict` copies them back. A step runs
    exactly the measured plan: the same devices, orders and transfers. Inputs of other shapes are captured at their
    first call. Each op of their graphs goes to the device of the matching op of the measured graph.

    Threads may share it: calls, and other uses of its state, run one at a time. A call within a call (by a hook, a loss
    or an op) is refused. A call in a forked process is refused, too.

    It is also a context manager that closes it.

    Args:
        graph: captured from the model.
        host: a host of this machine, or a HOST word for it.
        plan: the plan to run.
        seed: of random ops. Each draws from (seed, step, place), the same numbers on all devices of the same kind.
        op_order: order of ops in the search of the plan, one of `OP_ORDERS`; None if unknown.
        step_time_s: measured or simulated step time of the plan; None if unknown.
        table: of the race that the plan won; None without a race.
        other_shapes: for inputs of other shapes: `capture` them, run them in `eager` mode, or `refuse` them.
        crew: that runs it; by default the threads or processes of `host`, made here.

    Attributes:
        num_steps: number of steps so far; random ops derive their seeds from it.
        op_order: the argument.
        step_time_s: the argument.
        table: of the race that the plan won, with one device and plain PyTorch. `table.rows` are those of `train`, and
            `table.summary` says in one line whether placing is worth it. None without a race, for example for a
            placement from a file.
    """

    op_order: str | None
    step_time_s: float | None
    table: Table | None

    lr, betas, eps, momentum, weight_decay = Option(), Option(), Option(), Option(), Option()

    def __init__(
        self,
        graph: OpGraph,
        host: Host | str,
        plan: Plan,
        *,
        seed: int = 0,
        op_order: str | None = None,
        step_time_s: float | None = None,
        table: Table | None = None,
        other_shapes: OtherShapes = "capture",
        crew: Crew | None = None,
    ) -> None:
        check_known("way with other shapes", other_shapes, get_args(OtherShapes))
        vars(self).update(op_order=op_order, step_time_s=step_time_s, table=table)
        keep_freed_memory()
        self._program, self._seed = require_program(graph), seed
        self._host = host = resolve_host(host)
        check_plan(graph, host.num_devices, plan)
        self._crew = crew_of(graph, host, seed=seed) if crew is None else crew
        self._arguments = Arguments(self._program.origin)
        with torch.inference_mode(False):  # what is made here is updated elsewhere
            self._first = PlacedGraph(graph, host, plan, self._crew, seed=seed)
        self._state, self._other_shapes = self._first.state, other_shapes
        self._flags = Flags.of(self._program.origin.model)  # graphs that are captured later have the same
        self._modes = frozenset(dotted(path, "training") for path in self._flags.modes)
        self._graphs = {_key(self._arguments.captured, is_evaluation=False): self._first}
        self._optimizer = None if self._program.optimizer is None else CapturedOptimizer(self._state)
        self.num_steps, self._num_evaluations = 0, 0

    def __repr__(self) -> str:
        time = "" if self.step_time_s is None else f", {self.step_time_s * 1e3:.4g} ms a step"
        return f"PlacedModel({self._first.graph!r} on {self._host.name}{time})"

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        if name != "num_steps" and not hasattr(type(self), name):
            raise UnknownName("attribute of a placed step", name, _SETTABLE, hint="Only these may be set.")
        with self._crew.turn(runs=False):
            super().__setattr__(name, value)

    def __call__(self, *args: Any, targets: Any = None, **kwargs: Any) -> Any:
        """Runs one step: the result of the loss function in training, else the model's output.

        Args:
            args: inputs as captured: the same structure and dtypes, and the same values of arguments that are not
                tensors.
            targets: labels of this batch, if the step was captured with targets; a dict if it was captured with a dict.
            kwargs: inputs, like `args`.

        Raises:
            InvalidValue: inputs or targets of another structure or dtype, or without data; another value of an argument
                that is not a tensor; or another shape, if other shapes are refused. If the step updates parameters: a
                parameter that was frozen or unfrozen after the capture, or that has a hook.
            CaptureError: the model cannot be captured for these shapes.
            RunnerError: an op failed.
            UserError: a call within a call, or in a forked process.
        """
        with self._turn():
            if self._optimizer is not None:
                self._optimizer.refresh()
                self._state.check_trained(is_updating=True)
            result = self._run(args, kwargs, targets)
            if self._optimizer is not None:
                self._optimizer.note_step()
            return result

    def backward(self, *args: Any, targets: Any = None, loss_scale: float | torch.Tensor = 1.0, **kwargs: Any) -> Any:
        """Forward and backward: gradients are added to `grad` of `parameters()`, and nothing is updated.

        It does the same as `loss.backward()` of plain PyTorch: clipping, accumulation, `GradScaler` and any optimizer
        for `parameters()` work as usual. It also works for a step that was captured with an optimizer.

        Args:
            args: as in a call.
            targets: as in a call.
            loss_scale: the gradients are multiplied by this number; the returned loss is not scaled.
            kwargs: as in a call.

        Returns:
            The result of the loss function.

        Raises:
            InvalidValue: the step was captured without a loss, a parameter was unfrozen after the capture, or as in a
                call.
            CaptureError: as in a call.
            RunnerError: as in a call.
            UserError: as in a call.
        """
        if not self._program.is_training:
            raise InvalidValue(
                "loss_fn",
                None,
                "a step captured with a loss",
                where="backward",
                hint="Capture with `capture(..., loss_fn, targets=...)`.",
            )
        scale = float(loss_scale)
        if not math.isfinite(scale):
            raise InvalidValue("loss_scale", scale, "a finite number", where="backward")
        with self._turn():
            self._state.check_trained(is_updating=False)
            return self._run(args, kwargs, targets, loss_scale=scale)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output with all modules in evaluation mode; parameters and buffers do not change.

        Random ops draw new numbers in every evaluation, from a separate count. So evaluations do not change the random
        numbers of training.

        Args:
            args: as in a call, without targets.
            kwargs: as in a call.

        Raises:
            InvalidValue: as in a call.
            CaptureError: the model cannot be captured in evaluation mode.
            RunnerError: an op failed.
            UserError: as in a call.
        """
        with self._turn():
            tensors = self._arguments.tensors(args, kwargs, None, has_targets=False)
            placed = self._graph_of(tensors, is_evaluation=True)
            assert placed is not None, "only steps are run eagerly"
            result = placed.run(tensors, -1 - self._num_evaluations)  # no step's number
            self._num_evaluations += 1
            return result

    def recapture(self) -> None:
        """Captures every graph in use again, so that steps take over Python state of model and loss that has changed.

        This holds for attributes, globals, closures, and modes of submodules. The placement stays; ops that are new
        are placed as those of other shapes. Parameters, buffers, optimizer state and counts of steps stay, too.

        Raises:
            CaptureError: the model cannot be captured as it is now; nothing has changed then.
        """
        with self._turn():
            graphs = {key: self._captured(each.call, is_evaluation=bool(key[0])) for key, each in self._graphs.items()}
            self._flags = self._flags_now
            self._graphs = {key: self._placed(graph, self._graphs[key]) for key, graph in graphs.items()}
            self._first = next(iter(self._graphs.values()))
            self._program = require_program(self._first.graph)

    def train(self, mode: bool = True) -> NoReturn:
        """Always raises: the modes of a step are fixed at the capture.

        Raises:
            UserError: always; the message names the alternative.
        """
        raise UserError(
            "a placed step has no modes to switch: a call runs as the model was captured, and `step.evaluate(x)` "
            "gives the output in evaluation mode. For other modes, call `train()` or `eval()` of the model before "
            "`capture`, or take `to_module(model, graph, placement)`, which has both."
        )

    def eval(self) -> NoReturn:
        """Always raises: use `evaluate` for the output in evaluation mode.

        Raises:
            UserError: always; the message names the alternative.
        """
        self.train(mode=False)

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs: one for each set of input shapes, in training and in evaluation."""
        return len(self._graphs)

    @property
    def num_micro_batches(self) -> int:
        """Number of slices of a batch; 1 if it is not cut."""
        return self._first.graph.num_micro_batches

    @property
    def verdict(self) -> LossVerdict | None:
        """How the loss of the batch is computed from micro-batches; None if the batch is not cut."""
        micro = self._program.origin.micro
        return None if micro is None else micro.verdict

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The captured optimizer as a PyTorch optimizer: for schedulers, for its `state_dict`, and after `backward`.

        A call of the step also updates the parameters, with the options of this object. After `backward`,
        `optimizer.step()` updates them from `grad`. Both use the same state.

        Raises:
            InvalidValue: the step was captured without one.
        """
        self._show(has_state=True)
        return self.captured_optimizer.as_torch

    @property
    def captured_optimizer(self) -> CapturedOptimizer:
        """The optimizer in the graph.

        Raises:
            InvalidValue: the step was captured without one.
        """
        if self._optimizer is None:
            raise InvalidValue(
                "optimizer",
                None,
                "a step captured with one",
                where="placed step",
                hint="Make one over `step.parameters()`, and fill `grad` by `step.backward(...)`.",
            )
        return self._optimizer

    def parameters(self) -> Iterator[nn.Parameter]:
        """The placed parameters on their devices, in the order of the model; for optimizers and clipping."""
        self._show()
        return iter(self._state.parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The placed parameters with their dotted names."""
        self._show()
        return iter(self._state.parameters.items())

    def zero_grad(self) -> None:
        """Sets the gradients of all parameters to None."""
        with self._turn(runs=False):
            for parameter in self._state.parameters.values():
                parameter.grad = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors of the model's `state_dict`, with the same names; those of parameters that are split
        are in the memory of the CPU. `save` also writes optimizer state and counts."""
        with self._turn(runs=False):
            return self._state.shown(as_copies=True)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrites parameters and buffers, by dotted name; the others do not change.

        Raises:
            UnknownName: no parameter or buffer has that name.
            InvalidValue: another shape or dtype.
        """
        with self._turn(runs=False):
            self._state.load(state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything that is needed to continue: parameters, buffers, optimizer state, options, counts of steps.

        Args:
            path: of a safetensors file.

        Raises:
            FileProblem: it cannot be written.
        """
        with self._turn(runs=False):
            if self._optimizer is not None:
                self._optimizer.refresh()
            told = {
                "schema": SCHEMA,
                "optimizer": None if self._optimizer is None else dataclasses.asdict(self._optimizer.spec),
                "num_steps": self.num_steps,
                "num_evaluations": self._num_evaluations,
                "seed": self._seed,
            }
            tensors = {name: each.copy("cpu").contiguous() for name, each in self._state.stored().items()}
            write_bytes_atomic(path, save(tensors, metadata={"rlplace": json.dumps(told)}))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restores the state from a file of `save` for this model; the placement may differ.

        Raises:
            FileProblem: no such file, or a file of another model, optimizer or seed. In this case nothing is
                overwritten.
        """
        with self._turn(runs=False):
            told, found = read_step(Path(path))
            own, optimizer, spec = self._state.stored(), self._optimizer, told["optimizer"] or {}
            own_name, options = (None, ()) if optimizer is None else (optimizer.spec.name, optimizer.options)
            if (name := spec.get("name")) != own_name:
                raise FileProblem(path, f"of a step with optimizer {name}, this one has {own_name}.")
            if (seed := told.get("seed")) != self._seed:
                raise FileProblem(
                    path, f"of a step with seed {seed}, this one has {self._seed}: random ops would differ."
                )
            _check_draws(told["schema"], self._program, path)
            if lacking := set(options) - spec.keys():
                raise FileProblem(path, f"its optimizer lacks {min(lacking)!r}.")
            names = {key.split(".", 2)[-1] for key in found.keys() - own.keys() if key.startswith("optimizer.")}
            for name in names & self._state.parameters.keys():  # those that only graphs of other shapes update
                self._state.begun(name)
            own = self._state.stored()
            kinds = {key: (each.dtype, tuple(each.shape)) for key, each in found.items()}
            for key in sorted(own.keys() | found.keys()):
                pair = kinds.get(key), own[key].kind if key in own else None
                theirs, here = ("missing" if one is None else "{} {}".format(*one) for one in pair)
                if theirs != here:
                    raise FileProblem(path, f"of another model: {key} is {theirs}, here {here}.")
            for key, each in own.items():
                each.write(found[key])
            for option in options:
                self.captured_optimizer.set_option(option, spec[option])
            self.num_steps, self._num_evaluations = told["num_steps"], told["num_evaluations"]

    def checkpoint(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """The state that this process has, for `torch.distributed.checkpoint` to save or to load into.

        Its tensors are the placed ones, no copies. After a load into them, call `restore`.

        Args:
            optimizer: your own over `parameters()`; by default the captured one, if there is one.

        Returns:
            `model`: the model's own `state_dict`. `optim`: state and options of the optimizer by names of parameters,
            as PyTorch flattens them. `rlplace`: counts of steps, and the schema of
            draws if the step has any.
        """
        with self._turn(runs=False):
            counts = {"num_steps": self.num_steps, "num_evaluations": self._num_evaluations}
            counts |= {"schema": SCHEMA} if self._program.draws else {}
            return {
                "model": self._state.gathered(("", name, "", each) for name, each in self._state.shown().items()),
                "optim": optimizer_state(self._torch_optimizer(optimizer), self._state),
                "rlplace": {name: torch.tensor(count) for name, count in counts.items()},
            }

    def restore(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Goes on from a checkpoint.

        Args:
            state: what `checkpoint` returned, after it was loaded into. Counts of steps may be missing.
            optimizer: as it was given there.
        """
        with self._turn(runs=False):
            set_options(self._torch_optimizer(optimizer), self._state, state["optim"])
            counts = state.get("rlplace", {})
            _check_draws(int(counts.get("schema", 1 if counts else SCHEMA)), self._program, "checkpoint")
            self.num_steps = int(counts.get("num_steps", self.num_steps))
            self._num_evaluations = int(counts.get("num_evaluations", self._num_evaluations))

    def _show(self, *, has_state: bool = False) -> None:
        """Has parameters that are split in memory as whole ones, with the state of their updates if asked for."""
        if not all(
            each.is_shown and (each.state or not (has_state and each.states)) for each in self._state.split.values()
        ):
            with self._turn(runs=False):
                self._state.show(has_state=has_state)

    def _torch_optimizer(self, own: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
        return self._optimizer.as_torch if own is None and self._optimizer is not None else own

    def copy_to(self, model: nn.Module) -> None:
        """Writes parameters and buffers back into `model`.

        Raises:
            UnknownName: `model` lacks a parameter or buffer of this step.
            InvalidValue: a parameter or buffer has another shape. In both cases nothing is written.
        """
        model = original_of(model)
        with self._turn(runs=False):
            self._state.write_to({**dict(model.named_parameters()), **dict(model.named_buffers())})

    def close(self) -> None:
        """Waits for a running call of another thread, and ends all threads and processes of the step."""
        self._crew.stop()

    def __reduce__(self) -> Any:
        """Refuses to be copied or pickled: it has threads."""
        raise InvalidValue(
            "step",
            "a placed one",
            "a model to be copied or pickled",
            where="copy",
            hint="Save it with `save`, make another with `to_step` and `load` that; or copy the model itself.",
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _turn(self, *, runs: bool = True) -> Iterator[None]:
        """While active, the calling thread has the model alone; on GPUs, all that it launched is done afterwards.

        The next caller may launch on other streams.
        """
        with self._crew.turn(runs=runs), torch.inference_mode(False), self._state.settled():
            yield

    def _graph_of(self, tensors: list[torch.Tensor], *, is_evaluation: bool) -> PlacedGraph | None:
        """The graph for these inputs and targets, captured where their shapes are new; None to run a step eagerly."""
        # All graphs take over parameters whose `data` was replaced, as `vector_to_parameters` and swaps of averages do.
        first, key = self._first, _key(tensors, is_evaluation=is_evaluation)
        for placed in self._graphs.values() if self._state.is_moved() else ():
            placed.follow_state()
        if key not in self._graphs:
            if not is_evaluation and self._other_shapes != "capture":
                return None if self._other_shapes == "eager" else first  # it says what it expects
            again = self._captured(self._arguments.call(tensors), is_evaluation=is_evaluation)
            self._graphs[key] = self._placed(again, first)
            _log.info(
                "captured %s of shapes %s: %d graphs share this placement",
                "evaluation" if is_evaluation else "inputs",
                key[1:],
                len(self._graphs),
            )
        placed, model = self._graphs[key], self._program.origin.model
        is_switched = is_evaluation or model.training != self._flags.modes[""]
        capture_now = partial(self._captured, placed.call, is_evaluation=is_evaluation)
        placed.check(capture_now, self._modes if is_switched else ())
        return placed

    def _captured(self, call: Call, *, is_evaluation: bool) -> OpGraph:
        if is_evaluation:
            return captured_evaluation(self._first.graph, call)
        return captured_again(self._first.graph, call, self._flags_now)

    def _placed(self, graph: OpGraph, like: PlacedGraph) -> PlacedGraph:
        plan = like.plan if graph.fingerprint == like.graph.fingerprint else carried_plan(like.graph, like.plan, graph)
        return PlacedGraph(graph, self._host, plan, self._crew, self._state, seed=self._seed)

    @property
    def _flags_now(self) -> Flags:
        """How the model is set now; where it is switched as a whole (`model.eval()`), a step keeps its own modes."""
        now = Flags.of(self._program.origin.model).modes
        return dataclasses.replace(self._flags, modes=now) if now[""] == self._flags.modes[""] else self._flags

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any, loss_scale: float | None = None) -> Any:
        """One step; with a scale of the loss, gradients are left in `grad` instead of updating."""
        tensors = self._arguments.tensors(args, kwargs, targets)
        placed = self._graph_of(tensors, is_evaluation=False)
        if placed is None:
            result = self._run_eagerly(self._arguments.call(tensors), loss_scale)
        else:
            with nullcontext() if loss_scale is None else self._state.grad_filled(loss_scale, placed.graph):
                result = placed.run(tensors, self.num_steps)
        self.num_steps += 1
        if self._program.is_training:
            loss_of(result).backward = _HAS_RUN
        return result

    def _run_eagerly(self, call: Call, loss_scale: float | None) -> Any:
        """The result of plain PyTorch, the whole batch on the device of the first parameter, with draws of its own."""
        state, origin = self._state, self._program.origin
        state.show()
        place = next((parameter.device for parameter in state.parameters.values()), torch.device("cpu"))
        held = {name: tensor.to(place) for name, tensor in (*state.parameters.items(), *state.buffers.items())}
        args, kwargs, targets = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), call)
        has_backward = self._program.is_training and (self._optimizer is not None or loss_scale is not None)
        flagged, cast = self._flags.on(origin.model), as_cast(origin.model, origin.autocast)
        with flagged, cast, uncompiled(), torch.set_grad_enabled(has_backward):
            with holding(origin.model, held):
                returned = origin.model(*args, **kwargs)
            if origin.loss_fn is not None:
                returned = origin.loss_fn(returned, *targets)
        with holding(origin.model, held):  # of a checkpoint, whose forward runs again
            if has_backward and loss_scale is not None:
                (loss_of(returned) * loss_scale).backward()
            elif has_backward:
                self._update(loss_of(returned))
        with torch.no_grad():
            for name, buffer in state.buffers.items():
                if held[name] is not buffer:  # it was moved, or `forward` replaced it
                    buffer.copy_(held[name])
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, returned)

    def _update(self, loss: torch.Tensor) -> None:
        """Updates the parameters by the gradients of the loss alone; `grad` stays as it is."""
        before = [(parameter, parameter.grad) for parameter in self._state.parameters.values()]
        try:
            for parameter, _ in before:
                parameter.grad = None
            loss.backward()  # type: ignore[no-untyped-call]
            self.captured_optimizer.as_torch.step()
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient


def _key(tensors: list[torch.Tensor], *, is_evaluation: bool) -> tuple[object, ...]:
    """The common properties of the inputs that one graph takes."""
    return is_evaluation, *(tuple(tensor.shape) for tensor in tensors)


class _HasRun:
    """In the place of `backward` of a loss that a step returned."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(
            "the step that returned this loss has run its backward already: leave out `loss.backward()`. A call of a "
            "step that was captured with an optimizer has updated the parameters, too; `step.backward(x)` leaves "
            "gradients in `grad` for an optimizer of your own, and `to_module(model, graph, placement)` leaves the "
            "loss to you."
        )

    def __reduce__(self) -> Any:
        """Nothing of ours: a saved loss is loaded where rlplace is not, and by `torch.load` as it is safest."""
        return OrderedDict, ()

    def __deepcopy__(self, memo: object) -> Self:
        return self


_HAS_RUN = _HasRun()


def to_step(
    model: nn.Module,
    graph: OpGraph,
    placement: Placement,
    *,
    host: Host | str | None = None,
    seed: int = 0,
    other_shapes: OtherShapes = "capture",
) -> PlacedModel:
    """Returns `model` as a callable that runs on the devices of the placement, starting with its current parameters.

    Args:
        model: the model that `graph` was captured from.
        graph: a graph with its program.
        placement: made for `graph` and for a host of this machine.
        host: that host, or a HOST word for it; by default the host of this machine that the placement was made for.
        seed: of random ops.
        other_shapes: for inputs of other shapes: `capture` a new graph for them at their first call, with the same
            placement; run them in `eager` mode; or `refuse` them.

    Raises:
        InvalidValue: an argument is not a model, graph or placement, or the arguments are in the wrong order.
        FingerprintMismatch: the placement was made for another graph or host.
    """
    host = host_of(model, graph, placement, host, "to_step")
    placed = PlacedModel(graph, host, placement.plan, seed=seed, other_shapes=other_shapes)
    model = original_of(model)
    placed.load_state_dict({**dict(model.named_parameters()), **dict(model.named_buffers())})
    return placed


def _check_draws(schema: int, program: Program, path: str | os.PathLike[str]) -> None:
    """Refuses to go on with a training whose random ops drew other numbers."""
    if schema != SCHEMA and program.draws:
        raise FileProblem(
            path,
            f"of an earlier rlplace (schema {schema}, now {SCHEMA}), whose random ops drew other numbers from the same "
            f"seed. Take its parameters alone (`load_state_dict`), or end that training with that rlplace.",
        )

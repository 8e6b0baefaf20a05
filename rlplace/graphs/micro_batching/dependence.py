"""`dependence`: how the values of a step depend on the samples of its batch, op by op, for any values.

A few samples can look as if nothing mixed them where an op saturates: `x.norm().clamp(min=20)` of small samples is 20,
and flooding, `(loss - b).abs() + b`, of a large loss is the loss. So each value is followed from the inputs on: by its
op, not by its number. One run of a slice and one of the batch tell which dimension counts the samples.

`Trial`: a copy of a model, computed in float64 on the CPU, to analyse a step without running the user's own.

`Pinned`: while active, a step is a function of its samples alone: float64, nothing random, fixed statistics.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rlplace.graphs.capturing.constants import calls_told, memory, owner_of
from rlplace.graphs.capturing.portable import uncompiled
from rlplace.graphs.capturing.trace import LossFn, check_alone, gradients_of
from rlplace.graphs.capturing.untouched import PythonState
from rlplace.graphs.program import Slicing, closed, opened, tensors_in, with_tensors

aten = torch.ops.aten

WIDENED = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64) | {
    torch.complex64: torch.complex128
}
"""Types of floats, and what they become in float64."""


class TimeUp(BaseException):
    """The time of a check is over; no `Exception`, so that no model or loss catches it."""


@dataclass(frozen=True)
class Labels:
    """The labels that one loss of negative log-likelihood read.

    Attributes:
        ignore_index: the label of entries that do not count.
        num_ignored: how many had it.
        is_mean: whether it divides by how many labels count.
        is_weighted: whether it divides by the weights of the classes that occur.
    """

    ignore_index: int
    num_ignored: int
    is_mean: bool
    is_weighted: bool


Draw = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Makes the result of a random op from the op and its arguments."""


class Pinned(TorchDispatchMode):
    """Makes ops of one step comparable with those of another that has more or fewer samples.

    Casts to lower precision stay in float64; a random op returns a constant (a permutation the reverse order), memory
    that is not filled is zero; batch
    normalisation uses its running statistics, mean 0 and variance 1 where it has none, and changes nothing.

    Args:
        is_double: whether floats become float64, also tensors from outside of the step.
        most_work: an op that begins after so much work (see `_work`) raises `TimeUp`.
        draw: makes the results of random ops.
        statistics: mean and variance that batch normalisation takes; None leaves it as it is.

    Attributes:
        written: the memory that in-place ops wrote to.
        labels: one entry for every loss of negative log-likelihood that ran.
        normalises_batch: whether batch normalisation would have used the statistics of the batch.
        work: of the ops that ran.
    """

    def __init__(
        self,
        *,
        is_double: bool,
        most_work: float = float("inf"),
        draw: Draw | None = None,
        statistics: Callable[[dict[str, Any]], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.labels: list[Labels] = []
        self.normalises_batch, self.work = False, 0.0
        self._is_double, self._most_work = is_double, most_work
        self._draw, self._statistics = draw or constant_draw, statistics

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.work > self._most_work:
            raise TimeUp
        args, kwargs = self._widened(func, args, kwargs or {})
        result = self._called(func, args, kwargs)
        if self._most_work < float("inf"):
            self.work += _work(func, args, kwargs, result)
        if not self._is_double or not isinstance(result, Tensor) or tensors_in((args, kwargs)):
            return result
        return result.to(WIDENED.get(result.dtype, result.dtype))  # made without a type: PyTorch's default

    def _widened(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Arguments of an op in float64; the tensors that it writes to stay as they are."""
        if not self._is_double or func is aten.view.dtype:
            return args, kwargs
        args, kwargs = pytree.tree_map_only(torch.dtype, lambda dtype: WIDENED.get(dtype, dtype), (args, kwargs))
        if all(each.dtype not in WIDENED for each in tensors_in((args, kwargs))):
            return args, kwargs
        schema = func._schema.arguments
        written = {each.name for each in schema if each.alias_info is not None and each.alias_info.is_write}

        def wide(value: Any) -> Any:
            return pytree.tree_map_only(Tensor, lambda each: each.to(WIDENED.get(each.dtype, each.dtype)), value)

        named = zip(schema, args, strict=False)
        return (
            tuple(value if argument.name in written else wide(value) for argument, value in named),
            {name: value if name in written else wide(value) for name, value in kwargs.items()},
        )

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._statistics is not None and func in _NORMS:
            return self._normalised(_named(func, args, kwargs), func, self._statistics)
        if self._statistics is not None and func in _NORMS_BACKWARD:
            given = _named(func, args, kwargs)
            if given.get("train", given.get("update")):
                mean, variance = self._statistics(given)
                return aten.native_batch_norm_backward.default(
                    given["grad_out"], given["input"], given.get("weight"), mean, variance, None, None, False,
                    given["eps"], given["output_mask"],
                )  # fmt: skip
        if func in _LOSSES:
            given = _named(func, args, kwargs)
            num_ignored, is_mean = int((given["target"] == given["ignore_index"]).sum()), given["reduction"] == 1
            self.labels.append(
                Labels(given["ignore_index"], num_ignored, is_mean, is_mean and given.get("weight") is not None)
            )
        if func._schema.is_mutable:
            self.written.update(memory(value)[0] for value in tensors_in((args[:1], kwargs.get("out"))))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        result = func(*args, **kwargs)
        return result.zero_() if func.overloadpacket in _UNFILLED else result

    def _normalised(
        self, given: dict[str, Any], func: Any, statistics: Callable[[dict[str, Any]], tuple[Tensor, Tensor]]
    ) -> Any:
        x: Tensor = given["input"]
        if given.get("training", func is aten._batch_norm_with_update.default):
            self.normalises_batch |= x.shape[0] > 1  # instances are normalised as channels of one sample
        mean, variance = statistics(given)
        done = aten.native_batch_norm.default(
            x, given.get("weight"), given.get("bias"), mean, variance, False, given["momentum"], given["eps"]
        )
        if func is aten._native_batch_norm_legit_functional.default:
            return (*done, given["running_mean"].clone(), given["running_var"].clone())
        return (*done, x.new_empty(0, dtype=torch.uint8)) if len(func._schema.returns) == 4 else done


def _work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """What an op takes, in about nanoseconds of one core, whatever else the machine does: a call, elements, FLOPs."""
    flops = flop_registry.get(func.overloadpacket)
    count = 0 if flops is None else flops(*args, **kwargs, out_val=result)
    return 20_000 + 0.5 * sum(each.numel() for each in tensors_in((args, kwargs, result))) + 0.1 * count


_UNFILLED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_NORMS = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update.default,
}
_NORMS_BACKWARD = (aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)
_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the schema of an op."""
    return {**dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)), **kwargs}


def running_statistics(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Mean and variance that batch normalisation takes as given."""
    mean, variance = given.get("running_mean"), given.get("running_var")
    return unit_statistics(given) if mean is None or variance is None else (mean, variance)


def unit_statistics(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Mean 0 and variance 1."""
    x: Tensor = given["input"]
    return x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])


def constant_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a random op here: the same for a sample wherever it stands in its batch."""
    if func is aten.native_dropout.default:
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if func is aten.rrelu_with_noise.default:
        args[1].fill_(1.0)
        return func(*args[:4], False)
    drawn = func(*args, **kwargs)
    if not isinstance(drawn, Tensor):  # fused attention, whose dropout comes apart before where there is any
        return drawn
    if func.overloadpacket is aten.randperm:
        return drawn.copy_(torch.arange(len(drawn) - 1, -1, -1, dtype=drawn.dtype, device=drawn.device))
    if drawn.is_floating_point() or drawn.is_complex():
        return drawn.fill_(0.5)  # neither nothing nor everything
    given = _named(func, args, kwargs)
    return drawn.fill_(True if drawn.dtype is torch.bool else given.get("low", given.get("from", 0)))


@dataclass(frozen=True)
class Stepped:
    """The result of a step: a loss, and the gradients of all trainable parameters in their order."""

    loss: Tensor
    gradients: tuple[Tensor, ...]

    @classmethod
    def of_output(cls, output: Any) -> Stepped:
        """The output of inference, in the form of a step without a loss."""
        return cls(torch.zeros(()), tuple(leaf.double() for leaf in tensors_in(output) if not leaf.is_complex()))

    @property
    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it."""
        return all(bool(torch.isfinite(value).all()) for value in (self.loss, *self.gradients))


@contextmanager
def random_states_kept(devices: Sequence[int] = ()) -> Iterator[None]:
    """Afterwards the random states of Python, NumPy, PyTorch and these GPUs are as before."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


MOST_ALONE = 50e9
"""FLOPs that one thread computes in about a second."""


@contextmanager
def one_thread(flops: float) -> Iterator[None]:
    """While active, ops run in one thread, if they are few: a team takes longer to meet than small ops to run."""
    before = torch.get_num_threads()
    try:
        if flops < MOST_ALONE:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


class Trial:
    """A copy of `model`, its inputs and its loss; runs here leave the user's own as they are.

    Args:
        model: copied, to the CPU.
        call: (args, kwargs) of the model.
        loss_fn: copied where it is a module or bound to one; None for inference.
        targets: further arguments of the loss.
        is_double: whether floats become float64; else they keep their precision.
        most_work: of all runs together; an op after so much raises `TimeUp`.

    Attributes:
        model: the copy.
        tensors: copies of the tensors among the inputs, then the targets.
        num_inputs: how many of them are inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Any,
        loss_fn: LossFn | None,
        targets: Sequence[Tensor],
        *,
        is_double: bool,
        most_work: float = float("inf"),
    ) -> None:
        self.is_double, self._work_left = is_double, most_work
        held = tensors_in([vars(module) for owner in (model, *owner_of(loss_fn)) for module in owner.modules()])
        memo: dict[int, Any] = {id(value): self._copied(value) for value in held}
        with torch.no_grad():
            self.model, self._loss_fn = copy.deepcopy((model, loss_fn), memo)
        given, self._filled = with_tensors(call)
        self.num_inputs = len(given)
        self.tensors = [self._copied(tensor) for tensor in (*given, *targets)]
        # once each: a loss may be a method of the model
        copies = {each: None for owner in (self.model, *owner_of(self._loss_fn)) for each in owner.modules()}
        self._buffers = [
            (module._buffers, name, buffer)
            for module in copies
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._state = PythonState((("", module) for module in copies), has_hooks=False)

    @contextmanager
    def rehearsal(self) -> Iterator[Pinned]:
        """While active, ops are pinned, without autocast, in float64 by default; random states stay as they are."""
        default, plain = torch.get_default_dtype(), torch.autocast("cpu", enabled=False)
        mode = Pinned(is_double=self.is_double, most_work=self._work_left, statistics=running_statistics)
        with random_states_kept(), plain, uncompiled(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a model that sees one sample
            try:
                torch.set_default_dtype(torch.float64 if self.is_double else default)
                with mode:
                    yield mode
            finally:
                torch.set_default_dtype(default)
                self._work_left -= mode.work

    @property
    def has_loss(self) -> bool:
        """Whether a step has a loss; without, it is inference."""
        return self._loss_fn is not None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable ones."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """The model's opened results for these inputs (targets may follow); buffers and attributes are as at first."""
        self._state.restore()
        for buffers, name, first in self._buffers:
            buffers[name] = first.detach().clone()  # a gradient to come may need the one before
        args, kwargs = self._filled(tensors)
        return opened(self.model(*args, **kwargs))

    def loss(self, output: Any, tensors: Sequence[Tensor]) -> Tensor:
        """The loss of an output, and of the targets among `tensors`."""
        assert self._loss_fn is not None
        loss: Tensor = check_alone(self._loss_fn(closed(output), *tensors[self.num_inputs :]))
        return loss.reshape(())

    def step(self, tensors: Sequence[Tensor]) -> Stepped:
        """Loss and gradients for these inputs and targets; without a loss the outputs, in place of gradients."""
        with torch.set_grad_enabled(self.has_loss):
            output = self.output(tensors)
        if not self.has_loss:
            return Stepped.of_output(output)
        loss = self.loss(output, tensors)
        return Stepped(loss.detach(), self.gradients([loss], None))

    def gradients(self, outputs: Sequence[Tensor], seeds: Sequence[Tensor | None] | None) -> tuple[Tensor, ...]:
        """Gradients of all trainable parameters, given those of `outputs`; zeros where these depend on none."""
        found = gradients_of(outputs, self.parameters, seeds)
        return tuple(
            torch.zeros_like(parameter) if gradient is None else gradient.detach().to_dense()
            for gradient, parameter in zip(found, self.parameters, strict=True)
        )

    def _copied(self, value: Tensor) -> Tensor:
        dtype = WIDENED.get(value.dtype, value.dtype) if self.is_double else value.dtype
        made = value.detach().to(device="cpu", dtype=dtype, copy=True)
        if isinstance(value, nn.Parameter):
            made = nn.Parameter(made, value.requires_grad)
            for hook in (value._backward_hooks or {}).values():  # they change the gradient
                made.register_hook(hook)  # type: ignore[no-untyped-call]
        return made


MOST_NAMED = 3


class Of(IntEnum):
    """How a value depends on the samples of a batch."""

    NOTHING = 0
    """No sample: parameters, constants, and values computed of them."""
    SAMPLES = 1
    """A part for each sample, computed of that sample alone, along some dimension."""
    SUM = 2
    """A sum or a mean over samples of a value of each alone, times constants, plus constants."""
    MIXED = 3
    """Anything else."""


@dataclass(frozen=True)
class Dependence:
    """How a step depends on the samples of its batch.

    Attributes:
        outputs: of the tensors that the model returns.
        loss: of the loss; NOTHING without one.
        mixing: ops of the model that mix samples, or add them up; else those of the loss that do, or that make of a sum
            over samples a value that is no such sum. As `aten.mm.default in encoder.layer (Linear)`: the op, and the
            path and class of the module that called it.
        is_known: whether it could be told: a slice runs, calls the same ops as the batch, and there was time.
    """

    outputs: tuple[Of, ...]
    loss: Of
    mixing: tuple[str, ...]
    is_known: bool

    @property
    def is_mixed(self) -> bool:
        """Whether an output is known to be of all samples together, and no sum over them."""
        return self.is_known and Of.MIXED in self.outputs


def dependence(trial: Trial, tensors: Sequence[Tensor], slicing: Slicing) -> Dependence:
    """How the outputs and the loss of a step depend on its samples.

    Args:
        trial: the step.
        tensors: its inputs and targets.
        slicing: how they are cut.
    """
    size = max(1, slicing.batch // 2)  # code often differs for one sample
    halves = Slicing(slicing.dims, (slicing.batch - size, size))
    watch = _Watch(trial, slicing.batch, size)
    outputs: list[Of] = []
    in_model: list[str] = []
    loss, is_done = Of.NOTHING, False
    try:
        with trial.rehearsal(), torch.set_grad_enabled(trial.has_loss):  # a loss may take gradients (a penalty on them)
            of_slice, of_batch = halves.cut(tensors, 1), list(tensors)
            with watch.calls(), watch:
                output = trial.output(of_slice)
                if trial.has_loss:
                    trial.loss(output, of_slice)
            watch.is_whole = True
            for tensor in [each for each, dim in zip(of_batch, slicing.dims, strict=True) if dim is not None]:
                watch.known.note(tensor, Of.SAMPLES, is_written=False)
            with watch.calls(), watch:
                output = trial.output(of_batch)
                leaves = tensors_in(output)
                outputs = [watch.known.of(leaf) for leaf in leaves]
                in_model, watch.found = watch.found, []
                in_model += [watch.origin[id(leaf)] for leaf in leaves if id(leaf) in watch.origin]
                if trial.has_loss:
                    loss = watch.known.of(trial.loss(output, of_batch))
        is_done = watch.is_aligned
    except (Exception, TimeUp):  # of the user's model; the check of its values says so
        pass
    return Dependence(tuple(outputs), loss, tuple(dict.fromkeys(in_model or watch.found))[:MOST_NAMED], is_done)


_FACTORIES = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros_like", "ones_like"),
    *("full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full", "zero", "fill"),
}
"""Ops that read shapes of tensors, no values."""
_SUMS = {
    *("sum", "mean", "nansum", "count_nonzero", "trace", "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "addbmm"),
    *("baddbmm", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"),
    *("multilabel_margin_loss_forward", "index_add", "scatter_add", "bincount", "embedding_dense_backward"),
}
"""Ops that add up, or average, the values of samples, where they leave no dimension of samples."""
_LINEAR_IN_ALL = {"add", "sub", "rsub", "stack", "cat", "copy"}
_LINEAR_IN_FIRST = {
    *("neg", "sum", "mean", "clone", "_to_copy", "_unsafe_view", "repeat", "flip", "roll", "tril", "triu", "trace"),
    *("index", "index_select", "gather", "masked_fill", "constant_pad_nd", "div", "lift_fresh", "_reshape_copy"),
}
_LINEAR_IN_ONE = {"mul", "mm", "mv", "dot", "bmm"}
_OFFSETS = {"add", "sub", "rsub", "mul", "clone", "_to_copy", "_unsafe_view"}
"""Arithmetic of indices: positions in a flattened batch are of its samples, but other numbers in a slice."""


def _is_linear(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], is_sum: list[bool]) -> bool:
    """Whether an op is linear in those of its tensors that are sums over samples, all others of no sample."""
    if name in _LINEAR_IN_ALL or (name == "where" and not is_sum[0]):
        return True
    if name in _LINEAR_IN_ONE:
        return sum(is_sum) == 1
    is_exact = kwargs.get("rounding_mode") is None
    return (name in _LINEAR_IN_FIRST or func.is_view) and is_exact and is_sum[0] and not any(is_sum[1:])


@dataclass
class _Known:
    """Tensors of the batch whose dependence is known, kept so that an id stays the name of one."""

    by_id: dict[int, tuple[Tensor, Of]] = field(default_factory=dict)
    by_memory: dict[int, Of] = field(default_factory=dict)
    written: dict[int, Of] = field(default_factory=dict)

    def of(self, value: Tensor) -> Of:
        """The dependence of a value; of an unknown one that shows known memory: its dependence."""
        storage = memory(value)[0]
        own = self.by_id[id(value)][1] if id(value) in self.by_id else self.by_memory.get(storage, Of.NOTHING)
        return _joined(own, self.written.get(storage, Of.NOTHING))

    def note(self, value: Tensor, of: Of, *, is_written: bool) -> None:
        """Notes the dependence of a value; one that is written in place is so for all that show its memory."""
        storage = memory(value)[0]
        self.by_id[id(value)] = value, of
        self.by_memory[storage] = _joined(self.by_memory.get(storage, Of.NOTHING), of)
        if is_written:
            self.written[storage] = _joined(self.written.get(storage, Of.NOTHING), of)


def _joined(one: Of, other: Of) -> Of:
    return Of.MIXED if {one, other} == {Of.SAMPLES, Of.SUM} else max(one, other)


class _Watch(TorchDispatchMode):
    """Keeps the results of every op for a slice, then finds for each op of the whole batch how its outputs depend on
    samples.

    Attributes:
        found: the ops that mix samples, since it was emptied.
        is_aligned: whether the batch has run the ops of the slice so far.
        is_whole: whether ops are of the batch, no longer of the slice.
        known: the dependence of the batch's tensors.
        origin: by id of a sum over samples, the op that added up.
    """

    def __init__(self, trial: Trial, batch: int, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self.is_aligned = True
        self.is_whole = False
        self._trial, self._cut = trial, (batch, batch - size, size)
        self._of_slice: dict[tuple[str, int], tuple[Any, list[Tensor]]] = {}
        self._counts: Counter[str] = Counter()
        self.known = _Known()
        self.origin: dict[int, str] = {}
        self._running: list[str] = []
        self._kept: list[Tensor] = []

    @contextmanager
    def calls(self) -> Iterator[None]:
        """While active, the watch knows which module runs."""

        def enter(path: str, module: nn.Module) -> None:
            self._running.append(f"{path or 'the root'} ({type(module).__name__})")

        def leave() -> None:
            if self._running:
                self._running.pop()

        with calls_told(self._trial.model, enter, leave):
            yield
        self.is_aligned &= not self.is_whole or self._counts.total() == len(self._of_slice)
        self._running.clear()
        self._counts.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        module = self._running[-1] if self._running else "the loss"
        place = (module, self._counts[module])
        self._counts[module] += 1
        outputs = tensors_in(result)
        if not self.is_whole:
            self._of_slice[place] = func, [value.detach().clone() for value in outputs]
            self._kept += outputs  # as those of the batch are: PyTorch detaches what is new and kept elsewhere
            return result
        called, expected = self._of_slice.get(place, (None, []))
        is_alike = called is func and len(expected) == len(outputs)  # else a slice took another path there
        self.is_aligned &= is_alike
        pairs = zip(outputs, expected if is_alike else [None] * len(outputs), strict=True)
        self._judge(f"{func} in {module}", func, args, kwargs, pairs)
        return result

    def _judge(
        self,
        op: str,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Iterable[tuple[Tensor, Tensor | None]],
    ) -> None:
        inputs = tensors_in((args, kwargs))
        of_inputs = [self.known.of(value) for value in inputs]
        name = func.overloadpacket.__name__.removesuffix("_" * func._schema.is_mutable)
        sums = next((self.origin[id(value)] for value in inputs if id(value) in self.origin), op)
        for value, of_slice in outputs:
            of = self._of(name, func, args, kwargs, of_inputs, inputs, value, of_slice)
            if of is Of.MIXED and Of.MIXED not in of_inputs:
                named = sums if Of.SAMPLES in of_inputs else op  # `x - x.mean(0)`: the mean, not the difference
                if named not in self.found and value.numel():
                    self.found.append(named)
            if of is Of.SUM:
                self.origin[id(value)] = sums if Of.SUM in of_inputs else op
            self.known.note(value, of, is_written=any(value is each for each in inputs))

    def _of(
        self,
        name: str,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        of_inputs: list[Of],
        inputs: list[Tensor],
        value: Tensor,
        of_slice: Tensor | None,
    ) -> Of:
        """The dependence of an op's output."""
        kinds = set(of_inputs) - {Of.NOTHING}
        if not kinds or not value.numel():
            return Of.NOTHING
        if name in _FACTORIES:
            return Of.NOTHING if not any(value is each for each in inputs) else max(kinds)
        if kinds == {Of.SUM}:
            is_sum = [of is Of.SUM for of in of_inputs]
            rounds = any(each.is_floating_point() for each in inputs) and not value.is_floating_point()
            return Of.SUM if _is_linear(name, func, args, kwargs, is_sum) and not rounds else Of.MIXED
        if kinds != {Of.SAMPLES}:
            return Of.MIXED
        if of_slice is None:  # not known, and said so
            return Of.SAMPLES
        if of_slice.shape == value.shape:
            return Of.SUM if name in _SUMS else Of.MIXED
        is_offset = not value.is_floating_point() and (name in _OFFSETS or func.is_view)
        return Of.SAMPLES if is_offset or _is_slice(of_slice, value, *self._cut) else Of.MIXED


def _is_slice(part: Tensor, whole: Tensor, batch: int, start: int, size: int) -> bool:
    """Whether `part` is the slice of `whole` for `size` of `batch` samples, along any dimension.

    A dimension may hold the samples among others, before or behind them, as in (B * tokens) or (heads * B).
    """
    if part.dim() != whole.dim():
        return False
    scaled = [dim for dim in range(part.dim()) if part.shape[dim] != whole.shape[dim]]
    if not scaled:
        return _is_close(part, whole)
    dim = scaled[0]
    others, left = divmod(whole.shape[dim], batch)
    if len(scaled) > 1 or left or part.shape[dim] != others * size:
        return False
    shapes = ((before, batch, others // before) for before in range(1, others + 1) if others % before == 0)
    splits = (whole.reshape(*whole.shape[:dim], *shape, *whole.shape[dim + 1 :]) for shape in shapes)
    return any(_is_close(part, split.narrow(dim + 1, start, size).reshape(part.shape)) for split in splits)


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    rtol = 1e-6 if one.dtype in (torch.float64, torch.complex128) else 1e-3
    atol = rtol * float(other.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return bool(torch.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True).all())

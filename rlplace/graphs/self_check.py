"""`check_step`: a captured step proves itself against plain PyTorch, on the batch that it was captured with.

A trace can be wrong in ways that no list of special cases holds: a backward that runs as a side effect of another, a
write that PyTorch's own functionalisation loses, Python code that looks at how many samples there are. What all of them
have in common is that the captured step gives other numbers than the model does. So both run once, and the loss, the
outputs, every gradient (and which parameters have one), and the buffers are compared.

Two rounds. In the precision of the model, equal to the bit: most steps are, and are done. Else in float64, where
rounding is far below the differences that a wrong step makes: `Pinned` widens every float as it meets it, so that
neither the model nor the graph has to be made anew.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from rlplace import cuda
from rlplace.errors import CaptureError
from rlplace.graphs.capturing.portable import uncompiled
from rlplace.graphs.capturing.refusals import has_values
from rlplace.graphs.capturing.untouched import holding, untouched
from rlplace.graphs.interpreter import require_program, run_graph
from rlplace.graphs.micro_batching.dependence import (
    Pinned,
    constant_draw,
    one_thread,
    random_states_kept,
    unit_statistics,
)
from rlplace.graphs.micro_batching.slices import run_in_micro_batches
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Call, Slicing, loss_of, opened, tensors_in, with_tensors
from rlplace.graphs.random_streams import DrawKey, Streams, place_of, seeded

aten = torch.ops.aten

MOST_PARAMETERS = 1 << 28
"""Larger models are not compared: in float64, with gradients of both ways, this many take 8 GiB."""
MOST_NAMED = 3
_SAMPLES = "code that looks at the number of samples or at their positions, or that mixes samples, has only those"
_BUFFERS = "buffers that `forward` changes from the batch change with each micro-batch, from the samples"
_ACCUMULATE = "`loss='accumulated'` (--loss accumulated) takes gradient accumulation, which is another step; "

Values = dict[str, Tensor]
"""What a step gives, by the name that a message gives it."""


class StepDiffers(CaptureError):
    """The captured step is not that of plain PyTorch."""


def check_step(graph: OpGraph) -> str:
    """Compares a captured step with plain PyTorch; both run once, on the batch of the capture.

    The model, its gradients, buffers and attributes, the inputs, and all random states are as before afterwards.

    Args:
        graph: with its program.

    Returns:
        why the step was not compared; "" where it was, and is right.

    Raises:
        StepDiffers: the captured step gives something else; names what.
    """
    check = _Check(graph)
    if problem := check.obstacle():
        return problem
    with one_thread(float(graph.flops.sum())):
        return check.run()


class _Check:
    def __init__(self, graph: OpGraph) -> None:
        self.graph, self.program = graph, require_program(graph)
        self.origin, self.micro = self.program.origin, self.program.origin.micro
        self.tensors, self.filled = with_tensors((self.origin.args, self.origin.kwargs))
        self.keys = self.program.draws
        self.has_shards = any(key.shard >= 0 for key in self.keys)
        self.is_whole = True
        self.whole: dict[DrawKey, list[Tensor]] = {}  # draws of the batch
        self.seeds: tuple[Tensor, ...] = ()  # gradients of a module's outputs: any will do
        if self.program.is_training and self.origin.loss_fn is None:
            generator = torch.Generator().manual_seed(0)
            self.seeds = tuple(
                torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype).to(each.device)
                for each in self.origin.targets
            )

    @property
    def state(self) -> Values:
        """The model's own parameters and buffers."""
        return {**dict(self.origin.model.named_parameters()), **dict(self.origin.model.named_buffers())}

    def obstacle(self) -> str:
        """Why nothing can be compared; "" where it can be."""
        given = (*self.state.values(), *self.tensors, *(() if self.seeds else self.origin.targets))
        if not has_values(given):
            return "its tensors are fake, without values"
        count = sum(each.numel() for each in self.origin.model.parameters())
        if count > MOST_PARAMETERS:
            return f"its {count:,} parameters are more than {MOST_PARAMETERS:,}"
        needed, free = 2 * int(self.graph.output_bytes.sum()), _free_bytes(given)
        return f"its step needs up to {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free" if needed > free else ""

    def run(self) -> str:
        """Both ways, in one precision or two; why they could not be compared."""
        is_cut = self.micro is not None
        references = [self.micro is not None and self.micro.verdict.kind == "accumulated"]
        if self.micro is not None and self.micro.verdict.normalises_batch and not references[0]:
            references = [False, True]  # on fixed statistics; and with those of each slice, in turn
        for in_slices in references:
            self.is_whole = not in_slices
            is_fixed = not in_slices and len(references) > 1
            if problem := self._compared(in_slices=in_slices, is_cut=is_cut, is_fixed=is_fixed):
                return problem
        return ""

    def _compared(self, *, in_slices: bool, is_cut: bool, is_fixed: bool) -> str:
        """Both ways: equal to the bit, else alike in float64, else, where that does not run, as far as can be told."""
        rounds = [(True, 1e-6)] if is_cut else [(False, 0.0), (True, 1e-9)]
        found, problem = list[str](), ""
        for is_double, rtol in (*rounds, (False, 1e-3)):
            try:
                expected = self._eager(is_double=is_double, in_slices=in_slices, is_fixed=is_fixed)
            except CaptureError:
                raise
            except Exception as error:  # the model is the user's: whatever it raises
                problem = f"plain PyTorch does not run on the sample batch: {_said(error)}"
                continue
            try:
                actual = self._captured(is_double=is_double, is_fixed=is_fixed)
            except Exception as error:
                if is_double:  # an op for float32 alone
                    continue
                told = f"the captured step does not run where plain PyTorch does: {_said(error)}"
                raise StepDiffers(f"{told}. {self._hint([], is_double, is_fixed, in_slices)}") from error
            found = _differences(expected, actual, rtol)
            if not found:
                return ""
            if is_double:
                break
        if found:
            raise self._refusal(found, self._hint(found, is_double, is_fixed, in_slices), in_slices=in_slices)
        return problem

    @contextmanager
    def _mode(self, *, is_double: bool, is_fixed: bool) -> Iterator[None]:
        if not is_double and not is_fixed:
            yield
            return
        with Pinned(is_double=is_double, draw=_as_it_is, statistics=unit_statistics if is_fixed else None):
            yield

    def _eager(self, *, is_double: bool, in_slices: bool, is_fixed: bool) -> Values:
        """What plain PyTorch gives: `loss.backward()` of the user's own model, on copies of its tensors.

        Not a copy of the model: functions that wrap its layers (adapters) hold the model itself, and a copy would call
        them. So its tensors are swapped for copies, and all else is as before afterwards (`untouched`).

        Draws have the keys of the trace. Those of the whole batch are keyed as if all of it were micro-batch 0, and
        those of a joined loss as those of none (-1): so a slice finds the draw of the batch that it is a part of.
        """
        origin, trains = self.origin, self.program.is_training
        own = dict(origin.model.named_parameters())
        devices = sorted({each.device.index for each in own.values() if each.is_cuda})
        with ExitStack() as stack:
            stack.enter_context(random_states_kept(devices))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(uncompiled())
            stack.enter_context(torch.set_grad_enabled(trains))
            kind = next((each.device.type for each in own.values()), "cpu")
            stack.enter_context(torch.autocast(kind, dtype=origin.autocast, enabled=origin.autocast is not None))
            stack.enter_context(untouched(origin.model, origin.loss_fn))
            stack.enter_context(self._mode(is_double=is_double, is_fixed=is_fixed))
            streams = Streams(self._drawn)
            if self.keys:
                stack.enter_context(streams.step())
            state = {name: each.detach().clone() for name, each in self.state.items()}
            for name, each in own.items():
                state[name] = nn.Parameter(state[name], trains and each.requires_grad)
                for hook in (each._backward_hooks or {}).values() if trains else ():  # they change the gradient
                    state[name].register_hook(hook)  # type: ignore[no-untyped-call]
            tensors = [each.detach().clone() for each in self.tensors]
            targets = [each.detach().clone() for each in (self.seeds or origin.targets)]
            wanted = [tensors[position].requires_grad_(True) for position in self.program.input_gradients]
            args, kwargs = self.filled(tensors)
            parameters = dict(state)
            with holding(origin.model, state):  # until the end of the backward, which may run the model again
                if in_slices and self.micro is not None:
                    result = run_in_micro_batches(
                        origin.model, (args, kwargs), origin.loss_fn, tuple(targets), self.micro, streams.begin
                    )
                else:
                    streams.begin(-1 if self.micro is None else 0)
                    result = origin.model(*args, **kwargs)
                    if self.micro is not None and self.micro.verdict.kind == "joined":
                        streams.begin(-1)  # the loss is not of a slice
                    if origin.loss_fn is not None:
                        result = origin.loss_fn(result, *targets)
                        loss_of(result).backward()
                    elif self.seeds:
                        ends = [each for each in tensors_in(opened(result)) if each.requires_grad]
                        torch.autograd.backward(ends, targets)
            gradients = {name: parameters[name].grad for name in own if parameters[name].grad is not None}
            inputs = {k: each.grad for k, each in zip(self.program.input_gradients, wanted, strict=True)}
            # parameters too, which `forward` may write; on fixed statistics, buffers are as before
            after = {name: each for name, each in state.items() if name in own or not is_fixed}
            return self._named(result, gradients, after, inputs)

    def _drawn(self, key: DrawKey, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The draws of plain PyTorch: those of the program. Of a batch, they are kept for its slices."""
        if self.has_shards:
            return constant_draw(op, args, kwargs)
        asked = key
        if key not in self.keys:  # of a draw that micro-batches share
            key = replace(key, micro_batch=-1)
        result = seeded(op, place_of(args, kwargs), seed=0, key=key)(0, *args, **kwargs)
        noise = args[1] if op.overloadpacket is aten.rrelu_with_noise else result
        self.whole[asked] = [each.clone() for each in tensors_in(noise)]
        return result

    def _drawn_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op of the program. A draw is that of plain PyTorch; of a slice its part, if it grows with the batch.

        Equal seeds do not do: in another layout of memory, the same numbers come in another order.
        """
        if call.draw is None:
            return call.target(*args, **kwargs)
        if self.has_shards:
            return constant_draw(call.target, args, kwargs)
        result = seeded(call.target, place_of(args, kwargs), seed=0, key=call.draw)(0, *args, **kwargs)
        index, first = call.draw.micro_batch, replace(call.draw, micro_batch=0)  # of the batch: see `_eager`
        is_cut = self.is_whole and index >= 0
        whole = self.whole.get(first if is_cut else call.draw, self.whole.get(first))
        if whole is None:
            return result
        slicing = Slicing((), (1,)) if self.micro is None else self.micro.slicing
        bounds = (slicing.starts[index], slicing.sizes[index]) if is_cut else (0, slicing.batch)
        drawn = _slice_of(whole[-1], tensors_in(result)[-1], slicing.batch, *bounds)
        if drawn is None:
            return result
        if call.returns_tuple:  # what is drawn is the mask, or the noise, that the first tensor is multiplied by
            scale = 1 / (1 - args[1]) if drawn.dtype is torch.bool and args[1] < 1 else 1.0
            return args[0] * drawn * scale, drawn
        return drawn

    def _captured(self, *, is_double: bool, is_fixed: bool) -> Values:
        """What the captured step gives, op by op."""
        sources = self.program.sources
        given = {op: self.seeds[int(each.key)] for op, each in sources.items() if self.seeds and each.kind == "target"}

        with random_states_kept(), self._mode(is_double=is_double, is_fixed=is_fixed):
            found = run_graph(self.graph, given, self._drawn_call, is_updating=False)
            shards = {each.key: each.shard for each in sources.values() if each.shard is not None}
            gradients: dict[str, Any] = {}
            for name, gradient in found.gradients.items():
                if (shard := shards.get(name)) is None:
                    gradients[name] = gradient
                else:
                    like = dict(self.origin.model.named_parameters())[shard.name]
                    whole = gradients.setdefault(shard.name, gradient.new_zeros(like.shape))
                    shard.copy(whole, gradient, is_joined=True)
            # what the graph does not hold, or only in parts, stays as it is
            parameters = dict(self.origin.model.named_parameters())
            after = {name: each for name, each in self.state.items() if name in parameters or not is_fixed}
            after |= {name: each for name, each in found.state.items() if name in after}
            return self._named(found.result, gradients, after, found.input_gradients)

    def _named(
        self, result: Any, gradients: Mapping[str, Any], state: Mapping[str, Tensor], inputs: Mapping[int, Any]
    ) -> Values:
        has_loss, parameters = self.origin.loss_fn is not None, dict(self.origin.model.named_parameters())
        named: Values = {
            "the loss" if has_loss and not k else f"output {k}": each
            for k, each in enumerate(tensors_in(opened(result)))
        }
        named |= {f"the gradient of {name!r}": each for name, each in gradients.items()}
        named |= {f"{'parameter' if name in parameters else 'buffer'} {name!r}": each for name, each in state.items()}
        named |= {f"the gradient of input {k}": each for k, each in inputs.items() if each is not None}
        return {name: each.detach() for name, each in named.items()}

    def _refusal(self, found: list[str], hint: str, *, in_slices: bool) -> StepDiffers:
        what = "plain PyTorch"
        if self.micro is not None:
            what += " on the whole batch" if not in_slices else ", slice after slice"
        more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        return StepDiffers(f"the captured step is not that of {what}: {'; '.join(found[:MOST_NAMED])}{more}. {hint}")

    def _hint(self, found: list[str], is_double: bool, is_fixed: bool, in_slices: bool) -> str:
        """What to do; plain PyTorch runs again, as does what the hint would advise."""
        eager = partial(self._eager, is_double=is_double, in_slices=in_slices, is_fixed=is_fixed)
        if not _is_alike(eager, eager, 1e-13 if is_double else 1e-6):
            return (
                "Hint: plain PyTorch itself gives other results in a second run: something outside of the model "
                "changes from run to run (a counter, a generator, the clock); pass it as a tensor."
            )
        if any("has none when captured" in each for each in found):
            return (
                "Hint: what runs a backward of its own, or adds to `.grad` by itself, is no part of the gradient of "
                "the loss. Use `torch.utils.checkpoint(..., use_reentrant=False)`, and autograd Functions that return "
                "all gradients."
            )
        if self.micro is not None:
            self.is_whole = False
            is_accumulation = not in_slices and _is_alike(
                partial(self._eager, is_double=is_double, in_slices=True, is_fixed=False),
                partial(self._captured, is_double=is_double, is_fixed=False),
                1e-6 if is_double else 1e-3,
            )
            return (
                f"Hint: {_BUFFERS if any(each.startswith('buffer') for each in found) else _SAMPLES} of a slice. "
                f"{_ACCUMULATE if is_accumulation else ''}micro_batches=1 keeps the batch whole."
            )
        return (
            "Hint: find the op by capturing parts of the model; `check=False` leaves the comparison out, where such a "
            "difference is wanted."
        )


def _is_alike(one: Callable[[], Values], other: Callable[[], Values], rtol: float) -> bool:
    """Whether both ways run and give the same."""
    try:
        return not _differences(one(), other(), rtol)
    except Exception:  # the model is the user's: whatever it raises
        return False


def _as_it_is(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(*args, **kwargs)


def _differences(expected: Values, actual: Values, rtol: float) -> list[str]:
    """What differs, in words, the loss first, then by the largest share.

    A gradient that is zero but for rounding is compared with the size of all of them.
    """
    overall = cache(partial(_overall, expected))  # most captured steps are equal to the bit, which asks for no norm
    found: list[tuple[float, str]] = []
    for name in {**expected, **actual}:
        one, other = expected.get(name), actual.get(name)
        if one is None or other is None:
            where = ("in plain PyTorch", "captured") if one is None else ("when captured", "in plain PyTorch")
            value = other if one is None else one
            assert value is not None
            found.append((float("inf"), f"{name} has none {where[0]}, and norm {_norm(value):.3g} {where[1]}"))
            continue
        if one.shape != other.shape:
            found.append((float("inf"), f"{name} is {tuple(other.shape)}, expected {tuple(one.shape)}"))
            continue
        if torch.equal(one, other):
            continue
        one, other = _plain(one), _plain(other)
        if torch.equal(one, other) or (
            torch.equal(one.isnan(), other.isnan()) and bool((one.isnan() | (one == other)).all())
        ):
            continue
        scale = _norm(one) + 1e-3 * (max(overall(), 1e-3) if name.startswith("the gradient") else 1.0)
        share = _norm(torch.where(one == other, 0.0, other - one)) / scale
        if not share <= rtol:
            found.append((share, f"{name} differs by {share:.2g} of its size ({_told(one)}, captured {_told(other)})"))
    return [words for _, words in sorted(found, key=lambda each: (not each[1].startswith("the loss"), -each[0]))]


def _overall(values: Values) -> float:
    """The norm of all gradients."""
    return float(sum(_norm(each) ** 2 for name, each in values.items() if name.startswith("the gradient")) ** 0.5)


def _slice_of(whole: Tensor, part: Tensor, batch: int, start: int, size: int) -> Tensor | None:
    """The samples of a part in what was drawn for the batch; None where its shape does not grow with the batch."""
    if whole.shape == part.shape:
        return whole
    dims = [dim for dim in range(min(whole.dim(), part.dim())) if whole.shape[dim] != part.shape[dim]]
    if whole.dim() != part.dim() or len(dims) != 1 or whole.shape[dims[0]] * size != part.shape[dims[0]] * batch:
        return None
    grown = whole.shape[dims[0]] // batch
    return whole.narrow(dims[0], start * grown, size * grown)


def _plain(value: Tensor) -> Tensor:
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return value.double()


def _norm(value: Tensor) -> float:
    return float(_plain(value).norm())


def _told(value: Tensor) -> str:
    return f"{float(value):.6g}" if value.numel() == 1 else f"norm {_norm(value):.6g}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _free_bytes(tensors: Any) -> float:
    """Memory that is free where the tensors are."""
    place = next((each.device for each in tensors if each.is_cuda), None)
    if place is not None:
        return float(cuda.gpu(place.index or 0).free_bytes)
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # another system
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

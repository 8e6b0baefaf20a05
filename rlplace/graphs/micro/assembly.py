"""`Assembly`: the graph of K micro-batches, grown from the ops of slices and from single calls between them.

`Pinned`: while active, a step is a function of its samples alone: float64, nothing random, fixed statistics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.graphs.capturing import op_work as facts
from rlplace.graphs.capturing.lower import Lowered
from rlplace.graphs.opgraph import FORWARD, UPDATE
from rlplace.graphs.program import Call, Ref, Source, View, map_refs, refs_in

RefMap = dict[int, Ref]
"""By `Ref.id` in a slice, the `Ref` that stands for it in the assembly."""


_ZEROS = torch.ops.aten.zeros.default


class Assembly:
    """A graph in the making.

    Attributes:
        ops: what is there so far.
    """

    def __init__(self) -> None:
        self.ops = Lowered()
        self._mode = FakeTensorMode()
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of a value, which stays alive with it
        self._known: dict[str, tuple[facts.Facts, Any]] = {}  # by signature: what a call costs, and what it returns

    def add_source(
        self, source: Source, name: str, *, module: str = "", gradient_bytes: int = 0, micro_batch: int = -1
    ) -> Ref:
        """Adds a source op; what comes back is its tensor."""
        built, value = self.ops.built, source.value
        target = "input" if source.kind == "target" else source.kind  # a target of the loss is placed as an input is
        size = facts.tensor_bytes(value) if source.kind == "parameter" else 0
        op = built.add_op(
            named(name, micro_batch),
            target,
            module,
            FORWARD,
            target,
            facts.NOTHING,
            parameter_bytes=size,
            micro_batch=micro_batch,
        )
        built.gradient_bytes[op] = gradient_bytes
        self.ops.sources[op] = source
        return Ref(built.add_tensor(op, 0, self._twin(value)))

    def copy(self, part: Lowered, chosen: Iterable[int], refs: RefMap, *, micro_batch: int) -> None:
        """Copies the ops `chosen`, in order; `refs` then knows their outputs and the views that they read.

        Args:
            part: of a slice.
            chosen: ops of `part` that run.
            refs: what stands for the tensors that they read and that none of them produces.
            micro_batch: which one the copies belong to.
        """
        built, like, ops = self.ops.built, part.built, self.ops

        def here(ref: Ref) -> Ref:
            found = refs.get(ref.id)
            return found if found is not None else self._add_view(part, ref, refs, here)

        ops.folded.update(part.folded)
        empty: dict[tuple[str, str], Ref] = {}  # by module and signature
        for op in chosen:
            call = part.calls[op]
            assert isinstance(call, Call)
            if call.target is _ZEROS:  # mean and variance of a batch norm begin with one and the same
                key = like.modules[op], like.signatures[op]
                if key in empty:
                    refs[call.outputs[0]] = empty[key]
                    continue
            args, kwargs = map_refs(here, call.args), map_refs(here, call.kwargs)
            reads = tuple(sorted({ops.base(refs[tensor]) for tensor in like.reads[op]}))
            new = len(built.names)
            built.names.append(named(like.names[op], micro_batch))
            built.targets.append(like.targets[op])
            built.modules.append(like.modules[op])
            built.phases.append(like.phases[op])
            built.signatures.append(like.signatures[op])
            built.facts.append(like.facts[op])
            built.reads.append(reads)
            built.parameter_bytes.append(0)
            built.gradient_bytes.append(0)
            built.state_bytes.append(0)
            built.micro_batches.append(micro_batch)
            tensor = len(built.tensor_op)
            outputs = []
            for output in part.tensors_of(op):
                built.tensor_op.append(new)
                built.tensor_output.append(like.tensor_output[output])
                built.tensor_values.append(like.tensor_values[output])
                refs[output] = Ref(tensor)
                tensor += 1
            for output in call.outputs:
                outputs.append(-1 if output < 0 else refs[output].id)
            if op in part.seeds:
                ops.seeds.add(new)
            ops.calls[new] = Call(
                call.target, args, kwargs, tuple(outputs), call.returns_tuple, call.is_random, call.takes_device
            )
            if call.target is _ZEROS:
                empty[like.modules[op], like.signatures[op]] = refs[call.outputs[0]]

    def here(self, part: Lowered, ref: Ref, refs: RefMap) -> Ref:
        """What stands for `ref` of `part`; views that nobody read so far are made."""

        def own(other: Ref) -> Ref:
            return self.here(part, other, refs)

        return refs[ref.id] if ref.id in refs else self._add_view(part, ref, refs, own)

    def _add_view(self, part: Lowered, ref: Ref, refs: RefMap, here: Callable[[Ref], Ref]) -> Ref:
        ops, view = self.ops, part.views[-1 - ref.id]
        args, kwargs = map_refs(here, view.args), map_refs(here, view.kwargs)
        ops.views.append(View(ops.base(refs[view.base]), view.target, args, kwargs))
        ops.view_values.append(part.view_values[-1 - ref.id])
        refs[ref.id] = new = Ref(-len(ops.views))
        return new

    def call(
        self,
        target: torch._ops.OpOverload,
        *args: Any,
        name: str,
        module: str = "",
        phase: int,
        micro_batch: int = -1,
        **kwargs: Any,
    ) -> Ref:
        """Adds one call that returns one tensor, which comes back; its arguments may hold `Ref`s, `kwargs` none."""
        values = map_refs(self._value, args)
        signature = facts.signature(str(target), values, kwargs)
        if signature not in self._known:
            with self._mode, torch.no_grad():
                output = target(*values, **kwargs)
            self._known[signature] = facts.call_facts(target, values, kwargs, output), output
        known, output = self._known[signature]
        reads = tuple(self.ops.base(ref) for ref in refs_in(args))
        op = self.ops.built.add_op(
            named(name, micro_batch), str(target), module, phase, signature, known, reads, micro_batch=micro_batch
        )
        tensor = self.ops.built.add_tensor(op, 0, output)
        self.ops.calls[op] = Call(target, args, kwargs, (tensor,), returns_tuple=False)
        return Ref(tensor)

    def _value(self, ref: Ref) -> torch.Tensor:
        """What `ref` stands for, as a fake tensor of the assembly's own mode."""
        return self._twin(self.ops.value(ref))

    def _twin(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) not in self._twins:
            with self._mode:
                twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
            self._twins[id(value)] = value, twin
        return self._twins[id(value)][1]

    def view(self, target: torch._ops.OpOverload, shown: Ref, *args: Any) -> Ref:
        """A view of `shown`, which costs nothing."""
        with self._mode:
            value = target(self._value(shown), *args)
        self.ops.views.append(View(self.ops.base(shown), target, (shown, *args), {}))
        self.ops.view_values.append(value)
        return Ref(-len(self.ops.views))

    def store(self, place: Ref, value: Ref, *, name: str, together: Iterable[int]) -> None:
        """Adds the copy of `value` into the source tensor `place`; it lives there, and the ops `together` with it."""
        built, ops, target = self.ops.built, self.ops, torch.ops.aten.copy_.default
        values = self._value(place), self._value(value)
        home = built.tensor_op[place.id]
        op = built.add_op(
            name,
            str(target),
            built.modules[home],
            UPDATE,
            facts.signature(str(target), values, {}),
            facts.call_facts(target, values, {}, values[0]),
            (place.id, ops.base(value)),
        )
        ops.calls[op] = Call(target, (place, value), {}, (), returns_tuple=False)
        built.mutations.append((op, place.id))
        built.colocated.append((op, home, *together))


def named(name: str, micro_batch: int) -> str:
    """The name of a micro-batch's copy of an op."""
    return name if micro_batch < 0 else f"{name}.mb{micro_batch}"


aten = torch.ops.aten

FLOATS = {torch.float16, torch.bfloat16, torch.float32}
"""What becomes float64."""
MOST_COMPARED = 4
"""Numbers in a tensor, at most, that are noted where another is compared with it: a few labels, not a batch of them."""
DRAWN = 0.5
"""What a random op of floats draws instead: neither nothing nor everything."""


class TimeUp(Exception):
    """The time of a check is over."""


@dataclass(frozen=True)
class Labels:
    """What one loss of negative log-likelihood read.

    Attributes:
        ignore_index: the label of what does not count.
        num_ignored: how many had it.
        is_mean: whether it divides by how many labels count.
        is_weighted: whether it divides by the weights of the classes that occur.
    """

    ignore_index: int
    num_ignored: int
    is_mean: bool
    is_weighted: bool


class Pinned(TorchDispatchMode):
    """Makes ops of one step comparable with those of another that has more or fewer samples.

    Casts to lower precision stay in float64; a random op returns a constant (a permutation the reverse order); batch
    normalisation uses its running statistics, mean 0 and variance 1 where it has none, and changes nothing.

    Args:
        is_double: whether everything is to be float64.
        deadline: in the time of `time.monotonic`; an op after it raises `TimeUp`.

    Attributes:
        labels: one entry for every loss of negative log-likelihood that ran.
        compared: the numbers that tensors were compared with; NaN where one was with itself, as `isnan` does.
        normalises_batch: whether batch normalisation would have used the statistics of the batch.
    """

    def __init__(self, *, is_double: bool, deadline: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels: list[Labels] = []
        self.compared: set[float] = set()
        self.normalises_batch = False
        self._is_double, self._deadline = is_double, deadline

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if time.monotonic() > self._deadline:
            raise TimeUp
        kwargs = kwargs or {}
        if self._is_double and func is not aten.view.dtype:
            args = tuple(map(_widened, args))
            kwargs = {key: _widened(value) for key, value in kwargs.items()}
        if func in _NORMS:
            return self._normalised(_named(func, args, kwargs), func)
        if func in _NORM_BACKWARDS:
            given = _named(func, args, kwargs)
            if given.get("train", given.get("update")):
                mean, variance = _statistics(given)
                return aten.native_batch_norm_backward.default(
                    given["grad_out"], given["input"], given.get("weight"), mean, variance, None, None, False,
                    given["eps"], given["output_mask"],
                )  # fmt: skip
        if func.overloadpacket in _COMPARISONS:
            self._note_comparison(args)
        if func in _LOSSES:
            self._note(_named(func, args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _drawn(func, args, kwargs)
        return func(*args, **kwargs)

    def _normalised(self, given: dict[str, Any], func: Any) -> Any:
        x: Tensor = given["input"]
        if given.get("training", func is aten._batch_norm_with_update.default):
            self.normalises_batch |= x.shape[0] > 1  # instances are normalised as channels of one sample
        mean, variance = _statistics(given)
        done = aten.native_batch_norm.default(
            x, given.get("weight"), given.get("bias"), mean, variance, False, given["momentum"], given["eps"]
        )
        return (*done, x.new_empty(0, dtype=torch.uint8)) if len(func._schema.returns) == 4 else done

    def _note(self, given: dict[str, Any]) -> None:
        ignored = given["target"] == given["ignore_index"]
        is_mean = given["reduction"] == 1
        is_weighted = is_mean and given.get("weight") is not None
        self.labels.append(Labels(given["ignore_index"], int(ignored.sum()), is_mean, is_weighted))

    def _note_comparison(self, args: tuple[Any, ...]) -> None:
        one, other = args[0], args[-1]
        if one is other:  # so, too, where there is one alone
            self.compared.add(math.nan)
        elif isinstance(other, (int, float)):
            self.compared.add(float(other))
        elif isinstance(other, Tensor) and other.numel() <= MOST_COMPARED and not other.is_complex():
            self.compared.update(other.flatten().tolist())


_COMPARISONS = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan}
_NORMS = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update.default,
}
_NORM_BACKWARDS = {aten.native_batch_norm_backward.default, aten.batch_norm_backward.default}
_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in FLOATS else value


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the schema of an op."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _statistics(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Mean and variance that batch normalisation takes as given."""
    x: Tensor = given["input"]
    mean, variance = given.get("running_mean"), given.get("running_var")
    if mean is None or variance is None:
        return x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return mean, variance


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a random op returns here: the same for a sample wherever it stands in its batch."""
    if func is aten.native_dropout.default:
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if func is aten.rrelu_with_noise.default:
        args[1].fill_(1.0)
        return func(*args[:4], False)
    drawn = func(*args, **kwargs)
    if not isinstance(drawn, Tensor):  # fused attention, whose dropout comes apart before where there is any
        return drawn
    if func in _PERMUTATIONS:
        return drawn.copy_(torch.arange(len(drawn) - 1, -1, -1, dtype=drawn.dtype, device=drawn.device))
    if drawn.is_floating_point() or drawn.is_complex():
        return drawn.fill_(DRAWN)
    given = _named(func, args, kwargs)
    least = given.get("low", given.get("from", 0))
    return drawn.fill_(True if drawn.dtype is torch.bool else least)


_PERMUTATIONS: set[Callable[..., Any]] = {aten.randperm.default, aten.randperm.generator}

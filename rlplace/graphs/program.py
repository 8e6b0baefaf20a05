"""`Program`: the executable side of an `OpGraph`, one `Call` an op, with its views apart.

`Slicing`: how the tensors of a batch are cut into micro-batches. `SplitPlan`: which ops are split into shards.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import UnknownName, refuse_if
from rlplace.graphs.random_streams import DrawKey

SourceKind = Literal["parameter", "buffer", "input", "target", "constant"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in a call's arguments for a value: tensor `id` of the graph, or view `id - num_tensors`."""

    id: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a whole tensor belongs to one micro-batch.

    Attributes:
        dim: the dimension that it is cut along.
        start: the first sample.
        size: how many samples.
    """

    dim: int
    start: int
    size: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of `whole`, as a view."""
        return whole.narrow(self.dim, self.start, self.size)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a parameter a source op holds.

    Attributes:
        name: of the whole parameter.
        index: of the shard, from 0.
        dim: the dimension that it is cut along.
        intervals: (start, end) of each run of indices along `dim` that belongs to it, ascending.
    """

    name: str
    index: int
    dim: int
    intervals: tuple[tuple[int, int], ...]

    @property
    def key(self) -> str:
        """Its own name: that of the parameter, with the number of the shard."""
        return f"{self.name}[{self.index}]"

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of `whole`: a view of a contiguous part, else a copy."""
        parts = [whole.narrow(self.dim, start, end - start) for start, end in self.intervals]
        return parts[0] if len(parts) == 1 and self.dim == 0 else torch.cat(parts, self.dim)

    def copy(self, whole: torch.Tensor, part: torch.Tensor, *, is_joined: bool = False) -> None:
        """Writes its part of `whole` into `part`; where `is_joined`, the other way round."""
        at = 0
        for start, end in self.intervals:
            there, here = whole.narrow(self.dim, start, end - start), part.narrow(self.dim, at, end - start)
            (there if is_joined else here).copy_(here if is_joined else there)
            at += end - start


@dataclass(frozen=True, slots=True)
class Source:
    """Where the value of a source op comes from.

    Attributes:
        kind: its kind.
        key: dotted name of a parameter or buffer, position of an input among the flattened inputs or of a
            target among the targets, or "" .
        value: the tensor at capture time (fake tensors where the model was built from them).
        cut: of an input or a target that is cut into micro-batches: which part of the whole this is.
        held: of a constant: the tensor itself, which its owner may change; `value` shows the memory of the capture.
        shard: of a parameter that is split: which part of it this is; `key` is then the name of the shard.
    """

    kind: SourceKind
    key: str
    value: torch.Tensor
    cut: Cut | None = None
    held: torch.Tensor | None = None
    shard: Shard | None = None

    @property
    def name(self) -> str:
        """Its key; of a shard the name of the whole parameter."""
        return self.key if self.shard is None else self.shard.name


@dataclass(frozen=True, slots=True)
class Folded:
    """A constant tensor whose values are in the graph as numbers, so that it must not change.

    Attributes:
        name: as the user writes it.
        tensor: the user's own.
        version: of its values, as PyTorch counts.
    """

    name: str
    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Call:
    """How one op runs: `outputs = target(*args, **kwargs)`.

    Attributes:
        target: the ATen overload (or a `torch.library` op).
        args: positional arguments, with `Ref` leaves, lists and tuples nested as the op takes them.
        kwargs: keyword arguments, likewise.
        outputs: tensor index of each output, -1 for one that is not a tensor or that no op reads; an op that returns
            a single tensor has one entry.
        returns_tuple: whether the op returns a tuple or list, to be unpacked into `outputs`.
        draw: of an op that draws random numbers: which draw it is.
        takes_device: whether the op has a `device` argument that must follow its placement.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    returns_tuple: bool
    draw: DrawKey | None = None
    takes_device: bool = False

    @property
    def is_random(self) -> bool:
        """Whether the op draws random numbers."""
        return self.draw is not None


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer's in-place update of one parameter; its state lives where the parameter lives."""

    parameter: Ref
    gradient: Ref


@dataclass(frozen=True, slots=True)
class View:
    """A value that aliases tensor `base` and costs nothing: run wherever it is read.

    Attributes:
        base: the tensor whose memory it shows.
        target: view op, or `operator.getitem` on a view that returns several.
        args: with `Ref` leaves: the base or an earlier view of it.
        kwargs: likewise.
    """

    base: int
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_OF_NAME: Any = None
"""An option of an optimizer that was left out: its default depends on the optimizer's name."""


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer of a step, with PyTorch's defaults.

    Attributes:
        name: `sgd`, `momentum`, `adam` or `adamw`.
        lr: learning rate.
        betas: moment decays of `adam` and `adamw`.
        eps: denominator term of `adam` and `adamw`.
        momentum: of the optimizer `momentum`, 0.9 by default; 0 is plain SGD. `sgd` with a momentum runs as `momentum`.
        weight_decay: L2 term, decoupled for `adamw`. The default is 0.01 for `adamw`, and 0 for the others.
    """

    name: str
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = _OF_NAME
    weight_decay: float = _OF_NAME

    def __post_init__(self) -> None:
        for option, (name, value) in {"momentum": ("momentum", 0.9), "weight_decay": ("adamw", 1e-2)}.items():
            if getattr(self, option) is _OF_NAME:
                object.__setattr__(self, option, value if self.name == name else 0.0)


class LossByName(functools.partial[torch.Tensor]):
    """A loss that takes its targets by name, as one that takes them in order.

    Args:
        loss_fn: called as `loss_fn(output, **targets)`.
        names: of the targets, in order.
    """

    names: tuple[str, ...]

    def __new__(cls, loss_fn: Callable[..., torch.Tensor], names: tuple[str, ...] = ()) -> Self:
        """The same; the names are set afterwards where it is a copy."""
        self = super().__new__(cls, loss_fn)
        self.names = names
        return self

    def __call__(self, output: Any, *targets: torch.Tensor) -> torch.Tensor:
        """The loss of an output and these targets."""
        return super().__call__(output, **dict(zip(self.names, targets, strict=True)))


LossKind = Literal["separate", "joined", "accumulated"]
Weights = Literal["mean", "sum"]


@dataclass(frozen=True)
class LossVerdict:
    """How micro-batches make the loss of their batch.

    Attributes:
        kind: `separate`: each micro-batch has its own loss. `joined`: one loss of their concatenated outputs; for
            inference, only the concatenated outputs. `accumulated`: as separate, even if this differs from the loss of
            the whole batch.
        weights: of separate losses: `mean`: samples of the micro-batch divided by samples of the batch. `sum`: 1.
        is_checked: whether the loss and gradients of some samples were compared, or there was nothing to compare.
        why: a sentence for people.
        normalises_batch: whether the model has batch norm in training, whose statistics are then those of each
            micro-batch: the step is that of gradient accumulation.
    """

    kind: LossKind
    weights: Weights
    is_checked: bool
    why: str
    normalises_batch: bool = False


@dataclass(frozen=True)
class MicroBatches:
    """How a step is cut along its batch.

    Attributes:
        slicing: which tensors are cut, and where.
        verdict: how the micro-batches make the loss.
        output_dims: of a joined loss, or of outputs without one: for every tensor that the model returns, the dimension
            that grows with the batch; None for one that is the same for every batch.
    """

    slicing: Slicing
    verdict: LossVerdict
    output_dims: tuple[int | None, ...] = ()

    @property
    def weights(self) -> tuple[float, ...]:
        """Of separate losses, one a micro-batch."""
        return self.slicing.weights(self.verdict.weights)

    @property
    def equals_whole(self) -> bool:
        """Whether the step equals that of the whole batch; else it equals accumulation of gradients."""
        return self.verdict.kind != "accumulated" and not self.verdict.normalises_batch


SPLITTABLE = ("vocabulary", "attention", "mlp", "experts", "tables", "updates")
"""What a step can be split by."""
MOST_SHARDS = 1024
"""More are taken for a slip: every one is an op of its own."""
MOST_SHARE = 9999
_PARTS = re.compile(r"\d{1,4}(:\d{1,4})*")


@dataclass(frozen=True)
class SplitPlan:
    """Which ops of a step are split into shards, and into how many.

    Attributes:
        classes: of `SPLITTABLE`. `vocabulary`: the classes of a softmax loss, with the weights that they come from.
            `attention`: heads. `mlp`: the hidden width of two products, one after the other. `experts`: the same, for
            tokens that are sent to it. `tables`: columns of large embedding tables. `updates`: large parameters of ops
            that stay whole, whose gradients are summed and updated in parts.
        parts: how many shards, or the share of each, as (3, 1).
        reduce: how partial results are summed. `owner`: by one op, whose result all shards read. `chunks`: each shard
            sums a chunk of the tokens, norms and residual sums run by these chunks, and each shard joins them for its
            next product (reduce-scatter and all-gather).

    Raises:
        InvalidValue: classes or a reduction that do not exist, fewer than two shards, or a share below 1.

    >>> SplitPlan(("mlp",), (3, 1)).bounds(8)
    (0, 6, 8)
    """

    classes: tuple[str, ...] = SPLITTABLE[:-1]
    parts: int | tuple[int, ...] = 2
    reduce: Literal["owner", "chunks"] = "owner"

    def __post_init__(self) -> None:
        if self.reduce not in ("owner", "chunks"):
            raise UnknownName("reduction of a split", self.reduce, ("owner", "chunks"))
        refuse_if(isinstance(self.classes, str), "classes", self.classes, 'a tuple, as ("mlp",)', where="split")
        if wrong := next((name for name in self.classes if name not in SPLITTABLE), None):
            raise UnknownName("class to split", wrong, SPLITTABLE)
        refuse_if(not self.classes, "classes", self.classes, f"some of {', '.join(SPLITTABLE)}", where="split")
        is_count = type(self.parts) is int and 1 < self.parts <= MOST_SHARDS
        is_shares = isinstance(self.parts, tuple) and 1 < len(self.parts) <= MOST_SHARDS
        refuse_if(
            not is_count
            and not (is_shares and all(type(share) is int and 0 < share <= MOST_SHARE for share in self.shares)),
            "parts",
            self.parts,
            f"a number of shards from 2 to {MOST_SHARDS}, or the share of each as integers from 1 to {MOST_SHARE}",
            where="split",
        )

    @classmethod
    def parse(cls, classes: str, parts: str = "2") -> SplitPlan | None:
        """The plan in the words of a command or a file; None for `none`. `parts` may end with `/chunks`.

        Raises:
            InvalidValue: words of another form, or what no plan can have.

        >>> SplitPlan.parse("attention,mlp", "3:1/chunks")
        SplitPlan(classes=('attention', 'mlp'), parts=(3, 1), reduce='chunks')
        """
        names = tuple(name.strip() for name in classes.split(",") if name.strip())
        refuse_if(
            names == ("auto",),
            "split",
            classes,
            f"none, or some of {','.join(SPLITTABLE)}",
            hint="Only a search chooses a split (`rlplace train`, `place` and `compare`): name the classes here.",
        )
        if names == ("none",):
            return None
        expected = f"a number of shards from 2 to {MOST_SHARDS}, or the share of each, as 3:1; /chunks behind either"
        numbers = parts.strip().removesuffix("/chunks")
        refuse_if(_PARTS.fullmatch(numbers) is None, "split_parts", parts, expected)
        shares = tuple(map(int, numbers.split(":")))
        reduce: Literal["owner", "chunks"] = "owner" if numbers == parts.strip() else "chunks"
        return cls(names, shares if len(shares) > 1 else shares[0], reduce)

    @property
    def words(self) -> dict[str, str]:
        """The arguments of `parse` that give it again."""
        parts = (self.parts,) if isinstance(self.parts, int) else self.parts
        reduce = "" if self.reduce == "owner" else f"/{self.reduce}"
        return {"classes": ",".join(self.classes), "parts": ":".join(map(str, parts)) + reduce}

    @property
    def shares(self) -> tuple[int, ...]:
        """The share of each shard."""
        return self.parts if isinstance(self.parts, tuple) else (1,) * self.parts

    @property
    def num_shards(self) -> int:
        """P."""
        return len(self.shares)

    def bounds(self, size: int) -> tuple[int, ...]:
        """(P + 1,): where the shards of so many indices begin and end, by their shares."""
        ends = itertools.accumulate(self.shares, initial=0)
        return tuple(size * end // sum(self.shares) for end in ends)


@dataclass(frozen=True)
class SplitReport:
    """What became of a split.

    Attributes:
        parameters: by name of each parameter that was split, its class.
        gathered: of ops that read a split value whole: name, target, module, and share of the FLOPs of the step.
        random: ops that draw random numbers for each shard apart: not those of the step that is not split.
        together: names of parameters, those that are split along the same dimension together.
    """

    parameters: Mapping[str, str]
    gathered: tuple[tuple[str, str, str, float], ...] = ()
    random: tuple[tuple[str, str, str], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()

    @property
    def gathered_share(self) -> float:
        """Share of the FLOPs of the step in ops that could not be split and read split values."""
        return sum(share for *_, share in self.gathered)


@dataclass(frozen=True)
class Origin:
    """The user's arguments: kept to run the same step eagerly beside the placed one.

    Attributes:
        model: in the mode that it was captured in.
        args: positional arguments.
        kwargs: keyword arguments.
        loss_fn: of the model's output and the targets; None for inference.
        targets: labels and further arguments of the loss.
        autocast: the dtype of the `torch.autocast` that was active around the capture: its casts are ops of the graph,
            a plain step has to enter it again.
        micro: how the step is cut along its batch; None for one that is not.
        frozen: attributes that the step may change as Python does; placed steps leave them as they are.
        split: which ops are split into shards; None for a step whose ops are whole.
        is_checked: whether the step, and that of other shapes, is compared with plain PyTorch.
        read: the Python state that the step reads, a `ReadState`; None where it is not compared.
    """

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., torch.Tensor] | None
    targets: tuple[torch.Tensor, ...] = ()
    autocast: torch.dtype | None = None
    micro: MicroBatches | None = None
    frozen: tuple[str, ...] = ()
    split: SplitPlan | None = None
    is_checked: bool = True
    read: Any = field(default=None, compare=False, repr=False)

    @property
    def target_names(self) -> tuple[str, ...]:
        """Of targets that are given by name; empty where they are given in order."""
        return self.loss_fn.names if isinstance(self.loss_fn, LossByName) else ()

    def as_given(self, targets: tuple[torch.Tensor, ...]) -> Any:
        """Targets as a placed step takes them: a dict where they are given by name."""
        names = self.target_names
        return dict(zip(names, targets, strict=True)) if names else targets


@dataclass(frozen=True)
class Program:
    """The executable graph: re-captured from the user's model, never saved.

    Attributes:
        sources: by op index, for source ops.
        calls: by op index, for ops that run.
        views: in topological order; view k has id `num_tensors + k`.
        num_tensors: T of the graph.
        result: the results of the step, a pytree with `Ref` leaves for tensors: the output; for a training step the
            result of the loss function, the loss or a tuple that begins with it.
        optimizer: of a training step.
        is_training: whether the step has a backward.
        origin: the model, inputs, loss and targets that were captured.
        gradients: of every parameter that the backward reaches, by dotted name.
        input_gradients: of the inputs that have one, by position among the input tensors; of a module's step alone.
        seeds: ops that make the gradient of the loss, where the backward begins: a scale of the loss multiplies it.
        folded: constants that were read as numbers.
        split: what became of the split of the step; None for one that is not split.
    """

    sources: dict[int, Source]
    calls: dict[int, Call | Update]
    views: tuple[View, ...]
    num_tensors: int
    result: Any
    optimizer: OptimizerSpec | None
    is_training: bool
    origin: Origin
    gradients: Mapping[str, Ref] = field(default_factory=dict)
    input_gradients: Mapping[int, Ref] = field(default_factory=dict)
    seeds: frozenset[int] = frozenset()
    folded: tuple[Folded, ...] = ()
    split: SplitReport | None = None

    @property
    def result_refs(self) -> tuple[Ref, ...]:
        """The `Ref` leaves of `result`, in order."""
        return tuple(leaf for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, Ref))

    def returned(self, read: Callable[[Ref], Any]) -> Any:
        """What a step returns, its tensors made by `read`."""
        return closed(pytree.tree_map_only(Ref, read, self.result))

    @property
    def draws(self) -> dict[DrawKey, list[int]]:
        """Ops that draw random numbers, by their draws: several make one that is made again."""
        found: dict[DrawKey, list[int]] = {}
        for op, call in self.calls.items():
            if isinstance(call, Call) and call.draw is not None:
                found.setdefault(call.draw, []).append(op)
        return found

    def base(self, ref: Ref) -> int:
        """The tensor whose memory `ref` shows."""
        return ref.id if ref.id < self.num_tensors else self.views[ref.id - self.num_tensors].base


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested values, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def with_tensors(value: Any) -> tuple[list[torch.Tensor], Callable[[Iterable[torch.Tensor]], Any]]:
    """The tensors in nested values, in order, and a function that gives the same values with other tensors in their
    places."""
    leaves, spec = pytree.tree_flatten(value)

    def filled(tensors: Iterable[torch.Tensor]) -> Any:
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)

    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], filled


CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, type)
"""What a step may return besides tensors: every step returns the same."""


class Opened(NamedTuple):
    """An object among results as its parts, which may hold tensors: a cache of keys and values, a dataclass."""

    kind: type
    """Its class."""
    attributes: dict[str, Any]
    """Opened themselves."""


def opened(value: Any) -> Any:
    """Nested values, with objects that are no more than their attributes as `Opened`."""

    def open_one(leaf: Any) -> Any:
        attributes = None if isinstance(leaf, (torch.Tensor, nn.Module)) else _attributes(leaf)
        return leaf if attributes is None else Opened(type(leaf), opened(attributes))

    return pytree.tree_map(open_one, value)


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that copying would take for the whole of it; None for another ."""
    kind, as_usual = type(value), ("__reduce_ex__", "__reduce__", "__getstate__")
    try:
        object.__new__(kind)
    except TypeError:
        return None
    is_plain = all(getattr(kind, name) is getattr(object, name) for name in as_usual)
    attributes = value.__getstate__() if is_plain and not hasattr(kind, "__setstate__") else None
    return attributes if isinstance(attributes, dict) else None


def closed(value: Any) -> Any:
    """The values that `opened` took apart: new objects with the same attributes."""

    def close_one(each: Any) -> Any:
        if isinstance(each, Opened):
            made: Any = object.__new__(each.kind)
            vars(made).update(closed(each.attributes))
            return made
        return each

    return pytree.tree_map(close_one, value, is_leaf=lambda each: isinstance(each, Opened))


def loss_of(returned: Any) -> Any:
    """The loss in the result of a loss function: itself, or the first of a tuple or list."""
    return returned[0] if isinstance(returned, (list, tuple)) and returned else returned


_LEAVES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))
"""Most arguments that are no tensors; they hold none."""


def refs_in(value: Any) -> list[Ref]:
    """Every `Ref` in nested arguments, in order."""
    found: list[Ref] = []
    map_refs(found.append, value)
    return found


def map_refs(function: Callable[[Ref], Any], value: Any) -> Any:
    """Nested arguments with every `Ref` replaced by `function` of it."""
    kind = type(value)
    if kind is Ref:
        return function(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, (list, tuple)):
        items = [map_refs(function, item) for item in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, dict):
        return {key: map_refs(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_refs(function, item) for item in (value.start, value.stop, value.step)))
    return value


@dataclass(frozen=True)
class Slicing:
    """Which tensors of a step are cut, where, and into how many samples each.

    Attributes:
        dims: for every tensor among the flattened inputs, then the targets: the dimension that it is cut along; None
            for one that all micro-batches share.
        sizes: samples of each of the K micro-batches; their sum is the batch.
    """

    dims: tuple[int | None, ...]
    sizes: tuple[int, ...]

    @property
    def num_micro_batches(self) -> int:
        """K."""
        return len(self.sizes)

    @property
    def batch(self) -> int:
        """Samples of the whole batch."""
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first sample of each micro-batch."""
        return tuple(sum(self.sizes[:index]) for index in range(len(self.sizes)))

    def weights(self, kind: Weights) -> tuple[float, ...]:
        """The weight of each micro-batch's loss: its part of the batch where losses are means, 1 for sums."""
        return tuple(size / self.batch if kind == "mean" else 1.0 for size in self.sizes)

    def cut(self, tensors: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        """The tensors of micro-batch `index`: views of those that are cut, and the shared ones as they are."""
        start, size = self.starts[index], self.sizes[index]
        return [
            tensor if dim is None else tensor.narrow(dim, start, size)
            for tensor, dim in zip(tensors, self.dims, strict=True)
        ]


def even_sizes(batch: int, count: int) -> tuple[int, ...]:
    """`batch` samples in `count` slices whose sizes differ by one at most, larger ones first."""
    small, larger = divmod(batch, count)
    return (small + 1,) * larger + (small,) * (count - larger)

"""`functionalise`: a traced graph without in-place ops, so that no op writes memory that another device may be reading.

The rules are those of functionalisation in PyTorch (`torch.func.functionalize`), applied to the graph rather than to a
second run of it, which would double the time of a capture: a write makes a new version of a tensor, is carried through
views to their base by a scatter, and later reads see views of the new version. Writes that the rules here do not cover
(through `as_strided`, or to several arguments) are left to such a second run.

`Versions`: a graph copied node by node, its writes turned into new versions of the written tensors.

Views in a traced graph: which tensors are views of which, and how a write to a view becomes one to its base.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from rlplace.errors import CaptureError
from rlplace.graphs.program import tensors_in

aten = torch.ops.aten


def functionalise(module: GraphModule, replaced: Sequence[int] = ()) -> GraphModule:
    """The same graph without in-place ops, but for two kinds of update of placeholders (buffers, inputs).

    Batch norm updates its running statistics where they live, as one op, if no other op reads the new values; every
    other change of a placeholder is one `copy_` into it at the end.

    Args:
        module: as traced.
        replaced: placeholders (by position) whose new values are the last outputs of the graph; they are outputs no
            more, but stored.
    """
    for norm in module.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if norm.args[7] is True:  # in training it takes running statistics in vain
            norm.args = (*norm.args[:3], None, None, *norm.args[5:])
    if any(map(mutates, module.graph.nodes)):
        try:
            module = _make_graph_module(module, Versions(module.graph).run())
        except Uncovered:
            module = _traced_again(module)
    if replaced:
        _store(module.graph, replaced)
    return module


def _store(graph: torch.fx.Graph, replaced: Sequence[int]) -> None:
    """Takes the last outputs away and copies them into placeholders; views of the old values are cloned before."""
    (output,) = graph.find_nodes(op="output")
    placeholders = graph.find_nodes(op="placeholder")
    places = [placeholders[position] for position in replaced]
    flat: Any = output.args[0]
    count = len(flat) - len(replaced)
    with graph.inserting_before(output):
        flat = list(flat)
        for position, node in enumerate(flat):
            if isinstance(node, Node) and shown(node) in places:
                flat[position] = graph.call_function(aten.clone.default, (node,))
                flat[position].meta = dict(node.meta)
        for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
            if node.args[0] in places:  # changed in place, and then replaced
                graph.erase_node(node)
        for place, value in zip(places, flat[count:], strict=True):
            _add_store(graph, place, value)
    output.args = (flat[:count],)


def _add_store(graph: torch.fx.Graph, place: Node, value: Node) -> None:
    store = graph.call_function(aten.copy_.default, (place, value))
    store.meta = {"custom": {"phase": "forward"}, "val": place.meta["val"]}


def _traced_again(module: GraphModule) -> GraphModule:
    """The same by PyTorch's own means: slower, and three ops where batch norm needs one."""
    for write in filter(mutates, module.graph.nodes):
        views = _views(write.args[0]) if isinstance(write.args[0], Node) else ()
        if any(view.target is aten.unfold.default for view in views):
            raise CaptureError(
                f"op {write.target} in module {write.meta['custom']['module'] or 'the root'} writes through `unfold`, "
                f"in a step with another write that is hard to follow (through `as_strided` or complex views, or to "
                f"several tensors at once). Write to slices of the tensor instead, or compute a new one.",
                op=str(write.target),
            )
    for node in module.graph.find_nodes(op="call_function", target=aten.native_batch_norm.default):
        node.target, node.args = _norm_twin(node)
    module.recompile()

    def run(*flat: torch.Tensor) -> Any:
        return torch.fx.Interpreter(module).run(*flat)

    placeholders = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with fx_traceback.preserve_node_meta():
        functional = torch.func.functionalize(run, remove="mutations")
        return make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*placeholders)


def mutates(node: Node) -> bool:
    """Whether a node writes to one of its arguments."""
    is_mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return is_mutable or node.target is aten.native_batch_norm.default


def live_nodes(graph: torch.fx.Graph, is_kept: Callable[[Node], bool]) -> set[Node]:
    """The nodes that the outputs of a graph, and those that `is_kept` says, depend on, and these themselves."""
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in live or is_kept(node):
            live.update((node, *node.all_input_nodes))
    return live


class Versions:
    """Copies a graph node by node and keeps, for every old node, the newest version of its value.

    Attributes:
        new: the graph being built.
        value: by old node, its value in the new graph, as of version `seen` of its memory.
        seen: see `value`.
        base: the base of each old node that is a view.
        root: by old node, the old node that owns its memory.
        version: by root, how often its memory was written.
        result_of: by in-place op, the old node that it wrote and returned.
    """

    def __init__(self, old: torch.fx.Graph) -> None:
        self.old = old
        self.new = torch.fx.Graph()
        self.value: dict[Node, Node] = {}
        self.seen: dict[Node, int] = {}
        self.base: dict[Node, Node] = {}
        self.root: dict[Node, Node] = {}
        self.version: dict[Node, int] = {}
        self.result_of: dict[Node, Node] = {}
        self.owners: dict[int, Node] = {}

    def run(self) -> torch.fx.Graph:
        for node in self.old.nodes:
            if node.op == "output":
                outputs = torch.fx.node.map_arg(node.args[0], self._newest)
                self._store_placeholders()
                self.new.output(outputs)
            elif node.target is aten.native_batch_norm.default:
                self._add_norm(node)
            elif mutates(node):
                self._add_write(node)
            else:
                self._add(node, self.new.node_copy(node, self._newest))
        return self.new

    def _newest(self, node: Node) -> Node:
        """The value of an old node now: a view of memory that was written since is taken anew."""
        if node.graph is self.new:
            return node
        node = self.result_of.get(node, node)
        version = self.version[self.root[node]]
        if self.seen[node] != version:
            if node not in self.base:
                raise Uncovered
            self.value[node] = self.new.node_copy(node, self._newest)
            self.seen[node] = version
        return self.value[node]

    def _add(self, node: Node, value: Node) -> None:
        """Takes `value` for that of the old node, which owns its memory or shows that of its first argument."""
        storages = _storages(node)
        root = next((self.owners[storage] for storage in storages if storage in self.owners), node)
        first = node.args[0] if node.args else None
        if isinstance(first, Node):
            first = self.result_of.get(first, first)
            if self.root[first] is root:
                self.base[node] = first
        if root is not node or isinstance(node.meta.get("val"), torch.Tensor):  # else each output owns its own
            for storage in storages:
                self.owners.setdefault(storage, root)
        self.root[node], self.value[node] = root, value
        self.seen[node] = self.version.setdefault(root, 0)

    def _emit(self, like: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """A new call, its old arguments brought up to date; it comes from where `like` came from."""
        args, kwargs = torch.fx.node.map_arg((args, kwargs or {}), self._newest)
        fresh = self.new.create_node("call_function", target, args, kwargs, target.__name__.partition(".")[0])
        fresh.meta = {**like.meta, "val": target(*_values(args), **_values(kwargs))}
        return fresh

    def _add_write(self, node: Node) -> None:
        target, written = _functional_twin(node), node.args[0]
        if not isinstance(written, Node):  # several tensors at once, as `torch._foreach_mul_` takes them
            raise Uncovered
        self.result_of[node] = self.result_of.get(written, written)
        before: torch.Tensor = written.meta["val"]
        source = node.args[1] if target is aten.copy.default else None
        # a source that is no placeholder, laid out like what it is copied into, may itself stand for the copy
        if (
            isinstance(source, Node)
            and self.root[self.result_of.get(source, source)].op == "call_function"
            and _layout(source.meta["val"]) == _layout(before)
        ):
            self._carry(node, written, self._newest(source))
            return
        # the only default that the twin does not share
        default = (0.5,) if node.target is aten.bernoulli_.float and len(node.args) == 1 else ()
        fresh = self._emit(node, target, (*node.args, *default), node.kwargs)
        after: torch.Tensor = fresh.meta["val"]
        if (after.shape, after.dtype, after.device) != (before.shape, before.dtype, before.device):
            raise Uncovered
        self._carry(node, written, fresh)

    def _carry(self, like: Node, written: Node, fresh: Node) -> None:
        """Makes `fresh` the newest value of `written`, and so of all that shows the same memory."""
        written = self.result_of.get(written, written)
        root = self.root[written]
        fits = _layout(fresh.meta["val"]) == _layout(written.meta["val"])
        if windows := self._windows(written):
            base = self.base[windows[-1]]
            self._carry(like, base, self._put(like, base, windows, fresh))
        elif written is not root:
            if (own := self.base.get(written)) is None:
                raise Uncovered
            base, target, args = inverse(written, own, fresh)
            self._carry(like, base, fresh if target is None else self._emit(like, target, args))
        elif fits and root.op != "get_attr":
            self.version[root] += 1
        else:
            raise Uncovered
        if fits:  # else it is taken from its base again, where it is read
            self.value[written], self.seen[written] = fresh, self.version[root]

    def _windows(self, written: Node) -> list[Node]:
        """The views from `written` up to the last `unfold` before its root; none without one."""
        views, windows = [written], list[Node]()
        while views[-1] in self.base:
            windows = [*views] if views[-1].target is aten.unfold.default else windows
            views.append(self.base[views[-1]])
        return windows

    def _put(self, like: Node, base: Node, views: Sequence[Node], fresh: Node) -> Node:
        """`base` with `fresh` where the first of `views` shows it: by position, as windows may overlap."""
        whole: torch.Tensor = base.meta["val"]
        with detect_fake_mode(whole) or contextlib.nullcontext():
            options = {"dtype": torch.int64, "device": whole.device}
            shown = self._emit(like, aten.arange.default, (whole.numel(),), options)
        shown = self._emit(like, aten.view.default, (shown, list(whole.shape)))
        for view in reversed(views):
            shown = self._emit(like, view.target, (shown, *view.args[1:]), view.kwargs)
        old, places, new = (self._emit(like, aten.reshape.default, (each, [-1])) for each in (base, shown, fresh))
        put = self._emit(like, aten.scatter.src, (old, 0, places, new))
        put = self._emit(like, aten.view.default, (put, list(whole.shape)))
        return put if whole.is_contiguous() else self._emit(like, aten.copy.default, (base, put))

    def _add_norm(self, node: Node) -> None:
        """`native_batch_norm` updates its running statistics without saying so; its `_legit` twins say it."""
        target, args = _norm_twin(node)
        if target is not aten._native_batch_norm_legit.default:
            self._add(node, self._emit(node, target, args))
        elif _owns_statistics(node):
            fresh = self.new.node_copy(node, self._newest)
            fresh.target = target
            self._add(node, fresh)
        else:
            fresh = self._emit(node, aten._native_batch_norm_legit_functional.default, node.args)
            self._add(node, fresh)
            for output, statistic in enumerate(node.args[3:5], start=3):
                assert isinstance(statistic, Node)
                self._carry(node, statistic, self._emit(node, operator.getitem, (fresh, output)))

    def _store_placeholders(self) -> None:
        """Every placeholder that was written gets its newest value at the end, where no op reads the old one."""
        for node, version in self.version.items():
            if version and node.op == "placeholder":
                place = next(fresh for fresh in self.new.nodes if fresh.name == node.name)
                _add_store(self.new, place, self._newest(node))


def _functional_twin(node: Node) -> Any:
    """The overload that returns the result of the node's in-place op."""
    target: Any = node.target
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    packet = getattr(aten, name[:-1], None) if namespace == "aten" and name.endswith("_") else None
    overload = "p" if target is aten.bernoulli_.float else schema.overload_name or "default"
    twin: Any = getattr(packet, overload, None)
    is_twin = twin is not None and not twin._schema.is_mutable and node.kwargs.get("out") is None
    if not is_twin or [each.name for each in twin._schema.arguments] != [each.name for each in schema.arguments]:
        raise Uncovered
    return twin


def _norm_twin(norm: Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that does the same as `native_batch_norm` and declares its writes: its target and arguments."""
    mean, _, is_training = norm.args[3:6]
    if mean is None:
        return aten._native_batch_norm_legit.no_stats, (*norm.args[:3], *norm.args[5:])
    if not is_training:
        return aten._native_batch_norm_legit_no_training.default, (*norm.args[:5], *norm.args[6:])
    return aten._native_batch_norm_legit.default, norm.args


def _owns_statistics(norm: Node) -> bool:
    """Whether the norm's running statistics are placeholders that only it reads."""
    statistics = [each for each in norm.args[3:5] if isinstance(each, Node) and each.op == "placeholder"]
    return len(statistics) == 2 and all(user is norm for each in statistics for user in each.users)


def _storages(node: Node) -> list[int]:
    return [value.untyped_storage()._cdata for value in tensors_in(node.meta.get("val"))]


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype, value.device


def _values(args: Any) -> Any:
    try:
        return torch.fx.node.map_arg(args, lambda node: node.meta["val"])
    except KeyError as error:
        raise Uncovered from error


_UNDECLARED = {
    aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}  # fmt: skip
"""They return views of their argument and do not say so: nothing writes to either, in a graph without in-place ops."""
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.squeeze.default}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor}


class Uncovered(Exception):
    """A write that the rules for taking writes out of a graph do not cover."""


def is_view(target: torch._ops.OpOverload) -> bool:
    """Whether an op returns views of its first argument."""
    aliases = (result.alias_info for result in target._schema.returns)
    return target in _UNDECLARED or any(alias is not None and not alias.is_write for alias in aliases)


def _views(node: Node) -> Iterator[Node]:
    """The node, and those whose memory it shows, view after view."""
    yield node
    while node.op == "call_function" and node.args and isinstance(of := node.args[0], Node):
        target: Any = node.target
        if target is not operator.getitem and not is_view(target) and not target._schema.name.endswith("_"):
            break
        yield (node := of)


def shown(node: Node) -> Node:
    """The node whose memory a view shows, at the end of all views."""
    *_, last = _views(node)
    return last


def inverse(view: Node, base: Node, fresh: Node) -> tuple[Node, Any, tuple[Any, ...]]:
    """The base of `view`, and the call that replaces the viewed part by `fresh`: (base, target, args).

    A target of None means `fresh` itself.
    """
    target: Any = view.target
    value = base.meta["val"]
    if target is operator.getitem and isinstance(base.args[0], Node):
        whole, which = base.args[0], view.args[1]
        if base.target in _SPLITS:
            dim = int(base.args[2]) if len(base.args) > 2 else 0  # type: ignore[arg-type]
            ends = list(itertools.accumulate(piece.shape[dim] for piece in value))
            start = ends[which] - value[which].shape[dim]  # type: ignore[index]
            return whole, aten.slice_scatter.default, (whole, fresh, dim, start, ends[which])  # type: ignore[index]
        if base.target is aten.unbind.int:
            dim = int(base.args[1]) if len(base.args) > 1 else 0  # type: ignore[arg-type]
            return whole, aten.select_scatter.default, (whole, fresh, dim, which)
    elif target in _SAME:
        return base, None, ()
    elif target in _SCATTERS:
        return base, _SCATTERS[target], (base, fresh, *view.args[1:])
    elif target in _RESHAPES and fresh.meta["val"].is_contiguous() and value.is_contiguous():
        return base, aten.view.default, (fresh, list(value.shape))
    elif target is aten.unsqueeze.default:
        return base, aten.squeeze.dim, (fresh, view.args[1])
    elif target is aten.squeeze.dim and value.dim() > view.meta["val"].dim():
        return base, aten.unsqueeze.default, (fresh, view.args[1])
    elif target in (aten.t.default, aten.transpose.int):
        return base, target, (fresh, *view.args[1:])
    elif target is aten.permute.default:
        order = [dim % value.dim() for dim in view.args[1]]  # type: ignore[union-attr]
        return base, target, (fresh, [order.index(dim) for dim in range(len(order))])
    raise Uncovered

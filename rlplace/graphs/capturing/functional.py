"""`functionalise`: a traced graph without in-place ops, so that no op writes what another device may be reading.

The rules are those of functionalisation in PyTorch (`torch.func.functionalize`), applied to the graph rather than to a
second run of it, which would double the time of a capture: a write makes a new version of a tensor, is carried through
views to their base by a scatter, and later reads see views of the new version. Writes that the rules here do not cover
(through `unfold`, or to several arguments) are left to such a second run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from rlplace.graphs.capturing.versions import Versions, mutates
from rlplace.graphs.capturing.views import Uncovered, shown

aten = torch.ops.aten


def functionalise(module: GraphModule, replaced: Sequence[int] = ()) -> GraphModule:
    """The same graph without in-place ops, but for two kinds of update of placeholders (buffers, inputs).

    Batch norm updates its running statistics where they live, as one op, if nothing else reads what it wrote; every
    other change of a placeholder is one `copy_` into it at the end.

    Args:
        module: as traced.
        replaced: placeholders (by position) whose new values are the last outputs of the graph; they are outputs no
            more, but stored.
    """
    if any(map(mutates, module.graph.nodes)):
        try:
            module = _make_graph_module(module, Versions(module.graph).run())
        except Uncovered:
            module = _traced_again(module)
    if replaced:
        _store(module.graph, replaced)
    return module


def _store(graph: torch.fx.Graph, replaced: Sequence[int]) -> None:
    """Takes the last outputs away and copies them into placeholders; what shows the old values is cloned before."""
    (output,) = graph.find_nodes(op="output")
    placeholders = graph.find_nodes(op="placeholder")
    places = [placeholders[position] for position in replaced]
    flat: Any = output.args[0]
    count = len(flat) - len(replaced)
    with graph.inserting_before(output):

        def kept(node: Any) -> Any:
            if not isinstance(node, Node) or shown(node) not in places:
                return node
            clone = graph.call_function(aten.clone.default, (node,))
            clone.meta = dict(node.meta)
            return clone

        flat = [kept(node) for node in flat]
        for place in places:  # changed in place, and then replaced
            for user in list(place.users):
                if user.target is aten.copy_.default and user.args[0] is place:
                    graph.erase_node(user)
        for place, value in zip(places, flat[count:], strict=True):
            store = graph.call_function(aten.copy_.default, (place, value))
            store.meta = {"custom": {"phase": "forward"}, "val": place.meta["val"]}
    output.args = (flat[:count],)


def _traced_again(module: GraphModule) -> GraphModule:
    """The same by PyTorch's own means: slower, and three ops where batch norm needs one."""
    for node in module.graph.nodes:
        if node.target is aten.native_batch_norm.default:
            _, is_training = node.args[3], node.args[5]
            node.target = aten._native_batch_norm_legit.default
            if node.args[3] is None:
                node.target = aten._native_batch_norm_legit.no_stats
                node.args = (*node.args[:3], *node.args[5:])
            elif not is_training:
                node.target = aten._native_batch_norm_legit_no_training.default
                node.args = (*node.args[:5], *node.args[6:])
    module.recompile()

    def run(*flat: torch.Tensor) -> Any:
        return torch.fx.Interpreter(module).run(*flat)

    placeholders = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with fx_traceback.preserve_node_meta():
        functional = torch.func.functionalize(run, remove="mutations")
        return make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*placeholders)

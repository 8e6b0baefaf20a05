"""`check_steps_alike`: refuses a step whose next one would be another, as Python state that it changes says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from rlplace.errors import CaptureError, UnknownName
from rlplace.graphs.capturing.python_state import Change, PythonState
from rlplace.graphs.capturing.untouched import modules_of_loss

_log = logging.getLogger(__name__)

_OF_RECURRENT_LAYERS = {"_flat_weights", "_flat_weight_refs"}
"""Lists that PyTorch keeps of parameters, and makes anew where these are swapped."""
_HINT = (
    "Hint: keep what changes from step to step in a buffer (`register_buffer`), return it, or count outside of the "
    "model and pass it as a tensor among the inputs"
)


def watched_state(model: nn.Module, loss_fn: Callable[..., Any] | None) -> PythonState:
    """The Python state of a model and of the modules that its loss reaches, as it is now."""
    return PythonState((*model.named_modules(), *modules_of_loss(model, loss_fn)))


def check_frozen(model: nn.Module, loss_fn: Callable[..., Any] | None, frozen: Collection[str]) -> None:
    """Refuses names of nothing that a model or its loss has or, as their code tells, may set.

    Args:
        model: that is captured.
        loss_fn: of its output.
        frozen: names of what may change.

    Raises:
        UnknownName: a name of nothing.
    """
    modules = [*model.modules(), *(module for _, module in modules_of_loss(model, loss_fn))]
    paths, known = {path for path, _ in model.named_modules()}, watched_state(model, loss_fn).names
    methods = [
        each for kind in {cls for module in modules for cls in type(module).__mro__} for each in vars(kind).values()
    ]
    read = {word for each in (*methods, loss_fn) for word in getattr(getattr(each, "__code__", None), "co_names", ())}
    for name in frozen:
        root = name.partition("[")[0]
        owner, _, last = root.rpartition(".")
        if not (name in known or root in known or last in read or (owner in known and owner not in paths)):
            raise UnknownName("attribute in `frozen`", name, (each for each in known if _is_own(each)))


def _is_own(name: str) -> bool:
    """Whether a name is one that a user knows, and none of PyTorch's private ones."""
    return bool(name) and "[" not in name and not any(part.startswith("_") for part in name.split("."))


def check_steps_alike(
    model: nn.Module,
    traced: GraphModule,
    again: Callable[[], GraphModule],
    before: PythonState,
    after: PythonState,
    frozen: Collection[str],
) -> None:
    """Compares a step with the one that follows it, where it left something changed.

    A cache that the first step fills and the next one only reads is no change of the step.

    Args:
        model: that runs.
        traced: the graph of the step.
        again: traces the next step.
        before: the state that the step began with.
        after: the state that it left.
        frozen: names of what may change.

    Raises:
        CaptureError: the next step changes the same again, reads what this one left, or computes something else.
    """
    changed = [change for change in before.changes() if not _is_free(change.name, frozen)]
    if not changed:
        return
    try:
        following = again()
    except Exception as error:  # it reads what the first step left: tensors of a graph that is gone
        raise _refusal(changed, "and the next step reads that") from error
    more = [change for change in after.changes() if not _is_free(change.name, frozen)]
    growing = [change for change in more if change.is_growth or not change.tensors]
    if growing:
        raise _refusal(growing, "in every step")
    read = {id(value) for value in _constants(following)}
    carried = [change for change in changed if any(id(tensor) in read for tensor in change.tensors)]
    renewed = {change.name for change in more}
    if carried := [change for change in carried if change.name in renewed]:
        raise _refusal(carried, "in every step, and the next one reads that")
    if list(_work(traced)) != list(_work(following)):
        raise _refusal(changed, "and the next step then computes something else")
    if renewed := renewed - set(_norms_of_weights(model)):
        _log.warning(
            "`forward` sets %s to tensors of the step; a placed step leaves them as they are: return what is needed",
            ", ".join(sorted(renewed)),
        )


def _is_free(name: str, frozen: Collection[str]) -> bool:
    if name.rpartition(".")[2] in _OF_RECURRENT_LAYERS:
        return True
    return any(name == each or name.startswith((f"{each}.", f"{each}[")) for each in frozen)


def _norms_of_weights(model: nn.Module) -> Iterator[str]:
    """The weights that hooks of `torch.nn.utils.weight_norm` and its like make for every call."""
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils"):
                yield f"{path}.{getattr(hook, 'name', '')}".strip(".")


def _refusal(changed: Sequence[Change], why: str) -> CaptureError:
    names = ", ".join(f"`{change.name}`" for change in changed)
    given = ", ".join(repr(change.name) for change in changed)
    return CaptureError(
        f"cannot capture the model: `forward` (or the loss) changes {names} {why}. It is Python's, not a tensor of the "
        f"graph: placed steps would leave it as it is now. {_HINT}. Where it may stay so: `frozen=[{given}]`."
    )


def _constants(module: GraphModule) -> Iterator[Tensor]:
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, Tensor):
            yield value


def _work(module: GraphModule) -> Iterator[tuple[Any, ...]]:
    """What a step computes from its inputs and parameters or draws: ops with their plain arguments, in order."""
    dependent: set[Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            dependent.add(node)
        elif node.op == "call_function":
            is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if is_random or any(each in dependent for each in node.all_input_nodes):
                dependent.add(node)
                plain = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each in dependent)
                yield str(node.target), repr(plain)

"""`to_step`: a model that runs as a placement says.

`to_module`: a model as an `nn.Module` that runs as placed, its loss wherever the caller has it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.errors import FingerprintMismatch, InvalidValue
from rlplace.export.placed.graphs import OtherShapes
from rlplace.export.placed.placed_model import PlacedModel
from rlplace.export.placed.placed_module import PlacedForward, PlacedModule
from rlplace.graphs.capturing.portable import original_of
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.detect import MOST_PARTS, detect_host
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.placement import Placement, check_is_placement, check_plan
from rlplace.measure.timing.threads import usable_cores


def to_step(
    model: nn.Module,
    graph: OpGraph,
    placement: Placement,
    *,
    host: Host | str | None = None,
    seed: int = 0,
    other_shapes: OtherShapes = "capture",
) -> PlacedModel:
    """`model` as a callable that runs as placed, starting from its parameters as they are now.

    Args:
        model: the one that `graph` was captured from.
        graph: with its program.
        placement: made for `graph` and for a host of this machine.
        host: that host, or a word for it; by default the one that the placement was made for, whatever word of this
            machine named it.
        seed: of random ops.
        other_shapes: what is done with inputs of other shapes: `capture` them when they are first seen, placed alike;
            run them in `eager` mode; or `refuse`.

    Raises:
        InvalidValue: what is given is no model, graph or placement, or in another order.
        FingerprintMismatch: the placement was made for another graph or host.
    """
    check_arguments(model, graph, placement, "to_step")
    host = matching_host(placement) if host is None else resolve_host(host)
    placement.require(graph, host)
    placed = PlacedModel(graph, host, placement.plan, seed=seed, other_shapes=other_shapes)
    model = original_of(model)
    placed.load_state_dict({**dict(model.named_parameters()), **dict(model.named_buffers())})
    return placed


def check_arguments(model: object, graph: object, placement: object, where: str) -> None:
    """Checks that a user gave `where` a model, a graph and a placement, in this order.

    Raises:
        InvalidValue: one of them is something else.
    """
    for name, value, kind in (("model", model, nn.Module), ("graph", graph, OpGraph)):
        if not isinstance(value, kind):
            raise InvalidValue(
                name,
                f"of type {type(value).__name__}",
                f"of type {kind.__name__}",
                where=where,
                hint=f"Call `{where}(model, graph, placement)`, in this order; `rlplace.capture` makes the graph.",
            )
    check_is_placement(placement, where)


def matching_host(placement: Placement) -> Host:
    """The host of this machine that the placement was made for.

    Raises:
        FingerprintMismatch: there is none.
    """
    for host in _hosts_here(len(placement.device_names)):
        if host.fingerprint == placement.host_fingerprint:
            return host
    raise FingerprintMismatch("host", placement.host_fingerprint, detect_host("auto").fingerprint)


def _hosts_here(num_devices: int) -> Iterator[Host]:
    """Hosts of this machine with so many devices that a word names: its GPUs, any `cores:...`, with a gang or not."""
    num_gpus = cuda.num_gpus()
    for with_cpu in (False, True):
        num_parts, rest = divmod(num_devices - with_cpu, max(num_gpus, 1))
        if num_gpus and not rest and 1 <= num_parts <= MOST_PARTS:
            yield detect_host("cuda", num_parts=num_parts, with_cpu=with_cpu)
    for num_single, gangs in ((num_devices, False), (num_devices - 1, True)):  # a gang is one device more
        for cores_per_device in range(1, len(usable_cores()) // max(num_single, 1) + 1):
            if num_single > 0:
                yield detect_host("cores", num_single, cores_per_device, gangs=gangs)


def to_module(
    model: nn.Module, graph: OpGraph, placement: Placement, *, host: Host | str | None = None, seed: int = 0
) -> PlacedModule:
    """A copy of `model` that runs as placed: it trains, evaluates, saves and loads as the original does.

    It is of a class that derives from that of `model`, with the same modules, parameters and buffers by the same names;
    these are moved to where the placement has them. Forward and backward are captured at the first call with inputs of
    a kind (structure, shapes, mode, what requires a gradient), and run where the placement has the ops of that role.
    The loss is the caller's, and so is the optimizer.

    Args:
        model: the one that `graph` was captured from; it stays as it is, and is what is captured.
        graph: of a step of the model, with its program: training or inference.
        placement: made for `graph` and for a host of this machine.
        host: that host, or a word for it; by default the one that the placement was made for, whatever word of this
            machine named it.
        seed: of random ops: each draws from (seed, op, call).

    Raises:
        InvalidValue: what is given is no model, graph or placement, or in another order.
        FingerprintMismatch: the placement was made for another graph or host.
        InvalidValue: `graph` was captured from another model.
    """
    check_arguments(model, graph, placement, "to_module")
    model = original_of(model)
    host = matching_host(placement) if host is None else resolve_host(host)
    placement.require(graph, host)
    if require_program(graph).origin.model is not model:
        raise InvalidValue("model", type(model).__name__, "the model that the graph was captured from", where="module")
    check_plan(graph, host.num_devices, placement.plan)
    with torch.inference_mode(False):
        placed: Any = copy.deepcopy(model, {id(constant): constant for constant in _constants(model)})
    for hooks in (placed._forward_hooks, placed._forward_pre_hooks):
        hooks.clear()  # they are in the graph
    placed.__class__ = _placed_class(type(model))
    vars(placed)["_placed"] = runs = PlacedForward(placed, graph, placement.plan, host, seed)
    if len({*runs.places.values()}) > 1:
        vars(placed)["hf_device_map"] = hf_device_map(runs.places)
    result: PlacedModule = placed
    return result


def _constants(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors in plain attributes of modules, and in lists there: what is captured and its copy have them in common."""
    registries = ("_parameters", "_buffers", "_modules")
    for module in model.modules():
        for name, value in vars(module).items():
            leaves = () if name in registries else pytree.tree_leaves(value)
            yield from (
                leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)
            )


def hf_device_map(places: Mapping[str, torch.device]) -> dict[str, int | str]:
    """Where parameters and buffers are, as Hugging Face writes it: who reads it leaves a model where it is.

    >>> hf_device_map({"up.weight": torch.device("cuda", 1), "down.weight": torch.device("cpu")})
    {'up.weight': 1, 'down.weight': 'cpu'}
    """
    return {name: place.type if place.index is None else place.index for name, place in places.items()}


def _placed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class that derives from `kind`; its `forward` runs as placed and has the signature that `kind`'s has.

    Hugging Face's `Trainer` drops the columns of a batch that the signature does not name.
    """

    @functools.wraps(kind.forward)
    def forward(self: PlacedModule, *args: Any, **kwargs: Any) -> Any:
        return PlacedModule.forward(self, *args, **kwargs)

    return type(f"Placed{kind.__name__}", (PlacedModule, kind), {"forward": forward})

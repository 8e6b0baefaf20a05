"""`RankModel`: one rank of a placed model under torchrun, in a training loop that all ranks run; `to_rank` makes it."""

from __future__ import annotations

import os
from typing import Literal, NoReturn

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlplace.errors import UserError, refuse_if
from rlplace.export.placed.graphs import check_arguments
from rlplace.export.placed.placed_model import PlacedModel
from rlplace.export.placed.step_arguments import Index
from rlplace.graphs import OpGraph
from rlplace.graphs.capturing.portable import original_of
from rlplace.measure import Placement, Plan
from rlplace.measure.execute.spmd import SpmdCrew
from rlplace.measure.hosts.detect import nodes_host
from rlplace.measure.hosts.nodes import Nodes, join


class RankModel(PlacedModel):
    """The part of a placed model that one process runs: the ops, parameters and optimizer states of one device.

    It is used as a `PlacedModel`, by all ranks at once: each makes the same calls in the same order, with tensors of
    the same shapes. Every rank gets the result of a step. `parameters`, `state_dict`, `load_state_dict`, `copy_to` and
    `checkpoint` are about what this rank holds: each parameter is on one rank. Of one that is split, a rank has shards,
    each a parameter of its own: `up.weight[0]`. In a checkpoint they are under the names of the model.

    Args:
        graph: captured from the model, alike on all ranks.
        plan: the plan to run; device d is rank d.
        nodes: this process and the others.
        seed: of random ops.
        other_shapes: for inputs of other shapes: `capture` them, or `refuse` them.

    Raises:
        RuntimeError: a rank did not come, or cannot be reached.
        RunnerError: another rank has another step.
    """

    def __init__(
        self,
        graph: OpGraph,
        plan: Plan,
        nodes: Nodes,
        *,
        seed: int = 0,
        other_shapes: Literal["capture", "refuse"] = "capture",
    ) -> None:
        host = nodes_host(nodes.facts)
        self._nodes, self._ranks = nodes, SpmdCrew(host, nodes)
        super().__init__(graph, host, plan, seed=seed, other_shapes=other_shapes, crew=self._ranks)

    @property
    def rank(self) -> int:
        """The index of this process, and of its device."""
        return self._nodes.rank

    @property
    def reads(self) -> tuple[tuple[Index, ...], ...]:
        """Of each tensor of a call, inputs before targets, the parts that this rank reads, to index the tensor with.

        The other parts may have any values. A tensor with no parts is not read; `...` is all of it. Only a batch that
        is cut into micro-batches has parts.
        """
        return self._first.reads

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the norm of the gradients of all ranks together, as `torch.nn.utils.clip_grad_norm_` does for a model.

        Args:
            max_norm: that the norm has at most afterwards.
            norm_type: the p of the norm; `inf` for the largest absolute value.

        Returns:
            The norm before, the same on all ranks.
        """
        with self._turn(runs=False):
            gradients = [each.grad for each in self.parameters() if each.grad is not None]
            own = get_total_norm(gradients, norm_type)
            norms = torch.tensor(self._ranks.gather(float(own)), dtype=torch.float64)
            norm: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
            clip_grads_with_norm_(self.parameters(), max_norm, norm.to(own))
            return norm

    def save(self, path: str | os.PathLike[str]) -> NoReturn:
        """Always raises: one rank does not have all of the model.

        Raises:
            UserError: always; the message names the alternative.
        """
        raise UserError(
            "one rank holds a part of the model: let all ranks call `torch.distributed.checkpoint.save("
            f"step.checkpoint(), checkpoint_id={str(path)!r})`, and `load`, then `step.restore`, likewise"
        )

    def load(self, path: str | os.PathLike[str]) -> NoReturn:
        """Always raises, as `save`."""
        self.save(path)


def to_rank(
    model: nn.Module,
    graph: OpGraph,
    placement: Placement,
    *,
    seed: int = 0,
    other_shapes: Literal["capture", "refuse"] = "capture",
) -> RankModel:
    """Returns the part of `model` that this process runs under torchrun, starting with its current parameters.

    All ranks call it with the same model, graph and placement. From then on, this process runs on its share of the
    cores of its machine, or on its GPU; process groups of gloo and NCCL that are made later use the network
    interface that the ranks reach each other by.

    Args:
        model: the model that `graph` was captured from.
        graph: a graph with its program.
        placement: made for `graph` and any host; device d is rank d.
        seed: of random ops.
        other_shapes: for inputs of other shapes: `capture` a new graph for them at their first call, or `refuse` them.

    Raises:
        InvalidValue: torchrun did not start this process, or not as many as the placement has devices; or an argument
            is not a model, graph or placement.
        FingerprintMismatch: the placement was made for another graph.
        RunnerError: a rank did not come, or has another step.
    """
    check_arguments(model, graph, placement, "to_rank")
    placement.require_graph(graph)
    nodes: Nodes = join()
    plan, names = placement.plan, placement.device_names
    num_used = 1 + max([*plan.devices.tolist(), *plan.transfer_destination.tolist()])
    refuse_if(
        not num_used <= nodes.num_ranks <= len(names),
        "ranks",
        nodes.num_ranks,
        f"{num_used}, one for each device of the placement ({', '.join(names[:num_used])})",
        where="to_rank",
        hint=f"Start so many processes (`torchrun --nproc-per-node {num_used}` on one machine), or train again on a "
        "host with as many devices as there are processes.",
    )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, nodes.interface)
    step = RankModel(graph, plan, nodes, seed=seed, other_shapes=other_shapes)
    model = original_of(model)
    step.load_state_dict({**dict(model.named_parameters()), **dict(model.named_buffers())})
    return step

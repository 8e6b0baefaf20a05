"""A step as the stages of a pipeline of `torch.distributed.pipelining`.

`split_step`: the stages. `stage_step`: what the process of one of them does. The text of exported scripts contains all
functions of this file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import Pipe, pipe_split, pipeline
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate


class WholeStep(nn.Module):
    """A model with its loss: takes the tensors of a batch, inputs before targets, and returns the loss, shape (1,).

    Args:
        model: whose path becomes `model`.
        loss_fn: takes its output and the targets.
        names: of its inputs, where they are keyword arguments; None where they are positional.
        num_targets: how many of the tensors are targets.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any], names: Sequence[str] | None, num_targets: int
    ) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        self.names, self.num_targets = names, num_targets

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The loss, (1,): that of a micro-batch is an output of the last stage, which must have a dimension."""
        count = len(tensors) - self.num_targets
        inputs, targets = tensors[:count], tensors[count:]
        named = None if self.names is None else dict(zip(self.names, inputs, strict=True))
        output = self.model(*inputs) if named is None else self.model(**named)
        loss = self.loss_fn(output, *targets)
        first: torch.Tensor = loss[0] if isinstance(loss, (tuple, list)) else loss
        return first.reshape(1)


def split_step(
    step: nn.Module, tensors: Sequence[torch.Tensor], begins: Sequence[str]
) -> tuple[Pipe, list[dict[int, str]]]:
    """`step` in stages; a stage begins with each module of `begins`, as with `SplitPoint.BEGINNING` there.

    Returns:
        The stages; and of every parameter that several hold a copy of, its name in each of them.

    Args:
        step: traced as it is; its modules of `begins` stay marked.
        tensors: of one micro-batch.
        begins: paths of modules, each of which runs once.
    """
    mark: Callable[[], None] = pipe_split
    for path in begins:
        step.get_submodule(path).register_forward_pre_hook(lambda *_: mark())
    pipe = pipeline(step, tuple(tensors), split_policy=hand_on)
    return pipe, tie(pipe, step)


def stage_step(
    step: nn.Module,
    batch: Sequence[torch.Tensor],
    begins: Sequence[str],
    index: int,
    device: torch.device,
    *,
    schedule: Callable[..., Any],
    num_micro_batches: int,
    dims: Sequence[int | None],
    averages: bool,
    group: dist.ProcessGroup | None = None,
) -> tuple[nn.Module, Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """What one process of a pipeline does: its stage, and its forward and backward of a batch, which leaves gradients.

    Returns:
        The module of the stage; and a function that takes a batch, and returns the losses of its micro-batches in the
        process of the last stage, none in others.

    Args:
        step: to be split.
        batch: of the shapes of all batches.
        begins: as of `split_step`.
        index: of the stage of this process, which is also its rank.
        device: of the stage.
        schedule: a class of `torch.distributed.pipelining`.
        num_micro_batches: K.
        dims: the dimension of the batch of each tensor; None where micro-batches share it.
        averages: whether the losses of micro-batches are averaged, not added.
        group: of all stages, each two parameters of which are shared alike or apart; the default one if None.
    """
    sizes = [None if dim is None else one.shape[dim] // num_micro_batches for one, dim in zip(batch, dims, strict=True)]
    first = [
        one if dim is None or size is None else one.narrow(dim, 0, size)
        for one, dim, size in zip(batch, dims, sizes, strict=True)
    ]
    pipe, copies = split_step(step, first, begins)
    stage = pipe.build_stage(index, device, group)
    made = [
        (by_rank, dist.new_group(sorted(by_rank), use_local_synchronization=group is not None))
        for by_rank in copies
        if group is None or index in by_rank
    ]
    copied = [(by_rank, those) for by_rank, those in made if index in by_rank]
    chunks = tuple(_Replicate() if dim is None else TensorChunkSpec(dim) for dim in dims)  # type: ignore[no-untyped-call]
    order = schedule(
        stage,
        num_micro_batches,
        loss_fn=lambda output, _: (output[0] if isinstance(output, (tuple, list)) else output).sum(),
        args_chunk_spec=chunks,
        scale_grads=averages,
    )
    is_first, is_last = index == 0, index == pipe.num_stages - 1

    def run(batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        order.step(
            *([tensor.to(device) for tensor in batch] if is_first else ()),
            target=torch.zeros(num_micro_batches, device=device) if is_last else None,  # the loss has its targets
            losses=losses,
            return_outputs=False,
        )
        for by_rank, those in copied:  # copies of one parameter are updated alike
            copy = stage.submod.get_parameter(by_rank[index])
            copy.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
            dist.all_reduce(copy.grad, group=those)
        return losses

    return stage.submod, run


def tie(pipe: Pipe, step: nn.Module) -> list[dict[int, str]]:
    """Ties the names of one parameter of `step` in each stage: copies may have come of them.

    Args:
        pipe: stages of `step`.
        step: as it was.

    Returns:
        Of every parameter that several stages hold, its name by stage.
    """
    identity = {name_in_model(name): id(one) for name, one in step.named_parameters(remove_duplicate=False)}
    held: dict[int, dict[int, str]] = {}
    for stage in range(pipe.num_stages):
        module = pipe.get_stage_module(stage)
        for name, _ in list(module.named_parameters(remove_duplicate=False)):
            first = held.setdefault(identity[name_in_model(name)], {}).setdefault(stage, name)
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, module.get_parameter(first))
    return [names for names in held.values() if len(names) > 1]


def hand_on(traced: fx.GraphModule) -> fx.GraphModule:
    """`traced`, every stage of which reads from the one before it alone: tensors that later ones need are handed on.

    For a stage of `torch.distributed.pipelining` can take inputs of the model only if it is the first, and a value that
    is differentiated can be read by one later stage. Sent tensors are contiguous, as they must be.
    """
    open_regions(traced)
    graph = traced.graph
    stage_of: dict[fx.Node, int] = {}
    begins = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in graph.nodes:
        if node.target is torch.ops.pippy._pipe_split.default:
            begins.append(node)
        stage_of[node] = len(begins) - 1

    def copied(value: fx.Node, place: fx.Node, stage: int, modules: dict[str, Any]) -> fx.Node:
        if not isinstance(value.meta["val"], torch.Tensor):
            raise TypeError(f"{value} is handed to a later stage and is no tensor")
        how: dict[str, Any] = {"memory_format": torch.contiguous_format}
        with graph.inserting_after(place):
            made = graph.call_function(torch.ops.aten.clone.default, (value,), how)
        made.meta = {"val": torch.ops.aten.clone.default(value.meta["val"], **how), "nn_module_stack": modules}
        stage_of[made] = stage
        return made

    # Inputs go into the first stage, each as a copy of its own, so that later ones may be handed it.
    outside, place = {"": ("", "")}, begins[0]
    for value in [node for node in graph.nodes if node.op == "placeholder"]:  # all go into the first stage, in order
        readers = list(value.users)
        place = copied(value, place, 0, outside)
        for reader in readers:
            reader.replace_input_with(value, place)
    # Whatever a later stage reads is copied from stage to stage up to the last that does.
    for value, stage in [(node, stage) for node, stage in stage_of.items() if node.op == "call_function"]:
        readers, handed = [reader for reader in value.users if reader.op != "output"], value
        last = max((stage_of[reader] for reader in readers), default=stage)
        if last > stage and isinstance(value.meta["val"], torch.Tensor) and not value.meta["val"].is_contiguous():
            handed = copied(value, value, stage, value.meta["nn_module_stack"])
        for later in range(stage + 1, last + 1):
            for reader in readers:
                if stage_of[reader] == later and handed is not value:
                    reader.replace_input_with(value, handed)
            if later < last:
                handed = copied(handed, begins[later], later, outside)
    graph.lint()
    traced.recompile()
    return traced


def open_regions(traced: fx.GraphModule) -> None:
    """Puts the ops of regions without gradients, or with autocast off, among the others; gradients still end there.

    `torch.export` makes them graphs of their own, which a stage cannot hold.
    """
    graph = traced.graph
    for node in [node for node in graph.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]:
        place = next((index for index, arg in enumerate(node.args) if is_graph(traced, arg)), -1)
        settings, name = node.args[:place], str(node.target)
        is_closed = name == "wrap_with_set_grad_enabled" and not settings[0]
        if place < 0 or not (
            name == "wrap_with_set_grad_enabled" or (name == "wrap_with_autocast" and not settings[2])
        ):
            raise TypeError(f"{name} makes a region of its own, which a stage cannot hold")
        region = getattr(traced, node.args[place].target)
        open_regions(region)
        inputs = [inner for inner in region.graph.nodes if inner.op == "placeholder"]
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(region.graph, dict(zip(inputs, node.args[place + 1 :], strict=True)))
        for reader in list(node.users):  # each takes one result
            result = results[reader.args[1]]
            if is_closed:
                with graph.inserting_before(node):
                    ended = graph.call_function(torch.ops.aten.detach.default, (result,))
                ended.meta = dict(result.meta)
                result = ended
            reader.replace_all_uses_with(result)
            graph.erase_node(reader)
        graph.erase_node(node)


def is_graph(traced: fx.GraphModule, arg: object) -> bool:
    """Whether an argument of a node is a graph of its own."""
    name = str(arg.target) if isinstance(arg, fx.Node) and arg.op == "get_attr" else ""
    return isinstance(getattr(traced, name, None), fx.GraphModule)


def name_in_model(name: str) -> str:
    """The model's name of a parameter of a stage, where calls of a module after its first are numbered: `head@1`."""
    return re.sub(r"@\d+(?=\.)", "", name).removeprefix("model.")


PARTS = (WholeStep, split_step, stage_step, tie, hand_on, open_regions, is_graph, name_in_model)
"""The functions that are part of the text."""

"""`ModuleGraph`: forward and backward of a model for inputs of one kind, as a function that autograd knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.errors import RunnerError, UserError
from rlplace.export.placed.arguments import InputCutter
from rlplace.export.placed.held import HeldConstants
from rlplace.graphs.capturing.capture import CapturedModule
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import BACKWARD, OpGraph
from rlplace.graphs.program import Ref
from rlplace.measure.hosts.host import Host
from rlplace.measure.placed.residents import Residents
from rlplace.measure.placed.two_part_step import Kept, TwoPartStep
from rlplace.measure.placed.workers import Crew
from rlplace.measure.plan import Plan


def backward_ops(graph: OpGraph) -> frozenset[int]:
    """The ops of a module's second part: its backward, and the gradients of outputs that it is given."""
    given = {op for op, source in require_program(graph).sources.items() if source.kind == "target"}
    return frozenset(given | {op for op, phase in enumerate(graph.phases.tolist()) if phase == BACKWARD})


class ModuleGraph:
    """A captured forward and backward that run as planned.

    Args:
        captured: forward and backward.
        host: of this machine.
        plan: what runs, the backward at the end.
        crew: the threads of the host.
        state: parameters and buffers by dotted name, where the plan keeps them.
        model: the placed copy of what was captured: its attributes hold the constants.
        seed: of random ops.
    """

    def __init__(
        self,
        captured: CapturedModule,
        host: Host,
        plan: Plan,
        crew: Crew,
        state: Mapping[str, torch.Tensor],
        model: nn.Module,
        *,
        seed: int,
    ) -> None:
        graph = captured.graph
        self._program, self._plan, self._crew = require_program(graph), plan, crew
        self._with_gradient = captured.with_gradient
        self._residents = Residents(graph, host, seed=seed)
        second = backward_ops(graph)
        late = {
            graph.num_ops + index
            for index, tensor in enumerate(plan.transfer_tensor.tolist())
            if graph.tensor_op[tensor] in second
        }
        self._step = TwoPartStep(graph, host, plan, self._residents, crew, seed=seed, second=second | late)
        sources, positions = self._program.sources, InputCutter(graph).positions
        self._inputs = {op: k for op, k in positions.items() if sources[op].kind == "input"}
        self._seeds = {op: int(sources[op].key) for op in positions if sources[op].kind == "target"}
        read_late = {
            tensor
            for tensor, op in zip(graph.input_tensors.tolist(), graph.edge_op.tolist(), strict=True)
            if op in second
        }
        self._kept_inputs = [k for op, k in self._inputs.items() if int(graph.output_offsets[op]) in read_late]
        gradients = (*self._program.gradients.values(), *self._program.input_gradients.values())
        self._constants = HeldConstants(graph, plan, self._residents, model)
        self._late_sources = {int(graph.tensor_op[tensor]) for tensor in read_late}
        self._output_is_shared = self._shared(graph, self._program.result_refs, read_late)
        self._gradient_is_shared = self._shared(graph, gradients, set())
        self.adopt(state)

    def adopt(self, state: Mapping[str, torch.Tensor]) -> None:
        """Runs with these parameters and buffers from now on."""
        for op, source in self._program.sources.items():
            if source.kind in ("parameter", "buffer"):
                self._residents.adopt(op, int(self._plan.devices[op]), state[source.key].detach())
        self._step.load()

    def run(self, tensors: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], number: int) -> Any:
        """What the model returns, with a gradient where the model's own output has one.

        Args:
            tensors: inputs.
            parameters: by dotted name: those whose tensors were adopted.
            number: of the step: random ops draw by it.

        Raises:
            RunnerError: an op failed.
        """
        if self._with_gradient:
            wanted = [parameters[name] for name in self._program.gradients]
            wanted += [tensors[position] for position in self._program.input_gradients]
            outputs = _Forward.apply(self, tensors, number, *wanted)  # type: ignore[no-untyped-call]
        else:
            outputs, _ = self.forward(tensors, number)
        values = iter(outputs)
        return pytree.tree_map_only(Ref, lambda _: next(values), self._program.result)

    def forward(self, tensors: Sequence[torch.Tensor], number: int) -> tuple[list[torch.Tensor], Kept]:
        """Output tensors, which share no memory with anything else, and what `backward` needs."""
        given = self._placed({op: tensors[position] for op, position in self._inputs.items()})
        if self._constants.follow():
            self._step.load()
        outputs, kept = self._step.run_first(given, number)
        return self._apart(outputs, self._output_is_shared), kept

    def backward(self, gradients: Sequence[torch.Tensor], kept: Kept, number: int) -> list[torch.Tensor]:
        """Gradients of parameters, then of inputs; those of all outputs, with a gradient or not, are given."""
        seeds = [gradients[position] for position in self._with_gradient]
        with self._crew.turn():
            given = self._placed({op: seeds[index] for op, index in self._seeds.items()})
            return self._apart(self._step.run_second(given, kept, number), self._gradient_is_shared)

    def without_gradient(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs that have none."""
        return [output for position, output in enumerate(outputs) if position not in self._with_gradient]

    def kept_inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs that the backward reads, and the constants."""
        return [*(tensors[position] for position in self._kept_inputs), *self._constants.tensors(self._late_sources)]

    def _placed(self, given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Each tensor on the device of its op and laid out as captured; the caller's own where it is so already."""
        placed = {}
        with self._residents.settled():  # and so is what was done with parameters and outputs since
            for op, tensor in given.items():
                place, like = self._residents.place(int(self._plan.devices[op])), self._program.sources[op].value
                own = tensor.detach()
                if own.stride() != like.stride() or own.device != place or own.is_inference():
                    fresh = torch.empty_strided(own.shape, like.stride(), dtype=own.dtype, device=place)
                    own = fresh.copy_(own)
                placed[op] = own
        return placed

    def _shared(self, graph: OpGraph, refs: Sequence[Ref], read_late: Iterable[int]) -> list[bool]:
        """Whether what is handed out shows memory of something that stays, or that is handed out too."""
        bases = [self._program.base(ref) for ref in refs]
        times, late = Counter(bases), set(read_late)
        sources = self._program.sources
        return [times[base] > 1 or base in late or int(graph.tensor_op[base]) in sources for base in bases]

    def _apart(self, tensors: Sequence[torch.Tensor], is_shared: Sequence[bool]) -> list[torch.Tensor]:
        """What may be handed out; on GPUs, the next caller may launch on other streams than this one."""
        pairs = list(zip(tensors, is_shared, strict=True))
        with torch.no_grad(), self._residents.settled():
            apart = [tensor.clone() if shared else tensor for tensor, shared in pairs]
        for tensor, shared in pairs:
            if tensor.device.type == "cuda" and not shared:  # its memory is that of the thread that made it
                cuda.keep_for(tensor, cuda.current_stream(tensor.device))
        return apart


class _Forward(torch.autograd.Function):
    """Runs the forward, and has autograd run the backward."""

    @staticmethod
    def forward(ctx: Any, graph: ModuleGraph, tensors: Sequence[torch.Tensor], number: int, *wanted: Any) -> Any:
        outputs, ctx.kept = graph.forward(tensors, number)
        ctx.graph, ctx.number = graph, number
        ctx.read = [*graph.kept_inputs(tensors), *wanted]
        ctx.versions = _versions(ctx.read)
        ctx.mark_non_differentiable(*graph.without_gradient(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # by `create_graph`
            raise UserError(
                "the backward of a placed module has no graph of its own, so `create_graph=True` is refused: gradients "
                "of gradients (a gradient penalty, a Hessian) need the model itself. Keep the model that needs them "
                "unplaced, and place the others"
            )
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise RunnerError(
                "backward through a placed module a second time, whose tensors are freed by the first: sum the losses, "
                "and call backward once (`retain_graph` keeps nothing here)"
            )
        if _versions(ctx.read) != ctx.versions:
            raise RunnerError(
                "a parameter or an input of a placed module was modified in place between forward and backward; step "
                "the optimizer after `backward`, and clone an input before it is written to"
            )
        return None, None, None, *ctx.graph.backward(gradients, kept, ctx.number)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

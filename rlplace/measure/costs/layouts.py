"""`layouts`: how every value of a program lies in memory, found without computing any; tensors made to match."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Ref, Update, map_refs

LEAST, MOST = 0.01, 0.05
"""Between them lie the values of made tensors: probabilities, scales and variances may be so, and nothing overflows."""


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make(self, place: torch.device, generator: torch.Generator) -> torch.Tensor:
        """A tensor that lies so: small random numbers, zeros where it holds integers or booleans.

        Args:
            place: where.
            generator: of that place.
        """
        size = 0 if 0 in self.shape else 1 + sum((n - 1) * k for n, k in zip(self.shape, self.strides, strict=True))
        memory = torch.zeros(size, dtype=self.dtype, device=place)
        if self.dtype.is_complex:
            torch.view_as_real(memory).uniform_(LEAST, MOST, generator=generator)
        elif self.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            memory.uniform_(LEAST, MOST, generator=generator)
        return memory.as_strided(self.shape, self.strides)


def layouts(graph: OpGraph) -> dict[int, Layout]:
    """By `Ref.id`, the layouts of tensors and views that calls read, as PyTorch's fake tensors have them on the CPU.

    Raises:
        InvalidValue: the graph has no program.
    """
    program = require_program(graph)
    values: dict[int, Any] = {}

    def read(ref: Ref) -> Any:
        if ref.id not in values:
            view = program.views[ref.id - program.num_tensors]
            values[ref.id] = view.target(*map_refs(read, view.args), **map_refs(read, view.kwargs))
        return values[ref.id]

    with FakeTensorMode(), torch.no_grad():
        for op in range(graph.num_ops):
            if op in program.sources:
                value = program.sources[op].value
                made = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype)
                values[int(graph.output_offsets[op])] = made
                continue
            call = program.calls[op]
            if isinstance(call, Update):
                read(call.gradient)
                continue
            output = call.target(*map_refs(read, call.args), **map_refs(read, call.kwargs))
            outputs = output if call.returns_tuple else (output,)
            values.update({tensor: value for tensor, value in zip(call.outputs, outputs, strict=False) if tensor >= 0})
    return {
        each: Layout(tuple(value.shape), value.stride(), value.dtype)
        for each, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def maker(known: dict[int, Layout], place: torch.device) -> Callable[[Ref], torch.Tensor]:
    """A function of a `Ref` that gives a tensor of its layout, one and the same whenever it is asked for."""
    generator = torch.Generator(place).manual_seed(0)
    made: dict[int, torch.Tensor] = {}

    def make(ref: Ref) -> torch.Tensor:
        if ref.id not in made:
            made[ref.id] = known[ref.id].make(place, generator)
        return made[ref.id]

    return make

"""`SeededDraws`: plain PyTorch draws the random numbers that a placed step draws, so that the two can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.errors import InvalidValue
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Call
from rlplace.measure.placed.residents import seeded


def random_ops(graph: OpGraph) -> list[int]:
    """The ops that draw random numbers, as plain PyTorch comes to them: slice after slice, then what is common."""
    drawing, last = _drawing(graph), graph.num_micro_batches
    slices = graph.micro_batch.tolist()
    return sorted(drawing, key=lambda op: (slices[op] if slices[op] >= 0 else last, op))


class SeededDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, the random ops of an eager step draw from (seed, op, step), as those of the placed step do.

    The first random op that PyTorch calls is the first one of the graph, and so on. On CPUs, and between alike GPUs,
    equal seeds give equal numbers.

    Args:
        graph: the placed one, with its program.
        place: where the eager step runs.
        seed: of the placed step.
    """

    def __init__(self, graph: OpGraph, place: torch.device, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place, self._seed = place, seed
        self._targets = _drawing(graph)
        self._ops = random_ops(graph)
        self._step, self._next = 0, 0

    @contextmanager
    def of_step(self, number: int) -> Iterator[None]:
        """While active, one eager step draws as the placed one with that number does.

        Raises:
            InvalidValue: plain PyTorch calls other random ops than the graph has, or more or fewer of them.
        """
        self._step, self._next = number, 0
        with self:
            yield
        if self._next < len(self._ops):
            raise _unlike(f"{self._next} random ops in plain PyTorch", f"{len(self._ops)}, as in the graph")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if self._next >= len(self._ops):
            raise _unlike(f"more random ops in plain PyTorch ({_name(func)})", f"{len(self._ops)}, as in the graph")
        op = self._ops[self._next]
        self._next += 1
        wanted = _name(self._targets[op])
        if _name(func) != wanted:
            raise _unlike(f"{_name(func)} in plain PyTorch", f"{wanted}, as in the graph")
        return seeded(func, self._place, seed=self._seed, op=op)(self._step, *args, **kwargs)


def _drawing(graph: OpGraph) -> dict[int, Callable[..., Any]]:
    """Targets by op, of those that draw random numbers."""
    calls = require_program(graph).calls
    return {op: call.target for op, call in calls.items() if isinstance(call, Call) and call.is_random}


def _name(target: Callable[..., Any]) -> str:
    """An op without its overload, also of its in-place form."""
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet, "__name__", target)).removesuffix("_")


def _unlike(actual: str, expected: str) -> InvalidValue:
    hint = "Check it with `model.eval()`, or with p=0: what is placed, and what runs where, is the same."
    return InvalidValue("model", actual, expected, where="export check", hint=hint)

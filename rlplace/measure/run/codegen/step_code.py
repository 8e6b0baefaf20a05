"""`StepCode`: the generated code of one plan, and what its names stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlplace.measure.run.codegen.update_runs import Run


@dataclass(frozen=True)
class StepCode:
    """Generated code of one plan.

    In the code, `t5` is tensor 5, `v7` view 7, `f3` the call of op 3, `u3` the updater of the run that op 3 ends, `c2`
    constant 2, `k4` channel 4 by its methods (`k4_send`, `k4_wait`, `k4_take`, `k4_done`, `k4_copied`, and where a GPU
    copies, `k4_arrived` before the first read), `s6` signal 6 (`s6_set`, `s6_wait`), `O` the results, `a8` takes
    gradient 8 out, `S` keeps what the second part of a step in two parts needs of the first; in traced code `clock`,
    `B` and `E` record when each item began and ended, and `hold` holds a GPU back.

    Attributes:
        sources: by device: a module that defines `run(step)`, and `second(step)` for a step in two parts.
        line_items: by device: for each line of its source, the item that it belongs to, -1 for none.
        constants: values of `c...`.
        items: by device: items of the plan's sequence (op i, or N + k), in program order.
        allocations: by device: (item, tensor) where a tensor starts to take memory on the device ...
        releases: ... and the item after whose end it is freed.
        acknowledged: transfers whose original is overwritten later in the step.
        is_handover: by transfer: the tensor itself goes over, no copy.
        update_runs: by device: updates that one call does, where the last of them stands.
        num_signals: how many times a gang takes over from a member, or a member from a gang: each waits for a signal.
        num_results: entries of `O`: what the step returns, then, of a step in two parts, the gradients.
    """

    sources: tuple[str, ...]
    line_items: tuple[tuple[int, ...], ...]
    constants: dict[str, Any]
    items: tuple[tuple[int, ...], ...]
    allocations: tuple[tuple[tuple[int, int], ...], ...]
    releases: tuple[tuple[tuple[int, int], ...], ...]
    acknowledged: frozenset[int]
    is_handover: tuple[bool, ...]
    update_runs: tuple[tuple[Run, ...], ...]
    num_signals: int
    num_results: int

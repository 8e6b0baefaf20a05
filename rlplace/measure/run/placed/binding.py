"""What the names in generated code stand for: tensors, functions, updates, channels and signals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Update
from rlplace.measure.hosts.host import Host
from rlplace.measure.run.codegen.step_code import StepCode
from rlplace.measure.run.crew.channels import Channel
from rlplace.measure.run.crew.streams import torch_device
from rlplace.measure.run.placed.gradients_out import GradientsOut
from rlplace.measure.run.placed.random_ops import seeded
from rlplace.measure.run.placed.residents import Residents


def program_names(
    graph: OpGraph,
    host: Host,
    code: StepCode,
    device: int,
    residents: Residents,
    *,
    seed: int,
    gradients: GradientsOut | None,
) -> dict[str, Any]:
    """What one device's code computes with and by; residents that are not there yet are made.

    Args:
        graph: with its program.
        host: of this machine.
        code: generated for both.
        device: index of the device.
        residents: where parameters and state are kept.
        seed: of random ops.
        gradients: where gradients go that are asked for; None in a step that is never asked.
    """
    program = require_program(graph)
    place = torch_device(host.devices[device])
    names: dict[str, Any] = {
        **code.constants,
        **{f"D{d}": torch_device(described) for d, described in enumerate(host.devices)},
        **{f"g{k}": _direct(view.target) for k, view in enumerate(program.views)},
    }
    for item in code.items[device]:
        if item >= graph.num_ops:
            continue
        if item in program.sources:
            names[f"t{int(graph.output_offsets[item])}"] = residents.tensor(item, device)
            continue
        call = program.calls[item]
        if not isinstance(call, Update):
            function = seeded(call.target, place, seed=seed, op=item) if call.is_random else _direct(call.target)
            if gradients is not None and item in program.seeds:
                function = gradients.scaled(function)
            names[f"f{item}"] = function
    for run_of in code.update_runs[device]:
        update = residents.updater(run_of, device)
        if gradients is not None:
            update = gradients.instead_of(update, [program.sources[residents.updated(op)].key for op in run_of])
        names[f"u{run_of[-1]}"] = update
    if gradients is not None and program.optimizer is None:
        names.update({f"a{k}": gradients.taker([name]) for k, name in enumerate(program.gradients)})
    return names


def order_names(channels: Sequence[Channel], signals: Sequence[threading.Lock]) -> dict[str, Any]:
    """What the code of a device sends to others by, and waits for them by."""
    names: dict[str, Any] = {}
    for transfer, channel in enumerate(channels):
        for method in ("send", "take"):
            names[f"k{transfer}_{method}"] = getattr(channel, method)
        names[f"k{transfer}_wait"] = channel.wait_ready
        names[f"k{transfer}_arrived"] = channel.wait_arrived
        names[f"k{transfer}_done"] = channel.acknowledge
        names[f"k{transfer}_copied"] = channel.wait_copied
    for index, signal in enumerate(signals):
        names[f"s{index}_set"], names[f"s{index}_wait"] = signal.release, signal.acquire
    return names


def _direct(target: Callable[..., Any]) -> Callable[..., Any]:
    """The C++ entry of an ATen overload, without its Python wrapper."""
    direct: Callable[..., Any] = getattr(target, "_op", target)
    return direct

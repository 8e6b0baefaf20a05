"""What a placed module and gradients out cost on one device: python benchmarks/placed_module.py [WORKLOAD ...].

Forward, loss, backward and a fused optimizer's step, each way in turn within a round: eager PyTorch, a placed module,
and a placed step that leaves gradients. All is on one device with one thread, and eager has that thread and core too.
Figures are medians over rounds of the time over that of eager in the same round, with half their interquartile range.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from record import argument, as_markdown, parse, record

from rlplace.export import PlacedModel, to_module
from rlplace.graphs import capture
from rlplace.graphs.capturing.capture import as_call
from rlplace.measure import Host, Placement, Plan, detect_host
from rlplace.measure.timing.threads import keep_freed_memory, pin_current_thread, set_intra_op_threads
from rlplace.workloads import build, parse_workload

WORKLOADS = ("inception_v3@small", "nmt@small", "bert@small", "resnet50@small")
WARMUP = 3


def contenders(name: str, host: Host) -> dict[str, Callable[[], Any]]:
    """A whole training step each way."""
    workload = build(parse_workload(name))
    args, kwargs = as_call(workload.inputs)
    loss_fn, targets = workload.loss_fn, workload.targets
    assert loss_fn is not None
    graph = capture(workload.model, workload.inputs, loss_fn, targets=targets or None)
    nothing, on_first = np.zeros(0, dtype=np.int32), np.zeros(graph.num_ops, dtype=np.int32)
    plan = Plan(on_first, nothing, nothing, np.arange(graph.num_ops, dtype=np.int32))
    names = tuple(device.name for device in host.devices)
    module = to_module(workload.model, graph, Placement(plan, graph.fingerprint, host.fingerprint, names), host=host)
    step = PlacedModel(graph, host, plan)
    labels = {"targets": targets} if targets else {}

    def in_torch(model: torch.nn.Module) -> Callable[[], Any]:
        optimizer = torch.optim.Adam(model.parameters(), fused=True)

        def run() -> None:
            optimizer.zero_grad()
            loss_fn(model(*args, **kwargs), *targets).backward()
            optimizer.step()

        return run

    ours = torch.optim.Adam(step.parameters(), fused=True)

    def gradients_out() -> None:
        ours.zero_grad()
        step.backward(*args, **kwargs, **labels)
        ours.step()

    return {"eager": in_torch(copy.deepcopy(workload.model)), "module": in_torch(module), "gradients": gradients_out}


def raced(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray[Any, Any]]:
    """Seconds of each way in each round; the order turns."""
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARMUP + rounds):
        for position in range(len(names)):
            name = names[(number + position) % len(names)]
            begin = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: np.array(each[WARMUP:]) for name, each in seconds.items()}


def main() -> None:
    options = parse(
        __doc__,
        argument("workloads", nargs="*", default=list(WORKLOADS)),
        argument("--steps", type=int, default=30),
    )
    print("# Placed on one device\n")
    print(as_markdown(record()))
    host = detect_host("cores", 1, 1)
    keep_freed_memory()
    pin_current_thread(host.devices[0].cores)
    set_intra_op_threads(1)
    print("| workload | eager, ms | module / eager | gradients out / eager |\n|---|---|---|---|")
    for name in options.workloads:
        seconds = raced(contenders(name, host), options.steps)
        cells = [f"{np.median(seconds['eager']) * 1e3:.1f}"]
        for way in ("module", "gradients"):
            low, middle, high = np.percentile(seconds[way] / seconds["eager"], (25, 50, 75))
            cells.append(f"{middle:.3f} ± {(high - low) / 2:.3f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

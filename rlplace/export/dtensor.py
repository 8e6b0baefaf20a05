"""`DTENSOR`: the format of a script that trains with tensor parallelism of PyTorch, a process for each shard.

`module_plan` says which modules `torch.distributed.tensor.parallel.parallelize_module` splits, and how, where a split
is Megatron's (Shoeybi et al. 2019, arXiv:1909.08053): layers by columns, then by rows, with whole heads or a hidden
width between them, and the vocabulary of a softmax loss. What it cannot split stays whole, and is named.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator

import numpy as np
from torch import nn

from rlplace import __version__
from rlplace.errors import refuse_if
from rlplace.export.formats import (
    CapturedRun,
    Exported,
    ExportFormat,
    ExportRequest,
    in_docstring,
    rank_devices,
    trained_by,
)
from rlplace.export.pipeline import OPTIMIZERS
from rlplace.graphs import FORWARD, OpGraph, SplitPlan
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import OptimizerSpec, Shard
from rlplace.say import clean, say
from rlplace.session.prepare import capture_workload

WHERE = "export dtensor"
CLASSES = ("vocabulary", "attention", "mlp")
"""Classes of a split that `parallelize_module` has styles for."""
STYLES: dict[tuple[bool, type[nn.Module] | None, int], str] = {
    (False, nn.Linear, 0): "ColwiseParallel()",
    (False, nn.Linear, 1): "RowwiseParallel()",
    (True, nn.Linear, 0): "ColwiseParallel(use_local_output=False)",
    (True, nn.Embedding, 0): "RowwiseParallel(input_layouts=Replicate())",
}
"""By whether it is the vocabulary, type of module, and dimension that its parameters are split along."""

_TEMPLATE = '''"""Trains {workload} with tensor parallelism, in {num_ranks} shards (rlplace {version}).

    torchrun --nproc-per-node {num_ranks} dtensor.py --steps 10

{expected}
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: no module that lies there is imported, it may be a stranger's

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils import _pytree as pytree

from rlplace.workloads import build, parse_workload

DEVICES = {devices}  # of each rank, or ("cpu",) * {num_ranks} on any machine
PLAN = {{{styles}
}}


def parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Splits the modules of a model as PLAN says; tied parameters stay tied."""
    names: dict[nn.Parameter, list[str]] = {{}}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    parallelize_module(model, mesh, PLAN)
    for first, *others in names.values():
        for path, _, leaf in (other.rpartition(".") for other in others):
            setattr(model.get_submodule(path), leaf, model.get_parameter(first))


def whole(value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor whose shards the ranks may have."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def main(steps: int, is_checked: bool) -> None:
    """Trains for a number of steps, after a comparison of loss and gradients with those of the whole model."""
    if DEVICES[0] != "cpu" and (found := torch.accelerator.device_count()) < len(DEVICES):
        raise SystemExit(f"DEVICES names {{len(DEVICES)}} accelerators, this machine has {{found}}: change DEVICES")
    dist.init_process_group(dist.get_default_backend_for_device(DEVICES[0]))
    if dist.get_world_size() != len(DEVICES):
        raise SystemExit(f"start {{len(DEVICES)}} processes, one for each shard, not {{dist.get_world_size()}}")
    device = torch.device(DEVICES[dist.get_rank()])
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    mesh = init_device_mesh(device.type, (len(DEVICES),))
    workload = build(parse_workload("{workload}"), default_size="{size}", seed={seed})
    model, loss_fn = workload.model.to(device), workload.loss_fn
    # One batch: put your own here, the same on all ranks.
    inputs, targets = pytree.tree_map(lambda each: each.to(device), (workload.inputs, tuple(workload.targets)))
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {{}})

    def backward() -> torch.Tensor:
        with loss_parallel():  # of logits whose classes are split
            result = loss_fn(model(*args, **kwargs), *targets)
            loss = result[0] if isinstance(result, (tuple, list)) else result
            loss.backward()
        return whole(loss)

    def evaluated() -> list[torch.Tensor]:
        is_training = model.training
        model.eval()  # dropout would draw other numbers
        found = [backward(), *(whole(each.grad) for each in model.parameters() if each.grad is not None)]
        model.zero_grad()
        model.train(is_training)
        return found

    expected = evaluated() if is_checked else []
    parallel(model, mesh)
    if is_checked:
        found = zip(expected, evaluated(), strict=True)
        pairs = [(one.double().norm(), (one - other).double().norm()) for one, other in found]
        size, difference = (torch.stack(some) for some in zip(*pairs))
        most = max(difference[0] / size[0], difference[1:].norm() / size[1:].norm())
        if not most < max(torch.finfo(each.dtype).eps for each in expected) ** 0.5:
            raise SystemExit(f"loss or gradients are not those of the whole model, by {{most:.1e}}: change PLAN")
    torch.manual_seed({seed})  # ranks draw alike where they compute the same
    optimizer = torch.optim.{optimizer}(model.parameters(), {options}, foreach=False)  # some are DTensors
    for number in range(steps):
        optimizer.zero_grad()
        loss = backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(number, float(loss), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10, help="number of steps")
    parser.add_argument("--no-check", action="store_true", help="do not first compare with the whole model")
    options = parser.parse_args()
    main(options.steps, not options.no_check)
    sys.stdout.flush()
    os._exit(0)  # DTensor keeps the group's threads; one that drops its last tensor while Python ends would abort
'''


def module_plan(graph: OpGraph) -> tuple[dict[str, str], dict[str, str]]:
    """By path of a module the call that makes its style; and of the split parameters that stay whole, why.

    Parameters that are split along one dimension have styles together, or none of them has one.

    Args:
        graph: of a step in even shares, whose partial results are summed by one op, with its program.
    """
    program = require_program(graph)
    report, model = program.split, program.origin.model
    assert report is not None
    found = [source.shard for source in program.sources.values() if source.shard is not None]
    shards = {name: [shard for shard in found if shard.name == name] for name in report.parameters}
    paths = dict(model.named_modules())  # each module once, also one that several share
    tensors = {
        name: one for name, one in model.named_parameters(remove_duplicate=False) if name.rpartition(".")[0] in paths
    }
    names = {name: [other for other, one in tensors.items() if one is tensors.get(name)] for name in shards}
    mixed = _mixed(graph) - {name.rpartition(".")[0] for each in names.values() for name in each}
    styles, left = dict[str, str](), dict[str, str]()
    for group in report.together:
        parts = {name: shards[first] for first in group for name in names[first]}
        made = _styles(model, report.parameters[group[0]], parts, mixed)
        styles |= {} if isinstance(made, str) else made
        left |= dict.fromkeys(group, made) if isinstance(made, str) else {}
    return styles, left


def _styles(model: nn.Module, kind: str, parts: dict[str, list[Shard]], mixed: set[str]) -> dict[str, str] | str:
    """The styles of the modules that hold some parameters, by path, or why they have none."""
    styles, dims, is_vocabulary = dict[str, str](), set[int](), kind == "vocabulary"
    for name, shards in parts.items():
        path, dim = name.rpartition(".")[0], shards[0].dim
        module = model.get_submodule(path)
        of = next((each for each in (nn.Linear, nn.Embedding) if isinstance(module, each)), None)
        style = STYLES.get((is_vocabulary, of, dim))
        if style is None or styles.setdefault(path, style) != style or f"{path}.weight".lstrip(".") not in parts:
            return f"no style for this split of {type(module).__name__}"
        sizes = {end - start for shard in shards for start, end in shard.intervals}
        if any(len(shard.intervals) > 1 for shard in shards) or (len(sizes) > 1 and not is_vocabulary):
            return "its shards are not even, or of several pieces, as those of a fused projection"
        dims |= {dim} if of is nn.Linear else set()
    if dims != ({0} if is_vocabulary else {0, 1}):
        return "no layer by columns comes before one by rows"
    parents = [path.rpartition(".")[0].replace(".", "/") for path in styles]
    around = os.path.commonpath(parents).replace("/", ".")
    if not is_vocabulary and any(f"{path}.".startswith(f"{around}." if around else "") for path in mixed):
        return "shards between its layers read values that are not split"
    return styles


def _mixed(graph: OpGraph) -> set[str]:
    """Modules whose shards read whole values that depend on parameters: ranks have only parts of their gradients."""
    producer, reader = graph.tensor_op[graph.input_tensors].tolist(), graph.edge_op.tolist()
    depends, shard, found = (graph.gradient_bytes > 0).tolist(), graph.shard.tolist(), set[str]()
    for source, op in zip(producer, reader, strict=True):  # in topological order
        if depends[source] and graph.phases[op] == FORWARD:
            depends[op] = True
            found |= {graph.modules[op]} if shard[source] < 0 <= shard[op] else set()
    return found


def dtensor_script(request: ExportRequest) -> Exported:
    """The text of `dtensor.py` for a run; says on stderr what is split and what is left whole.

    Raises:
        UserError: the run's step cannot be captured again, does not train, or is not split as `parallelize_module` can.
    """
    run, asked, cut = CapturedRun.of(request), request.session.request, request.session.cut[1]
    graph, host, spec, split = run.graph, run.host, trained_by(run.workload, WHERE), cut.plan
    classes = tuple(name for name in split.classes if name in CLASSES) if split is not None else ()
    hint = "Train with `--split attention,mlp`. `--format torchrun` runs any split."
    refuse_if(not classes, "split", cut.split, f"some of {','.join(CLASSES)}", where=WHERE, hint=hint)
    assert split is not None
    refuse_if(len(set(split.shares)) > 1, "split_parts", cut.split_parts, "even shares, as of a DTensor", where=WHERE)
    count = graph.num_micro_batches
    refuse_if(count > 1, "micro_batches", count, "1: parallelize_module runs whole batches", where=WHERE)
    places = rank_devices(host, WHERE)
    team, moved = _team(request, run, split.num_shards, list(places), hint)
    names = [host.devices[device].name for device in team]
    styles, left = module_plan(capture_workload(run.workload, split=SplitPlan(classes, split.num_shards)))
    kinds = {} if (report := require_program(graph).split) is None else report.parameters
    left |= {name: f"no style for {kind}" for name, kind in kinds.items() if kind not in CLASSES}
    lines = list(_said(names, styles, left, moved))
    refuse_if(not styles, "split", cut.split, "of layers that have styles", where=WHERE, hint="; ".join(lines[1:]))
    command = f"torchrun --nproc-per-node {len(team)} {request.run.root / DTENSOR.file}"
    simulated = f"; {clean(asked.host)} was simulated: elsewhere, change DEVICES in it" if request.is_simulated else ""
    say("\n".join((*lines, f"run it with {command}{simulated}")))
    text = _text(request, spec, [places[device] for device in team], styles, lines)
    return Exported(text, {"ranks": names, "moved_share": moved, "plan": styles, "left": left})


def _team(
    request: ExportRequest, run: CapturedRun, num_shards: int, places: list[int], hint: str
) -> tuple[list[int], float]:
    """The devices of the ranks, and the part of the time of shards that the placement has elsewhere."""
    graph, host, devices = run.graph, run.host, request.placement.devices
    members = graph.shard >= 0
    modules, module = np.unique(graph.modules, return_inverse=True)
    spent_s = np.zeros((modules.size, host.num_devices))  # by shards
    op_time_s = request.session.costs.op_time_s[np.arange(graph.num_ops), devices]
    np.add.at(spent_s, (module[members], devices[members]), op_time_s[members] + 1e-15)
    most = sorted(places, key=lambda device: -spent_s[:, device].sum())  # the ranks: neighbours of the busiest
    machines = {device: host.devices[device].name.rpartition("/")[0] for device in most}
    team = sorted([device for device in most if machines[device] == machines[most[0]]][:num_shards])
    names = ", ".join(host.devices[device].name for device in team)
    expected = f"{num_shards} devices of one machine that each have a process"
    refuse_if(len(team) < num_shards, "devices", names, expected, where=WHERE, hint=hint)
    even_s = spent_s.sum(axis=1, keepdims=True) / num_shards  # of each module on each rank: shards are alike
    return team, 1.0 - float(np.minimum(spent_s[:, team], even_s).sum() / spent_s.sum())


def _said(names: list[str], styles: dict[str, str], left: dict[str, str], moved: float) -> Iterator[str]:
    """Lines for people: what is split over which devices, what stays whole, and how the placement differs."""
    yield f"{len(styles)} modules are split over {', '.join(names)}"
    for why in dict.fromkeys(left.values()):
        of = [name for name, each in left.items() if each == why]
        yield f"left whole: {', '.join(of[:4])}{', ...' if len(of) > 4 else ''} ({why})"
    if moved > 1e-9:
        yield f"{moved:.1%} of the time of shards is elsewhere in the placement: the plan is even in each layer"


def _text(
    request: ExportRequest, spec: OptimizerSpec, places: list[str], styles: dict[str, str], lines: list[str]
) -> str:
    """The script, for an optimizer, PyTorch's names of the ranks' devices, a plan, and what is said of it."""
    asked = request.session.request
    optimizer, options = OPTIMIZERS[spec.name]
    return _TEMPLATE.format(
        workload=request.spec,
        num_ranks=len(places),
        version=__version__,
        expected=in_docstring("\n".join(lines)),
        devices=tuple(places),
        styles="".join(f"\n    {path!r}: {style}," for path, style in styles.items()),
        size=asked.default_size,
        seed=asked.workload_seed,
        optimizer=optimizer,
        options=", ".join(f"{name}={getattr(spec, name)}" for name in options),
    )


DTENSOR = ExportFormat("dtensor.py", "a plan of torch.distributed.tensor.parallel, for torchrun", dtensor_script)

"""`TORCHRUN`: the format of a script that trains as placed under torchrun, a process for each device, on any machines.

In each process `to_rank` makes the part of one device; the loop is the user's own, and all ranks run it.
"""

from __future__ import annotations

from collections import Counter

from rlplace import __version__
from rlplace.errors import InvalidValue
from rlplace.export.formats import ExportFormat, ExportRequest, in_docstring, rank_devices, trained_by
from rlplace.say import clean, say
from rlplace.workloads import build_for

WHERE = "torchrun"

_TEMPLATE = '''"""Trains {workload} as placement.json beside this file says, a process a device (rlplace {version}).

    torchrun --nproc-per-node {num_ranks} torchrun.py --steps 10 --checkpoints saved

On several machines, start it on each with torchrun's options for nodes; all of them read and write one folder
of checkpoints. The ranks are, in order: {names}.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: no module that lies there is imported, it may be a stranger's

import argparse
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import rlplace
from rlplace.measure.hosts.nodes import join
from rlplace.workloads import build, parse_workload


def main(steps: int, clip: float | None, folder: Path | None, every: int) -> None:
    """Trains up to a number of steps, from the last checkpoint in the folder, if it has one."""
    workload = build(parse_workload("{workload}"), default_size="{size}", seed={seed})
    model, inputs, targets = workload.model, workload.inputs, workload.targets
    placement = rlplace.load_placement(Path(__file__).with_name("placement.json"))
    graph = rlplace.capture(model, inputs, workload.loss_fn, workload.optimizer, targets=targets{cut})
    step = rlplace.export.to_rank(model, graph, placement)
    nodes = join()  # of checkpoints, by addresses that are signed; steps have connections of their own
    dist.init_process_group("gloo", store=nodes.store, rank=nodes.rank, world_size=nodes.num_ranks)

    # Complete checkpoints, by number of steps. To load one runs the code that is in it: use only your own.
    complete = [] if folder is None else [path.parent for path in folder.glob("[0-9]*/.metadata")]
    if complete:
        state = step.checkpoint()
        dcp.load(state, checkpoint_id=max(complete, key=lambda path: int(path.name)))
        step.restore(state)

    # One batch: put your own of these shapes here, the same on all ranks. Of each tensor, inputs before targets, a rank
    # reads only the parts `tensor[part] for part in step.reads[k]`: it need not load the others.
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {{}})
    labels = {{"targets": graph.program.origin.as_given(targets)}} if targets else {{}}
    while step.num_steps < steps:
        if clip is None:  # updates run within the step, as placed
            loss = step(*args, **kwargs, **labels)
        else:
            step.zero_grad()
            loss = step.backward(*args, **kwargs, **labels)
            step.clip_grad_norm_(clip)  # of the gradients of all ranks together
            step.optimizer.step()  # of the parameters that this rank holds
        if step.rank == 0:
            print(step.num_steps - 1, float(loss), flush=True)
        if folder is not None and (step.num_steps % every == 0 or step.num_steps == steps):
            dcp.save(step.checkpoint(), checkpoint_id=folder / str(step.num_steps))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10, help="number of steps, with those of a checkpoint")
    parser.add_argument("--clip", type=float, help="the norm that all gradients together have at most")
    parser.add_argument("--checkpoints", type=Path, help="a folder for checkpoints, which all ranks can reach")
    parser.add_argument("--every", type=int, default=1000, help="steps between two checkpoints")
    options = parser.parse_args()
    main(options.steps, options.clip, options.checkpoints, options.every)
'''


def torchrun_script(request: ExportRequest) -> str:
    """The text of `torchrun.py` for a run.

    Raises:
        UserError: the run lacks a file or is malformed, its workload cannot be built, or is no training step with an
            optimizer; or a device that the placement uses cannot be a process.
    """
    session, placement, host = request.session, request.placement, request.session.host
    asked = session.request
    trained_by(build_for(request.spec, host, asked.workload_seed), WHERE)
    ranks = list(rank_devices(host, WHERE))
    used = sorted({*placement.devices.tolist(), *placement.plan.transfer_destination.tolist()})
    if ranks != list(range(len(ranks))) or not set(used) <= set(ranks):
        raise InvalidValue(
            "devices",
            ", ".join(host.devices[index].name for index in used),
            "whole GPUs, or cores: each is a process",
            where=WHERE,
            hint="Gangs of cores, parts of a GPU and a CPU beside GPUs need one process. Train with `--host procs`, "
            "`cuda-procs` or `nodes`.",
        )
    count, cut = session.cut
    dims = "workload.batch_dims" if cut.batch_dims is None else repr(cut.batch_dims)
    options = [f"micro_batches={count}, batch_dims={dims}, loss={cut.loss!r}"] * (count > 1)
    options += ["split=placement.split"] * (cut.plan is not None)
    text = _TEMPLATE.format(
        workload=request.spec,
        version=__version__,
        num_ranks=len(ranks),
        names=in_docstring(", ".join(host.devices[index].name for index in ranks)),
        size=asked.default_size,
        seed=asked.workload_seed,
        cut="".join(f",\n        {each}" for each in options) + ",\n    " * bool(options),
    )
    machines = Counter(host.devices[index].machine for index in ranks)
    where = (
        ""
        if len(machines) == 1
        else f"--nnodes {len(machines)} --node-rank N --master-addr ADDRESS --master-port 29400"
    )
    counts = set(machines.values())
    number = str(*counts) if len(counts) == 1 else "COUNT"
    command = f"torchrun {where}{' ' * bool(where)}--nproc-per-node {number} {request.run.root / TORCHRUN.file}"
    if len(machines) > 1:
        command += f" on each of {', '.join(machines)}, N from 0 on"
        command += f", COUNT {', '.join(map(str, machines.values()))}" if len(counts) > 1 else ""
    simulated = f"; {clean(asked.host)} was simulated: it runs on such a host only" if request.is_simulated else ""
    say(f"run it with {command}{simulated}")
    return text


TORCHRUN = ExportFormat("torchrun.py", "a program that trains as placed under torchrun", torchrun_script)

"""`pipeline`: a run's workload as a script of `torch.distributed.pipelining`, a process for each stage."""

from __future__ import annotations

import inspect
from typing import Any

from rlplace import __version__
from rlplace.export.captured import CapturedRun
from rlplace.export.pipeline.plan import PipelinePlan, plan_pipeline
from rlplace.export.pipeline.stages import WholeStep, hand_on, is_graph, name_in_model, open_regions, split_step, tie
from rlplace.export.registry import Exported, ExportFormat, ExportRequest
from rlplace.graphs.optimizers import resolve_optimizer
from rlplace.graphs.program import OptimizerSpec
from rlplace.say import say

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
"""Classes of `torch.distributed.pipelining` by the order of micro-batches."""

PARTS = (WholeStep, split_step, tie, hand_on, open_regions, is_graph, name_in_model)
"""What is part of the text."""

_TEMPLATE = '''"""Trains {workload} in {num_stages} stages, {num_micro_batches} micro-batches (rlplace {version}).

    torchrun --standalone --nproc-per-node {num_stages} pipeline.py --steps 10 --save trained

{expected}
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: no module that lies there is imported, it may be a stranger's

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import fx, nn
from torch.distributed.pipelining import Pipe, {schedule}, pipe_split, pipeline
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from rlplace.workloads import build, parse_workload

BEGINS = {begins}  # the module that each stage but the first begins with
DEVICES = {devices}  # of each stage
CORES = {cores}  # of the CPU, that the process of each stage is kept on; empty for any
MICRO_BATCHES = {num_micro_batches}
DIMS = {dims}  # the dimension of the batch of each input, then each target; None where micro-batches share it


{stages}

def main(steps: int, save: Path | None) -> None:
    """Trains for a number of steps; every stage then writes the parameters that it trained."""
    dist.init_process_group(dist.get_default_backend_for_device(DEVICES[0]))
    rank = dist.get_rank()
    if dist.get_world_size() != len(DEVICES):
        raise SystemExit(f"start {{len(DEVICES)}} processes, one for each stage, not {{dist.get_world_size()}}")
    device = torch.device(DEVICES[rank])
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if CORES[rank]:
        os.sched_setaffinity(0, CORES[rank])
        torch.set_num_threads(len(CORES[rank]))

    workload = build(parse_workload("{workload}"), default_size="{size}", seed={seed})
    # One batch of {batch} samples, inputs before targets: put your own batches of that shape here.
    inputs = workload.inputs.values() if isinstance(workload.inputs, dict) else workload.inputs
    batch = [*inputs, *workload.targets]
    sizes = [None if dim is None else tensor.shape[dim] // MICRO_BATCHES for tensor, dim in zip(batch, DIMS)]
    first = [tensor if dim is None else tensor.narrow(dim, 0, size) for tensor, dim, size in zip(batch, DIMS, sizes)]

    names = tuple(workload.inputs) if isinstance(workload.inputs, dict) else None
    whole = WholeStep(workload.model, workload.loss_fn, names, len(workload.targets))
    pipe, copies = split_step(whole, first, BEGINS)
    stage = pipe.build_stage(rank, device)
    optimizer = torch.optim.{optimizer}(stage.submod.parameters(), {options})
    shared = [(by_rank, dist.new_group(sorted(by_rank))) for by_rank in copies]
    schedule = {schedule}(
        stage,
        MICRO_BATCHES,
        loss_fn=lambda output, _: (output[0] if isinstance(output, (tuple, list)) else output).sum(),
        args_chunk_spec=tuple(_Replicate() if dim is None else TensorChunkSpec(dim) for dim in DIMS),
        scale_grads={averages},
    )

    first_stage, last_stage = rank == 0, rank == len(DEVICES) - 1
    for number in range(steps):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(
            *([tensor.to(device) for tensor in batch] if first_stage else ()),
            target=torch.zeros(MICRO_BATCHES, device=device) if last_stage else None,  # the loss has its targets
            losses=losses,
            return_outputs=False,
        )
        for by_rank, group in shared:  # copies of one parameter are updated alike
            if rank in by_rank:
                copy = stage.submod.get_parameter(by_rank[rank])
                copy.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
                dist.all_reduce(copy.grad, group=group)
        optimizer.step()
        if last_stage:
            print(number, float(torch.stack(losses).detach().{reduce}()), flush=True)
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        named = ((name, p) for name, p in stage.submod.named_parameters() if p.grad is not None)  # else not its own
        save_file({{name_in_model(name): p.detach().cpu() for name, p in named}}, save / f"stage{{rank}}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", type=Path, help="a folder for the parameters, a file for each stage")
    options = parser.parse_args()
    main(options.steps, options.save)
'''


def pipeline_script(request: ExportRequest) -> Exported:
    """The text of `pipeline.py` for a run, with what is expected of it.

    Raises:
        UserError: the run lacks a file or is malformed, its workload cannot be built, or it makes no pipeline.
    """
    run = CapturedRun.of(request)
    plan = plan_pipeline(run)
    constraints = request.train.get("constraints")
    if isinstance(constraints, dict) and any(constraints.values()):
        say("the run's pins, exclusions and what is together are not followed by stages")
    for line in said(plan):
        say(line)
    command = f"torchrun --standalone --nproc-per-node {len(plan.stages)}"
    say(f"run it with {command} {request.run.root / PIPELINE.file}")
    return Exported(text_of(run, plan), figures(plan))


def text_of(run: CapturedRun, plan: PipelinePlan) -> str:
    """The script that runs a plan.

    Args:
        run: whose workload it is of.
        plan: of its pipeline.
    """
    spec = resolve_optimizer(run.workload.optimizer)
    assert spec is not None  # a plan is of a step with one
    optimizer, options = _optimizer(spec)
    return _TEMPLATE.format(
        workload=run.request.spec,
        version=__version__,
        num_stages=len(plan.stages),
        num_micro_batches=plan.num_micro_batches,
        expected="\n".join(map(_in_docstring, said(plan))),
        schedule=SCHEDULES[plan.schedule],
        begins=tuple(stage.begin for stage in plan.stages[1:]),
        devices=tuple(stage.place for stage in plan.stages),
        cores=tuple(stage.device.cores if stage.device.backend == "cpu" else () for stage in plan.stages),
        dims=plan.dims,
        stages="\n\n".join(inspect.getsource(each) for each in PARTS),
        size=run.request.default_size,
        seed=run.request.workload_seed,
        batch=plan.batch,
        optimizer=optimizer,
        options=options,
        averages=not plan.sums_losses,
        reduce="sum" if plan.sums_losses else "mean",
    )


def said(plan: PipelinePlan) -> list[str]:
    """What people are told of a plan, a line each."""
    begins = ", ".join(stage.begin.removeprefix("model.") for stage in plan.stages[1:])
    work = ", ".join(f"{stage.device.name} {stage.work_s * 1e3:.4g} ms" for stage in plan.stages)
    lines = [
        f"{len(plan.stages)} stages, cut before {begins}; work of each ({plan.source}): {work}",
        f"{plan.num_micro_batches} micro-batches, {SCHEDULES[plan.schedule]}: {plan.step_s * 1e3:.4g} ms a step by the "
        f"simulator, {plan.ratio:.3g} of the run's placement of ops ({plan.placement_s * 1e3:.4g} ms)",
    ]
    if not plan.is_loss_checked:
        lines.append(f"warning: the loss of micro-batches was not checked ({plan.why_loss})")
    elif "accumulation" in plan.why_loss:
        lines.append(f"warning: another step than that of the whole batch: {plan.why_loss}")
    if plan.shared:
        lines.append(f"several stages hold a copy of {', '.join(plan.shared)}; their gradients are added each step")
    return lines


def _in_docstring(line: str) -> str:
    """A line as it may stand in a docstring: names of a stranger's devices must not end it."""
    return line.replace("\\", "/").replace('"', "'")


def figures(plan: PipelinePlan) -> dict[str, Any]:
    """What `--json` says of a plan."""
    return {
        "schedule": plan.schedule,
        "num_micro_batches": plan.num_micro_batches,
        "stages": [
            {"begin": stage.begin.removeprefix("model."), "device": stage.device.name, "work_s": stage.work_s}
            for stage in plan.stages
        ],
        "shared_parameters": list(plan.shared),
        "loss": {"is_checked": plan.is_loss_checked, "why": plan.why_loss},
        "costs": plan.source,
        "step_s": plan.step_s,
        "placement_step_s": plan.placement_s,
        "ratio": plan.ratio,
    }


def _optimizer(spec: OptimizerSpec) -> tuple[str, str]:
    """The class of `torch.optim` and the words of its options."""
    if spec.name in ("adam", "adamw"):
        options = f"lr={spec.lr}, betas={spec.betas}, eps={spec.eps}, weight_decay={spec.weight_decay}"
        return {"adam": "Adam", "adamw": "AdamW"}[spec.name], options
    return "SGD", f"lr={spec.lr}, momentum={spec.momentum}, weight_decay={spec.weight_decay}"


PIPELINE = ExportFormat("pipeline.py", "a pipeline of torch.distributed.pipelining, for torchrun", pipeline_script)

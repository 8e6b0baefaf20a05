"""The small set of runs that every mutant must fail one of."""

from __future__ import annotations

import functools

from fake_gpus.fake_ranks import processes
from fake_gpus.gpu_plans import gpu_host, host_of_machines, input_elsewhere, late_copy, setting_of, split_layers
from fake_gpus.late_queues import POLICIES, Policy
from fake_gpus.mutants import Mutant, alive
from fake_gpus.plan_runs import Body, judged, trained
from fake_gpus.scenarios import (
    clock_alone,
    failed_and_run_again,
    gang,
    gradients_out,
    inference,
    module,
    module_of_several_callers,
    parameters_read,
    placed_model,
)
from rlplace.measure.execute import distributed


@functools.cache
def runs() -> dict[str, Body]:
    """By name; those that catch most come first."""
    parts = setting_of("batch_norm_train", "adam", gpu_host(("cuda:0/0", "cuda:0/1", "cuda:1", "cuda:2", "cpu")), 1)
    pair = setting_of("tied", "momentum", gpu_host(("cuda:0", "cuda:1")), 0)
    plain = setting_of("linear", "sgd", gpu_host(("cuda:0", "cuda:1")), 0)
    three = setting_of("batch_norm_train", "adam", gpu_host(("cuda:0", "cuda:1", "cuda:2")), 0)
    constants = setting_of("constants", "sgd", gpu_host(("cuda:0", "cuda:1")), 0)
    return {
        "parts of GPUs and the CPU": trained(parts),
        "two GPUs": trained(pair),
        "late copy": trained(late_copy()),
        "traced": trained(parts, is_traced=True),
        "model, called": placed_model(input_elsewhere(), ()),
        "model, state_dict": placed_model(input_elsewhere(), ("state_dict",)),
        "model, copy_to": placed_model(input_elsewhere(), ("copy_to",)),
        "model, constants": placed_model(constants, ("constants",)),
        "model, shards": parameters_read(split_layers()),
        "model, gradients out": gradients_out(plain),
        "inference": inference,
        "module": module,
        "module of several callers": module_of_several_callers,
        "clock": clock_alone,
        "failure": failed_and_run_again(pair, 6),
        "gang": gang(late_copy()),
        "processes": processes(three),
        "processes, late copy": processes(late_copy()),
        "processes, traced": processes(three, is_traced=True),
        "processes, relays": processes(setting_of("batch_norm_train", "adam", host_of_machines(3), 0)),
    }


def catches(mutant: Mutant, *, policies: tuple[Policy, ...] = POLICIES, is_first: bool = False) -> list[str]:
    """Which runs fail with the mutant, and by what: `order`, `values`, `error`.

    Args:
        mutant: what is wrong.
        policies: of late execution.
        is_first: the first that fails is enough.
    """
    found: list[str] = []
    is_of_processes = mutant.module is distributed or "_made()" in mutant.text
    with alive(mutant):
        for name, body in runs().items():
            if is_of_processes and not name.startswith("processes"):
                continue
            for policy in policies:
                verdict = judged(body, policy, 1)
                if verdict.caught_by:
                    found.append(f"{name}, {policy}: {verdict.caught_by}")
                    if is_first:
                        return found
    return found

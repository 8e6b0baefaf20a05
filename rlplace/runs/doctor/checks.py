"""All checks, in the order in which they are shown."""

from __future__ import annotations

from rlplace.runs.doctor.check import Check
from rlplace.runs.doctor.folders import check_disk, check_numba
from rlplace.runs.doctor.gpus import check_gpus
from rlplace.runs.doctor.processor import (
    check_cores,
    check_hyper_threads,
    check_load,
    check_malloc,
    check_memory,
    check_threads,
    check_wait_policy,
)
from rlplace.runs.doctor.software import check_extras, check_packages, check_python, check_rlplace, check_torch
from rlplace.runs.doctor.timing import check_clock, check_timing
from rlplace.runs.doctor.wandb_login import check_wandb

CHECKS: tuple[Check, ...] = (
    Check("python", check_python),
    Check("rlplace", check_rlplace),
    Check("packages", check_packages),
    Check("torch", check_torch),
    Check("cuda", check_gpus, needs="torch"),
    Check("cores", check_cores),
    Check("hyper-threads", check_hyper_threads, needs="torch"),
    Check("load", check_load),
    Check("memory", check_memory),
    Check("threads", check_threads, needs="torch"),
    Check("wait policy", check_wait_policy),
    Check("malloc", check_malloc),
    Check("numba", check_numba),
    Check("disk", check_disk),
    Check("clock", check_clock),
    Check("timing", check_timing, needs="torch"),
    Check("wandb", check_wandb),
    Check("extras", check_extras),
)

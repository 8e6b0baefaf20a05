"""Checks of GPUs: whether PyTorch can use them, what they are, and whether they can read each other's memory."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from rlplace.report.format import format_bytes
from rlplace.runs.doctor.check import Finding
from rlplace.runs.doctor.software import torch_build
from rlplace.runs.doctor.system import System

GET_TORCH = "install the PyTorch build for your GPUs: https://pytorch.org/get-started/locally"
MOST_PAIRS = 4
"""How many pairs are named."""


def check_gpus(system: System) -> Iterator[Finding]:
    """Whether there are GPUs that PyTorch can use; then one finding a GPU, and one of their pairs."""
    torch, driver = system.import_torch(), driver_version(system)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield _without_gpus(torch, driver, [str(warning.message) for warning in caught], system)
        return
    gpus = "1 GPU" if count == 1 else f"{count} GPUs"
    yield Finding("cuda", "ok", f"{gpus}, {torch_build(torch)}, {f'driver {driver}' if driver else 'driver unknown'}")
    for index in range(count):
        yield _look_at_gpu(torch, index)
    if count > 1:
        yield _look_at_pairs(torch, count)


def driver_version(system: System) -> str:
    """Version of NVIDIA's kernel driver; empty where there is none or it cannot be told."""
    match = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", system.read("proc/driver/nvidia/version"))
    return match[1] if match else ""


def _without_gpus(torch: Any, driver: str, said: list[str], system: System) -> Finding:
    if not driver and not said:
        return Finding("cuda", "ok", f"no GPU ({torch_build(torch)}): the CPU's cores serve as devices")
    found = f"driver {driver or 'unknown'}, but PyTorch ({torch_build(torch)}) sees no GPU"
    visible = system.environ.get("CUDA_VISIBLE_DEVICES")
    if said:
        found += f": {' '.join(said[0].split())}"
    if not torch.version.cuda:
        remedy = GET_TORCH
    elif visible is not None:
        remedy = f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, unless you mean to hide them"
    else:
        remedy = f"update the driver to one for CUDA {torch.version.cuda}, or {GET_TORCH}"
    return Finding("cuda", "warn", found, remedy)


def _look_at_gpu(torch: Any, index: int) -> Finding:
    facts = torch.cuda.get_device_properties(index)
    found = f"{facts.name}, {format_bytes(facts.total_memory)}, compute capability {facts.major}.{facts.minor}"
    architectures = torch.cuda.get_arch_list()
    if torch.version.cuda and not any(runs_on(each, facts.major, facts.minor) for each in architectures):
        found += f"; this PyTorch has kernels for {', '.join(architectures)} only"
        return Finding(f"cuda:{index}", "fail", found, GET_TORCH)
    return Finding(f"cuda:{index}", "ok", found)


def runs_on(architecture: str, major: int, minor: int) -> bool:
    """Whether kernels for `architecture` run on a GPU of that compute capability.

    Machine code (`sm_86`) runs on the same major version from its minor version on, PTX (`compute_80`) on everything
    newer (CUDA C++ Programming Guide, "Application Compatibility"); what ends with a letter, on its own version alone.

    >>> [runs_on(each, 8, 9) for each in ("sm_86", "sm_90", "compute_80", "sm_90a")]
    [True, False, True, False]
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if match is None:
        return False
    kind, letter, built_for = match[1], match[4], (int(match[2]), int(match[3]))
    if letter:
        return built_for == (major, minor)
    return built_for <= (major, minor) and (kind == "compute" or built_for[0] == major)


def _look_at_pairs(torch: Any, count: int) -> Finding:
    pairs = list(permutations(range(count), 2))
    apart = [(one, other) for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
    if not apart:
        return Finding("peer access", "ok", f"between all of {count} GPUs")
    names = ", ".join(f"cuda:{one} to cuda:{other}" for one, other in apart[:MOST_PAIRS])
    more = f" and {len(apart) - MOST_PAIRS} more" if len(apart) > MOST_PAIRS else ""
    found = f"not for {len(apart)} of {len(pairs)} routes ({names}{more}): their copies go through host memory"
    return Finding("peer access", "warn", found, "see `nvidia-smi topo -p2p r`; IOMMU and ACS settings can turn it off")

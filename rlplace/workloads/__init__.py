"""Workloads: the built-in models, users' functions, and the words that name them. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.workloads.config import CONFIGS, SIZES, InceptionV3Config, NMTConfig, Size, WorkloadConfig
from rlplace.workloads.registry import OPTIMIZERS, Optimizer, Workload, WorkloadSpec, build, parse_workload

if TYPE_CHECKING:
    from rlplace.workloads.inception_v3 import InceptionV3, InceptionV3Output
    from rlplace.workloads.nmt import NMT, NMTOutput

__all__ = [
    "CONFIGS",
    "NMT",
    "OPTIMIZERS",
    "SIZES",
    "InceptionV3",
    "InceptionV3Config",
    "InceptionV3Output",
    "NMTConfig",
    "NMTOutput",
    "Optimizer",
    "Size",
    "Workload",
    "WorkloadConfig",
    "WorkloadSpec",
    "build",
    "parse_workload",
]

_NEED_TORCH = {
    "InceptionV3": "rlplace.workloads.inception_v3",
    "InceptionV3Output": "rlplace.workloads.inception_v3",
    "NMT": "rlplace.workloads.nmt",
    "NMTOutput": "rlplace.workloads.nmt",
}


def __getattr__(name: str) -> object:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_NEED_TORCH[name]), name)

"""Workloads: the named models, users' functions, and the words that name them. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.lazy_imports import lazy
from rlplace.workloads.build import (
    WeightedPart,
    WorkloadSpec,
    build,
    build_for,
    default_size,
    parse_kept_workload,
    parse_workload,
    without_memory,
)
from rlplace.workloads.catalog import (
    CATALOG,
    OPTIMIZERS,
    Family,
    Optimizer,
    Parts,
    Workload,
    describe_workloads,
    register_workload,
)
from rlplace.workloads.configs import SIZES, InceptionV3Config, NMTConfig, Size, WorkloadConfig

if TYPE_CHECKING:
    from rlplace.workloads.networks.inception_v3 import InceptionV3, InceptionV3Output
    from rlplace.workloads.networks.nmt import NMT, NMTOutput

__all__ = [
    "CATALOG",
    "NMT",
    "OPTIMIZERS",
    "SIZES",
    "Family",
    "InceptionV3",
    "InceptionV3Config",
    "InceptionV3Output",
    "NMTConfig",
    "NMTOutput",
    "Optimizer",
    "Parts",
    "Size",
    "WeightedPart",
    "Workload",
    "WorkloadConfig",
    "WorkloadSpec",
    "build",
    "build_for",
    "default_size",
    "describe_workloads",
    "parse_kept_workload",
    "parse_workload",
    "register_workload",
    "without_memory",
]

__getattr__ = lazy(__name__, __file__)

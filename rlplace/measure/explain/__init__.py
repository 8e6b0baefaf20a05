"""What a placed step is made of: shares of devices, the critical path, the costliest cut edges, and what to do next."""

from rlplace.measure.explain.explain import explain
from rlplace.measure.explain.explanation import (
    Advice,
    Alternative,
    CriticalPath,
    CutEdge,
    DeviceShare,
    Explanation,
    MemoryCurve,
    ModuleShare,
    PathPart,
    RouteShare,
    load_explanation,
    save_explanation,
)

__all__ = [
    "Advice",
    "Alternative",
    "CriticalPath",
    "CutEdge",
    "DeviceShare",
    "Explanation",
    "MemoryCurve",
    "ModuleShare",
    "PathPart",
    "RouteShare",
    "explain",
    "load_explanation",
    "save_explanation",
]

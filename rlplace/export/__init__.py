"""Export: a placement as a model that runs."""

from rlplace.export.check import CheckResult, check_export
from rlplace.export.module import PlacedModule, to_module
from rlplace.export.place import place
from rlplace.export.placed_model import PlacedModel
from rlplace.export.registry import FORMATS, Exported, ExportFormat, ExportRequest
from rlplace.export.script import script
from rlplace.export.step import matching_host, to_step

__all__ = [
    "FORMATS",
    "CheckResult",
    "ExportFormat",
    "ExportRequest",
    "Exported",
    "PlacedModel",
    "PlacedModule",
    "check_export",
    "matching_host",
    "place",
    "script",
    "to_module",
    "to_step",
]

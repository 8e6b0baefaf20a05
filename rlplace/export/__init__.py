"""Export: a placement as a model that runs."""

from rlplace.export.check import CheckResult, check_export
from rlplace.export.place import place
from rlplace.export.registry import FORMATS, ExportFormat, ExportRequest
from rlplace.export.script import script
from rlplace.export.step import PlacedModel, matching_host, to_step

__all__ = [
    "FORMATS",
    "CheckResult",
    "ExportFormat",
    "ExportRequest",
    "PlacedModel",
    "check_export",
    "matching_host",
    "place",
    "script",
    "to_step",
]

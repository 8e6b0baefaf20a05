"""Export: a placement as a model that runs, and a run as a file of some format.

`place`, `to_step` and `to_module` make what runs (`placed`), and `check_export` holds it against plain PyTorch. Each
format of `FORMATS` is a file (`script`, `table`, `torchrec`) or a folder (`device_map`, `pipeline`) here, and `session`
is the command that writes it.
"""

from rlplace.export.check import CheckResult, check_export
from rlplace.export.module import to_module
from rlplace.export.place import place
from rlplace.export.placed.placed_model import PlacedModel
from rlplace.export.placed.placed_module import PlacedModule
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

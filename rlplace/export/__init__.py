"""Export: a placement as a model that runs, and a run as a file of some format.

`place`, `to_step`, `to_module` and `to_rank` make a step or a module that runs (`placed`), and `check_export` compares
it with plain PyTorch. `FORMATS` in `formats` is the table of file formats: a new one is a row there. `device_map`,
`pipeline` and `torchrun` write long ones.
"""

from rlplace.export.formats import (
    FORMATS,
    CapturedRun,
    CheckResult,
    Exported,
    ExportFormat,
    ExportRequest,
    check_export,
)
from rlplace.export.place_model import place
from rlplace.export.placed.graphs import matching_host
from rlplace.export.placed.placed_model import PlacedModel, to_step
from rlplace.export.placed.placed_module import PlacedModule, to_module
from rlplace.export.placed.rank_model import RankModel, to_rank
from rlplace.session.step_script import script

__all__ = [
    "FORMATS",
    "CapturedRun",
    "CheckResult",
    "ExportFormat",
    "ExportRequest",
    "Exported",
    "PlacedModel",
    "PlacedModule",
    "RankModel",
    "check_export",
    "matching_host",
    "place",
    "script",
    "to_module",
    "to_rank",
    "to_step",
]

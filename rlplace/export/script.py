"""`script`: a run's placement as a short program that trains with it."""

from __future__ import annotations

from rlplace import __version__
from rlplace.export.registry import ExportFormat, ExportRequest

_TEMPLATE = '''"""Trains {workload} as placed in placement.json beside this file (rlplace {version})."""

from pathlib import Path

import rlplace
{imports}

{build}
graph = rlplace.capture(model, inputs, loss_fn, optimizer, targets=targets)
placement = rlplace.load_placement(Path(__file__).with_name("placement.json"))
step = rlplace.export.to_step(model, graph, placement)

args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {{}})
labels = {{"targets": targets}} if targets else {{}}
for number in range(10):
    print(number, step(*args, **kwargs, **labels))
step.copy_to(model)  # the trained parameters, back in the model
step.close()
'''

_NAMED = """workload = build(parse_workload("{workload}"), default_size="{size}", seed={seed})
model, inputs = workload.model, workload.inputs
loss_fn, optimizer, targets = workload.loss_fn, workload.optimizer, workload.targets"""


def script(workload: str, *, default_size: str, seed: int) -> str:
    """The text of `step.py` for a run of `workload`.

    Args:
        workload: as the user named it.
        default_size: `small` or `paper`, where the name gives no size.
        seed: of the workload's weights and inputs.
    """
    return _TEMPLATE.format(
        workload=workload,
        version=__version__,
        imports="from rlplace.workloads import build, parse_workload",
        build=_NAMED.format(workload=workload, size=default_size, seed=seed),
    )


def _of_run(request: ExportRequest) -> str:
    size, seed = request.config["default_size"], request.config["train"]["seed"]
    return script(str(request.spec), default_size=size, seed=seed)


SCRIPT = ExportFormat("step.py", "a short program that trains as placed", _of_run)

"""`script`: a run's placement as a short program that trains with it."""

from __future__ import annotations

from rlplace import __version__
from rlplace.records import shortened
from rlplace.say import clean
from rlplace.session.setup import NO_SPLIT, WHOLE, CutOptions

_TEMPLATE = '''"""Trains {workload} as placed in placement.json beside this file (rlplace {version})."""
import sys
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: no module that lies there is imported, it may be a stranger's
from pathlib import Path
import rlplace
from rlplace.errors import FingerprintMismatch
from rlplace.export import matching_host
from rlplace.workloads import build, parse_workload

placement = rlplace.load_placement(Path(__file__).with_name("placement.json"))
try:
    host = matching_host(placement)
except FingerprintMismatch:
    sys.exit({elsewhere!r})

workload = build(parse_workload("{workload}"), default_size="{size}", seed={seed})
model, inputs = workload.model, workload.inputs
loss_fn, optimizer, targets = workload.loss_fn, workload.optimizer, workload.targets
graph = rlplace.capture(model, inputs, loss_fn, optimizer, targets=targets{cut})
step = rlplace.export.to_step(model, graph, placement, host=host)

args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {{}})
labels = {{"targets": graph.program.origin.as_given(targets)}} if targets else {{}}
for number in range(10):
    print(number, step(*args, **kwargs, **labels))
step.copy_to(model)  # the trained parameters, back in the model
step.close()
'''


def script(
    workload: str,
    *,
    default_size: str,
    seed: int,
    cut: tuple[int, CutOptions] = (1, WHOLE),
    host: str = "another host",
    is_simulated: bool = False,
) -> str:
    """The text of `step.py` for a run of `workload`.

    Args:
        workload: as the user named it.
        default_size: `small` or `paper`, where the name gives no size.
        seed: of the workload's weights and inputs.
        cut: the number of micro-batches, how they are cut, and which ops are split.
        host: that the placement was found on, for people.
        is_simulated: whether it was simulated; then the program names an alternative.
    """
    count, asked = cut
    dims = "workload.batch_dims" if asked.batch_dims is None else repr(asked.batch_dims)
    words = f",\n    micro_batches={count}, batch_dims={dims}, loss={asked.loss!r},\n" if count > 1 else ""
    if asked.split != NO_SPLIT:
        words = f"{words}    split=placement.split,\n" if words else ", split=placement.split"
    why = "which was simulated" if is_simulated else "and this machine is another"
    return _TEMPLATE.format(
        workload=workload,
        version=__version__,
        size=default_size,
        seed=seed,
        cut=words,
        elsewhere=f"step.py: placement.json was found on {shortened(clean(host))}, {why}: it cannot run here. "
        f"`rlplace train {workload} --host auto` finds a placement for this machine; `rlplace export --format list` "
        "says what else this one can be written as.",
    )

"""`export_run`: what `rlplace export` does with a run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rlplace.errors import InvalidValue
from rlplace.export.check import check_export
from rlplace.export.script import script
from rlplace.export.step import matching_host
from rlplace.measure.placement import load_placement
from rlplace.measure.run.threads import one_thread_here
from rlplace.runs.folder import RunFolder
from rlplace.runs.setup import capture_workload, only_simulated
from rlplace.workloads import WorkloadSpec, build, parse_workload


@one_thread_here()
def export_run(folder: Path, *, workload: str | None, is_check: bool) -> dict[str, Any]:
    """Writes a run's `step.py`, or compares its placed step with eager; returns what `--json` prints.

    Raises:
        FileProblem: no run there, or a malformed one.
        FingerprintMismatch: its placement is for another graph or host.
        InvalidValue: the run is of a user's function, and `workload` does not name it again; or of a graph file.
    """
    run = RunFolder.open(folder)
    config = run.read_json("config.json")
    placement = load_placement(run.path("placement.json"))
    spec = _spec_of(config, workload)
    if not is_check:
        run.write_text("step.py", script(str(spec), default_size=config["default_size"], seed=config["train"]["seed"]))
        print(f"wrote {run.path('step.py')}: run it with python {run.path('step.py')}", file=sys.stderr)
        return {"schema": 1, "path": str(run.path("step.py"))}
    host = matching_host(placement)
    graph = capture_workload(build(spec, default_size=config["default_size"], seed=config["train"]["seed"]))
    placement.require(graph, host)
    checked = check_export(graph, host, placement.plan)
    verdict = "agrees with eager" if checked.ok else "DIFFERS from eager"
    print(
        f"{checked.num_steps} placed steps: {verdict}; largest relative difference of the loss "
        f"{checked.max_loss_rel_diff:.2e}, of parameters {checked.max_param_rel_diff:.2e} (float64)",
        file=sys.stderr,
    )
    return checked.to_dict()


def _spec_of(config: dict[str, Any], workload: str | None) -> WorkloadSpec:
    recorded = parse_workload(config["workload"])
    if workload is not None:
        recorded = parse_workload(workload)
    if recorded.is_file:
        raise only_simulated(recorded)
    if workload is None and recorded.is_function:
        raise InvalidValue(
            "workload",
            None,
            repr(config["workload"]),
            where="export",
            hint="The run is of your own function, and code named in a run is imported only if you pass it again: "
            f"--workload {config['workload']}",
        )
    return recorded

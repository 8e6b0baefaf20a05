"""`rlplace explain`: where the time of a run's placed step goes.

`rlplace export`: a run's placement as a model that runs.

`rlplace report`: a run as one page for a browser.
"""

from __future__ import annotations

from pathlib import Path

import tyro

from rlplace.cli.option_groups import print_json
from rlplace.errors import InvalidValue
from rlplace.say import say


def explain(folder: tyro.conf.Positional[Path], top: int = 12, json: bool = False) -> None:
    """Show where a run's step spends its time: devices, critical path, costliest copies, alternatives, and advice.

    It reads the run folder alone: neither the model nor the host is needed, and no code of yours is imported.

    Args:
        folder: a run folder
        top: most modules of the critical path to show
        json: print one JSON object on stdout
    """
    from rlplace.session.session import read_explanation

    if top < 1:
        raise InvalidValue("top", top, "at least 1")
    explanation = read_explanation(folder)
    if json:
        print_json(explanation.to_dict())
        return
    from rlplace.report.console import explanation_tables, show

    show(explanation_tables(explanation, top), markup=False)


def export(
    folder: tyro.conf.Positional[Path],
    workload: str | None = None,
    format: str = "script",
    cache_tokens: int = 0,
    check: bool = False,
    json: bool = False,
) -> None:
    """A run's placement as a model that runs or in another format: writes it into FOLDER, or checks it against eager.

    Args:
        folder: a run folder
        workload: the workload again, if it is your own function: code named in a run is imported only if you pass it
        format: script (FOLDER/step.py, a short program that trains as placed), csv (one row an op), device_map (of
            Hugging Face), pipeline (a script of torch.distributed.pipelining), torchrec (a sharding plan of embedding
            tables), or one of yours; list says what there is and what each is for, and writes nothing
        cache_tokens: with device_map, also count keys and values of so many tokens a sequence, prompt and new ones
        check: compare 5 training steps with eager ones on one device, in float64
        json: print the result as one JSON object on stdout
    """
    from rlplace.export.export_run import export_run

    result = export_run(folder, workload=workload, is_check=check, format=format, cache_tokens=cache_tokens)
    if json:
        print_json(result)
    if check and not result["ok"]:
        raise SystemExit(1)


def report(folder: tyro.conf.Positional[Path], json: bool = False) -> None:
    """Write a run's report: one page for a browser that needs no network, FOLDER/report.html.

    It reads the run folder alone: neither the model nor the host is needed, and no code of yours is imported.

    Args:
        folder: a run folder
        json: print the result as one JSON object on stdout
    """
    from rlplace.report.html.page import write_report

    path = write_report(folder)
    say(f"wrote {path}: open it in a browser")
    if json:
        print_json({"schema": 1, "path": str(path), "bytes": path.stat().st_size})

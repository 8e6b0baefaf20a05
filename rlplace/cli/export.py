"""`rlplace export`: a run's placement as a model that runs."""

from __future__ import annotations

from pathlib import Path

import tyro

from rlplace.cli.arguments import print_json


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
    from rlplace.export.session import export_run

    result = export_run(folder, workload=workload, is_check=check, format=format, cache_tokens=cache_tokens)
    if json:
        print_json(result)
    if check and not result["ok"]:
        raise SystemExit(1)

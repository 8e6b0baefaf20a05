"""`rlplace workloads`: the models that there are to place."""

from __future__ import annotations

from rlplace.cli.arguments import print_json
from rlplace.say import say


def workloads(json: bool = False) -> None:
    """List the named workloads: their sizes, options, and counts of ops and edges of a training step.

    Args:
        json: print one JSON object on stdout
    """
    from rlplace.workloads import describe_workloads

    rows = describe_workloads()
    if json:
        print_json({"schema": 1, "workloads": rows})
        return
    for row in rows:
        if row["problem"]:
            say(f"{row['name']:13} {row['problem']}")
            continue
        for size in ("small", "paper"):
            options = ",".join(f"{key}={str(value).lower()}" for key, value in row[size].items())
            counts = row["counts"].get(size)
            counted = f"{counts['num_ops']:7,} ops {counts['num_edges']:7,} edges" if counts else f"{'not counted':>25}"
            say(f"{row['name']:13} {size:6} {counted}  {options}")
        if not row["is_installed"]:
            say(f"{'':13} needs pip install 'rlplace[{row['extra']}]'")
    say("several as one: multi:NAME[@...][*WEIGHT],NAME,...; your own: package.module:function, or a graph file")

"""`rlplace bench`: how fast rlplace itself is."""

from __future__ import annotations

import tyro

from rlplace.cli.arguments import print_json
from rlplace.say import say


def bench(subject: tyro.conf.Positional[str] = "simulator", quick: bool = False, json: bool = False) -> None:
    """Time rlplace itself.

    Args:
        subject: simulator
        quick: fewer sizes
        json: print one JSON object on stdout
    """
    from rlplace.errors import UnknownName

    if subject != "simulator":
        raise UnknownName("benchmark", subject, ("simulator",))
    from rlplace.measure.simulate.bench_simulator import bench_simulator

    result = bench_simulator(is_quick=quick, on_row=lambda row: say(str(row)))
    if json:
        print_json({"schema": 1, **result})

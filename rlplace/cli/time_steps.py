"""`rlplace simulate`, `measure`, `fidelity` and `bench`: step times, predicted and real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from rlplace.cli.arguments import check_workload, find_host, parse_constraints, print_json, say


def simulate(
    workload: tyro.conf.Positional[str],
    placement: Path | None = None,
    host: str = "auto",
    seed: int = 0,
    pin: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    together: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    gangs: bool = False,
    timeline: Path | None = None,
    json: bool = False,
) -> None:
    """Simulate one step of a placement.

    Args:
        workload: a name with an optional size, `package.module:function`, or for a simulated host a graph file
        placement: a placement file; without one, everything runs on the best single device
        host: `auto`, `cores`, `cores:2x4`, a preset, or a host file
        seed: of the workload
        pin: PATTERN=DEVICE, again and again: these ops run there (a glob over modules, op names and targets)
        exclude: PATTERN=DEVICE, again and again: these ops never run there
        together: PATTERN,PATTERN,..., again and again: these ops move as one
        gangs: on CPU hosts, also a device that runs an op on all cores at once
        timeline: write a Chrome trace of the simulated step here
        json: print one JSON object on stdout
    """
    from rlplace.runs.step_time import time_placement

    spec, found = check_workload(workload), find_host(host, gangs=gangs)
    constraints = parse_constraints(pin, exclude, together, found)
    result = time_placement(
        spec, found, placement, is_measured=False, seed=seed, timeline=timeline, constraints=constraints
    )
    _show(result, json)


def measure(
    workload: tyro.conf.Positional[str],
    placement: Path | None = None,
    host: str = "auto",
    seed: int = 0,
    pin: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    together: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    gangs: bool = False,
    timeline: Path | None = None,
    json: bool = False,
) -> None:
    """Run steps of a placement on this machine and time them.

    Args:
        workload: a name with an optional size, or `package.module:function`
        placement: a placement file; without one, everything runs on the best single device
        host: `auto`, `cores` or `cores:2x4`
        seed: of the workload
        pin: PATTERN=DEVICE, again and again: these ops run there (a glob over modules, op names and targets)
        exclude: PATTERN=DEVICE, again and again: these ops never run there
        together: PATTERN,PATTERN,..., again and again: these ops move as one
        gangs: on CPU hosts, also a device that runs an op on all cores at once
        timeline: write a Chrome trace of a measured and of a simulated step here
        json: print one JSON object on stdout
    """
    from rlplace.runs.step_time import time_placement

    spec, found = check_workload(workload), find_host(host, gangs=gangs)
    constraints = parse_constraints(pin, exclude, together, found)
    result = time_placement(
        spec, found, placement, is_measured=True, seed=seed, timeline=timeline, constraints=constraints
    )
    _show(result, json)


def fidelity(
    workload: tyro.conf.Positional[str],
    host: str = "auto",
    placements: int = 40,
    fit: int = 16,
    seed: int = 0,
    pin: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    together: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    gangs: bool = False,
    plot: Path = Path("fidelity.png"),
    json: bool = False,
) -> None:
    """Simulate and measure many unseen placements: how far the simulator can be trusted here.

    Args:
        workload: a name with an optional size, or `package.module:function`
        host: `auto`, `cores` or `cores:2x4`
        placements: how many unseen placements
        fit: how many other placements the simulator is calibrated on first
        seed: of the workload and of what is drawn
        pin: PATTERN=DEVICE, again and again: these ops run there (a glob over modules, op names and targets)
        exclude: PATTERN=DEVICE, again and again: these ops never run there
        together: PATTERN,PATTERN,..., again and again: these ops move as one
        gangs: on CPU hosts, also a device that runs an op on all cores at once
        plot: where the scatter plot goes
        json: print one JSON object on stdout
    """
    from rlplace.runs.fidelity import run_fidelity

    spec, found = check_workload(workload), find_host(host, gangs=gangs)
    constraints = parse_constraints(pin, exclude, together, found)
    result = run_fidelity(
        spec, found, num_placements=placements, num_fit=fit, seed=seed, plot=plot, constraints=constraints
    )
    if json:
        print_json(result)
    else:
        say(fidelity_words(result))


def fidelity_words(result: dict[str, Any]) -> str:
    """What `fidelity` tells people, from what it prints as JSON."""
    overall, ceiling, best, best_ceiling = (
        "none" if result[f"spearman{which}"] is None else f"{result[f'spearman{which}']:.{digits}f}"
        for which, digits in (("", 3), ("_ceiling", 3), ("_best_quartile", 2), ("_ceiling_best_quartile", 2))
    )
    return (
        f"{result['num_placements']} unseen placements, simulated against measured:\n"
        f"  rank correlation {overall} (two measurements of the same placements: {ceiling}); "
        f"among the best quarter {best} ({best_ceiling})\n"
        f"  error of the step time: median {result['median_abs_rel_error']:.1%}, "
        f"90th percentile {result['p90_abs_rel_error']:.1%}\n"
        f"  the simulator's favourite is {result['pick_regret']:.1%} slower than the best measured\n"
        f"  largest error of a device's peak memory {result['peak_bytes_max_rel_error']:.1%}\n"
        f"  scatter plot: {result['plot']}"
    )


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


def _show(result: dict[str, Any], json: bool) -> None:
    if json:
        print_json(result)
    elif result["status"] == "ok":
        spread = f" ± {result['spread_s'] * 1e3:.2f}" if result["kind"] == "measured" else ""
        say(
            f"{result['placement']}, {result['kind']}: {result['step_time_s'] * 1e3:.2f} ms{spread}, "
            f"bound {result['lower_bound_s'] * 1e3:.2f} ms ({result['lower_bound']})"
        )
    else:
        say(f"{result['placement']}, {result['kind']}: {result['status']}: {result['why']}")


COMMANDS: dict[str, Callable[..., Any]] = {
    "simulate": simulate,
    "measure": measure,
    "fidelity": fidelity,
    "bench": bench,
}

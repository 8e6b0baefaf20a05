"""What commands share: durations, JSON, and groups of options whose text stands once."""

from __future__ import annotations

import inspect
import re

import pytest

from rlplace.cli.main import COMMANDS, main
from rlplace.cli.option_groups import GroupingOptions, PlacementOptions, parse_duration
from rlplace.errors import InvalidValue, UnknownName
from rlplace.files import jsonable
from rlplace.graphs.grouping.groups import group_ops
from rlplace.measure.hosts.resolve import resolve_host


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("150s", 150.0), ("5m", 300.0), ("1.5h", 5400.0), ("0.5m", 30.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5x", "m", "-3s", "5 m m", "1e3"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="budget"):
        parse_duration(text)


def test_what_is_not_finite_becomes_null() -> None:
    assert jsonable({"a": [float("inf"), 1.0], "b": {"c": float("nan")}}) == {"a": [None, 1.0], "b": {"c": None}}


SEEDED = ("train", "place", "compare", "advise", "measure", "fidelity")
"""Commands that draw something."""
BUILDING = (*SEEDED, "simulate", "graph")
"""Commands that build a workload, which has a seed of its own."""


@pytest.mark.parametrize("seed", ["-1", str(2**32), str(2**70)])
@pytest.mark.parametrize(
    ("command", "option"), [*((name, "--seed") for name in SEEDED), *((name, "--workload-seed") for name in BUILDING)]
)
def test_a_seed_out_of_range_is_refused_before_anything_is_built(
    command: str, option: str, seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "nmt", option, seed]) == 2
    assert capsys.readouterr().err == f"rlplace: error: seed is {seed}, expected a whole number from 0 to 4294967295.\n"


def test_every_seed_is_of_the_type_that_is_checked() -> None:
    for option, named in (("seed", SEEDED), ("workload_seed", BUILDING)):
        seeds = {name: inspect.signature(command).parameters.get(option) for name, command in COMMANDS.items()}
        assert {name: seed.annotation for name, seed in seeds.items() if seed} == dict.fromkeys(named, "Seed")


def test_a_seed_means_nothing_where_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("simulate", "graph"):
        with pytest.raises(SystemExit) as ended:
            main([command, "nmt", "--seed", "3"])
        assert ended.value.code == 2
        assert "--workload-seed" in capsys.readouterr().err


def test_a_seed_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["measure", "nmt", "--seed", "many"])
    assert ended.value.code == 2
    assert "--seed" in capsys.readouterr().err


PLACING = ("--pin", "--exclude", "--together", "--gangs")
GROUPING = ("--groups", "--grouping")


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("train", (*PLACING, *GROUPING, "--acyclic", "--budget", "--simulate-share")),
        ("compare", (*PLACING, *GROUPING, "--seeds", "--objective")),
        ("simulate", PLACING),
        ("measure", PLACING),
        ("fidelity", (*PLACING, "--placements", "--fit")),
    ],
)
def test_options_of_a_group_are_flags_like_all_others(
    command: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help-all"])
    assert ended.value.code == 0
    shown = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {*flags, "--json", "--workload-seed"} <= shown
    assert not [flag for flag in shown if flag.startswith(("--placing", "--grouping-"))]


def options_in(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit) as ended:
        main([command, word])
    assert ended.value.code == 0
    return set(re.findall(r"^. (?:-h, )?(--[a-z.-]+)", capsys.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_options_of_a_day_and_help_all_every_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = options_in(command, "--help", capsys), options_in(command, "--help-all", capsys)
    assert len(short) <= 15
    assert short <= whole
    assert "--json" in short or "--json" not in whole
    if command == "train":
        daily = {"--host", "--budget", "--total", "--run", "--resume", "--method", "--micro-batches", "--pin", "--seed"}
        assert daily | {"--no-trace"} <= short
        assert {"--priors", "--agent.batch", "--ppo.flips", "--in-process", "--exclude"} <= whole - short


def test_options_that_help_leaves_out_are_taken_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nmt", "--grouping", "no-such-rule", "--host", "2xK80"]) == 2
    assert "no-such-rule" in capsys.readouterr().err


def test_grouping_is_as_in_python_where_nothing_is_said() -> None:
    parameters = inspect.signature(group_ops).parameters
    options = GroupingOptions()
    assert (options.num_groups, options.rule) == (parameters["num_groups"].default, parameters["rule"].default)


def test_constraints_are_checked_against_the_host() -> None:
    host = resolve_host("4xV100-pcie")
    constraints = PlacementOptions(pin=("encoder=cuda:1",), together=("a,b",)).constraints(host)
    assert constraints.pins == (("encoder", "cuda:1"),)
    assert constraints.together == (("a", "b"),)
    with pytest.raises(UnknownName, match="cuda:4"):
        PlacementOptions(exclude=("encoder=cuda:4",)).constraints(host)

from __future__ import annotations

from typing import Any

from run_files import HOSTILE, rows_of

from rlplace.report.html.page import command, what_was_run_section
from rlplace.report.html.run_data import decode_run


def test_the_command_asks_for_the_same_run() -> None:
    config = {
        "workload": "a model:of(mine)",
        "host": "4xV100-pcie",
        "gangs": True,
        "micro_batches": {"count": 4},
        "train": {"budget_s": 150.0, "seed": 0, "search": {"method": "policy"}, "learn": {"policy": "gnn"}},
    }
    assert command(config) == (
        "rlplace train 'a model:of(mine)' --host 4xV100-pcie --budget 150s --seed 0 --method policy --policy gnn "
        "--gangs --micro-batches 4"
    )
    assert command({"workload": "$(reboot)"}).startswith("rlplace train '$(reboot)'")


def test_what_took_how_long() -> None:
    durations = {"expected": {"search_s": 60.0, "calibration_s": 0.0}, "taken": {"search_s": 75.0, "<b>_s": 5.0}}
    body = what_was_run_section(decode_run({}, {"rows": rows_of(), "durations": durations})).body
    assert '<td>search</td><td class="number">1:00</td><td class="number">1:15</td>' in body
    assert "calibration" not in body
    assert "<td>&lt;b&gt;</td>" in body


def test_every_setting_is_listed_and_hostile_ones_are_text() -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"down": deep}
    config = {"train": {"seed": 3, "pins": [["a", "b"]]}, HOSTILE[0]: HOSTILE[2], "deep": deep, "none": None}
    body = what_was_run_section(decode_run(config, {"rows": rows_of()}, files=("result.json",))).body
    assert "train.seed" in body
    assert "<script" not in body
    assert "<img" not in body
    assert '<a href="result.json">' in body


def test_a_config_of_other_types_is_no_reason_to_fail() -> None:
    assert command({"train": [], "micro_batches": 3, "workload": None}) == "rlplace train None --host auto"

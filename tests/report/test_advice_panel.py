"""What `rlplace advise` prints."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from rlplace.advice.verdict import WORDS, Figures, decide
from rlplace.report.printed import advice_panel

FIGURES = Figures(
    kind="simulated",
    costs="estimated",
    bound_s=0.4,
    bound="total work",
    single_s=1.0,
    single_device="cuda:0",
    single_bytes=3 << 30,
    single_capacity_bytes=16 << 30,
    placed_s=0.6,
    num_placements=2000,
    split_s=0.9,
    eager_why="the host is simulated",
)


def shown(figures: Figures) -> list[str]:
    told = decide(figures).to_dict() | {"capture_s": 1.5, "seconds": 20.0}
    console = Console(file=StringIO(), width=120, force_terminal=False)
    console.print(advice_panel(told, WORDS[told["verdict"]]))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_verdict_comes_first_and_what_to_do_last() -> None:
    lines = [" ".join(line.split()) for line in shown(FIGURES)]
    assert lines[0] == "place: the best of 2,000 placements takes 600 ms a step, one device 1.00 s"
    assert lines[1:] == [
        "expected step 0.40 to 0.60 of what one device takes",
        "eager PyTorch – (the host is simulated)",
        "one device 1.00 s on cuda:0, 3.00 GiB of 16.0 GiB",
        "best placement 600 ms",
        "even split 900 ms at best (estimated)",
        "bound 400 ms (total work)",
        "step times simulated, op times estimated",
        "it took 1.50 s to capture, 20.0 s from there",
        "next rlplace.train(problem)",
    ]


def test_what_cannot_be_had_is_a_dash() -> None:
    lines = [" ".join(line.split()) for line in shown(replace(FIGURES, single_s=None, counts=(1, 4), cut_count=4))]
    assert "expected step – (nothing else can run the step)" in lines
    assert "one device – (does not fit) on cuda:0, 3.00 GiB of 16.0 GiB" in lines
    assert "4 micro-batches – (not faster, or does not fit)" in lines


def test_a_ratio_that_is_not_that_of_the_medians_says_what_it_counts() -> None:
    measured = replace(FIGURES, kind="measured", eager_s=0.8, spread=0.1)
    line = " ".join(shown(measured)[1].split())
    assert line == "expected step 0.50 to 0.92 of what eager takes: 0.75 by the medians, 0.92 with a spread of ± 10 %"
    stays = [" ".join(line.split()) for line in shown(replace(FIGURES, placed_s=0.97, bound_s=0.9))]
    assert stays[0].startswith("stay on one device")
    assert "expected step 0.90 to 1.00 of what one device takes: 0.97 by the medians, to stay is no gain" in stays


def test_a_placement_that_one_device_beats_is_not_called_the_best() -> None:
    lines = [
        " ".join(line.split()) for line in shown(replace(FIGURES, kind="measured", single_s=0.169, placed_s=0.202))
    ]
    assert not any(line.startswith("best") for line in lines)
    assert "searched placement 202 ms" in lines

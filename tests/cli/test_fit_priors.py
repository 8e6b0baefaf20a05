"""`rlplace fit-priors`: run folders in, a priors file out."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from rlplace.cli.main import main
from rlplace.files import write_json_atomic
from rlplace.measure.host_model import LearnedHost, Prior, load_learned_host, load_priors
from rlplace.measure.host_model.learned_host import LearnedFactor
from rlplace.store import MeasurementStore, Session

DEVICE = math.sqrt((0.3**2 + 0.1**2 + 4 * 0.1**2) / 6)
"""Two devices that are known exactly, beside the shipped 0.1 that counts as four."""


def run_of(folder: Path, log: float) -> str:
    """A run that learned one device's factor."""
    folder.mkdir()
    learned = LearnedHost("two", "0", "profiled", Prior(), (LearnedFactor("device", "d0", log, 1e-6, 0.1),), ())
    write_json_atomic(folder / "host_model.json", dataclasses.asdict(learned))
    return str(folder)


def test_it_writes_priors_and_tells_people_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(tmp_path / "a", 0.3), run_of(tmp_path / "b", -0.1) + "/host_model.json"]
    out = tmp_path / "mine.json"
    assert main(["fit-priors", *runs, "--out", str(out)]) == 0
    assert load_priors(out).prior("profiled").device == pytest.approx(DEVICE, rel=1e-3)
    assert load_priors(out).estimated == load_priors().estimated
    said = capsys.readouterr()
    assert said.out == ""
    assert "fitted to 2 factors of 2 runs; the shipped 0.1 counts as 4 more factors" in said.err
    assert f"{out}: 1 figure fitted" in said.err


def test_json_says_what_was_fitted_to_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(tmp_path / "a", 0.3), run_of(tmp_path / "b", -0.1)]
    out = tmp_path / "mine.json"
    assert main(["fit-priors", *runs, "--out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    told = json.loads(said.out)
    (figure,) = told.pop("fitted")
    assert told == {"schema": 1, "out": str(out), "num_runs": 2}
    assert figure.pop("value") == pytest.approx(DEVICE, rel=1e-3)
    assert figure == {"section": "profiled", "name": "device", "shipped": 0.1, "num_factors": 2, "num_runs": 2}


def test_what_searches_kept_in_a_store_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = run_of(tmp_path / "a", 0.3), tmp_path / "mine.json"
    other = LearnedHost("two", "0", "profiled", Prior(), (LearnedFactor("device", "d0", -0.1, 1e-6, 0.1),), ())
    with MeasurementStore.open(tmp_path / "measurements.db") as store:
        session = store.begin(Session(1e9, "nmt", "0", "two", "v"))
        for learned in (load_learned_host(run), other):
            store.add_learned(session, "0", learned)
    assert main(["fit-priors", run, "--store", str(tmp_path), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_runs"] == 2
    assert main(["fit-priors", "--store", str(tmp_path / "measurements.db"), "--out", str(out), "--overwrite"]) == 0
    assert load_priors(out).prior("profiled").device == pytest.approx(DEVICE, rel=1e-3)
    assert main(["fit-priors", "--store", str(tmp_path / "none.db"), "--out", str(out), "--overwrite"]) == 2
    assert "no such store" in capsys.readouterr().err


def test_what_is_there_is_replaced_only_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = run_of(tmp_path / "a", 0.3), tmp_path / "mine.json"
    out.write_text("mine")
    assert main(["fit-priors", run, "--out", str(out)]) == 2
    assert "is there already: name another file, or give `--overwrite`" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["fit-priors", run, "--out", str(out), "--overwrite"]) == 0
    assert load_priors(out).prior("profiled").device


def test_mistakes_exit_with_2_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = run_of(tmp_path / "a", 0.3), tmp_path / "mine.json"
    (tmp_path / "empty").mkdir()
    for words, told in (
        ([], "at least one run folder"),
        ([run, run], "expected every run once"),
        ([run, str(tmp_path / "empty")], "host_model.json: no such file."),
        ([run, "--out", run + "/host_model.json"], "name another file for the priors"),
        ([run, "--out", str(tmp_path / "none" / "p.json")], "cannot be written"),
    ):
        assert main(["fit-priors", "--out", str(out), *words]) == 2
        assert told in capsys.readouterr().err
    assert not out.exists()
    assert json.loads((tmp_path / "a" / "host_model.json").read_text())["host"] == "two"

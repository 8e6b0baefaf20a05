from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.font_manager  # makes the list of fonts where there is none yet
import pytest

from rlplace.errors import UnknownName, UserError
from rlplace.search.task import BestSoFar
from rlplace.training.tracking import NoTracker, make_tracker

OFFLINE_RUN = """
import json, sys
from pathlib import Path
from rlplace.report.drawing import save_fidelity_png
from rlplace.training.tracking import make_tracker
from rlplace.search.task import BestSoFar

folder = Path(sys.argv[1])
(folder / "placement.json").write_text(json.dumps({"schema": 1}))
save_fidelity_png(folder / "timeline.png", [0.1], [0.1], ["a"], {})
tracker = make_tracker("offline", folder, {"seed": 7, "train": {"budget_s": float("inf")}})
tracker.log_search(placements=64, mean_s=0.2, best_s=0.125, vs_single=0.5, infeasible_rate=0.25)
tracker.log_best_so_far("learned", BestSoFar(64, 6, 2.5, 0.125), 0.25)
tracker.log_best_so_far("portfolio", BestSoFar(64, 0, 2.5, 0.125), float("inf"))
tracker.log_picture("best_so_far", folder / "timeline.png")
tracker.log({"train/value_loss": 0.75, "train/explained_variance": float("nan")})
tracker.log_best(step_time_s=0.125, placement=folder / "placement.json", timeline_png=folder / "timeline.png")
row = {"method": "heft", "placement": True, "placements": 2, "spread_s": None, "history": [[1, 0, 0.5, 0.25]]}
tracker.log_table([{**row, "step_time_s": 0.125, "status": "ok"}, {**row, "method": "eager", "why": "the host"}])
for name in ("config.json", "policy.json"):
    (folder / name).write_text(json.dumps({"of": name}))
    tracker.log_files(name.removesuffix(".json"), [folder / name])
tracker.finish()
print(tracker.how_to_sync)
"""


def test_disabled_does_nothing_and_imports_no_wandb(tmp_path: Path) -> None:
    tracker = make_tracker("disabled", tmp_path, {})
    assert isinstance(tracker, NoTracker)
    tracker.log({"a": math.nan})
    tracker.log_search(placements=1, mean_s=1.0, best_s=1.0, vs_single=1.0, infeasible_rate=0.0)
    tracker.log_best(step_time_s=1.0, placement=tmp_path / "placement.json")
    tracker.log_best_so_far("anneal", BestSoFar(1, 1, 1.0, 1.0), 1.0)
    tracker.log_picture("best_so_far", tmp_path / "best_so_far.png")
    tracker.log_table([{"method": "single"}])
    tracker.log_files("config", [tmp_path / "config.json"])
    tracker.finish()
    assert tracker.how_to_sync == ""
    assert not list(tmp_path.iterdir())
    code = (
        "import sys; from rlplace.training.tracking import make_tracker\n"
        "make_tracker('disabled', '.', {}); assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_an_unknown_mode_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown tracking mode 'ofline': did you mean 'offline'") as caught:
        make_tracker("ofline", ".", {})
    assert caught.value.nearest[0] == "offline"


def test_without_wandb_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb, or --track disabled"):
        make_tracker("offline", tmp_path, {})


def test_online_without_a_login_is_refused_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from rlplace.errors import UserError; from rlplace.training.tracking import make_tracker\n"
        "try: make_tracker('online', sys.argv[1], {})\n"
        "except UserError as error: print(error)"
    )
    done = run_apart(code, tmp_path)
    assert "Log in with `wandb login`, or use --track offline." in done.stdout


@pytest.mark.slow
def test_offline_keeps_everything_under_the_run_folder_and_prints_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    done = run_apart(OFFLINE_RUN, folder)
    assert done.stderr == ""
    command, record_folder = done.stdout.strip().split("wandb sync ")
    assert command == "to send this run to Weights & Biases: "
    assert list((folder / "wandb").glob("offline-run-*")) == [Path(record_folder)]
    assert sorted(entry.name for entry in folder.iterdir()) == [
        *("config.json", "placement.json", "policy.json", "timeline.png", "wandb")
    ]
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    (record,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    for text in (
        "place/step_time_ms",
        "place/vs_single",
        "place/infeasible_rate",
        "train/value_loss",
        "budget_s",
        "placement.json",
        "rlplace",
    ):
        assert text.encode() in content, text
    for text in ("measured", "seconds", "best_by_measured/*", "best_by_measured/learned/vs_single"):
        assert text.encode() in content, text
    assert b"best_by_seconds/portfolio/step_time_ms" in content
    assert b"best_by_measured/portfolio" not in content  # nothing of it was measured
    assert b"portfolio/vs_single" not in content
    assert b"NaN" not in content
    (picture,) = (folder / "wandb").glob("offline-run-*/files/media/images/place/timeline_*.png")
    assert picture.read_bytes() == (folder / "timeline.png").read_bytes()
    (searches,) = (folder / "wandb").glob("offline-run-*/files/media/images/place/best_so_far_*.png")
    assert searches.read_bytes() == (folder / "timeline.png").read_bytes()
    staged = [path.read_text() for path in (folder / "wandb").glob("files-*/data/**/*") if path.is_file()]
    assert '{"schema": 1}' in staged
    assert {'{"of": "config.json"}', '{"of": "policy.json"}'} <= set(staged)
    for text in ("config-", "policy-", "run_table"):
        assert text.encode() in content, text
    (table,) = (folder / "wandb").glob("offline-run-*/files/media/table/table_*.json")
    shown = json.loads(table.read_text())
    rows = [dict(zip(shown["columns"], row, strict=True)) for row in shown["data"]]
    assert [row["method"] for row in rows] == ["heft", "eager"]
    assert rows[0]["step_time_s"] == 0.125
    assert (rows[0]["why"], rows[1]["why"]) == (None, "the host")


def run_apart(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a process of its own, whose home is empty and has no login and no W&B settings."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "XDG_"))}
    # an empty folder would make matplotlib look for fonts, which it says on stderr where that takes long
    environment |= {"HOME": str(home), "MPLCONFIGDIR": matplotlib.get_cachedir()}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done

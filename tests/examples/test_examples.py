"""The examples run, and do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
TESTED = {"training_loop.py", "placed_module.py", "hf_trainer.py", "accelerate_loop.py"}


def names_of(example: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / example), run_name="example")


def test_every_example_is_run_here() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == TESTED


@pytest.mark.slow
def test_a_training_loop_goes_on_from_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = names_of("training_loop.py")["train"]
    straight = train(4, tmp_path / "straight", 1.0)
    assert straight[-1] > 0.8
    assert straight[-1] > straight[0]
    resumed = [*train(2, tmp_path / "resumed", 1.0), *train(4, tmp_path / "resumed", 1.0)]
    assert resumed == pytest.approx(straight, abs=0.01)
    assert "4 graphs" in capsys.readouterr().out  # batches of 64 and of 52, held-out ones of 64 and of 8


@pytest.mark.slow
def test_a_placed_module_learns() -> None:
    losses = names_of("placed_module.py")["train"](1.0)
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
def test_a_placed_model_learns_under_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    losses = names_of("hf_trainer.py")["train"](1.0)
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 2
    assert "3 graphs" in capsys.readouterr().out  # batches of eight in training, and of eight and four in evaluation


@pytest.mark.slow
def test_a_placed_model_learns_under_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    losses = names_of("accelerate_loop.py")["train"](1.0, folder=tmp_path)
    assert losses[-1] < losses[0] / 2
    assert any(path.suffix == ".safetensors" for path in tmp_path.iterdir())

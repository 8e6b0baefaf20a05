"""Where the store is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.errors import FileProblem
from rlplace.files import cache_folder
from rlplace.store.log import store_path
from rlplace.store.rows import machine_key


def test_the_cache_folder_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/rlplace")
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/cache"):
        assert cache_folder({"XDG_CACHE_HOME": value}) == tmp_path / ".cache" / "rlplace"


def test_without_a_home_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(FileProblem, match="set XDG_CACHE_HOME"):
        cache_folder({})


def test_a_word_a_file_or_a_run_folder_names_a_store(tmp_path: Path) -> None:
    assert store_path("off") is None
    assert store_path("auto") == cache_folder() / "measurements.db"
    assert store_path(str(tmp_path)) == tmp_path / "measurements.db"
    assert store_path(str(tmp_path / "mine.db")) == tmp_path / "mine.db"


def test_a_machine_has_one_key() -> None:
    assert machine_key() == machine_key()
    assert len(machine_key()) == 16

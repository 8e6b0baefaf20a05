from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from rlplace.errors import FileProblem
from rlplace.files import jsonable, read_json, write_bytes_atomic, write_json_atomic, write_text_atomic


def test_a_written_file_is_read_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "a.json", {"rows": [1, 2.5, "ü", None, True]})
    assert read_json(tmp_path / "a.json") == {"rows": [1, 2.5, "ü", None, True]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    write_bytes_atomic(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileProblem, match=r"a\.bin: cannot be written: No space left on device"):
        write_bytes_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_where_a_folder_cannot_be_synced_a_file_is_written(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, "no")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    write_bytes_atomic(tmp_path / "a.bin", b"new")
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_data_that_json_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert read_json(path) == {"a": 1}


def test_a_missing_folder_is_a_file_problem(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="cannot be written: No such file"):
        write_text_atomic(tmp_path / "none" / "a.txt", "text")


def test_a_new_file_has_the_permissions_that_open_would_give(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text_atomic(tmp_path / "atomic", "")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_takes_the_place_of_a_private_file_is_as_private(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o600)
    write_text_atomic(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o777)
    write_text_atomic(path, "again")
    assert not path.stat().st_mode & stat.S_IXUSR  # what `open` would not give is not kept


def test_nan_and_infinity_become_null_at_any_depth(tmp_path: Path) -> None:
    data = {
        "a": math.nan,
        "b": [math.inf, (-math.inf, 1.0)],
        "c": np.array([1.0, np.nan]),
        "d": np.float32(2.5),
        "e": np.int64(3),
        "f": Path("runs") / "priors.json",
    }
    expected = {"a": None, "b": [None, [None, 1.0]], "c": [1.0, None], "d": 2.5, "e": 3, "f": "runs/priors.json"}
    assert jsonable(data) == expected
    write_json_atomic(tmp_path / "a.json", data)
    assert json.loads((tmp_path / "a.json").read_text()) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON: Expecting property name"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b"", "not valid JSON"),
    ],
)
def test_malformed_json_is_a_file_problem_that_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(FileProblem, match=message) as caught:
        read_json(path)
    assert caught.value.path == str(path)


def test_missing_and_irregular_and_oversized_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="no such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(FileProblem, match="not a regular file"):
        read_json(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(FileProblem, match="not a regular file"):
        read_json(tmp_path / "pipe.json")
    (tmp_path / "large.json").write_text("[1, 2, 3]")
    with pytest.raises(FileProblem, match="9 bytes of JSON, expected at most 8"):
        read_json(tmp_path / "large.json", largest_bytes=8)

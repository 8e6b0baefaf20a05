"""`RunFolder`: the folder that a run is kept in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlplace.errors import FileProblem, check_known, nearest_names
from rlplace.files import PARTIAL_ENDING, os_errors, refuse_link, write_json_atomic
from rlplace.locks import LOCK_FILE, FolderLock

SESSION = "session.db"
"""The state of a run; every other file is an output for people and tools, which no command reads as state."""
EXPORTED = ("step.py", "placement.csv", "device_map.json", "dtensor.py", "pipeline.py", "torchrec.json", "torchrun.py")
"""The files of a run that export formats of rlplace write; `--overwrite` removes no others that formats write."""
RUN_FILES = (
    SESSION,
    "config.json",
    "problem.json",
    "result.json",
    "placement.json",
    "policy.safetensors",
    "policy.json",
    "search.json",
    "learning.json",
    "host_model.json",
    "explanation.json",
    "timeline.json",
    "timeline.png",
    "best_so_far.png",
    "report.html",
    *EXPORTED,
)
"""Every file that rlplace writes into a run folder."""
_COMPANIONS = tuple(f"{SESSION}-{end}" for end in ("wal", "shm", "journal"))


@dataclass(frozen=True)
class RunFolder:
    """A folder whose files are each written whole or not at all.

    Attributes:
        root: the folder; it exists.
        lock: the right to write the run, which `create` takes and `close` gives up; None where the run is only read.
    """

    root: Path
    lock: FolderLock | None = None

    @classmethod
    def create(cls, path: str | os.PathLike[str], overwrite: bool = False) -> RunFolder:
        """A folder for a new run, made with its parents where it is missing; it is this process's until `close`.

        Args:
            path: of the folder.
            overwrite: remove the files of the run that is in it; other files in the folder stay.

        Raises:
            FileProblem: a file is in the way, the folder is not empty and `overwrite` is false, another run is writing
                into it, or it cannot be written.
        """
        root = Path(path)
        cls.check(root, overwrite)
        with os_errors(root, "made a run folder"):
            root.mkdir(parents=True, exist_ok=True)
            if not os.access(root, os.W_OK | os.X_OK):
                raise FileProblem(root, "this folder cannot be written to: name another.")
            lock = FolderLock(root)
            try:
                _check_entries(root, overwrite)  # a run may have come and gone since the first look
                _remove_run(root)
            except BaseException:
                lock.release()
                raise
        return cls(root, lock)

    @staticmethod
    def check(path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Whether a run may be kept at `path`; touches nothing.

        Args:
            path: of the folder.
            overwrite: whether a run may be there already.

        Raises:
            FileProblem: a file is in the way, the folder is not empty and `overwrite` is false, or another run is
                writing into it.
        """
        root = Path(path)
        FolderLock.check(root)
        with os_errors(root, "made a run folder"):
            _check_entries(root, overwrite)

    def close(self) -> None:
        """Ends the writing: another run may have the folder."""
        if self.lock is not None:
            self.lock.release()

    def clear(self) -> None:
        """Removes the files of a run that could not be started."""
        _remove_run(self.root)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that was started before.

        Raises:
            FileProblem: there is no such folder, no run in it, or a link where a file should be.
        """
        root = Path(path)
        with os_errors(root, "read"):
            if not root.exists():
                raise FileProblem(root, f"no such run folder.{_nearby(root)}")
            if not root.is_dir():
                raise FileProblem(root, "not a folder, expected a run folder as `rlplace train --run DIR` writes it.")
            for name in (*RUN_FILES, *_COMPANIONS, LOCK_FILE):
                refuse_link(root / name)
            if not (root / SESSION).exists():
                raise FileProblem(
                    root,
                    f"not a run folder (it has no {SESSION}), expected one as `rlplace train --run DIR` writes it.",
                )
        return cls(root)

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that was stopped, to go on with; half written files are removed.

        It is this process's until `close`.

        Raises:
            FileProblem: there is no run that could be gone on with, it is still going on, or the folder cannot be
                written.
        """
        root = Path(path)
        if root.is_dir() and not (root / SESSION).exists():
            FolderLock.check(root)
            raise FileProblem(
                root,
                f"there is nothing to resume (no {SESSION}): the run was stopped before it began. Start it again.",
            )
        cls.open(root)
        with os_errors(root, "gone on with"):
            if not os.access(root, os.W_OK | os.X_OK):
                raise FileProblem(root, "this folder cannot be written to.")
            lock = FolderLock(root)
            _remove_partial(root)
        return cls(root, lock)

    def path(self, name: str) -> Path:
        """Where the run's file `name` is, or would be.

        Raises:
            UnknownName: runs have no file of that name.
        """
        check_known("run file", name, RUN_FILES)
        return self.root / name

    def has(self, name: str) -> bool:
        """Whether the run's file `name` is there."""
        return self.path(name).is_file()

    def write_json(self, name: str, data: object) -> None:
        """Writes `data` as JSON, NaN and infinities as null.

        Raises:
            FileProblem: the file cannot be written.
        """
        write_json_atomic(self.path(name), data)


def _check_entries(root: Path, overwrite: bool) -> None:
    if root.exists() and not root.is_dir():
        raise FileProblem(root, "this is a file, expected a folder for the run: name another.")
    entries = sorted(entry.name for entry in root.iterdir() if not _is_passing(entry.name)) if root.is_dir() else []
    if entries and not overwrite:
        shown = ", ".join(entries[:3]) + (", ..." if len(entries) > 3 else "")
        raise FileProblem(
            root, f"this folder is not empty ({shown}): name another, or pass --overwrite to replace the run in it."
        )


def _remove_run(root: Path) -> None:
    """Removes the files of a run, its session first: without that the folder is no run."""
    ours = [*RUN_FILES, *_COMPANIONS]
    for name in ours:
        if (root / name).is_dir() and not (root / name).is_symlink():
            raise FileProblem(
                root / name, "a folder is where a file of the run would go: move it, or name another run."
            )
    _remove_partial(root)
    for name in ours:
        (root / name).unlink(missing_ok=True)


def _remove_partial(root: Path) -> None:
    """Removes files of a run that a killed process had half written."""
    for entry in sorted(root.glob(f".*{PARTIAL_ENDING}")):
        if _is_passing(entry.name) and not entry.is_dir():
            entry.unlink(missing_ok=True)


def _is_passing(name: str) -> bool:
    """Whether a file is the lock, or half of one of a run's, and so no result of anybody's."""
    return name == LOCK_FILE or (
        name.endswith(PARTIAL_ENDING) and any(name.startswith(f".{known}.") for known in RUN_FILES)
    )


def _nearby(root: Path) -> str:
    if not root.parent.is_dir():
        return f" There is no folder {str(root.parent)!r} either."
    nearest = nearest_names(root.name, [entry.name for entry in root.parent.iterdir() if entry.is_dir()])
    return f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""

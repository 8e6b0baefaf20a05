"""`Tracker`: where a run's figures go besides its folder: nowhere, or Weights & Biases.

The run folder is the record and W&B a copy of it; wandb is imported only when it is used.
"""

from __future__ import annotations

import math
import os
import shlex
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.errors import FileProblem, UserError, check_known
from rlplace.files import jsonable, refuse_link
from rlplace.say import format_ms

if TYPE_CHECKING:
    import wandb

    from rlplace.search.task import BestSoFar

TRACKING_MODES = ("disabled", "offline", "online")
PROJECT = "rlplace"
TABLE_COLUMNS = ("method", "step_time_s", "spread_s", "placements", "measured", "placement", "status", "why")
"""Of the final table, as a row of `result.json` has them."""
SERVICE_WAIT_S = 300.0
"""How long wandb's own process may take to start; its default of 30 s is too little on a machine that is full."""


class Tracker:
    """Takes the figures of a run as they come; this one, the base of all, records nothing."""

    how_to_sync: str = ""
    """The command that sends the record to a server; empty where there is nothing to send."""

    def log(self, values: Mapping[str, float]) -> None:
        """Records figures by name; those that are not finite are left out."""

    def log_search(
        self, *, placements: int, mean_s: float, best_s: float, vs_single: float, infeasible_rate: float
    ) -> None:
        """Records how the search stands.

        Args:
            placements: tried so far.
            mean_s: mean step time of the latest batch.
            best_s: best step time so far.
            vs_single: best step time over that of the best single device.
            infeasible_rate: share of the latest batch that failed.
        """
        self.log(
            {
                "place/placements": placements,
                "place/step_time_ms/mean": mean_s * 1e3,
                "place/step_time_ms/best": best_s * 1e3,
                "place/vs_single": vs_single,
                "place/infeasible_rate": infeasible_rate,
            }
        )

    def log_best(self, *, step_time_s: float, placement: Path, timeline_png: Path | None = None) -> None:
        """Records a new best placement: its file, and the picture of its timeline."""

    def log_best_so_far(self, method: str, best: BestSoFar, single_s: float) -> None:
        """Records the best step time of `method` so far, over placements measured and over seconds.

        Args:
            method: its name.
            best: the best step time by now, and the budget spent by now.
            single_s: step time on the best single device; not finite where there is none.
        """
        # a search on the simulator has no axis of measurements
        spent = {"seconds": best.seconds} | ({"measured": best.measurements} if best.measurements else {})
        step_ms = {f"best_by_{step}/{method}/step_time_ms": best.best_s * 1e3 for step in spent}
        ratios = {f"best_by_{step}/{method}/vs_single": best.best_s / single_s for step in spent if single_s}
        self.log({**spent, **step_ms, **(ratios if math.isfinite(single_s) else {})})

    def log_picture(self, name: str, path: Path) -> None:
        """Records the PNG file `path` under `name`."""

    def log_table(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Records the final table: rows of `result.json`."""

    def log_files(self, name: str, paths: Sequence[Path]) -> None:
        """Records files of the run together, under `name` (`config`, `policy`)."""

    def finish(self, *, is_complete: bool = True) -> None:
        """Ends the record; one that is not complete is marked as failed."""


def make_tracker(mode: str, run_dir: str | os.PathLike[str], config: Mapping[str, object]) -> Tracker:
    """The tracker of that mode.

    Args:
        mode: `disabled` does nothing; `offline` writes under `run_dir/wandb`, without login or network; `online` also
            sends it to the W&B server that the user is logged in to.
        run_dir: the run folder.
        config: the run's configuration, plain data.

    Raises:
        UnknownName: no mode has that name.
        UserError: wandb is not installed, or the server cannot be had.
    """
    check_known("tracking mode", mode, TRACKING_MODES)
    return NoTracker() if mode == "disabled" else WandbTracker(Path(run_dir), config, is_online=mode == "online")


class NoTracker(Tracker):
    """Records nothing."""


class WandbTracker(Tracker):
    """Records to Weights & Biases; prints nothing and samples nothing, as either would disturb measurements.

    Raises:
        UserError: wandb is not installed, or the server cannot be had.
        FileProblem: the folder `wandb` of the run leads elsewhere, or it or that of the current folder holds settings.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, object], *, is_online: bool) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"wandb cannot be imported ({error}): pip install wandb, or --track disabled.") from error
        _refuse_hostile(run_dir)
        self._wandb = wandb
        self._lock = threading.Lock()  # searches that run side by side log from threads of their own
        try:
            (run_dir / "wandb").mkdir(parents=True, exist_ok=True)
            self._files = Path(tempfile.mkdtemp(prefix="files-", dir=run_dir / "wandb"))
            with _files_under(self._files):
                self._run: wandb.Run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", PROJECT),
                    name=run_dir.resolve().name,
                    dir=str(run_dir),
                    config=jsonable(config),  # type: ignore[arg-type]  # a mapping stays one
                    settings=wandb.Settings(
                        mode="online" if is_online else "offline",
                        silent=True,
                        console="off",
                        disable_git=True,
                        save_code=False,
                        x_disable_stats=True,
                        reinit="create_new",
                        x_service_wait=SERVICE_WAIT_S,
                    ),
                )
        except (wandb.errors.Error, OSError, TimeoutError) as error:
            hint = "Log in with `wandb login`, or use --track offline." if is_online else "Use --track disabled."
            raise UserError(f"Weights & Biases cannot be started: {str(error).rstrip('.')}. {hint}") from error
        record = shlex.quote(str(Path(self._run.dir).parent))
        self.how_to_sync = "" if is_online else f"to send this run to Weights & Biases: wandb sync {record}"
        self._run.define_metric("place/placements")
        self._run.define_metric("place/*", step_metric="place/placements")
        for step in ("measured", "seconds"):
            self._run.define_metric(step)
            self._run.define_metric(f"best_by_{step}/*", step_metric=step)

    def log(self, values: Mapping[str, float]) -> None:
        finite = {key: float(value) for key, value in values.items() if math.isfinite(value)}
        if finite:
            with self._lock:
                self._run.log(finite)

    def log_best(self, *, step_time_s: float, placement: Path, timeline_png: Path | None = None) -> None:
        with _files_under(self._files):
            if timeline_png is not None:
                image = self._wandb.Image(str(timeline_png), caption=f"step {format_ms(step_time_s)} ms")
                with self._lock:
                    self._run.log({"place/timeline": image})
            artifact = self._wandb.Artifact(
                f"placement-{self._run.id}", type="placement", metadata={"step_time_s": step_time_s}
            )
            artifact.add_file(str(placement), name="placement.json")
            self._run.log_artifact(artifact)

    def log_picture(self, name: str, path: Path) -> None:
        with _files_under(self._files), self._lock:
            self._run.log({f"place/{name}": self._wandb.Image(str(path))})

    def log_table(self, rows: Sequence[Mapping[str, object]]) -> None:
        values = [[row.get(column) for column in TABLE_COLUMNS] for row in rows]
        cells = [[value if isinstance(value, str | int | float) else None for value in row] for row in values]
        with _files_under(self._files), self._lock:
            self._run.log({"table": self._wandb.Table(columns=list(TABLE_COLUMNS), data=cells)})

    def log_files(self, name: str, paths: Sequence[Path]) -> None:
        with _files_under(self._files):
            artifact = self._wandb.Artifact(f"{name}-{self._run.id}", type=name)
            for path in paths:
                artifact.add_file(str(path), name=path.name)
            self._run.log_artifact(artifact)

    def finish(self, *, is_complete: bool = True) -> None:
        with _files_under(self._files):
            self._run.finish(exit_code=0 if is_complete else 1)


def _refuse_hostile(run_dir: Path) -> None:
    """Refuses traps for wandb in a stranger's folder: links out of it, and settings that name a server."""
    refuse_link(run_dir / "wandb")
    if os.path.lexists(run_dir / ".wandb"):
        raise FileProblem(run_dir / ".wandb", "wandb would write here instead of in `wandb`: remove it.")
    for folder in (run_dir / "wandb", Path("wandb"), Path(".wandb")):
        if os.path.lexists(folder / "settings"):
            raise FileProblem(
                folder / "settings",
                "wandb may take its server from here: remove this file, or run in another folder; the settings in "
                "~/.config/wandb and variables such as WANDB_BASE_URL and WANDB_MODE count.",
            )


@contextmanager
def _files_under(folder: Path) -> Iterator[None]:
    """Keeps wandb's staged and cached files in `folder`, where the user has not said otherwise."""
    wanted = {"WANDB_DATA_DIR": folder / "data", "WANDB_CACHE_DIR": folder / "cache"}
    added = {name: str(path.resolve()) for name, path in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)

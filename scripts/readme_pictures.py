"""Draws the README's pictures from a run: python scripts/readme_pictures.py RUN [FOLDER]."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rlplace.report.drawing import save_field_png
from rlplace.report.html.page import write_report
from rlplace.session.session import Session
from rlplace.training.outputs import result_of

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
WIDTH, HEIGHT = 1180, 2100
"""Of the report's picture: its head, the table, the timeline and the placement."""
WAIT_MS, LONGEST_S = 20_000, 300


def picture_of(page: Path, path: Path) -> bool:
    """Writes what a browser shows of `page`, and says whether there is a browser."""
    browser = next((found for found in map(shutil.which, NAMES) if found), None)
    if browser is None:
        return False
    with tempfile.TemporaryDirectory() as profile:
        size = (f"--window-size={WIDTH},{HEIGHT}", f"--virtual-time-budget={WAIT_MS}")
        command = [browser, *FLAGS, f"--user-data-dir={profile}", *size, f"--screenshot={path}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_S)
    return True


def main(run: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Session.read(run) as session:
        title = f"One training step of {session.request.workload}, every method's placement in one race"
        save_field_png(folder / "field.png", result_of(session), title=title)
    shutil.copyfile(run / "timeline.png", folder / "timeline.png")
    print(f"wrote {folder / 'field.png'} and {folder / 'timeline.png'}")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(run, Path(scratch) / "run"))
        if picture_of(write_report(copy), folder / "report.png"):
            print(f"wrote {folder / 'report.png'}")
        else:
            print("no chromium here, so report.png stays as it is: apt-get install chromium", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURES)

"""`FreshRanks`: a job that all ranks of torchrun do together, each in a process of its own, which is gone afterwards.

Rank 0 starts it; the others do their part in threads of `serve`. So what a job leaves behind (connections, memory of
a GPU, default groups of `torch.distributed`) disappears with it, and one that crashes ends no process of torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import rlplace
from rlplace.errors import RunnerError
from rlplace.measure.hosts.nodes import Nodes
from rlplace.measure.timing.race import looks
from rlplace.process_settings import close_own, keep_from_children

JOBS = {
    "links": "from rlplace.measure.profiling.profile import links_main as main",
    "replicas": "from rlplace.compare.replicas import replica_main as main",
}
"""By name, the import of a function `main` of the job's options, which are plain data; other code is never run."""
_ENDS_WITHIN_S = 10.0
_LOOKS_EVERY_S = 0.2
LOST_AFTER_S = 20.0
"""A rank that gives no sign of itself for so long is lost."""
_COUNT, _FAILED = "jobs", "failed: "


class FreshRanks:
    """One job, seen by rank 0.

    Args:
        nodes: of rank 0.
        job: a name in `JOBS`.
        options: of every rank, as `main` takes them.

    Raises:
        OSError: the process of this rank cannot be started.
    """

    def __init__(self, nodes: Nodes, job: str, options: dict[str, Any] | None = None) -> None:
        self._nodes, self._job = nodes, job
        asked = json.dumps([job, options or {}])
        number = _number(nodes, _COUNT) + 1
        self._key = f"{_COUNT}/{number}"
        nodes.store.set(self._key, asked)
        nodes.store.set(_COUNT, str(number))
        self._signs = dict.fromkeys(range(1, nodes.num_ranks), (0, time.monotonic()))  # by rank: the last, and when
        self._process = _Process(asked)

    def tell(self, word: str) -> None:
        """Writes a line to the process of rank 0.

        Raises:
            RunnerError: it has ended.
        """
        try:
            self._process.words.write(f"{word}\n".encode())
            self._process.words.flush()
        except OSError as error:
            raise RunnerError(f"the {self._job} of rank 0 ended: {error}") from error

    def answer(self, within_s: float) -> Any:
        """What the process of rank 0 wrote, a line of JSON.

        Raises:
            RunnerError: a rank failed, or there is none in time.
        """
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.append(self._process.answers.readline()), daemon=True)
        reader.start()
        self._signs = {rank: (count, time.monotonic()) for rank, (count, _) in self._signs.items()}
        for _ in looks(within_s):
            reader.join(_LOOKS_EVERY_S)
            if not reader.is_alive():
                break
            self._look_for_signs()
            if self._nodes.store.check([f"{self._key}/failed"]):
                where = self._nodes.store.get(f"{self._key}/failed").decode()
                raise RunnerError(f"the {self._job} of {where}")
        else:
            raise RunnerError(f"the {self._job} of all ranks did not answer within {within_s:g} s")
        if said[0].startswith(_FAILED.encode()):
            raise RunnerError(f"the {self._job} of rank 0 {said[0].decode().strip()}")
        if not said[0]:
            raise RunnerError(f"the {self._job} of rank 0 ended with exit code {self._process.running.wait()}")
        return json.loads(said[0])

    def _look_for_signs(self) -> None:
        now_s = time.monotonic()
        for rank, (count, at_s) in self._signs.items():
            found = _number(self._nodes, f"{self._key}/signs/{rank}")
            if found > count:
                self._signs[rank] = found, now_s
            elif now_s > at_s + LOST_AFTER_S:
                where = f"rank {rank} on {self._nodes.facts[rank].machine!r}"
                raise RunnerError(
                    f"{where} gave no sign for {LOST_AFTER_S:g} s: its machine, or torchrun there, is gone"
                )

    def close(self) -> None:
        """Ends the job on all ranks."""
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._nodes.store.set(f"{self._key}/over", "1")
        self._process.close()


def serve(nodes: Nodes) -> None:
    """Has threads of any other rank take part in all jobs, until the command of rank 0 is over."""

    def follow() -> None:
        done = 0
        # torchrun's store is gone, which ends this process; or a value is not ours: this rank gives no more sign then
        with contextlib.suppress(RuntimeError, RunnerError):
            while not nodes.is_over:
                if _number(nodes, _COUNT) > done:
                    done += 1
                    threading.Thread(target=_take_part, args=(nodes, f"{_COUNT}/{done}"), daemon=True).start()
                time.sleep(_LOOKS_EVERY_S)

    threading.Thread(target=follow, name="rlplace jobs", daemon=True).start()


def _number(nodes: Nodes, key: str) -> int:
    """A number that one rank counts up in the store, where others cannot; 0 before it begins."""
    return int(nodes.store.get(key)) if nodes.store.check([key]) else 0


def _take_part(nodes: Nodes, key: str) -> None:
    store, signs = nodes.store, 0
    with (
        contextlib.suppress(RuntimeError, RunnerError),
        contextlib.closing(_Process(store.get(key).decode())) as process,
    ):
        while process.running.poll() is None and not store.check([f"{key}/over"]) and not nodes.is_over:
            signs += 1
            store.set(f"{key}/signs/{nodes.rank}", str(signs))
            time.sleep(_LOOKS_EVERY_S)
        if process.running.poll():
            said = process.answers.read().decode().partition(_FAILED)[2].strip()
            store.set(f"{key}/failed", f"{nodes.facts[nodes.rank].machine} {_FAILED}{said or 'see its messages'}")


_CODE = """
import os, runpy, sys
runpy.run_path({lifeline!r})["end_with"]({alive!r})
sys.path[:] = {path!r}
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
{job}
try:
    main(answers, **{options!r})
except Exception as error:
    from rlplace.errors import RlplaceError
    if not isinstance(error, RlplaceError):
        sys.excepthook(*sys.exc_info())
    print({failed!r} + f"{{type(error).__name__}}: {{error}}", file=answers, flush=True)
    os._exit(1)
"""
"""What libraries print does not come between the answers. Where it failed, nothing waits for connections to end."""


class _Process:
    """A fresh interpreter with the path of this one; nothing comes from the current folder, and it ends with this."""

    def __init__(self, asked: str) -> None:
        job, options = json.loads(asked)
        ours = Path(rlplace.__file__).parent
        others = (os.path.abspath(each) for each in sys.path if each)
        path = [str(ours.parent), *(each for each in others if each not in (str(ours.parent), os.getcwd()))]
        lifeline = str(ours / "measure" / "isolate" / "lifeline.py")
        alive, end = os.pipe()
        self._alive = keep_from_children(end)
        try:
            self.running = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c"),
                    _CODE.format(
                        lifeline=lifeline, alive=alive, path=path, job=JOBS[job], options=options, failed=_FAILED
                    ),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(alive,),
                env={**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"},  # none of these processes keeps a store
            )
        except BaseException:
            close_own(self._alive)
            raise
        finally:
            os.close(alive)
        assert self.running.stdin is not None
        assert self.running.stdout is not None
        self.words, self.answers = self.running.stdin, self.running.stdout

    def close(self) -> None:
        """Ends it; it has some time to do so itself."""
        with contextlib.suppress(OSError):
            self.words.close()
        if self.running.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.running.wait(_ENDS_WITHIN_S)
        self.running.kill()
        self.running.wait()
        self.answers.close()
        close_own(self._alive)

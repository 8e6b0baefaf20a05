"""`LearnerFile`: a learner's state in one file, from time to time, for a process that goes on with it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from rlplace.errors import FileProblem, InvalidValue
from rlplace.files import jsonable, parse_json, write_bytes_atomic
from rlplace.policy.learn.state import LearnerState, Resumable

EVERY_S = 5.0
"""So long at least between two writes ..."""
SHARE = 0.05
"""... and as long as keeps their share of the time below this."""
LARGEST_BYTES = 1 << 30
"""A larger file is not read: that of a policy with its optimizer has some ten megabytes."""
RECORDS = "records"
"""The tensor that holds the facts, as JSON: one file is written whole or not at all, two are not."""


class LearnerFile:
    """Keeps the state of a learner, and its policy's with it, and gives it to the next one of its kind.

    A learner that is not `Resumable` is left alone: it begins anew.

    Args:
        path: of the file, safetensors.
        is_resumed: whether a learner goes on from what is there; otherwise that is replaced.
        say: told what cannot be gone on from.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        path: Path,
        *,
        is_resumed: bool,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._is_resumed, self._say, self._clock = path, is_resumed, say, clock
        self._next_s = clock() + EVERY_S

    def restore(self, learner: object) -> None:
        """Puts a learner that was just made where the last one was, if that was of its kind."""
        begun = _state(learner) if self._is_resumed and self._path.is_file() else None
        if begun is None or not isinstance(learner, Resumable):
            return
        try:
            learner.load_state(self._read(type(learner).__name__))
        except FileProblem as error:
            self._say(f"warning: {error} The learner begins anew.")
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            learner.load_state(begun)
            self._say(f"warning: {self._path}: not the state of this learner ({error}). It begins anew.")

    def keep(self, learner: object) -> None:
        """Writes the learner's state, if the last time was long enough ago.

        Raises:
            FileProblem: the file cannot be written.
        """
        begin_s = self._clock()
        state = _state(learner) if begin_s >= self._next_s else None
        if state is None:
            return
        facts = {"learner": type(learner).__name__, "facts": dict(state.facts)}
        text = json.dumps(jsonable(facts), allow_nan=False).encode("utf-8")
        records = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        tensors = {name: tensor.detach().contiguous() for name, tensor in state.tensors.items()}
        write_bytes_atomic(self._path, save({RECORDS: records, **tensors}))
        self._next_s = self._clock() + max(EVERY_S, (self._clock() - begin_s) / SHARE)

    def _read(self, learner: str) -> LearnerState:
        try:
            if (size := self._path.stat().st_size) > LARGEST_BYTES:
                raise FileProblem(self._path, f"{size} bytes, expected at most {LARGEST_BYTES}.")
            tensors = load(self._path.read_bytes())
            text = tensors.pop(RECORDS).numpy().tobytes().decode("utf-8")
        except OSError as error:
            raise FileProblem(self._path, f"cannot be read: {error.strerror or error}.") from error
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FileProblem(self._path, f"not the state of a learner: {error}.") from error
        about = parse_json(text, self._path)
        if not isinstance(about, dict) or not isinstance(about.get("facts"), dict) or about.get("learner") != learner:
            raise FileProblem(self._path, f"not the state of a {learner}.")
        return LearnerState(tensors, about["facts"])


def _state(learner: object) -> LearnerState | None:
    """The state of a learner; None of one that cannot be gone on with."""
    if not isinstance(learner, Resumable):
        return None
    try:
        return learner.state()
    except InvalidValue:  # of a policy that does not say what it draws from
        return None

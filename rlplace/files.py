"""Files that are whole or not there: atomic writes, and JSON that is read with care."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from rlplace.errors import FileProblem

LARGEST_JSON_BYTES = 256 << 20
MOST_JSON_VALUES = 4_000_000
"""Values in a JSON text, about: one of brackets alone takes twenty times its size in memory, and a parser that finds no
more of it ends the process."""
MOST_GRAPH_VALUES = 20_000_000
"""In that of a graph, which may have a million ops."""
LARGEST_HEADER = 4 << 20
"""Bytes; of a safetensors file, 80 for each tensor, which takes a kilobyte in memory."""
PARTIAL_ENDING = ".partial"
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
"""A flag for opening: a stranger's folder could hold a link to any file of ours."""
_MOST_CHARACTERS = 80
_NO_FOLDER_SYNC = frozenset((errno.EINVAL, errno.ENOTSUP, errno.ENOSYS))
"""Errors of some network file systems for a folder: they have nothing to write there."""
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of one; two of them may be a character."""


@contextmanager
def os_errors(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """While active, an OSError becomes a `FileProblem` with the message that `path` cannot be read, written, ... (the
    verb is `what`)."""
    try:
        yield
    except OSError as error:
        raise FileProblem(path, f"cannot be {what}: {error.strerror or error}.") from error


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes `data` to `path`, whole or not at all: a failure or a kill at any moment leaves the old file.

    Raises:
        FileProblem: the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_ENDING}")
    with os_errors(path, "written"):
        try:
            with partial.open("xb") as file:
                _keep_mode(path, file.fileno())
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        _sync_folder(path.parent)


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` as UTF-8, whole or not at all.

    Raises:
        FileProblem: the file cannot be written.
    """
    write_bytes_atomic(path, text.encode("utf-8"))


def write_json_atomic(path: str | os.PathLike[str], data: object, *, indent: int | None = 2) -> None:
    """Writes `data` as JSON (see `jsonable`), whole or not at all.

    Raises:
        FileProblem: the file cannot be written.
        TypeError: `data` holds something that JSON has no word for; nothing is written.
    """
    separators = (",", ":") if indent is None else None
    text = json.dumps(jsonable(data), indent=indent, separators=separators, allow_nan=False, ensure_ascii=False)
    write_text_atomic(path, text + "\n")


def jsonable(data: object) -> object:
    """`data` as JSON can hold it: NaN and infinities as None, arrays and tuples as lists, paths as text.

    Example:
        >>> jsonable({"step_time_s": float("inf"), "samples_s": (0.5, 0.25)})
        {'step_time_s': None, 'samples_s': [0.5, 0.25]}
    """
    if isinstance(data, float):
        return float(data) if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: jsonable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [jsonable(value) for value in data]
    if isinstance(data, os.PathLike):
        return os.fspath(data)
    # arrays and scalars of NumPy and PyTorch, without importing either
    return jsonable(data.tolist()) if hasattr(data, "tolist") else data


def open_plain(path: str | os.PathLike[str], *, follows_links: bool = False) -> io.FileIO:
    """A regular file for reading, opened as `open_regular` does.

    Raises:
        OSError: it cannot be opened, is no regular file, or is a symbolic link and none is followed.
    """
    return io.FileIO(open_regular(path, os.O_RDONLY | (0 if follows_links else NO_LINK)), "rb")


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """The descriptor of a regular file, checked after it is opened, so that no pipe can take its place in between.

    A new one is this user's alone: whoever can open a file can lock it.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    flags |= getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def read_plain(
    path: str | os.PathLike[str], *, largest_bytes: int, holds: str, hint: str = "", follows_links: bool = False
) -> bytes:
    """The bytes of a regular file.

    Args:
        path: of the file.
        largest_bytes: a larger file is refused before it is read.
        holds: the kind of content, for messages.
        hint: a sentence that says which file is wanted, for messages.
        follows_links: whether a symbolic link leads to the file; a stranger's folder could lead to any file of yours.

    Raises:
        FileProblem: the file is missing, no regular file, too large, or a link and none is followed.
    """
    try:
        with open_plain(path, follows_links=follows_links) as file:
            size = os.fstat(file.fileno()).st_size
            if size > largest_bytes:
                raise FileProblem(path, f"{size} bytes of {holds}, expected at most {largest_bytes}.")
            return file.readall()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # the last: a path with a null character
        raise FileProblem(path, f"no such file. {hint}".rstrip()) from error
    except OSError as error:
        if not follows_links:
            refuse_link(path)
        if error.errno == errno.EINVAL:
            raise FileProblem(path, f"not a regular file, expected {holds}.") from error
        raise FileProblem(path, f"cannot be read: {error.strerror or error}.") from error


def check_header(data: bytes, path: str | os.PathLike[str]) -> None:
    """Refuses the bytes of a safetensors file whose header is long: a hundred megabytes may name a million tensors.

    Raises:
        FileProblem: it is longer than `LARGEST_HEADER`.
    """
    size = int.from_bytes(data[:8], "little")
    if size > LARGEST_HEADER:
        raise FileProblem(path, f"a header of {size} bytes, expected at most {LARGEST_HEADER}.")


def read_json(
    path: str | os.PathLike[str],
    *,
    largest_bytes: int = LARGEST_JSON_BYTES,
    most_values: int = MOST_JSON_VALUES,
    hint: str = "",
    follows_links: bool = True,
) -> Any:
    """The object of a JSON file; reading runs no code.

    Args:
        path: of a regular file.
        largest_bytes: a larger file is refused before it is read.
        most_values: more values are refused before they are parsed.
        hint: a sentence that says which file is wanted, for messages.
        follows_links: whether a symbolic link leads to the file, as in `read_plain`.

    Raises:
        FileProblem: the file is missing, too large, not UTF-8 or not JSON: NaN, a key given twice, nested too deeply.
    """
    data = read_plain(path, largest_bytes=largest_bytes, holds="JSON", hint=hint, follows_links=follows_links)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileProblem(path, f"not UTF-8 text ({error.reason} at byte {error.start}), expected JSON.") from error
    return parse_json(text, path, most_values=most_values, hint=hint)


def check_values(text: str, path: str | os.PathLike[str], most: int = MOST_JSON_VALUES) -> None:
    """Refuses a JSON text that holds many values, before a parser makes an object of each.

    Raises:
        FileProblem: there are more than that.
    """
    if sum(map(text.count, ",[{")) > most:
        raise FileProblem(path, f"JSON with too many values, expected at most {most:,}.")


def parse_json(text: str, path: str | os.PathLike[str], *, most_values: int = MOST_JSON_VALUES, hint: str = "") -> Any:
    """The object of the JSON text of the file `path`; `most_values` and `hint` as of `read_json`.

    Raises:
        FileProblem: it is not JSON (NaN, a key given twice, half a character, nested too deeply), or too much of it.
    """
    check_values(text, path, most_values)
    try:
        data = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
        if _HALF_CHARACTER.search(text):
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise FileProblem(path, f"not usable JSON: a text in it is no Unicode. {hint}".rstrip()) from error
    except ValueError as error:
        raise FileProblem(path, f"not valid JSON: {error}. {hint}".rstrip()) from error
    except RecursionError as error:
        raise FileProblem(path, f"not usable JSON: nested too deeply. {hint}".rstrip()) from error
    except MemoryError as error:
        raise FileProblem(path, "JSON that this machine has too little memory for.") from error
    return data


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder `rlplace` in the user's cache folder (XDG base directory rules); it need not be there yet.

    Args:
        environ: environment variables.

    Raises:
        FileProblem: the user's folders are not known.
    """
    named = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the rules: a path that is not absolute is to be ignored
        return Path(named) / "rlplace"
    try:
        return Path.home() / ".cache" / "rlplace"
    except RuntimeError as error:
        raise FileProblem("~/.cache", "no home folder is known: set XDG_CACHE_HOME.") from error


def refuse_link(path: str | os.PathLike[str]) -> None:
    """Refuses a symbolic link where a file of a run goes: a stranger's folder could lead to any file of yours.

    Raises:
        FileProblem: `path` is one.
    """
    if os.path.islink(path):
        raise FileProblem(path, "a symbolic link, expected a regular file: put a copy of what it leads to there.")


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key[:_MOST_CHARACTERS]!r} is given twice")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _keep_mode(path: Path, descriptor: int) -> None:
    """Takes from a new file the permissions that the file which it replaces does not have."""
    with suppress(OSError):
        old, new = os.lstat(path).st_mode, stat.S_IMODE(os.fstat(descriptor).st_mode)
        if stat.S_ISREG(old) and os.name == "posix" and new & ~old:
            os.fchmod(descriptor, new & old)


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power cut."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)

"""`SignedStore`: torchrun's store, in which each value proves that a process of this run wrote it.

torchrun's store listens on all interfaces and asks nobody who they are: whoever reaches its port reads and writes every
key. So a secret must come from elsewhere (`own_secret`), and what ranks tell each other carries a code under it
(HMAC-SHA256, RFC 2104) over the key and the value: no value can be changed, or copied from one key to another,
unnoticed. A stranger can still delete what is there, which ends the run.

gloo and NCCL keep their addresses in this store, too. What then flows between these addresses is neither signed nor
encrypted: that is theirs.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar

from torch._C._distributed_c10d import Store

from rlplace.errors import InvalidValue, RunnerError

SECRET = "RLPLACE_SECRET"
"""Variable of the environment, which other users of a machine cannot read, as they can a command line."""
LEAST_CHARACTERS = 32
HINT = (
    f"Ranks that do not run as one user of one machine need the same {SECRET} on each: write one once "
    "(umask 077; openssl rand -hex 32 > secret), copy the file, and start torchrun everywhere after "
    f"export {SECRET}=$(cat secret)."
)
_CODE_BYTES = 32
_FILE = re.compile(r"[0-9]{1,10}/fd/[0-9]{1,10}", re.ASCII)
_SECRET = re.compile(rb"[0-9a-f]{64}")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""Of a `Gift`: no file of a folder has them, and nothing can be written into what has them."""


class SignedStore(Store):
    """A store of `torch.distributed` over another one, whose values are signed; counters of `add` are not.

    Args:
        store: where the values are.
        secret: of the ranks that share them.
    """

    _all: ClassVar[list[SignedStore]] = []  # what PyTorch makes of one holds its C++ half alone

    def __init__(self, store: Store, secret: bytes) -> None:
        super().__init__()
        self._store, self._key = store, derived(secret, "store")
        self._all.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, code(self._key, key, data) + data)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there.

        Raises:
            RunnerError: no process of this run wrote it.
            RuntimeError: the store is gone, or the value does not come.
        """
        told = bytes(self._store.get(key))
        given, data = told[:_CODE_BYTES], told[_CODE_BYTES:]
        if not hmac.compare_digest(given, code(self._key, key, data)):
            raise RunnerError(
                f"the value of {key!r} in torchrun's store was not written by this run: another process that reaches "
                "the store changed it (docs/machines.md, Who may connect)"
            )
        return data

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there; a value that no process of this run wrote is an error, as of `get`."""
        return bool(self._store.check(list(keys))) and all(self.get(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(list(keys), *([] if timeout is None else [timeout]))

    def add(self, key: str, amount: int) -> int:
        """A counter of `torch.distributed` itself; anyone may change it."""
        return self._store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


def derived(secret: bytes, use: str) -> bytes:
    """A secret for one use alone: what is proved in one protocol proves nothing in another."""
    return hmac.digest(secret, use.encode(), "sha256")


def code(secret: bytes, key: str, value: bytes) -> bytes:
    """The proof that who wrote the value of a key knows the secret."""
    name = key.encode()
    return hmac.digest(secret, len(name).to_bytes(8) + name + value, "sha256")


class Gift:
    """A secret for the other ranks of this machine and user, in a file of the memory that has no name in any folder.

    They open it through `/proc`, where only this user can; from another network namespace, too. When this process
    ends, in any way, it is gone.

    Attributes:
        place: where, for the others.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_hex(_CODE_BYTES).encode()
        self._file = os.memfd_create("rlplace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._file, 0o600)
        os.write(self._file, self.secret)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        self.place = f"{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        os.close(self._file)

    @staticmethod
    def taken(place: str) -> bytes | None:
        """The secret of a place that anyone may have told; None where there is none of this user.

        A stranger may tell the place of any private file of this user whose beginning is known: only a gift counts.
        """
        if not _FILE.fullmatch(place):
            return None
        try:
            file = os.open(f"/proc/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
            is_gift = is_ours and fcntl.fcntl(file, fcntl.F_GET_SEALS) == _SEALS
            secret = os.pread(file, found.st_size, 0) if is_gift else b""
        except OSError:  # a file without seals
            return None
        finally:
            os.close(file)
        return secret if _SECRET.fullmatch(secret) else None


def own_secret() -> bytes | None:
    """The secret that the environment gives; None without one.

    Raises:
        InvalidValue: it is short.
    """
    given = os.environ.get(SECRET)
    if given is None:
        return None
    if len(given) < LEAST_CHARACTERS:
        raise InvalidValue(SECRET, f"{len(given)} characters", f"at least {LEAST_CHARACTERS} random ones", hint=HINT)
    return os.fsencode(given)


def keep_secret(secret: bytes) -> None:
    """Has every process that this one starts know the secret: workers, and jobs in fresh processes."""
    os.environ[SECRET] = os.fsdecode(secret)

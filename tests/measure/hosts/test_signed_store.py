"""What ranks tell each other through a store of everybody: no change goes unnoticed, and the secret is not in it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from many_ranks import at_once
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import HashStore, ProcessGroupGloo, TCPStore

from rlplace.errors import InvalidValue, RunnerError
from rlplace.measure.hosts import nodes, signed_store
from rlplace.measure.hosts.signed_store import SECRET, Gift, SignedStore, own_secret

KEY = b"k" * 32
NOBODY = 65534
PEEK = """
import os, sys
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
try:
    print(len(open("/proc/" + sys.argv[1], "rb").read()))
except PermissionError:
    print("refused")
"""


@pytest.fixture(autouse=True)
def without_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "")
    monkeypatch.delenv(SECRET)


def test_values_that_a_stranger_changed_copied_or_made_are_refused() -> None:
    plain = HashStore()
    store = SignedStore(plain, KEY)
    store.set("port", "4711")
    assert store.get("port") == b"4711"
    assert store.check(["port"])
    assert not store.check(["port", "none"])
    for forged in (b"4712", b"", plain.get("port")[:-1] + b"2", b"\0" * 36):
        plain.set("port", forged)
        for read in (store.get, lambda key: store.check([key])):
            with pytest.raises(RunnerError, match=r"'port' in torchrun's store was not written by this run"):
                read("port")
    store.set("a", "1")
    plain.set("b", plain.get("a"))
    with pytest.raises(RunnerError, match="'b'"):
        store.get("b")


def test_a_key_below_another_prefix_is_another_key() -> None:
    plain = HashStore()
    one, other = (PrefixStore(name, SignedStore(plain, KEY)) for name in ("one", "other"))
    one.set("port", "4711")
    assert one.get("port") == b"4711"
    plain.set("other/port", plain.get("one/port"))
    with pytest.raises(RunnerError, match="'other/port'"):
        other.get("port")


def groups(store: Any, between: Any = lambda: None) -> list[Any]:
    def rank(number: int) -> Any:
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=20)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = ProcessGroupGloo(PrefixStore("pair", SignedStore(store, KEY)), number, 2, options)
        row = torch.full((2,), float(number))
        group.allreduce([row]).wait()
        return row.tolist()

    return at_once([lambda: rank(0), lambda: rank(1)])


def test_gloo_finds_its_ranks_through_it() -> None:
    assert groups(HashStore()) == [[1.0, 1.0]] * 2


def test_gloo_goes_to_no_address_that_a_stranger_wrote() -> None:
    class Changed(HashStore):  # type: ignore[misc]
        """A store in which someone writes other addresses."""

        def get(self, key: str) -> bytes:
            return bytes(super().get(key))[:-1] + b"!"

    with pytest.raises(RunnerError, match="in torchrun's store was not written by this run"):
        groups(Changed())


def test_processes_of_this_user_take_the_secret_and_others_cannot() -> None:
    gift = Gift()
    try:
        assert Gift.taken(gift.place) == gift.secret
        if os.geteuid() != 0:
            pytest.skip("only root can be another user")
        told = [sys.executable, "-c", PEEK.format(uid=NOBODY), gift.place]
        assert subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip() == "refused"
    finally:
        gift.close()
    assert Gift.taken(gift.place) is None


@pytest.mark.parametrize(
    "place", ["../etc/hostname", "1/../self/fd/0", "self/fd/0", "1/fd/0\n", "", "١/fd/0", "9" * 12]
)
def test_a_place_that_is_no_descriptor_is_not_opened(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any) -> int:
        raise AssertionError("opened")

    monkeypatch.setattr(os, "open", opened)
    assert Gift.taken(place) is None


@pytest.mark.parametrize("wrong", ["mode", "seals", "letters", "length", "a file of a folder"])
def test_only_a_gift_is_a_secret(wrong: str, tmp_path: Path) -> None:
    """A stranger may tell the place of any private file of this user whose beginning it knows, as of a lock."""
    file = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    if wrong == "a file of a folder":
        file = os.open(tmp_path / "nohup.out", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(file, b"z" * 64 if wrong == "letters" else b"a" * (65 if wrong == "length" else 64))
    os.fchmod(file, 0o640 if wrong == "mode" else 0o600)
    if wrong not in ("seals", "a file of a folder"):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, signed_store._SEALS)
    try:
        assert Gift.taken(f"{os.getpid()}/fd/{file}") is None
    finally:
        os.close(file)


def both(store: Any) -> list[BaseException | tuple[str, bytes]]:
    """What two ranks of unlike machines find, or the error of each."""

    def caught(job: Any) -> Any:
        try:
            return job()
        except (InvalidValue, RunnerError) as error:
            return error

    return at_once(
        [lambda: caught(lambda: nodes._welcome_all(store, 2)), lambda: caught(lambda: nodes._await_welcome(store, 1))]
    )


def test_ranks_of_several_machines_need_a_secret_and_are_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gift, "taken", staticmethod(lambda place: None))  # as on another machine
    for error in both(HashStore()):
        assert isinstance(error, InvalidValue)
        assert f"{SECRET} is 'another, or none, of rank 1'" in str(error)
        assert "openssl rand" in str(error)
        assert "\n" not in str(error)


def test_ranks_with_one_secret_meet_and_those_with_two_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "s" * 40)
    one, other = both(HashStore())
    assert one == other
    assert isinstance(one, tuple)
    assert one[1] == b"s" * 40
    given = iter([b"s" * 40, b"t" * 40])
    monkeypatch.setattr(signed_store, "own_secret", lambda: next(given))
    assert all(isinstance(error, InvalidValue) for error in both(HashStore()))


def test_a_welcome_of_someone_else_is_no_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "s" * 40)

    class Answering(HashStore):  # type: ignore[misc]
        """A store in which a stranger answers first."""

        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            if key.startswith("rlplace/hello/"):
                super().set(f"rlplace/welcome/{value}", '["feedfacefeedface", "", "00"]')

    with pytest.raises(InvalidValue, match=SECRET):
        nodes._await_welcome(Answering(), 1)


@pytest.mark.parametrize("answer", ["", "{", "[1, 2]", "7", '["a", "b", "\u00e9"]', "[" * 20_000])
def test_a_welcome_that_is_none_is_one_line(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "s" * 40)
    plain = HashStore()
    monkeypatch.setattr(nodes.secrets, "token_hex", lambda _: "word")
    plain.set("rlplace/welcome/word", answer)
    with pytest.raises((InvalidValue, RunnerError), match=r"RLPLACE_SECRET|not written by this run"):
        nodes._await_welcome(plain, 1)


def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "password")
    with pytest.raises(InvalidValue, match=r"RLPLACE_SECRET is '8 characters', expected at least 32"):
        own_secret()


def test_the_secret_is_in_no_value_of_the_store() -> None:
    told: list[bytes] = []

    class Listening(HashStore):  # type: ignore[misc]
        def set(self, key: str, value: str | bytes) -> None:
            told.append(value.encode() if isinstance(value, str) else value)
            super().set(key, value)

    one, other = both(Listening())
    assert one == other
    assert isinstance(one, tuple)
    assert told
    assert not any(one[1] in value or bytes.fromhex(one[1].decode()) in value for value in told)


def test_a_store_of_torchrun_is_signed_over_the_network() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    SignedStore(server, KEY).set("a", "1")
    assert SignedStore(client, KEY).get("a") == b"1"
    client.set("a", b"2")
    with pytest.raises(RunnerError, match="'a'"):
        SignedStore(server, KEY).get("a")

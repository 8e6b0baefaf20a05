"""`Cluster` on nodes of this machine: work is spread, and what is lost or stands still is done elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray_nodes import ended, processes_of, ray_nodes

from rlplace.cluster import Cluster, check_cluster
from rlplace.cluster.cluster import address_of
from rlplace.errors import InvalidValue, MissingExtra, RunnerError


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with ray_nodes() as started:
        yield started


@pytest.fixture(scope="module")
def cluster(nodes: Any) -> Iterator[Cluster]:
    with Cluster.connect(nodes.address) as connected:
        yield connected


def test_it_knows_its_nodes(cluster: Cluster) -> None:
    assert [node.is_here for node in cluster.nodes] == [True, False]
    assert [node.num_cpus for node in cluster.nodes] == [1.0, 1.0]
    assert cluster.num_workers == 2


def test_every_item_comes_back_with_its_index(cluster: Cluster) -> None:
    def double(item: int) -> int:
        return 2 * item

    assert sorted(cluster.map(double, range(10, 15))) == [(0, 20), (1, 22), (2, 24), (3, 26), (4, 28)]
    assert list(cluster.map(double, [])) == []


def test_items_run_on_both_nodes_at_once(cluster: Cluster, tmp_path: Path) -> None:
    def meet(item: int) -> str:
        import ray

        (tmp_path / str(item)).touch()
        deadline_s = time.monotonic() + 60.0
        while not (tmp_path / str(1 - item)).exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return str(ray.get_runtime_context().get_node_id())

    assert {node for _, node in cluster.map(meet, [0, 1])} == {node.id for node in cluster.nodes}


def test_an_error_is_the_functions_own_and_says_which_item(cluster: Cluster) -> None:
    def fail(item: int) -> int:
        from rlplace.errors import InvalidValue

        if item == 2:
            raise InvalidValue("item", item, "another one", where="here")
        return item

    with pytest.raises(InvalidValue, match="here: item is 2, expected another one") as caught:
        dict(cluster.map(fail, range(3)))
    assert caught.value.actual == 2
    assert "item 2" in caught.value.__notes__[0]
    assert sorted(cluster.map(fail, [5])) == [(0, 5)]  # the cluster is as good as before


def test_an_item_that_ends_its_worker_again_and_again_is_an_error(cluster: Cluster) -> None:
    def die(item: int) -> None:
        os._exit(3)

    with pytest.raises(RunnerError, match="item 0 could not be done"):
        dict(cluster.map(die, [0]))


def test_an_item_whose_worker_is_killed_is_done_again(cluster: Cluster, tmp_path: Path) -> None:
    def die_once(item: int) -> int:
        if item == 1 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert sorted(cluster.map(die_once, range(4))) == [(k, k) for k in range(4)]


def test_an_item_that_stands_still_is_run_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    def stand_still(item: int) -> int:
        if item == 0 and not (tmp_path / "still").exists():
            (tmp_path / "still").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return item

    try:
        assert sorted(cluster.map(stand_still, range(4), backup_least_s=0.5)) == [(k, k) for k in range(4)]
    finally:
        os.kill(int((tmp_path / "still").read_text()), signal.SIGCONT)


def test_leaving_early_cancels_what_runs(cluster: Cluster, tmp_path: Path) -> None:
    def wait(item: int) -> int:
        time.sleep(600.0 * item)
        return item

    found = cluster.map(wait, [0, 1])
    assert next(found) == (0, 0)
    found.close()
    assert sorted(cluster.map(wait, [0, 0])) == [(0, 0), (1, 0)]  # both CPUs are free again


def test_workers_import_rlplace_before_pytorch_and_arrays_come_back(cluster: Cluster) -> None:
    from functools import partial

    from search_problems import tight_problem

    from rlplace.measure.simulate.simulator import Simulator

    def spin(of: object, item: int) -> tuple[str, np.ndarray]:
        assert of is not None
        return os.environ.get("GOMP_SPINCOUNT", ""), np.zeros(item)

    ((_, (count, array)),) = cluster.map(partial(spin, Simulator(tight_problem(6, 2), threads=1)), [3])
    assert (count, array.tolist()) == ("3000", [0.0, 0.0, 0.0])


def test_a_lost_node_costs_no_item(nodes: Any, cluster: Cluster, tmp_path: Path) -> None:
    def note(item: int) -> int:
        (tmp_path / f"{item}-{os.getpid()}").touch()
        time.sleep(0.3)
        return item

    (other,) = nodes.worker_nodes
    found = []
    for index, result in cluster.map(note, range(8)):
        if not found:
            nodes.remove_node(other, allow_graceful=False)
        found.append((index, result))
    assert sorted(found) == [(k, k) for k in range(8)]
    nodes.wait_for_nodes(timeout=120)
    assert cluster.num_workers == 1
    nodes.add_node(num_cpus=1)
    assert cluster.num_workers == 2


@pytest.mark.slow
def test_auto_starts_a_cluster_that_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import signal\n"
        "from rlplace.cluster import Cluster\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "handler = signal.getsignal(signal.SIGTERM)\n"
        "with Cluster.connect('auto', say=print) as cluster:\n"
        "    assert signal.getsignal(signal.SIGTERM) is handler\n"
        "    print(sorted(cluster.map(abs, [-1, -2])))\n"
    )
    folder = Path(f"/tmp/rlp{os.getpid()}")  # sockets need a short path
    environ = {**os.environ, "RAY_TMPDIR": str(folder), "RAY_ADDRESS": "", "HOME": str(tmp_path)}
    environ["RAY_AUTH_MODE"] = "disabled"  # as versions of Ray are by themselves
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=120)
    try:
        assert done.returncode == 0, done.stderr
        assert "started a Ray cluster on this machine " in done.stdout
        assert "[(0, 1), (1, 2)]" in done.stdout
        assert done.stderr == ""
        assert ended(str(folder)), processes_of(str(folder))
        assert (tmp_path / ".ray" / "auth_token").read_text(), "it asks for a secret"
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.parametrize("word", ["nowhere", "host:", ":6379", "ray://127.0.0.1:10001", "http://a:1", "a:b"])
def test_a_word_that_is_no_address_is_refused(word: str) -> None:
    with pytest.raises(InvalidValue, match=r"cluster is .*, expected HOST:PORT"):
        check_cluster(word)


def test_an_address_where_nobody_listens_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidValue, match="ray start --head"):
        check_cluster("127.0.0.1:1")


def test_auto_is_the_environments_then_what_was_started_here(tmp_path: Path, cluster: Cluster) -> None:
    assert address_of("auto", {"RAY_ADDRESS": cluster.address}) == cluster.address
    noted = tmp_path / "ray" / "ray_current_cluster"
    noted.parent.mkdir()
    noted.write_text(cluster.address)
    assert address_of("auto", {"RAY_TMPDIR": str(tmp_path)}) == cluster.address
    assert address_of("auto", {"RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": "local"}) is None
    noted.write_text("127.0.0.1:1")  # it has ended
    assert address_of("auto", {"RAY_TMPDIR": str(tmp_path)}) is None
    noted.write_bytes(b"\xff\xfe")
    assert address_of("auto", {"RAY_TMPDIR": str(tmp_path)}) is None


@pytest.mark.parametrize("kind", ["link", "pipe", "second name", "of others"])
def test_what_somebody_else_may_have_noted_is_not_joined(kind: str, tmp_path: Path) -> None:
    noted, own = tmp_path / "ray" / "ray_current_cluster", tmp_path / "own"
    noted.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as head:
        own.write_text(f"127.0.0.1:{head.getsockname()[1]}")
        shutil.copy(own, noted)
        assert address_of("auto", {"RAY_TMPDIR": str(tmp_path)}) == own.read_text()
        head.accept()[0].close()
        noted.unlink()
        if kind == "link":
            noted.symlink_to(own)
        elif kind == "pipe":
            os.mkfifo(noted)
        elif kind == "second name":
            noted.hardlink_to(own)
        else:
            shutil.copy(own, noted)
            noted.chmod(0o646)
        assert address_of("auto", {"RAY_TMPDIR": str(tmp_path)}) is None


def test_a_ray_without_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.51.1"))
    with pytest.raises(RunnerError, match=r"Ray 2\.51\.1 is installed, expected 2\.52 or later"):
        check_cluster("auto")


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"rlplace\[cluster\]"):
        check_cluster("auto")


def test_a_broken_ray_is_said_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('libray.so: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RunnerError, match=r"cannot be imported \(libray.so: .*\): install it anew"):
        check_cluster("auto")


@pytest.mark.slow
def test_importing_the_room_imports_neither_ray_nor_torch() -> None:
    code = "import sys, rlplace.cluster; print({'ray', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"

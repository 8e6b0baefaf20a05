"""Runs a Python program under torchrun on two machines that are not there: network namespaces with a link of some rate.

    python scripts/two_machines.py --rate 200mbit -- -m rlplace train nmt@small --host nodes --budget 60

The machines are called a (rank 0, 10.77.0.1) and b (10.77.0.2); they reach each other and nothing else. It needs root,
`ip`, `tc` and `unshare` (Linux). Namespaces and processes are gone at the end, also after Ctrl-C or a time-out. The
exit code is the first one that is not 0; 77 where this system cannot do it.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

PROGRAMS = ("ip", "tc", "unshare", "taskset")
SKIPPED = 77
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PORT = 29400
UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}


def why_not() -> str:
    """Why this system cannot make namespaces; empty where it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "this needs root"
    probe = f"rlplace-{os.getpid()}-probe"
    made = subprocess.run(("ip", "netns", "add", probe), capture_output=True, text=True, check=False)
    subprocess.run(("ip", "netns", "del", probe), capture_output=True, check=False)
    return made.stderr.strip() if made.returncode else ""


def run(*words: str) -> None:
    subprocess.run(words, check=True)


@contextlib.contextmanager
def two_namespaces(rate: str) -> Iterator[dict[str, str]]:
    """The names of two network namespaces, a link of that rate between them, by the name of the machine."""
    names = {machine: f"rlplace-{os.getpid()}-{machine}" for machine in ADDRESSES}
    try:
        for name in names.values():
            run("ip", "netns", "add", name)
        peer = ("peer", "name", "net-b", "netns", names["b"])
        run("ip", "link", "add", "net-a", "netns", names["a"], "type", "veth", *peer)
        for machine, name in names.items():
            run("ip", "-n", name, "addr", "add", f"{ADDRESSES[machine]}/24", "dev", f"net-{machine}")
            for device in ("lo", f"net-{machine}"):
                run("ip", "-n", name, "link", "set", device, "up")
            shape(name, f"net-{machine}", rate)
        yield names
    finally:
        for name in names.values():
            found = subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True, check=False).stdout
            for pid in found.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(("ip", "netns", "del", name), check=False, stderr=subprocess.DEVNULL)


def shape(namespace: str, device: str, rate: str) -> None:
    """Limits what a device sends."""
    unit = next((each for each in UNITS if rate.endswith(each)), "")
    bits_per_s = float(rate.removesuffix(unit)) * UNITS.get(unit, 1.0)
    burst = max(int(bits_per_s / 8 * 1e-3), 32 << 10)  # of a millisecond: what comes in one piece is not limited
    bucket = ("rate", rate, "burst", str(burst), "latency", "50ms")
    run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def command(namespace: str, machine: str, cores: str, words: list[str], options: argparse.Namespace) -> list[str]:
    """Of torchrun on one machine."""
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', machine]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--node-rank", str(list(ADDRESSES).index(machine)), "--nproc-per-node", str(options.ranks)]
    torchrun += ["--master-addr", ADDRESSES["a"], "--master-port", str(PORT), "--max-restarts", str(options.restarts)]
    module = words[: words[0] == "-m"]
    words = words[len(module) + (words[len(module)] == "--") :]  # torchrun takes no option behind its own `--`
    return ["ip", "netns", "exec", namespace, *named, "taskset", "--cpu-list", cores, *torchrun, *module, "--", *words]


def environment() -> dict[str, str]:
    """Of torchrun: interfaces that are named here are not there."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **kept}  # it would look for names of addresses


def later(when: str, names: dict[str, str]) -> threading.Thread:
    """Runs the shell command of `--at` when its time has come; A and B are the namespaces there."""
    seconds, _, line = when.partition(":")

    def wait() -> None:
        time.sleep(float(seconds))
        print(f"after {seconds} s: {line}", file=sys.stderr, flush=True)
        subprocess.run(line, shell=True, check=False, env={**os.environ, "A": names["a"], "B": names["b"]})

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of the link, in each direction, as `tc` reads it")
    parser.add_argument("--ranks", type=int, default=1, help="processes on each machine")
    parser.add_argument("--cores", nargs=2, default=["0", "1"], metavar=("A", "B"), help="cores of each machine")
    parser.add_argument("--restarts", type=int, default=0, help="of torchrun")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which all is ended")
    parser.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="SECONDS:COMMAND",
        help="run a shell command then, outside; $A and $B are the namespaces: 9:ip -n $B link set net-b down",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help="-- and then as behind `torchrun`")
    options = parser.parse_args()
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if why := why_not():
        print(f"two_machines: no network namespaces here: {why}", file=sys.stderr)
        return SKIPPED
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    until_s = time.monotonic() + options.limit
    with two_namespaces(options.rate) as names:
        processes = [
            subprocess.Popen(
                command(names[machine], machine, cores, words, options),
                stdout=None if machine == "a" else sys.stderr,
                env=environment(),
                start_new_session=True,
            )
            for machine, cores in zip(ADDRESSES, options.cores, strict=True)
        ]
        for when in options.at:
            later(when, names)
        try:
            codes = [process.wait(max(until_s - time.monotonic(), 0.0)) for process in processes]
        except subprocess.TimeoutExpired:
            print(f"two_machines: ended after {options.limit:g} s", file=sys.stderr)
            return 124
        except KeyboardInterrupt:
            for process in processes:
                process.terminate()
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10.0)
            return 130
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())

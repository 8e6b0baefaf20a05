"""`rlplace`: parses the command line, runs the command, turns errors into exit codes.

`--help` shows everyday options, `--help-all` every one: which are left out, and how.
"""

from __future__ import annotations

import _thread
import dataclasses
import errno
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from threading import Event
from types import FrameType
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.extras import SubcommandApp

from rlplace import __version__
from rlplace.cli.knowledge import doctor, hosts, measurements, workloads
from rlplace.cli.option_groups import only_json_on_stdout, options_given
from rlplace.cli.runs import explain, export, place, report, train
from rlplace.cli.workload import advise, compare, fidelity, graph, measure, simulate
from rlplace.errors import RlplaceError, UserError
from rlplace.measure.hosts.nodes import join, under_torchrun
from rlplace.say import say

DESCRIPTION = "Finds where each op of a PyTorch model should run so that the measured step is shortest."

COMMANDS: dict[str, Callable[..., Any]] = {
    "advise": advise,
    "train": train,
    "place": place,
    "report": report,
    "explain": explain,
    "export": export,
    "compare": compare,
    "simulate": simulate,
    "measure": measure,
    "measurements": measurements,
    "fidelity": fidelity,
    "hosts": hosts,
    "workloads": workloads,
    "graph": graph,
    "doctor": doctor,
}

MOVED = {
    "pretrain": "scripts/pretrain.py FOLDER",
    "fit-priors": "benchmarks/fit_priors.py RUN...",
    "bench": "benchmarks/simulator.py",
}
"""Commands of earlier versions, and the programs of the repository that do their work."""

REFUSED_ALLOCATION = ("not enough memory", "can't allocate memory", "out of memory")
"""Words of a refused allocation of PyTorch's, which is a `RuntimeError`."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk that is full or broken: a failure, also where a file that the user named could not be written."""
FULL_DATABASE = ("SQLITE_FULL", "SQLITE_IOERR")
AGAIN_S = 0.05
"""After how long a Ctrl-C that was lost comes again."""

HELP, HELP_ALL = ("--help", "-h"), "--help-all"


def _app(commands: Mapping[str, Callable[..., Any]]) -> SubcommandApp:
    made = SubcommandApp()
    for name, command in commands.items():
        made.command(name=name)(command)
    return made


app = _app(COMMANDS)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `rlplace ARGV`: 0, 2 for a mistake of the user's, 1 for a failure, 130 and 143 for signals.

    Ctrl-C gives 130, SIGTERM 143.
    """
    code = 0
    try:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (*FULL, errno.EROFS, errno.EPIPE):
            raise
        if code == 0 and error.errno != errno.EPIPE:  # nobody reads what is piped into `head` to its end
            what = "the output cannot be written" if error.filename is None else f"{error.filename} cannot be used"
            with suppress(OSError):  # stderr may be full, too
                say(f"rlplace: failed: {what}: {error.strerror}.")
        for stream in filter(None, (sys.stdout, sys.stderr)):
            try:
                stream.flush()
            except OSError:  # at its end the interpreter would try again, and say so
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return code or 1
    return code


def _run(arguments: list[str]) -> int:
    """The exit code of a command, whose errors are said."""
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"rlplace {__version__}")
        return 0
    if arguments and arguments[0] in MOVED:
        moved = f"`rlplace {arguments[0]}` is a program of the repository now: python {MOVED[arguments[0]]}"
        say(f"rlplace: error: {moved}")
        return 2
    if under_torchrun() and os.environ["RANK"] != "0":
        return _follow(arguments)
    terminated, parser = Event(), app
    if HELP_ALL in arguments:
        arguments = [HELP[0] if word == HELP_ALL else word for word in arguments]
    elif arguments and arguments[0] in COMMANDS and not {*HELP}.isdisjoint(arguments):
        parser = _app(COMMANDS | {arguments[0]: shortened(COMMANDS[arguments[0]])})
    try:
        with (
            _sigterm_as_ctrl_c(terminated),
            _no_interrupt_lost(),
            options_given(arguments),
            only_json_on_stdout() if "--json" in arguments else nullcontext(),
            _with_others() if under_torchrun() else nullcontext(),
        ):
            parser.cli(
                prog="rlplace",
                description=DESCRIPTION,
                args=arguments or ["--help"],
                use_underscores=False,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except (RlplaceError, TimeoutError) as error:  # or a step or a thread of ours did not end in time
        cause = error.__cause__
        is_full = getattr(cause, "errno", 0) in FULL or getattr(cause, "sqlite_errorname", "").startswith(FULL_DATABASE)
        kind, code = ("error", 2) if isinstance(error, UserError) and not is_full else ("failed", 1)
        said, notes = f"{kind}: {str(error) or type(error).__name__}", getattr(error, "__notes__", ())
        is_open = notes and not said.endswith(".")
        say(" ".join((f"rlplace: {said}{'.' if is_open else ''}", *notes)))
        return code
    except KeyboardInterrupt:
        print(f"rlplace: {'terminated' if terminated.is_set() else 'interrupted'}", file=sys.stderr)
        return 143 if terminated.is_set() else 130
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or any(words in str(error) for words in REFUSED_ALLOCATION)):
            raise
        asked = next((line for line in str(error).splitlines() if line.strip()), "an allocation was refused")
        say(
            f"rlplace: failed: this machine's memory does not suffice: {asked}. Take a smaller workload or smaller "
            "sizes (a run that goes on takes those that it was started with), or free memory."
        )
        return 1
    return 0


@contextmanager
def _with_others() -> Iterator[None]:
    """While active, the other ranks of torchrun work for this one; they end then."""
    nodes = join()
    try:
        yield
    except BaseException as error:
        nodes.end(has_failed=not isinstance(error, SystemExit) or bool(error.code))
        raise
    nodes.end()


def _follow(arguments: Sequence[str]) -> int:
    """What every rank of torchrun but the first does: it works for the first one until that one's command is over."""
    from rlplace.measure.hosts.fresh_ranks import serve
    from rlplace.measure.isolate.keeper import keep

    try:
        with _sigterm_as_ctrl_c(Event()):
            nodes = join()
            serve(nodes)
            if arguments[:1] == ["doctor"]:
                from rlplace.doctor.machines import look_at_machines

                look_at_machines(nodes)
            keep(nodes)
            return int(nodes.has_failed)
    except RlplaceError as error:
        say(f"rlplace: rank {os.environ['RANK']} failed: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


@contextmanager
def _sigterm_as_ctrl_c(told: Event) -> Iterator[None]:
    """While active, SIGTERM ends a command as Ctrl-C does: batch systems and `timeout` send it to long runs."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # another handler is installed
        yield
        return
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork: it has nothing to keep
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        told.set()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """While active, a Ctrl-C that arrives where Python cannot raise it comes again a moment later.

    In a finaliser or a weak reference's callback it is only reported, and compiling a kernel runs many of those.
    """
    before, main_thread, is_over = sys.unraisablehook, _thread.get_ident(), False

    def interrupt_again() -> None:
        time.sleep(AGAIN_S)
        if not is_over:
            signal.pthread_kill(main_thread, signal.SIGINT)  # also ends a sleep or a wait

    def catch(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is KeyboardInterrupt:
            _thread.start_new_thread(interrupt_again, ())  # `threading` takes locks that the main thread may hold
        else:
            before(lost)

    sys.unraisablehook = catch
    try:
        yield
    finally:
        is_over = True
        sys.unraisablehook = before


RARE = frozenset(
    {
        *("exclude", "together", "gangs", "num_groups", "rule", "granularity", "acyclic"),
        *("batch_dims", "loss", "exact", "split", "split_parts", "workload_seed"),
        *("storing", "no_wait", "in_process", "trace", "cluster", "track", "objective", "true", "save"),
        *("guide", "simulate_share", "num_calibrated", "priors", "table_rounds", "learn", "agent"),
    }
)
"""Parameters of commands, and fields of their groups of options, that `--help` leaves out."""
SUPPRESS: Any = tyro.conf.Suppress
MORE = "These are the everyday options; `--help-all` shows every one."


def shortened(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` without its rare options, for its help alone: nothing calls it; itself where it has none."""
    hints = get_type_hints(command, include_extras=True)
    types = {name: SUPPRESS[hint] if name in RARE else _short(hint) for name, hint in hints.items()}
    if types == hints:
        return command
    kept = [one.replace(annotation=types[name]) for name, one in inspect.signature(command).parameters.items()]

    def short(**_: Any) -> None:
        raise AssertionError("help ends before a command runs")

    summary, _, rest = inspect.getdoc(command).partition("\n")  # type: ignore[union-attr]  # every command has one
    short.__doc__ = f"{summary}\n\n{MORE}\n{rest}"
    short.__annotations__ = {one.name: one.annotation for one in kept}
    vars(short)["__signature__"] = inspect.Signature(kept)
    return short


def _short(hint: Any) -> Any:
    """A group of options without the rare ones; anything else as it is."""
    group, extras = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
    if not isinstance(group, type) or not dataclasses.is_dataclass(group):
        return hint
    hints = get_type_hints(group, include_extras=True)
    rare = [
        (one.name, SUPPRESS[hints[one.name]], dataclasses.field(default=one.default))
        for one in dataclasses.fields(group)
        if one.name in RARE
    ]
    if not rare:
        return hint
    short: Any = dataclasses.make_dataclass(group.__name__, rare, bases=(group,), frozen=True)
    short.__doc__ = group.__doc__
    return Annotated[short, *extras] if extras else short


if __name__ == "__main__":
    sys.exit(main())

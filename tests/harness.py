"""Runs test cases inside groups of real processes, so that a hang is a failed test and never a stuck run.

Three ways in, all built on `GroupSession`:

* `run_group(4, "tests.some.module:function", arg)`: fresh processes for one case.
* `with GroupSession(4, init="gloo") as group: group.run("tests.some.module:function", arg)`: many cases, one launch
  (importing torch and deepspeed costs seconds per process).
* the pytest fixture `groups` (see conftest.py): `groups.run(4, "tests.some.module:function", arg)`, pooled by size.

The target runs on every rank with the same arguments; results come back as a list ordered by rank. An exception on any
rank raises `GroupError` with every rank's traceback, or, with `check=False`, is returned in that rank's place as a
`Failure`. After a failure the processes are killed and the next case gets fresh ones, for the state of their process
group is unknown. A case past its deadline raises `GroupTimeoutError` with the stacks of all threads of all ranks.

Ranks with a process group are forked from a template that has imported torch, deepspeed and transformers
(`tests/forking.py`); the others are processes started anew.

Only processes started here are ever signalled, each by the id of the session it leads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.forking import Forked, fork

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DEADLINE_S = 60.0
STARTUP_DEADLINE_S = 150.0
GRACE_S = 5.0
_TAIL_CHARS = 3000
_DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong on one rank.

    `type_name` is the exception's class, `"ProcessDied"` (the process ended without an answer) or `"Killed"` (it had
    not answered when the grace after another rank's failure ran out); `bases` names the exception's base classes.
    """

    rank: int
    type_name: str
    message: str
    traceback: str
    bases: tuple[str, ...] = ()

    def is_a(self, type_name: str) -> bool:
        """True when the exception is of this class or of a subclass of it (by name)."""
        return type_name == self.type_name or type_name in self.bases


class GroupError(AssertionError):
    """At least one rank failed. `failures` holds one entry per failed rank, in rank order."""

    def __init__(self, title: str, failures: Iterable[Failure]) -> None:
        self.failures = list(failures)
        parts = [title]
        for failure in self.failures:
            parts.append(f"--- rank {failure.rank}: {failure.type_name}: {failure.message}\n{failure.traceback}")
        super().__init__("\n".join(parts))


class GroupTimeoutError(GroupError):
    """A case passed its deadline; the failures hold the stacks of the ranks that had not answered."""


@dataclass(slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes] | Forked
    connection: Connection
    output: Path
    stacks: Path

    def receive(self) -> Any:
        """Next answer of the child; a `Failure` when it died instead."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
            return self.failure("ProcessDied", f"exit status {self.process.returncode}")

    def failure(self, type_name: str, message: str) -> Failure:
        """A failure seen from outside, with the stacks (if the child wrote any) and the end of its output."""
        text = f"stacks of rank {self.rank}:\n{_tail(self.stacks)}\noutput of rank {self.rank}:\n{_tail(self.output)}"
        return Failure(rank=self.rank, type_name=type_name, message=message, traceback=text)


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-_TAIL_CHARS:] if path.exists() else ""


def free_port() -> int:
    """A TCP port that was free a moment ago on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class GroupSession:
    """A pool of `world_size` processes, started when the first case comes and again after a case that failed.

    Args:
        world_size: number of processes; their ranks are 0..world_size-1.
        init: `"gloo"` initialises the default process group through deepspeed before the first case; `"imported"`
            leaves that to the target; None does too (and imports neither torch nor deepspeed).
        env: extra environment variables of the processes.
        group_timeout_s: timeout of the default process group.
    """

    world_size: int
    init: str | None = None
    env: Mapping[str, str] | None = None
    group_timeout_s: float = 60.0
    launches: int = field(default=0, init=False)
    _workers: list[_Worker] = field(default_factory=list, init=False)
    _directory: Path | None = field(default=None, init=False)

    def __enter__(self) -> GroupSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        target: str,
        *args: Any,
        deadline_s: float = DEFAULT_DEADLINE_S,
        grace_s: float = GRACE_S,
        check: bool = True,
    ) -> list[Any]:
        """Runs `target` ("package.module:function") with `args` on every rank; returns the results by rank.

        Args:
            target: importable function; it, its arguments and its result must be picklable.
            args: the same on every rank (the function finds its rank in the RANK environment variable).
            deadline_s: seconds the case may take; starting the processes is not counted.
            grace_s: seconds the other ranks get to answer once one rank has failed.
            check: raise `GroupError` if any rank failed; else return `Failure` objects in their places.
        """
        if not self._workers:
            self._start()
        message = pickle.dumps((target, args, deadline_s))
        for worker in self._workers:
            with contextlib.suppress(OSError):  # a child that died while idle: seen as EOF below
                worker.connection.send_bytes(message)
        title = f"{target} on {self.world_size} ranks"
        answers = self._collect(f"{title}: ran past its deadline of {deadline_s} s", deadline_s, grace_s)
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if failures:
            self.close()
        if failures and check:
            raise GroupError(f"{title}: {len(failures)} failed", failures)
        return answers

    def pause(self) -> None:
        """Stops the processes where they are, between two cases, so that they take nothing of the machine."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets the processes go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, number)  # each child leads a session of its own

    def close(self) -> None:
        """Ends the processes (those idle end by themselves) and removes their files. The session can be used again."""
        self.resume()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=0.5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)  # each child leads a session of its own
            worker.process.kill()  # should it not have come so far
            worker.process.wait()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ds_ldt_group_"))
        self.launches += 1
        port = free_port()
        for rank in range(self.world_size):
            self._workers.append(self._launch(rank, port, self._directory))
        title = f"starting {self.world_size} ranks"
        answers = self._collect(f"{title}: not up in {STARTUP_DEADLINE_S} s", STARTUP_DEADLINE_S, GRACE_S)
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if failures:
            self.close()
            raise GroupError(f"{title} failed", failures)

    def _launch(self, rank: int, port: int, directory: Path) -> _Worker:
        ours, theirs = Pipe()
        stacks, output = directory / f"stacks_{rank}", directory / f"output_{rank}"
        environment = (
            os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "TORCH_EXTENSIONS_DIR": str(directory / "extensions"),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            }
            | dict(self.env or {})
        )
        if self.init is not None:
            options = (str(stacks), self.init, self.group_timeout_s)
            forked = fork(serve, theirs, options, environment=environment, directory=str(ROOT), output=str(output))
            theirs.close()
            return _Worker(rank=rank, process=forked, connection=ours, output=output, stacks=stacks)
        arguments = (theirs.fileno(), str(stacks), self.init, self.group_timeout_s)
        with output.open("wb") as sink:
            started = subprocess.Popen(
                [sys.executable, "-c", f"from tests.harness import serve; serve{arguments!r}"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        return _Worker(rank=rank, process=started, connection=ours, output=output, stacks=stacks)

    def _collect(self, timeout_title: str, deadline_s: float, grace_s: float) -> list[Any]:
        """One answer per rank; kills the group and raises `GroupTimeoutError` at the deadline."""
        waiting: dict[Any, _Worker] = {worker.connection: worker for worker in self._workers}
        answers: list[Any] = [None] * self.world_size
        deadline = time.monotonic() + deadline_s
        give_up = deadline
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, give_up - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                worker = waiting.pop(connection)
                answers[worker.rank] = worker.receive()
                if isinstance(answers[worker.rank], Failure):
                    give_up = min(give_up, time.monotonic() + grace_s)
        if not waiting:
            return answers
        self._dump_stacks(waiting.values())
        message = "no answer in the grace after another rank's failure" if give_up < deadline else "hangs"
        for worker in waiting.values():
            answers[worker.rank] = worker.failure("Killed", message)
        if give_up < deadline:
            return answers
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        self.close()
        raise GroupTimeoutError(timeout_title, failures)

    def _dump_stacks(self, workers: Iterable[_Worker]) -> None:
        """Asks children for the stacks of all their threads (they answer from inside a blocking C call too)."""
        asked = list(workers)
        for worker in asked:
            if worker.stacks.exists() and worker.process.poll() is None:  # no file yet: no handler yet
                os.kill(worker.process.pid, _DUMP_SIGNAL)
        until = time.monotonic() + 2.0
        while time.monotonic() < until and any(w.stacks.exists() and not _tail(w.stacks) for w in asked):
            time.sleep(0.02)
        time.sleep(0.1)  # the rest of a dump that has begun


def run_group(
    world_size: int,
    target: str,
    *args: Any,
    deadline_s: float = DEFAULT_DEADLINE_S,
    env: Mapping[str, str] | None = None,
    init: str | None = None,
    check: bool = True,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Runs one case in `world_size` fresh processes; arguments and results as of `GroupSession` and its `run`."""
    with GroupSession(world_size, init=init, env=env) as group:
        return group.run(target, *args, deadline_s=deadline_s, grace_s=grace_s, check=check)


@dataclass(slots=True)
class GroupPool:
    """Sessions with an initialised gloo group, by world size; never more than `max_processes` alive at once."""

    max_processes: int = 9
    _sessions: dict[int, GroupSession] = field(default_factory=dict, init=False)

    def run(self, world_size: int, target: str, *args: Any, **options: Any) -> list[Any]:
        """Runs a case in the pooled session of this size; arguments and results as `GroupSession.run`."""
        return self.session(world_size).run(target, *args, **options)

    def session(self, world_size: int) -> GroupSession:
        """The session of this size; the least recently used others are closed if the processes become too many."""
        session = self._sessions.pop(world_size, None) or GroupSession(world_size, init="gloo")
        while self._sessions and sum(self._sessions) + world_size > self.max_processes:
            self._sessions.pop(next(iter(self._sessions))).close()
        self._sessions[world_size] = session
        return session

    def close(self) -> None:
        """Ends all processes."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()


# ---- the child's side --------------------------------------------------------------------------------


def serve(descriptor: int, stacks: str, init: str | None, group_timeout_s: float) -> None:
    """Loop of a child process: reads (target, args, deadline) from the pipe, answers with a result or a `Failure`."""
    with open(stacks, "w") as sink:
        faulthandler.register(_DUMP_SIGNAL, file=sink, all_threads=True)
        connection = Connection(descriptor)
        connection.send_bytes(_answer(_initialise, init, group_timeout_s))
        while True:
            try:
                target, args, deadline_s = pickle.loads(connection.recv_bytes())
            except EOFError:
                os._exit(0)  # the parent closed the pool; do not wait for anybody's threads or peers
            signal.alarm(int(deadline_s) + 30)  # ends this process should the parent itself be gone
            answer = _answer(_call, target, args)
            signal.alarm(0)
            sys.stdout.flush()
            try:
                connection.send_bytes(answer)
            except OSError:
                os._exit(1)


def _initialise(init: str | None, group_timeout_s: float) -> None:
    if init is None:
        return
    from datetime import timedelta

    import deepspeed
    import torch
    from deepspeed import ops

    torch.set_num_threads(1)
    if init == "imported":
        return
    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled at first use (about a minute)
    deepspeed.init_distributed(init, timeout=timedelta(seconds=group_timeout_s))


_endings: list[Callable[[], object]] = []


def when_done(ending: Callable[[], object]) -> None:
    """Has this child call `ending` when its target has returned; an error of it counts as one of the target.

    Endings are called in the order in which they came, which is the same on every rank; not after an error.
    """
    _endings.append(ending)


def _call(target: str, args: tuple[Any, ...]) -> Any:
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(*args)
    while _endings:
        _endings.pop(0)()
    return result


def _answer(function: Any, *args: Any) -> bytes:
    """Pickled result of the call, or the pickled `Failure` of whatever it raised (SystemExit included)."""
    try:
        return pickle.dumps(function(*args))
    except BaseException as error:
        bases = tuple(base.__name__ for base in type(error).__mro__[1:])
        rank = int(os.environ["RANK"])
        trace = traceback.format_exc()
        return pickle.dumps(
            Failure(rank=rank, type_name=type(error).__name__, message=str(error), traceback=trace, bases=bases)
        )

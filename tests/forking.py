"""Processes that are forks of a template which has imported torch, deepspeed and transformers (`tests/template.py`).

Importing them anew costs every rank seconds of CPU. The template is the fork server of the standard library; it is
started when the first fork is asked for, has no thread but its main one, and ends with the process that started it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from typing import Any


@dataclass(slots=True)
class Forked:
    """A fork of the template, with those methods of `subprocess.Popen` that the harness uses."""

    process: ForkServerProcess

    @property
    def pid(self) -> int:
        """Process id; once the process has made its session, the id of that too."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs; the negative number of the signal that ended it."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        """Waits for its end; raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        self.process.join(timeout)
        if timeout is not None and self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork of the template", timeout)

    def kill(self) -> None:
        """Ends it, unless it has ended."""
        self.process.kill()


def fork(
    serve: Callable[..., None],
    connection: Connection,
    options: tuple[Any, ...],
    *,
    environment: Mapping[str, str],
    directory: str,
    output: str,
) -> Forked:
    """Starts `serve(descriptor of the connection, *options)` in a fork of the template.

    Args:
        serve: a function of a module; never returns.
        connection: its end of a pipe; this process may close its own copy.
        options: further arguments.
        environment: all of its environment variables. Libraries of the template have read theirs before.
        directory: its working directory.
        output: file that takes what it prints.
    """
    arguments = (serve, connection, options, dict(environment), directory, output)
    process = _template(environment["PYTHONPATH"]).Process(target=_become, args=arguments, daemon=True)
    process.start()
    return Forked(process)


def _template(python_path: str) -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.template"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = python_path  # the template is a process of its own, which has to find this repository
    try:
        ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        os.environ |= {} if before is None else {"PYTHONPATH": before}
    return context


def _become(
    serve: Callable[..., None],
    connection: Connection,
    options: tuple[Any, ...],
    environment: dict[str, str],
    directory: str,
    output: str,
) -> None:
    """Makes this fork what `subprocess.Popen` makes of a process that is started, then serves."""
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for path, flags, descriptors in ((os.devnull, os.O_RDONLY, (0,)), (output, os.O_WRONLY | os.O_CREAT, (1, 2))):
        opened = os.open(path, flags, 0o600)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    serve(connection.fileno(), *options)

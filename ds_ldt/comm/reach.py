"""Plain TCP: who answers where the ranks are to meet, and why nobody does.

torch's store can be asked to connect, but it neither says why a connection fails nor ends every wait in time: what
accepts a connection and then keeps quiet holds it for good. So it is called only once a plain socket has found a store
at the other end. Every wait here is bounded.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

HELPER = "ds_ldt waits for torch"
"""Name of the threads of `within`. One that is left over is still inside torch."""

_VALIDATE, _PING, _MAGIC = 0, 13, 0x3C85F7CE
"""From torch's TCPStoreBackend.hpp: two of the queries of its store, and the number that opens a connection."""

_ATTEMPT_S = 5.0
"""Longest wait for one connection or answer; then another is tried, so that one lost packet costs no more."""

_PAUSE_S = 0.25
_TELL_AFTER_S = 5.0
"""Seconds between two attempts; seconds without success after which a warning says why."""


class NotAStoreError(ConnectionError):
    """Something answers, but not as torch's store does."""


class NoAnswerError(ConnectionError):
    """A connection was accepted and closed again without an answer."""


_CLOSED = "the connection was accepted and closed, as by a proxy whose other end is not there or by another program"

_MEANINGS: dict[type[OSError], str] = {
    socket.gaierror: "the name does not resolve to an address on this machine",
    NotAStoreError: "something answers, but not as ds_ldt does: another program has the port, or a proxy is between",
    ConnectionRefusedError: "connection refused, so the machine is there but nothing listens at this port",
    NoAnswerError: _CLOSED,
    ConnectionResetError: _CLOSED,
    BrokenPipeError: _CLOSED,
    TimeoutError: (
        "no answer at all, so a firewall drops the packets, the address is wrong, or whoever listens there is stopped "
        "or another program"
    ),
}


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return what some work returns; for calls that have no bound of their own, or let no interrupt through.

    Args:
        seconds: The longest wait.
        work: Runs in a thread of its own, which is left behind if it takes longer.

    Raises:
        TimeoutError: It takes longer.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=HELPER, daemon=True).start()
    if not _is_done(future, seconds):
        raise TimeoutError(f"no answer in {seconds:.3g} s")
    return future.result()


def _is_done(future: Future[T], seconds: float) -> bool:
    """Tell a wait that ran out from work that itself ended in a TimeoutError."""
    with suppress(Exception):
        future.exception(seconds)
    return future.done()


def exit_past_helpers(status: int) -> None:
    """End this process here and now if a thread of `within` was left behind; else return.

    Were torch's call to return in that thread while Python shuts down, the process would abort.

    Args:
        status: The exit status.
    """
    if any(thread.name == HELPER for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def greet(host: str, port: int, *, timeout_s: float) -> None:
    """Connect to torch's store once and have it answer.

    Args:
        host: Name or address.
        port: TCP port.
        timeout_s: Seconds for each of: the name, the connection, the answer.

    Raises:
        OSError: There is no answer; `reason` puts it into words.
    """
    within(timeout_s, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    question = secrets.randbits(32)
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.settimeout(timeout_s)
        connection.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, question))
        answer = _receive(connection, 4)
    if len(answer) < 4:  # noqa: PLR2004
        raise NoAnswerError("the connection was accepted and closed")
    if answer != struct.pack("=I", question):
        raise NotAStoreError("something else answered")


def wait_for_store(host: str, port: int, *, timeout_s: float) -> None:
    """Wait until torch's store answers.

    Args:
        host: Name or address.
        port: TCP port.
        timeout_s: The longest wait in seconds.

    Raises:
        OSError: Of the last attempt, once the time is over.
    """
    begin = time.monotonic()
    told = False
    while True:
        left = begin + timeout_s - time.monotonic()
        try:
            greet(host, port, timeout_s=max(0.1, min(_ATTEMPT_S, left)))
            return
        except OSError as error:
            elapsed = time.monotonic() - begin
            if elapsed + _PAUSE_S >= timeout_s:
                raise
            if not told and elapsed >= min(_TELL_AFTER_S, timeout_s / 2):
                told = True
                logger.warning(
                    "Nobody answers at %s:%d yet: %s. Trying for another %.0f s.",
                    host,
                    port,
                    reason(error),
                    timeout_s - elapsed,
                )
        time.sleep(_PAUSE_S)


def reason(error: OSError) -> str:
    """Say what an attempt to connect ended with, and what that means."""
    for kind, meaning in _MEANINGS.items():
        if isinstance(error, kind):
            return meaning
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL):
        return f"no route leads there from this machine ({os.strerror(error.errno)})"
    return str(error) or type(error).__name__


def claim(host: str, port: int, *, timeout_s: float) -> None:
    """Find out whether a port of this machine is free and an address leads to it.

    Args:
        host: Name or address under which this machine is to be reached.
        port: TCP port.
        timeout_s: Longest wait in seconds for a connection to oneself.

    Raises:
        PermissionError: The port may not be used.
        OSError: With `errno.EADDRINUSE`: the port is in use. Else: the address does not lead here.
    """
    until = time.monotonic() + min(timeout_s, 2 * _ATTEMPT_S)
    with _listen(port) as listening:
        while True:
            left = max(0.1, until - time.monotonic())
            try:
                within(left, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
                _connect_to_oneself(host, port, listening, left)
                return
            except OSError:
                if time.monotonic() + _PAUSE_S >= until:
                    raise
            time.sleep(_PAUSE_S)


def _listen(port: int) -> socket.socket:
    """Listen at all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    return socket.create_server(("", port))


def _connect_to_oneself(host: str, port: int, listening: socket.socket, timeout_s: float) -> None:
    token = secrets.token_bytes(16)
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.sendall(token)
        try:
            _await(token, listening, time.monotonic() + min(timeout_s, 2.0))
        except TimeoutError as error:
            raise ConnectionError("it is an address of another machine, or of a proxy") from error


def _await(token: bytes, listening: socket.socket, until: float) -> None:
    """Take connections until one carries the token: ranks that come early try this port as well."""
    while True:
        listening.settimeout(max(0.1, until - time.monotonic()))
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.settimeout(0.5)
            if _receive(connection, len(token)) == token:
                return
        if time.monotonic() > until:
            raise TimeoutError("other connections came, but not this one")


def _receive(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes, or fewer if the other end closes the connection."""
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            break
        received += part
    return received


def local_end(host: str, port: int) -> str:
    """Say by which address and interface this machine would reach another, for error messages."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    named = f"GLOO_SOCKET_IFNAME={interface}" if interface else "GLOO_SOCKET_IFNAME not set"
    with suppress(OSError, TimeoutError):
        found = within(1.0, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            return f"own address {probe.getsockname()[0]}, {named}"
    return f"machine {socket.gethostname()}, {named}"

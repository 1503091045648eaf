"""Plain TCP: what is found where the ranks are to meet, and in what time."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from ds_ldt.comm.reach import claim, greet, reason, wait_for_store, within
from tests.harness import free_port


@contextmanager
def listening(serve: Callable[[socket.socket], None], *, backlog: int = 8) -> Iterator[int]:
    """A port of the loopback interface at which each connection is given to `serve`."""
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as server:
        kept: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    kept.append(server.accept()[0])
                    serve(kept[-1])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


@contextmanager
def deaf() -> Iterator[int]:
    """A port that takes no further connection and answers none, as behind a firewall that drops packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        yield server.getsockname()[1]
        for one in waiting:
            one.close()


@contextmanager
def nobody() -> Iterator[int]:
    """A port at which nothing listens."""
    yield free_port()


@pytest.mark.parametrize(
    "place, said",
    [
        (nobody, "connection refused"),
        (deaf, "no answer at all"),
        (lambda: listening(lambda _: None), "no answer at all"),
        (lambda: listening(lambda one: one.close()), "accepted and closed"),
        (lambda: listening(lambda one: one.sendall(b"HTTP/1.1 400 Bad Request\r\n")), "something answers, but not as"),
    ],
    ids=["nobody", "dropped", "keeps quiet", "hangs up", "web server"],
)
def test_S60_what_keeps_ranks_from_meeting_is_told_apart_in_time(
    place: Callable[[], AbstractContextManager[int]], said: str
) -> None:
    begin = time.monotonic()
    with place() as port, pytest.raises(OSError) as caught:  # noqa: PT011 - any kind: the words count
        wait_for_store("127.0.0.1", port, timeout_s=1.0)
    assert said in reason(caught.value)
    assert 0.7 < time.monotonic() - begin < 2.5


def test_S60_a_name_that_does_not_resolve_is_told() -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        wait_for_store("no-such-host.invalid", 1, timeout_s=0.5)
    assert "does not resolve" in reason(caught.value)


def test_the_store_of_torch_answers_a_greeting() -> None:
    """Written from torch's own header, whose queries may change with a new version."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(3):
        greet("127.0.0.1", store.port, timeout_s=2.0)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_that_comes_late_is_found() -> None:
    from torch.distributed import TCPStore

    port, stores = free_port(), []

    def come() -> None:
        stores.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    late = threading.Timer(0.7, come)
    late.start()
    wait_for_store("127.0.0.1", port, timeout_s=10.0)
    late.join()
    assert stores


def test_a_port_of_ones_own_is_claimed_and_free_afterwards() -> None:
    port = free_port()
    for _ in range(2):
        claim("127.0.0.1", port, timeout_s=2.0)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_S60_a_port_in_use_is_told_from_an_address_of_another_machine() -> None:
    with listening(lambda _: None) as port, pytest.raises(OSError) as caught:  # noqa: PT011
        claim("127.0.0.1", port, timeout_s=2.0)
    assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError) as caught:  # noqa: PT011
        claim("192.0.2.77", free_port(), timeout_s=1.0)
    assert caught.value.errno != errno.EADDRINUSE


def test_a_claim_is_not_disturbed_by_ranks_that_come_early() -> None:
    port, ended = free_port(), threading.Event()

    def knock() -> None:
        while not ended.is_set():
            try:
                greet("127.0.0.1", port, timeout_s=0.2)
            except OSError:
                continue

    knocking = [threading.Thread(target=knock, daemon=True) for _ in range(3)]
    for thread in knocking:
        thread.start()
    for _ in range(5):
        claim("127.0.0.1", port, timeout_s=5.0)
    ended.set()


def test_work_that_takes_too_long_is_left_behind_and_errors_come_through() -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.1 s"):
        within(0.1, lambda: time.sleep(1))
    assert time.monotonic() - begin < 0.8
    assert within(1, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(1, lambda: 1 / 0)


def test_a_timeout_of_the_work_itself_is_its_own() -> None:
    def work() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        within(5, work)

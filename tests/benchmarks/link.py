"""Two sites in two network namespaces, joined by a link with a latency and a rate: an emulator over two TUN devices.

Run as a process of its own, `python -m tests.benchmarks.link NAME`, with root. It makes the namespaces `NAME_edge` and
`NAME_cloud`, says `up`, and then answers one line on its standard input after the other:

    set LATENCY_S MBPS    one-way latency and rate of each direction from now on; 0: no limit
    bytes                 how many bytes it has carried, edge to cloud and cloud to edge

It takes everything down when its input ends (so it never outlives whoever started it), on SIGTERM and on SIGINT.

A direction is a queue: a packet starts when the one before it has passed at the set rate, and arrives a latency after
its last byte. Nothing is lost or reordered. Packets of 65000 bytes keep a Python process able to carry a gigabit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

from tests.benchmarks.setting import precise_sleeps

_TCP = "cd /proc/sys/net/ipv4; echo 0 > tcp_slow_start_after_idle; echo reno > tcp_congestion_control"
"""TCP of both sites, for all rows alike. Else it starts slowly again after each pause, and where the machine's default
is bbr it spaces packets out to a rate that it has guessed from earlier ones: a message of 64 KB then takes 15 ms.
Nothing is lost on this link, so reno, which every kernel has, sends as fast as the link carries."""
SITES = ("edge", "cloud")
ADDRESSES = {"edge": "10.77.0.1", "cloud": "10.77.0.2"}
DEVICE = "wan0"
_MTU = 65000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_PACKETS_A_TURN = 64
_COMMAND_S = 30.0
_BITS_PER_MEGABYTE = 8e-6


def namespace(name: str, site: str) -> str:
    """The network namespace of a site."""
    return f"{name}_{site}"


def available() -> str | None:
    """None where the emulator can run, else what is missing."""
    if os.geteuid() != 0:
        return "root"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun"
    try:
        subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, timeout=_COMMAND_S)
    except (OSError, subprocess.SubprocessError):
        return "the command ip (iproute2)"
    return None


@dataclass(slots=True)
class Direction:
    """One direction of the link.

    Attributes:
        out: where packets leave: the descriptor of the other end's device.
        latency_s: one way.
        bytes_per_s: rate; 0: unlimited.
        carried: bytes so far.
    """

    out: int
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    carried: int = 0
    _free_at: float = 0.0
    _under_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def enter(self, packet: bytes, now: float) -> None:
        """Take a packet in."""
        seconds = len(packet) / self.bytes_per_s if self.bytes_per_s else 0.0
        self._free_at = max(now, self._free_at) + seconds
        due = self._free_at + self.latency_s
        if self._under_way:
            due = max(due, self._under_way[-1][0])  # a latency that has been lowered does not let packets overtake
        self._under_way.append((due, packet))

    def leave(self, now: float) -> None:
        """Let out what is due."""
        while self._under_way and self._under_way[0][0] <= now:
            _, packet = self._under_way.popleft()
            self.carried += len(packet)
            with contextlib.suppress(OSError):  # a device whose queue is full drops, as real ones do
                os.write(self.out, packet)

    def next_due(self) -> float:
        """When the next packet is due; infinity if none is under way."""
        return self._under_way[0][0] if self._under_way else float("inf")


def carry(devices: dict[int, Direction], commands: int) -> None:
    """Move packets until the commands end.

    Args:
        devices: descriptor of the device that packets come from -> the direction that they take.
        commands: descriptor that commands come from.
    """
    pending = b""
    while True:
        now = time.monotonic()
        for direction in devices.values():
            direction.leave(now)
        wait_s = min(direction.next_due() for direction in devices.values()) - time.monotonic()
        ready, _, _ = select.select([*devices, commands], [], [], min(max(wait_s, 0.0), 60.0))
        for source in ready:
            if source == commands:
                chunk = os.read(commands, 4096)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    _obey(line.decode(), list(devices.values()))
                continue
            for packet in _packets(source):
                devices[source].enter(packet, time.monotonic())


def _obey(line: str, directions: list[Direction]) -> None:
    word, *values = line.split()
    if word == "set":
        latency_s, mbps = map(float, values)
        for direction in directions:
            direction.latency_s, direction.bytes_per_s = latency_s, mbps / _BITS_PER_MEGABYTE
        answer = "done"
    else:
        answer = " ".join(str(direction.carried) for direction in directions)
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def _packets(source: int) -> list[bytes]:
    packets = []
    with contextlib.suppress(BlockingIOError):
        for _ in range(_PACKETS_A_TURN):
            packets.append(os.read(source, 65535))
    return packets


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=_COMMAND_S)


def _open_device(name: str, site: str) -> int:
    """A TUN device in the namespace of a site; the descriptor goes on working after the move."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    there, here = namespace(name, site), f"ldt{os.getpid() % 10**7}{site[0]}"
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22s", here.encode(), _IFF_TUN_NO_PI, b""))
    _ip("link", "set", here, "netns", there)
    _ip("-n", there, "link", "set", here, "name", DEVICE)
    _ip("-n", there, "link", "set", "lo", "up")
    _ip("-n", there, "addr", "add", f"{ADDRESSES[site]}/30", "dev", DEVICE)
    _ip("-n", there, "link", "set", DEVICE, "mtu", str(_MTU), "txqueuelen", "2000", "up")
    _ip("netns", "exec", there, "sh", "-c", _TCP)
    return device


def take_down(name: str) -> None:
    """Remove the namespaces of a link; those that are gone already do not matter."""
    for site in SITES:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _ip("netns", "del", namespace(name, site), check=False)


def serve(name: str) -> None:
    """Be the link until the standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))
    precise_sleeps()
    devices: list[int] = []
    try:
        for site in SITES:
            _ip("netns", "add", namespace(name, site))
        devices = [_open_device(name, site) for site in SITES]
        edge, cloud = devices
        sys.stdout.write("up\n")
        sys.stdout.flush()
        carry({edge: Direction(out=cloud), cloud: Direction(out=edge)}, sys.stdin.fileno())
    finally:
        for device in devices:
            os.close(device)
        take_down(name)


class Link:
    """The link as the benchmark sees it: a context in which it is up.

    Args:
        name: a name that no other link on this machine has.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Link:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.link", self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for whoever started it, who then closes its input
        )
        try:
            if self._line() != "up":
                raise RuntimeError("the link emulator did not come up; its own message says why")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=_COMMAND_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        take_down(self.name)

    def set(self, *, latency_s: float, mbps: float) -> None:
        """Change latency and rate of both directions."""
        self._ask(f"set {latency_s!r} {mbps!r}")

    def carried(self) -> tuple[int, int]:
        """Bytes carried so far, headers and acknowledgements of TCP included: (edge to cloud, cloud to edge)."""
        up, down = self._ask("bytes").split()
        return int(up), int(down)

    def _ask(self, line: str) -> str:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        ready, _, _ = select.select([self._process.stdout], [], [], _COMMAND_S)
        return self._process.stdout.readline().strip() if ready else ""


if __name__ == "__main__":
    serve(sys.argv[1])

"""S74: a signal to DeepSpeed's launcher leaves ranks running; one to the scripts of a site ends all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# A rank that will not end by itself, with a child as a data loader has; the second one does not heed SIGTERM.
RANK = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[-1], f"rank_{rank}").write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


class Site:
    """One machine with two ranks of the edge, started by the real launcher."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "rank.py").write_text(RANK)
        (folder / "hostfile").write_text("edge slots=2\ncloud slots=1\n")
        environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        words = [word.format(folder=folder) for word in (*command, "{folder}/rank.py", "{folder}")]
        self.process = subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def pids(self) -> list[int]:
        """The processes of both ranks, as far as they have started."""
        texts = [path.read_text().split() for path in self.folder.glob("rank_*")]
        return [int(pid) for text in texts if len(text) == 2 for pid in text]

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.05)
    return condition()


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[dict[str, Site]]:
    options = ("--hostfile", "{folder}/hostfile")
    launcher = ("deepspeed", "--no_ssh", "--node_rank=0", "--hostfile={folder}/hostfile", "--master_addr=127.0.0.1")
    scripts = ("bash", str(EXAMPLES / "run_edge.sh"), *options)
    made = {
        "bare": Site(tmp_path / "bare", *launcher),
        **{name: Site(tmp_path / name, *scripts) for name in ("SIGTERM", "SIGINT", "SIGHUP")},
    }
    yield made
    for site in made.values():
        site.process.kill()
        site.process.wait()
        for pid in site.alive():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.distributed
def test_S74_a_signal_to_the_scripts_of_a_site_ends_every_rank_and_one_to_the_bare_launcher_does_not(
    sites: dict[str, Site],
) -> None:
    assert wait_until(lambda: all(len(site.pids()) == 4 for site in sites.values()), 120)
    assert all(len(site.alive()) == 4 for site in sites.values())
    sites["bare"].process.send_signal(signal.SIGTERM)
    statuses = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}
    for name in statuses:
        sites[name].process.send_signal(signal.Signals[name])
    for name, status in statuses.items():
        assert sites[name].process.wait(timeout=60) == status, name
        assert wait_until(lambda name=name: sites[name].alive() == [], 10), name  # type: ignore[misc]
    assert sites["bare"].process.wait(timeout=60) != 0
    assert len(sites["bare"].alive()) == 4, "DeepSpeed ends its ranks by now: docs/two-sites.md says otherwise"

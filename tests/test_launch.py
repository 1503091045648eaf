"""What is checked before the first process group: launch variables, backend, locks of killed builds."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ds_ldt.comm import launch
from ds_ldt.comm import operator_builds as build_locks
from ds_ldt.errors import ConfigError
from tests.harness import free_port

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


class FakeAccelerator:
    """Stands for a device type that this machine does not have."""

    def __init__(self, device: str, backend: str) -> None:
        self.device, self.backend = device, backend

    def device_name(self, device_index: int | None = None) -> str:
        return self.device

    def communication_backend_name(self) -> str:
        return self.backend


# --- launch variables ---------------------------------------------------------------------------------------------


def test_launch_variables_become_numbers() -> None:
    assert launch.read_environment(LAUNCHED) == launch.LaunchEnvironment(
        rank=1, world_size=3, local_rank=0, master_addr="127.0.0.1", master_port=29511
    )


def test_S48_run_without_a_launcher_is_one_line_that_names_the_launcher() -> None:
    with pytest.raises(ConfigError) as caught:
        launch.read_environment({})
    message = str(caught.value)
    assert "\n" not in message
    for part in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "deepspeed --no_ssh"):
        assert part in message


def test_S48_missing_local_rank_alone_gets_its_own_advice() -> None:
    with pytest.raises(ConfigError, match="LOCAL_RANK is not set.*among those on its machine") as caught:
        launch.read_environment({name: value for name, value in LAUNCHED.items() if name != "LOCAL_RANK"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(LAUNCHED))
def test_S48_each_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"\b{name}\b"):
        launch.read_environment({key: value for key, value in LAUNCHED.items() if key != name})


@pytest.mark.parametrize(
    "name, value",
    [
        ("RANK", "one"),
        ("RANK", "-1"),
        ("RANK", "3"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "-1"),
        ("MASTER_PORT", "http"),
        ("MASTER_PORT", "65536"),
    ],
)
def test_wrong_launch_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is '?{value}'?, expected"):
        launch.read_environment({**LAUNCHED, name: value})


def test_loopback_rendezvous_uses_the_loopback_interface() -> None:
    environ = dict(LAUNCHED)
    launch.prepare_environment(environ)
    assert environ == {**LAUNCHED, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def test_chosen_interface_is_kept() -> None:
    environ = {**LAUNCHED, "GLOO_SOCKET_IFNAME": "eth7"}
    launch.prepare_environment(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_host_name_on_loopback_is_reported_when_the_other_site_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch.socket, "gethostname", lambda: "localhost")
    environ = {**LAUNCHED, "MASTER_ADDR": "192.0.2.7"}
    with caplog.at_level(logging.WARNING):
        launch.prepare_environment(environ)
    assert "GLOO_SOCKET_IFNAME" not in environ
    assert "Set GLOO_SOCKET_IFNAME" in caplog.text
    assert "192.0.2.7" in caplog.text


# --- backend ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "nccl", "mpi"])
def test_S50_gloo_is_chosen_on_cpus_whatever_else_is_offered(backend: str) -> None:
    assert launch.choose_backend(FakeAccelerator("cpu", backend)) == "gloo"


def test_S50_ccl_on_cpus_is_a_named_error() -> None:
    with pytest.raises(ConfigError, match="ccl.*expected gloo.*uninstall oneccl_bindings_for_pytorch"):
        launch.choose_backend(FakeAccelerator("cpu", "ccl"))


def test_S50_backend_that_this_torch_lacks_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: False)
    with pytest.raises(ConfigError, match="'npu' needs backend 'hccl', which this torch does not have"):
        launch.choose_backend(FakeAccelerator("npu", "hccl"))


def test_accelerators_name_their_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: True)
    assert launch.choose_backend(FakeAccelerator("npu", "hccl")) == "hccl"
    with pytest.raises(ConfigError, match="backend 'tccl', expected one of gloo, nccl, hccl"):
        launch.choose_backend(FakeAccelerator("sdaa", "tccl"))


@pytest.mark.parametrize("config", ["gloo", "cpu:gloo", "cpu:gloo,other:nccl"])
def test_group_of_the_caller_is_accepted_when_it_can_send(config: str) -> None:
    launch.check_backend(FakeAccelerator("cpu", "gloo"), config)


@pytest.mark.parametrize("config", ["nccl", "other:nccl", "cpu:mpi,other:nccl"])
def test_S50_group_of_the_caller_that_cannot_send_is_refused(config: str) -> None:
    with pytest.raises(ConfigError, match=r"for device 'cpu', expected gloo\. Fix:"):
        launch.check_backend(FakeAccelerator("cpu", "gloo"), config)


# --- locks of killed builds ---------------------------------------------------------------------------------------


def lock_of(root: Path, op: str) -> Path:
    (root / op).mkdir(parents=True)
    lock = root / op / "lock"
    lock.touch()
    return lock


def test_S55_stale_lock_of_a_needed_operator_is_a_warning_a_bounded_wait_and_an_error_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = lock_of(tmp_path, "fused_adam")
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError) as caught:
        build_locks.wait_for_locks({"fused_adam"}, timeout_s=60, grace_s=0.3, roots=[tmp_path])
    assert f"locked by {lock}, held by no process of this machine; waiting at most" in caplog.text
    assert f"rm '{lock}'" in str(caught.value)
    assert lock.exists()  # another machine may share the directory: the user removes it, not we


def test_S55_stale_lock_of_an_operator_we_never_use_is_reported_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = lock_of(tmp_path, build_locks.SHARED_MEMORY_OP)
    with caplog.at_level(logging.WARNING):
        build_locks.wait_for_locks({"fused_adam"}, timeout_s=60, roots=[tmp_path], sleep=pytest.fail)
    assert str(lock) in caplog.text


def test_S55_build_that_ends_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = lock_of(tmp_path, "fused_adam")
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            lock.unlink()

    with caplog.at_level(logging.WARNING):
        build_locks.wait_for_locks({"fused_adam"}, timeout_s=60, roots=[tmp_path], sleep=sleep)
    assert len(naps) == 3
    assert len(caplog.records) == 1  # one warning, not one per poll


def test_S55_build_that_is_going_on_is_told_apart_and_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = lock_of(tmp_path, "fused_adam")
    with lock.open(), caplog.at_level(logging.WARNING):
        with pytest.raises(ConfigError, match=f"still being built by process {os.getpid()} after 0.3 s"):
            build_locks.wait_for_locks({"fused_adam"}, timeout_s=0.3, grace_s=0.0, roots=[tmp_path])
        assert build_locks.BuildLock(op="fused_adam", path=lock).holders() == (os.getpid(),)
    assert f"held by process {os.getpid()}" in caplog.text


def test_lock_that_torch_itself_takes_is_found_where_we_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension
    from torch.utils.file_baton import FileBaton

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    baton = FileBaton(os.path.join(cpp_extension._get_build_directory("fused_adam", False), "lock"))
    assert baton.try_acquire()
    (found,) = build_locks.find_locks()
    assert (found.op, found.holders()) == ("fused_adam", (os.getpid(),))
    baton.release()
    assert build_locks.find_locks() == ()


def test_lock_in_torchs_default_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr("torch.utils.cpp_extension.get_default_build_root", lambda: str(tmp_path))
    lock = lock_of(tmp_path / "py311_cpu", "cpu_adam")
    assert build_locks.find_locks() == (build_locks.BuildLock(op="cpu_adam", path=lock),)


@pytest.mark.parametrize(
    "optimizer, ops",
    [
        (None, set()),
        ({"type": "SGD", "params": {"lr": 1.0}}, set()),
        ({"type": "AdamW", "params": {"torch_adam": True}}, set()),
        ({"type": "AdamW", "params": {}}, {"fused_adam", "cpu_adam"}),
        ({"type": "Adam"}, {"fused_adam", "cpu_adam"}),
        ({"type": "Lion", "params": {}}, {"fused_lion", "cpu_lion"}),
    ],
)
def test_operators_that_an_optimizer_needs(optimizer: object, ops: set[str]) -> None:
    assert build_locks.ops_of({"optimizer": optimizer} if optimizer else {}) == ops


# --- the whole of it, in processes of its own ---------------------------------------------------------------------

START = """
    import sys
    from ds_ldt.comm.launch import init_distributed
    from ds_ldt.errors import LDTError
    try:
        who = init_distributed(float(sys.argv[1]))
    except LDTError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    import torch
    from torch.distributed import all_reduce, destroy_process_group, get_backend
    total = torch.tensor(float(who.rank + 1))
    all_reduce(total)
    sys.stdout.write(f"{get_backend()} {total.item()}\\n")  # in one piece, for another process writes too
    sys.stdout.flush()
    destroy_process_group()
"""


def start(tmp_path: Path, *argv: str, **variables: str) -> subprocess.Popen[str]:
    """Start one process that calls init_distributed, with `variables` as its only launch variables."""
    environ = {name: value for name, value in os.environ.items() if name not in (*LAUNCHED, "GLOO_SOCKET_IFNAME")}
    environ |= {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(START), *argv],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.distributed
def test_S55_run_goes_on_over_a_stale_lock_of_the_shared_memory_operator(tmp_path: Path) -> None:
    lock = lock_of(tmp_path / "extensions", build_locks.SHARED_MEMORY_OP)
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(tmp_path, "60", RANK=str(rank), LOCAL_RANK=str(rank), **meeting) for rank in range(2)]
    for rank in ranks:
        output, errors = rank.communicate(timeout=200)
        assert rank.returncode == 0, errors
        assert output.splitlines()[-1] == "gloo 3.0"
        assert str(lock) in errors


@pytest.mark.distributed
def test_S48_torchrun_works_as_well(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(textwrap.dedent(START))
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    environ = {name: value for name, value in os.environ.items() if name not in (*LAUNCHED, "GLOO_SOCKET_IFNAME")}
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), "60"],
        env={**environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gloo 3.0") == 2


@pytest.mark.distributed
def test_S60_sites_and_ranks_that_never_come_are_named_with_address_and_seconds(tmp_path: Path) -> None:
    """An edge alone, a cloud alone, and a job of three ranks of which two come."""
    ports = [free_port() for _ in range(3)]
    jobs = [(0, 2, ports[0]), (1, 2, ports[1]), (0, 3, ports[2]), (2, 3, ports[2])]
    ranks = [
        start(tmp_path, "6", RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", **port)
        for rank, size, port in ((rank, size, {"MASTER_PORT": str(port)}) for rank, size, port in jobs)
    ]
    said = []
    for (rank, size, port), process in zip(jobs, ranks, strict=True):
        _, errors = process.communicate(timeout=200)
        said.append(errors.strip().splitlines()[-1])
        assert process.returncode == 1
        where = f"127.0.0.1:{port} within 6 s (ldt.timeout_s)"
        assert said[-1].startswith(f"LinkError: Rank {rank} of {size} did not meet the others at {where}: ")
        for fragment in ("own address 127.0.0.1", "GLOO_SOCKET_IFNAME", "firewall", "ds_ldt.preparing_data"):
            assert fragment in said[-1]
        assert "terminate" not in errors
    assert "nobody answered; 1 of 2 ranks came, rank 1 did not" in said[0]
    assert "nobody answered. Rank 0 should listen there; this rank tried" in said[1]
    assert "connection refused" in said[1]
    assert "2 of 3 ranks came, rank 1 did not" in said[2]
    assert "2 of 3 ranks came, rank 1 did not" in said[3]


@pytest.mark.distributed
def test_S60_a_port_that_is_in_use_is_named_as_such(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(busy.getsockname()[1])}
        _, errors = start(tmp_path, "5", RANK="0", LOCAL_RANK="0", **meeting).communicate(timeout=200)
    assert "MASTER_PORT: found" in errors.splitlines()[-1]
    assert "no other program uses" in errors


@pytest.mark.distributed
def test_S48_process_without_a_launcher_ends_at_once(tmp_path: Path) -> None:
    _, errors = start(tmp_path, "60").communicate(timeout=200)
    assert errors.strip().splitlines()[-1].startswith("ConfigError: Environment variables RANK, WORLD_SIZE")

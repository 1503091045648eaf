"""What has to be right before the first process group exists: the launch environment, the backend, the rendezvous.

Every site is started on its own, so nothing but the launcher's environment variables tells a process who it is. They
are checked here, before anything can wait for anybody; each fault is one line that names the variable and the fix.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from ds_ldt.comm.operator_builds import leave_out_shared_memory_op, ops_of, wait_for_locks
from ds_ldt.comm.reach import local_end
from ds_ldt.comm.rendezvous import LaunchEnvironment, gather_at_start
from ds_ldt.errors import ConfigError, LinkError

logger = logging.getLogger(__name__)

# Backends whose point-to-point messages the transport is written for.
BACKENDS = ("gloo", "nccl", "hccl")

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER = (
    "start each site with the `deepspeed` launcher (deepspeed --no_ssh --node_rank=K --hostfile FILE --master_addr "
    "HOST --master_port PORT script.py ...), as examples/run_edge.sh and examples/run_cloud.sh do"
)


class Accelerator(Protocol):
    """The part of DeepSpeed's accelerator that the choice of a backend needs."""

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name of the device type, e.g. `cpu`."""

    def communication_backend_name(self) -> str:
        """Return the backend that DeepSpeed would use on this device type."""


def prepare_environment(environ: MutableMapping[str, str] | None = None) -> LaunchEnvironment:
    """Check the launcher's variables and fill in what gloo needs to find the right network interface.

    Args:
        environ: The environment, `os.environ` by default. `GLOO_SOCKET_IFNAME` is set to the loopback interface where
            it is absent and all processes meet on a loopback address; nothing else is changed.

    Returns:
        The checked values.

    Raises:
        ConfigError: If a variable is missing, is not a number, or contradicts another.
    """
    variables = os.environ if environ is None else environ
    launched = read_environment(variables)
    choose_interface(launched.master_addr, variables)
    return launched


def choose_interface(master_addr: str, variables: MutableMapping[str, str]) -> None:
    """Name the interface that gloo is to use where that is sure, and warn where gloo's own choice would be wrong.

    Args:
        master_addr: Where all processes meet.
        variables: Environment variables; `GLOO_SOCKET_IFNAME` is set to the loopback interface where it is absent and
            `master_addr` is a loopback address.
    """
    if _is_loopback(master_addr):
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    elif "GLOO_SOCKET_IFNAME" not in variables and _is_loopback(socket.gethostname()):
        logger.warning(
            "This machine's own name resolves to a loopback address, so gloo would listen where the other site cannot "
            "reach it. Set GLOO_SOCKET_IFNAME to the interface that leads to MASTER_ADDR=%s (see `ip route get`).",
            master_addr,
        )


def read_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Return the launcher's variables as checked values.

    Args:
        environ: Environment variables.

    Raises:
        ConfigError: If a variable is missing, is not a number, or contradicts another.
    """
    missing = [name for name in _VARIABLES if not environ.get(name)]
    if missing == ["LOCAL_RANK"]:
        raise ConfigError(
            "Environment variable LOCAL_RANK is not set, the other launch variables are. Fix: set it to the number of "
            f"this process among those on its machine (0 if it is the only one), or {_LAUNCHER}."
        )
    if missing:
        raise ConfigError(f"Environment variables {', '.join(missing)} are not set. Fix: {_LAUNCHER}.")
    world_size = _number(environ, "WORLD_SIZE", at_least=1)
    rank = _number(environ, "RANK", at_least=0)
    if rank >= world_size:
        raise ConfigError(
            f"Environment variable RANK is {rank}, expected less than WORLD_SIZE={world_size}. Fix: give every "
            "site the same hostfile, and the node rank of its own line in it."
        )
    port = _number(environ, "MASTER_PORT", at_least=1)
    if port > 65535:
        raise ConfigError(f"Environment variable MASTER_PORT is {port}, expected 1..65535. Fix: name a free TCP port.")
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", at_least=0),
        master_addr=environ["MASTER_ADDR"],
        master_port=port,
    )


def choose_backend(accelerator: Accelerator) -> str:
    """Return the backend for the process groups of this accelerator.

    Args:
        accelerator: DeepSpeed's `get_accelerator()`.

    Returns:
        `gloo` on CPUs, otherwise what the accelerator names.

    Raises:
        ConfigError: If the accelerator's backend has no point-to-point messages that ds_ldt can use, or if this torch
            was built without it.
    """
    from torch import distributed

    device = accelerator.device_name()
    backend = accelerator.communication_backend_name()
    if device == "cpu" and backend == "ccl":
        raise ConfigError(
            "DeepSpeed chose the 'ccl' backend for CPUs because oneccl_bindings_for_pytorch is installed; expected "
            "gloo, as ccl lacks the point-to-point messages. Fix: uninstall oneccl_bindings_for_pytorch here."
        )
    if device == "cpu":
        backend = "gloo"
    if backend not in BACKENDS:
        raise ConfigError(
            f"Accelerator '{device}' communicates through backend '{backend}', expected one of {', '.join(BACKENDS)}. "
            "Fix: run on another accelerator, or on CPUs with DS_ACCELERATOR=cpu."
        )
    if not distributed.is_backend_available(backend):
        raise ConfigError(
            f"Accelerator '{device}' needs backend '{backend}', which this torch does not have. Fix: install the "
            "torch build or plug-in of that accelerator, or run on CPUs with DS_ACCELERATOR=cpu."
        )
    return backend


def check_backend(accelerator: Accelerator, backend_config: str) -> None:
    """Check the backend of a process group that the caller made before ds_ldt was called.

    Args:
        accelerator: DeepSpeed's `get_accelerator()`.
        backend_config: `torch.distributed.get_backend_config()`, e.g. `gloo` or `cpu:gloo,cuda:nccl`.

    Raises:
        ConfigError: If that backend cannot send this accelerator's tensors.
    """
    device = accelerator.device_name().split(":")[0]
    of_device = dict(item.split(":", 1) for item in backend_config.split(",") if ":" in item)
    backend = of_device.get(device, "none") if of_device else backend_config
    expected = ("gloo",) if device == "cpu" else BACKENDS
    if backend not in expected:
        raise ConfigError(
            f"The process group in use has backend '{backend}' for device '{device}', expected "
            f"{' or '.join(expected)}. Fix: let ds_ldt start torch.distributed, or give "
            "init_process_group such a backend."
        )


def init_distributed(
    timeout_s: float, *, deepspeed_config: Mapping[str, Any] | None = None, sites: Sequence[str] = ()
) -> LaunchEnvironment:
    """Start DeepSpeed's communication layer over all ranks of both sites, or join them in the one that runs already.

    Every rank calls it. The ranks first meet in the store, which can tell who is missing, and wait for those that
    prepare their data (see :func:`ds_ldt.preparing_data`).

    Args:
        timeout_s: Longest wait in seconds for the other ranks, and for a build of an operator that is going on. It
            also becomes the timeout of the world group.
        deepspeed_config: The DeepSpeed JSON; its optimizer says which compiled operators this run will need.
        sites: Site of each rank, for messages.

    Returns:
        Who this process is.

    Raises:
        ConfigError: If the launch environment, the port or the backend cannot work, or a needed operator stays locked.
        LinkError: If the ranks do not all meet within `timeout_s`; who is missing is named.
    """
    launched = prepare_environment()
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from torch import distributed

    accelerator = get_accelerator()
    if distributed.is_initialized():
        check_backend(accelerator, distributed.get_backend_config())
        backend = str(distributed.get_backend())
    else:
        backend = choose_backend(accelerator)
    if accelerator.device_name() == "cpu":
        leave_out_shared_memory_op()
    wait_for_locks(ops_of(deepspeed_config or {}), timeout_s=timeout_s)
    gather_at_start(launched, distributed, timeout_s=timeout_s, sites=sites)
    try:
        deepspeed.init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            timeout=timedelta(seconds=timeout_s),
            verbose=False,
        )
    except (RuntimeError, OSError) as error:
        raise _not_connected(launched, timeout_s, error) from error
    return launched


def _not_connected(launched: LaunchEnvironment, timeout_s: float, error: Exception) -> LinkError:
    cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
    place = f"{launched.master_addr}:{launched.master_port}"
    return LinkError(
        f"Rank {launched.rank} of {launched.world_size} did not meet the others at {place} within {timeout_s:g} s "
        f"(ldt.timeout_s): all ranks came there, but the connections between them were not made "
        f"({local_end(launched.master_addr, launched.master_port)}): {cause}. Fix: look for an earlier error of "
        "another rank; name with GLOO_SOCKET_IFNAME, on both sites, the interface that leads to the other one; let "
        "every TCP port through between them, for gloo opens further ones."
    )


def _number(environ: Mapping[str, str], name: str, *, at_least: int) -> int:
    text = environ[name]
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise ConfigError(
            f"Environment variable {name} is '{text}', expected a whole number of at least {at_least}. "
            f"Fix: {_LAUNCHER}."
        )
    return value


def _is_loopback(host: str) -> bool:
    """Return whether a host name or address leads to this machine's loopback interface only."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    # A link-local IPv6 address carries its interface after a percent sign.
    plain = [ipaddress.ip_address(str(address).partition("%")[0]) for address in addresses]
    return bool(plain) and all(address.is_loopback for address in plain)

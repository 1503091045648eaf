"""How the ranks meet: the store of the job, who has come to it, and signs of life of those who are still preparing.

Rank 0 holds torch's store at `MASTER_ADDR:MASTER_PORT`, as torch's `env://` does, unless torchrun holds one there for
it. `torch.distributed` later shares this store, since both are opened as multi-tenant.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

from ds_ldt.comm.reach import claim, local_end, reason, wait_for_store, within
from ds_ldt.comm.shared_store import SharedStore
from ds_ldt.errors import ConfigError, LinkError

logger = logging.getLogger(__name__)

_BEATS = "beats"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_TELL_EVERY_S = 30.0
_LONGEST_BEAT_S = 5.0
_MARGIN_S = 5.0

_STORES: dict[tuple[str, int], Any] = {}
"""Address and port -> this process's connection; kept, as rank 0's process holds the store itself."""

_GATHERINGS = count(1)
"""Numbers the gatherings over a world that exists; every rank of it makes the same ones."""

DATA_HINT = (
    "The edge may still be reading or tokenising its data: do that inside `with ds_ldt.preparing_data(config):`, "
    "which lets the other ranks wait for as long as it goes on, or raise ldt.timeout_s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """Who this process is and where all of them meet, as the launcher says.

    Attributes:
        rank: Global rank, edge ranks first.
        world_size: Number of processes of both sites.
        local_rank: Number of this process among those on its machine.
        master_addr: Host of rank 0.
        master_port: TCP port on that host.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


def holds_store(rank: int) -> bool:
    """Return whether this rank's process holds the store; torchrun's agent does it for its ranks."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def join(launched: LaunchEnvironment, *, timeout_s: float, sites: Sequence[str] = ()) -> SharedStore:
    """Open the store of the job before `torch.distributed` is started.

    Args:
        launched: Who this process is and where all meet.
        timeout_s: Longest wait in seconds (`ldt.timeout_s`).
        sites: Site of each rank, for messages.

    Raises:
        ConfigError: The port is in use or may not be used.
        LinkError: Nobody answers, or the address does not lead to rank 0.
    """
    place = (launched.master_addr, launched.master_port)
    if place not in _STORES:
        _STORES[place] = _open(launched, timeout_s, sites)
    # torchrun starts processes again in the same store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return SharedStore(_STORES[place], f"ds_ldt/start/{attempt}", answer_s=timeout_s)


def of_world(world: Any, *, timeout_s: float) -> SharedStore:
    """Return the store of a world that exists, whoever made it.

    Args:
        world: `torch.distributed`, initialised.
        timeout_s: Longest wait for an answer in seconds, if it is less than a few.
    """
    return SharedStore(world.distributed_c10d._get_default_store(), "ds_ldt", answer_s=timeout_s)


def _open(launched: LaunchEnvironment, timeout_s: float, sites: Sequence[str]) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in its stubs

    host, port, listens = launched.master_addr, launched.master_port, holds_store(launched.rank)
    try:
        if listens:
            _claim(host, port, timeout_s)
        else:
            wait_for_store(host, port, timeout_s=timeout_s)
    except OSError as error:
        raise _unreached(launched, timeout_s, sites, error) from error

    def connect() -> Any:
        return TCPStore(
            host,
            port,
            is_master=listens,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=timeout_s),
        )

    try:
        return within(timeout_s + _MARGIN_S, connect)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise port_in_use("MASTER_PORT", port) from error
        raise _unreached(launched, timeout_s, sites, ConnectionError(str(error).partition("\n")[0])) from error
    except TimeoutError as error:
        raise _unreached(launched, timeout_s, sites, error) from error


def _claim(host: str, port: int, timeout_s: float) -> None:
    try:
        claim(host, port, timeout_s=timeout_s)
    except PermissionError as error:
        raise port_forbidden("MASTER_PORT", port) from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # Perhaps by a store of this very process, which torch shares: it will say if not.


def port_in_use(name: str, port: int) -> ConfigError:
    """Return the error for a port of this machine that something else listens at."""
    return ConfigError.of(
        name,
        found=port,
        expected="a TCP port of this machine that no other program uses",
        fix="end the job that listens there, or choose another port on both sites",
    )


def port_forbidden(name: str, port: int) -> ConfigError:
    """Return the error for a port that this user may not listen at."""
    return ConfigError.of(
        name,
        found=port,
        expected="a TCP port that this user may listen at",
        fix="choose one from 1024 on, the same on both sites",
    )


def _unreached(launched: LaunchEnvironment, timeout_s: float, sites: Sequence[str], error: OSError) -> LinkError:
    where = f"{launched.master_addr}:{launched.master_port}"
    start = (
        f"Rank {launched.rank} of {launched.world_size} did not meet the others at {where} within {timeout_s:g} s "
        "(ldt.timeout_s): "
    )
    end = local_end(launched.master_addr, launched.master_port)
    if holds_store(launched.rank):
        return LinkError(
            f"{start}this rank{_site(sites, 0)} listens at this port ({end}), but the address does not lead to "
            f"it: {reason(error)}. Fix: "
            "MASTER_ADDR (--master_addr) must be an address of the machine of rank 0, the edge, under which both "
            "sites reach it; name the same one on both."
        )
    return LinkError(
        f"{start}nobody answered. Rank 0{_site(sites, 0)} should listen there; this "
        f"rank{_site(sites, launched.rank)} tried ({end}): {reason(error)}. Look at: is the "
        "edge started, with the same hostfile, address and port; is this the edge's address as seen from here; does a "
        f"firewall let the port through; does GLOO_SOCKET_IFNAME name the interface that leads there. {DATA_HINT}."
    )


def _site(sites: Sequence[str], rank: int) -> str:
    return f" ({sites[rank]})" if rank < len(sites) else ""


def listed(ranks: Sequence[int], sites: Sequence[str]) -> str:
    """Return ranks with their sites, e.g. `rank 0 (edge), rank 1 (cloud)`."""
    return ", ".join(f"rank {rank}{_site(sites, rank)}" for rank in ranks)


# --- gathering ------------------------------------------------------------------------------------------------------


def gather(
    store: SharedStore,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    missed: Callable[[Sequence[int], float, bool], LinkError],
    key: str,
) -> None:
    """Wait until every rank has come to this call; as long as one shows signs of life, or else `timeout_s`.

    Args:
        store: Where they meet.
        rank: This rank.
        world_size: How many there are.
        timeout_s: Longest wait in seconds without a sign of life (see `preparing`).
        missed: Makes the error from the ranks that had not come when the store last answered, the seconds waited, and
            whether the store itself no longer answers.
        key: What this gathering is called.

    Raises:
        LinkError: As `missed` made it; at once if the process that holds the store has ended.
    """
    begin = last_life = last_told = time.monotonic()
    is_first, is_lost, pause = True, False, _FIRST_PAUSE_S
    missing: list[int] = []
    beats: int | None = None
    while True:
        now = time.monotonic()
        try:
            if is_first:
                store.append(key, f"{rank} ")
                is_first = False
            arrived = {int(number) for number in store.read(key).split()}
            missing = [number for number in range(world_size) if number not in arrived]
            is_lost = False
            if not missing:
                return
            beats, before = store.count(_BEATS), beats
            if before is not None and beats != before:
                last_life = now
        except (TimeoutError, socket.gaierror):
            is_lost = True
        except OSError as error:
            raise missed(missing, now - begin, True) from error
        if now - last_life > timeout_s:
            raise missed(missing, now - begin, is_lost)
        if now - last_told > _TELL_EVERY_S:
            last_told = now
            state = "it is preparing its data" if last_life > begin else "no sign of life yet"
            logger.warning("Rank %d has waited %.0f s for ranks %s: %s.", rank, now - begin, missing, state)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S, timeout_s / 10)


def gather_at_start(launched: LaunchEnvironment, world: Any, *, timeout_s: float, sites: Sequence[str]) -> None:
    """Wait until every rank has been started and is about to make or use process groups.

    Args:
        launched: Who this process is.
        world: `torch.distributed`.
        timeout_s: `ldt.timeout_s`.
        sites: Site of each rank, for messages.

    Raises:
        ConfigError: As for `join`.
        LinkError: As for `join`; or some rank did not come, which is named.
    """
    if world.is_initialized():
        store, key = of_world(world, timeout_s=timeout_s), f"module/{next(_GATHERINGS)}"
        if not store.is_usable:
            return
    else:
        store, key = join(launched, timeout_s=timeout_s, sites=sites), "arrived"

    def missed(missing: Sequence[int], waited_s: float, is_lost: bool) -> LinkError:
        where = f"{launched.master_addr}:{launched.master_port}"
        return LinkError(
            f"Rank {launched.rank} of {launched.world_size} did not meet the others at {where} within {timeout_s:g} s "
            f"(ldt.timeout_s): {_who(missing, launched, sites, is_lost)} This rank{_site(sites, launched.rank)} "
            f"waited {waited_s:.1f} s ({local_end(launched.master_addr, launched.master_port)}). Look at: is the "
            "other site started, with the same hostfile, address and port; can it reach this address and port "
            "(firewall); what do the logs of those ranks say; does GLOO_SOCKET_IFNAME name the interface that leads "
            f"there. {DATA_HINT}."
        )

    gather(store, rank=launched.rank, world_size=launched.world_size, timeout_s=timeout_s, missed=missed, key=key)


def _who(missing: Sequence[int], launched: LaunchEnvironment, sites: Sequence[str], is_lost: bool) -> str:
    lost = " The store that rank 0 holds there does not answer any more, so rank 0 has ended or is stopped."
    if not missing:
        return lost.strip()
    others = [rank for rank in range(launched.world_size) if rank != launched.rank]
    mine = sites[launched.rank] if sites else None
    other_site = [rank for rank in others if sites and sites[rank] != mine]
    nobody = "nobody answered; " if missing in (others, other_site) else ""
    came = launched.world_size - len(missing)
    told = f"{nobody}{came} of {launched.world_size} ranks came, {listed(missing, sites)} did not."
    return told + lost if is_lost else told


def gather_in_call(world: Any, *, call: str, number: int, timeout_s: float, sites: Sequence[str]) -> None:
    """Wait until every rank has come to a call that begins with messages between all of them.

    Args:
        world: `torch.distributed`, initialised.
        call: Its name, for messages.
        number: Tells one such call from the next, the same on every rank.
        timeout_s: `ldt.timeout_s`.
        sites: Site of each rank, for messages.

    Raises:
        LinkError: Some rank did not come, which is named.
    """
    store = of_world(world, timeout_s=timeout_s)
    if not store.is_usable:
        return
    rank, world_size = world.get_rank(), world.get_world_size()

    def missed(missing: Sequence[int], waited_s: float, is_lost: bool) -> LinkError:
        who = f"{listed(missing, sites)} to come to {call}" if missing else f"the others to come to {call}"
        if is_lost:
            who += "; rank 0, whose process holds the store, has ended or is stopped"
        return LinkError(
            f"rank {rank}{_site(sites, rank)} waited {waited_s:.1f} s for {who} (ldt.timeout_s = {timeout_s:g}). "
            f"Every rank of both sites has to call it; look at the log of who did not. {DATA_HINT}."
        )

    key = f"{call}/{number}"
    gather(store, rank=rank, world_size=world_size, timeout_s=timeout_s, missed=missed, key=key)


# --- signs of life --------------------------------------------------------------------------------------------------


@contextmanager
def preparing(store: SharedStore, *, timeout_s: float) -> Iterator[None]:
    """Show signs of life for as long as the body runs, so that ranks in `gather` go on waiting.

    Args:
        store: The one that they wait in.
        timeout_s: `ldt.timeout_s`; there are several signs within it.

    Raises:
        LinkError: The store does not answer.
    """
    ended = threading.Event()
    interval = min(_LONGEST_BEAT_S, timeout_s / 5)

    def beat() -> None:
        while not ended.wait(interval):
            try:
                store.count(_BEATS, 1)
            except OSError as error:
                logger.warning("The other ranks see no sign of life of this one: %s.", reason(error))

    try:
        store.count(_BEATS, 1)
    except OSError as error:
        raise LinkError(f"The store of the job does not answer: {reason(error)}. See the log of rank 0.") from error
    thread = threading.Thread(target=beat, name="ds_ldt signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(interval)

"""`ds-ldt check`: one process on each site; they meet, compare what they have, and measure the link between them.

They meet in a store of torch that the edge listens for, at the address and port of the job to come. Only JSON text
and numbers cross; nothing that comes from the other site is executed. The measuring is done over gloo, which is what
a job on CPUs sends its messages over, and on CPUs whatever the accelerator is.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in its stubs
from torch.distributed.distributed_c10d import PrefixStore, Store

import ds_ldt
from ds_ldt.comm.agreement import shared_settings, site_differences
from ds_ldt.comm.launch import choose_backend, choose_interface
from ds_ldt.comm.link_probe import Line, answer_probe, probe
from ds_ldt.comm.reach import claim, local_end, reason, wait_for_store, within
from ds_ldt.comm.rendezvous import port_forbidden, port_in_use
from ds_ldt.comm.site_report import MeasuredLink, SiteFacts, SiteReport, read_facts
from ds_ldt.config.schema import JobConfig
from ds_ldt.errors import Absent, ConfigError, ConfigProblem, LinkError
from ds_ldt.plan import Plan
from ds_ldt.topology.ranks import Site

_PREFIX = "ds_ldt_check"
_ARRIVED = f"{_PREFIX}/arrived"
_MEASURED = f"{_PREFIX}/measured"
_MOST_TEXT = 2**17
"""Bytes; what a site tells is a few thousand."""

_LEAVE_S = 5.0
"""Seconds that the edge, whose process holds the store, stays for the cloud to read the last of it."""

_GRACE_S = 5.0
_OPENING_S = 3.0
"""Seconds beyond the timeout after which torch itself is not waited for any longer."""

_KERNEL = Path("/proc/sys/net/ipv4")
"""Where Linux shows its settings of TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and as whom this process meets the other one.

    Attributes:
        site: Which site this process is.
        master_addr: Address of the edge, as seen from here.
        master_port: TCP port on which the edge listens.
        timeout_s: Longest wait in seconds for the other site, and for each of its messages.
    """

    site: Site
    master_addr: str
    master_port: int
    timeout_s: float

    @property
    def place(self) -> str:
        """Address and port, as they are written."""
        return f"{self.master_addr}:{self.master_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathering:
    """Two processes that have met.

    Attributes:
        store: What they share; the edge's process holds it.
        number: 1 for the process that came first, else 2.
        text: What the other one tells.
    """

    store: Store
    number: int
    text: str

    def leave(self, site: Site) -> None:
        """Say that this process needs the store no longer; who holds it waits for the other to say so."""

        def say() -> None:
            self.store.set(f"{_PREFIX}/done/{self.number}", "")
            if site == "edge":
                self.store.wait([f"{_PREFIX}/done/{3 - self.number}"], timedelta(seconds=_LEAVE_S))

        with suppress(RuntimeError, TimeoutError):
            within(2 * _LEAVE_S, say)


def facts_of(job: JobConfig, plan: Plan, site: Site) -> SiteFacts:
    """Return what this site has.

    Args:
        job: The configuration.
        plan: The plan that follows from it.
        site: Which site this is.

    Raises:
        ConfigError: The accelerator has no backend.
    """
    versions = {package.__name__: str(package.__version__) for package in (ds_ldt, deepspeed, torch)}
    versions["python"] = platform.python_version()
    with suppress(metadata.PackageNotFoundError):
        versions["transformers"] = metadata.version("transformers")
    slow_start, receive, send = map(_kernel_setting, ("tcp_slow_start_after_idle", "tcp_rmem", "tcp_wmem"))
    return SiteFacts(
        site=site,
        versions=versions,
        backend=choose_backend(get_accelerator()),
        settings=shared_settings(job),
        policy=plan.policy,
        fingerprint=plan.fingerprint,
        latency_ms=job.ldt.link.latency_ms,
        bandwidth_mbps=job.ldt.link.bandwidth_mbps,
        slow_start_after_idle=None if slow_start is None else slow_start == 1,
        tcp_buffer_bytes=None if receive is None or send is None else min(receive, send),
    )


def _kernel_setting(name: str) -> int | None:
    """Return the last number of a setting of TCP; None where it cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        return int((_KERNEL / name).read_text(encoding="ascii").split()[-1])
    return None


def check_sites(mine: SiteFacts, where: Meeting) -> SiteReport:
    """Meet the other site, compare what both have, and measure the link if nothing differs.

    Args:
        mine: What this site has.
        where: Where to meet.

    Returns:
        The same report on both sites.

    Raises:
        ConfigError: Both processes were started as the same site, or the interface or the port cannot be used.
        LinkError: The other site did not come, went away, or cannot be reached by gloo.
    """
    choose_interface(where.master_addr, os.environ)
    _check_interface(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    try:
        gathering = within(where.timeout_s + _GRACE_S, lambda: _meet(mine, where))
    except TimeoutError as error:
        raise _silenced(where) from error
    try:
        theirs = read_facts(gathering.text)
        if theirs.site == mine.site:
            other = "cloud" if mine.site == "edge" else "edge"
            raise ConfigError.of(
                "--site",
                found=Absent(f"{mine.site} on both sites"),
                expected="edge on one of them and cloud on the other",
                fix=f"start one of them with --site {other}",
            )
        edge, cloud = (mine, theirs) if mine.site == "edge" else (theirs, mine)
        difference = first_difference(edge, cloud)
        measured = None if difference is not None else _measure(gathering.store, where)
        return SiteReport(edge=edge, cloud=cloud, difference=difference, measured=measured)
    finally:
        gathering.leave(mine.site)


def first_difference(edge: SiteFacts, cloud: SiteFacts) -> ConfigProblem | None:
    """Return the first thing that must be alike and is not: versions, backend, shared settings, plan.

    Of torch only major and minor version must be alike; python and transformers are reported only.

    Args:
        edge: Facts of the edge.
        cloud: Facts of the cloud.
    """
    for package in ("ds_ldt", "deepspeed", "torch"):
        versions = [site.versions.get(package, "nothing") for site in (edge, cloud)]
        significant = [".".join(version.split(".")[:2]) if package == "torch" else version for version in versions]
        if significant[0] != significant[1]:
            return site_differences(
                {package: versions[0]},
                {package: versions[1]},
                fix=f"install the same version of {package} on both sites",
            )[0]
    found = [
        *site_differences(
            {"backend": edge.backend},
            {"backend": cloud.backend},
            fix="choose accelerators with the same backend, e.g. DS_ACCELERATOR=cpu on both sites",
        ),
        *site_differences(edge.settings, cloud.settings, fix="give both sites the same JSON"),
    ]
    # Where hints of the link change the plan, the plan is named: its line has the hints of both sites in words.
    if not [problem for problem in found if problem.key != "ldt.link"] and edge.fingerprint != cloud.fingerprint:
        found = site_differences(
            {"plan": _plan_of(edge)},
            {"plan": _plan_of(cloud)},
            fix="give both sites the same ldt.link and ldt.schedule, from which the plan follows",
        )
    return next(iter(found), None)


def _plan_of(site: SiteFacts) -> str:
    return (
        f"{site.policy} {site.fingerprint[:16]} (ldt.link.latency_ms {site.latency_ms:g}, "
        f"bandwidth_mbps {site.bandwidth_mbps:g})"
    )


def _check_interface(names: str) -> None:
    known = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in known:
            raise ConfigError.of(
                "--interface (GLOO_SOCKET_IFNAME)",
                found=name,
                expected=f"a network interface of this machine: {', '.join(known)}",
                fix="name the one that leads to the other site (`ip route get ADDRESS` shows it)",
            )


# --- meeting --------------------------------------------------------------------------------------------------------


def _meet(mine: SiteFacts, where: Meeting) -> _Gathering:
    until = time.monotonic() + where.timeout_s
    store = _open_store(where)
    try:
        number = store.add(_ARRIVED, 1)
        if number > 2:  # noqa: PLR2004
            raise ConfigError.of(
                "--master_port",
                found=where.master_port,
                expected="a port at which one edge and one cloud meet, but two processes have met there already",
                fix="start one process on each site, or choose another port on both",
            )
        store.set(f"{_PREFIX}/says/{number}", mine.model_dump_json())
        other = f"{_PREFIX}/says/{3 - number}"
        store.wait([other], timedelta(seconds=max(0.1, until - time.monotonic())))
        return _Gathering(store=store, number=number, text=_text(store.get(other)))
    except RuntimeError as error:
        raise _nobody_came(where) from error


def _open_store(where: Meeting) -> Store:
    """Listen on the edge, connect in the cloud."""
    try:
        if where.site == "edge":
            claim(where.master_addr, where.master_port, timeout_s=where.timeout_s)
        else:
            wait_for_store(where.master_addr, where.master_port, timeout_s=where.timeout_s)
    except PermissionError as error:
        raise port_forbidden("--master_port", where.master_port) from error
    except OSError as error:
        if where.site == "cloud":
            raise _nobody_answers(where, error) from error
        if error.errno != errno.EADDRINUSE:
            raise _elsewhere(where, error) from error
        return _store_of_another(where)
    try:
        return _store(where, listen=where.site == "edge")
    except RuntimeError as error:
        if where.site == "cloud":
            raise _nobody_came(where) from error
        if "EADDRINUSE" not in str(error):
            raise
        return _store_of_another(where)  # which took the port after it was found to be free


def _store_of_another(where: Meeting) -> Store:
    """Another process here has this port, or tries it: if it is a check too, both learn that both are edges."""
    with suppress(RuntimeError, OSError):
        wait_for_store(where.master_addr, where.master_port, timeout_s=min(_OPENING_S, where.timeout_s))
        store = _store(where, listen=False)
        store.wait([_ARRIVED], timedelta(seconds=1))
        return store
    raise port_in_use("--master_port", where.master_port)


def _store(where: Meeting, *, listen: bool) -> TCPStore:
    return TCPStore(
        where.master_addr,
        where.master_port,
        is_master=listen,
        wait_for_workers=False,
        timeout=timedelta(seconds=where.timeout_s),
    )


def _text(content: bytes) -> str:
    if len(content) > _MOST_TEXT:
        raise LinkError(f"The other site tells {len(content)} bytes, at most {_MOST_TEXT} were expected.")
    return content.decode(errors="replace")


def _nobody_came(where: Meeting) -> LinkError:
    other = "cloud" if where.site == "edge" else "edge"
    return LinkError(
        f"Nobody answered. The {other} did not come to {where.place} within {where.timeout_s:g} s (--timeout_s), "
        f"where this site, the {where.site}, waited for it ({_end(where)}). Look at: is `ds-ldt check CONFIG --site "
        f"{other}` running there, with the same --master_addr and --master_port; is that the edge's address as seen "
        "from the cloud; does a firewall let the cloud reach that TCP port of the edge; does --interface "
        "(GLOO_SOCKET_IFNAME) name the interface that leads to the other site."
    )


def _nobody_answers(where: Meeting, error: OSError) -> LinkError:
    what = "listens" if isinstance(error, ConnectionRefusedError) else "answers"
    return LinkError(
        f"Nobody answered. Nobody {what} at {where.place} within {where.timeout_s:g} s (--timeout_s) to this site, "
        f"the cloud ({_end(where)}): {reason(error)}. Look at: is `ds-ldt check CONFIG --site edge` running on the "
        "edge, with the same --master_addr and --master_port (it waits for the cloud, and is not found if both sites "
        "say --site cloud); is that the edge's address as seen from here; does a firewall let this TCP port through; "
        "does --interface (GLOO_SOCKET_IFNAME) name the interface that leads there."
    )


def _elsewhere(where: Meeting, error: OSError) -> LinkError:
    return LinkError(
        f"The edge did not reach its own address {where.place} ({_end(where)}): {reason(error)}. Fix: --master_addr "
        "must be an address of the edge's machine under which both sites reach it; name the same one on both."
    )


def _silenced(where: Meeting) -> LinkError:
    return LinkError(
        f"Nobody answered. What listens at {where.place} has stopped to answer this site, the {where.site} "
        f"({_end(where)}), within {where.timeout_s:g} s (--timeout_s). Look at: is the other site's process stopped; "
        "is the connection lost."
    )


def _end(where: Meeting) -> str:
    return local_end(where.master_addr, where.master_port)


# --- measuring ------------------------------------------------------------------------------------------------------


def _measure(store: Store, where: Meeting) -> MeasuredLink:
    """Measure the link over gloo; the edge counts and tells the cloud."""
    timeout = timedelta(seconds=where.timeout_s)
    _connect(store, where, timeout)
    try:
        if where.site == "edge":
            measured = probe(Line(peer=1, timeout=timeout))
            store.set(_MEASURED, measured.model_dump_json())
            return measured
        answer_probe(Line(peer=0, timeout=timeout))
        store.wait([_MEASURED], timeout)
        return MeasuredLink.model_validate_json(store.get(_MEASURED))
    except RuntimeError as error:
        raise LinkError(
            "The sites agree, but the other one went away while the link was measured, or was silent for "
            f"{where.timeout_s:g} s (--timeout_s). Fix: see what it says there, then run both anew. The cause: "
            f"{_first_line(error)}"
        ) from error
    finally:
        dist.destroy_process_group()


def _connect(store: Store, where: Meeting, timeout: timedelta) -> None:
    unreached = LinkError(
        f"The sites have met at {where.place} and agree, but gloo did not connect them within {where.timeout_s:g} s "
        "(--timeout_s). Fix: name with --interface (or GLOO_SOCKET_IFNAME, here "
        f"{os.environ.get('GLOO_SOCKET_IFNAME') or 'not set'}) the interface that leads to the other site, on both "
        "sites, and let every TCP port through between them: gloo opens further ones."
    )

    def connect() -> None:
        rank, shared = int(where.site == "cloud"), PrefixStore(f"{_PREFIX}/gloo", store)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=2, timeout=timeout)

    try:
        within(where.timeout_s + _GRACE_S, connect)
    except TimeoutError:
        raise unreached from None
    except RuntimeError as error:
        raise LinkError(f"{unreached} The cause: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

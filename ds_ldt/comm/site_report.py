"""What `ds-ldt check` finds, as text and as JSON: the facts of both sites, the link as measured, and what to change.

Pure: how the facts come together is the matter of `site_check`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ds_ldt.errors import ConfigProblem, LinkError
from ds_ldt.plan.bound import TO_CLOUD, TO_EDGE
from ds_ldt.topology.ranks import Site

HINT_TOLERANCE = 0.25
"""How far a hint may be from what was measured, as a part of the latter, before a change is advised."""

_LATENCY_FLOOR_MS = 0.5
"""Latencies nearer than this are alike: that much is software, and no plan depends on it."""

_LONG_LATENCY_S = 5e-3
"""From here on a slow start of TCP, which takes several round trips, is worth a line of advice."""

_FULL_BUFFER = 0.4
"""Part of TCP's largest buffer that bytes under way may fill before it is the buffer that limits them: Linux gives a
connection about half of it, the rest is its own bookkeeping."""

_MEGABIT = 1e6 / 8
"""Bytes per megabit."""

_NOT_COMPARED = ("transformers", "python")


class _Told(BaseModel):
    """What one site tells the other: read strictly, since it comes from another machine."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SiteFacts(_Told):
    """What a site has, before anything is measured.

    Attributes:
        site: Which one it was started as.
        versions: Package -> version; python is one of them.
        backend: The backend that its accelerator's process groups would use.
        settings: The settings that both sites must share, as short texts by name.
        policy: Name of the plan's policy.
        fingerprint: The plan's, 64 hexadecimal digits.
        latency_ms: The hint `ldt.link.latency_ms`.
        bandwidth_mbps: The hint `ldt.link.bandwidth_mbps`; 0 means unlimited.
        slow_start_after_idle: Whether TCP starts slowly again after a pause; None where that cannot be told.
        tcp_buffer_bytes: The most that TCP keeps for one connection, to send or received; None likewise.
    """

    site: Site
    versions: dict[str, str]
    backend: str
    settings: dict[str, str]
    policy: str
    fingerprint: str
    latency_ms: float
    bandwidth_mbps: float
    slow_start_after_idle: bool | None
    tcp_buffer_bytes: int | None

    @property
    def settings_digest(self) -> str:
        """Fingerprint of the shared settings, 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()


class MeasuredLink(_Told):
    """The link as measured.

    Attributes:
        latency_s: One way: half of the median round trip of a message of 8 bytes, in seconds.
        latency_p90_s: Half of the 90th percentile.
        round_trips: How many there were.
        to_cloud: Bytes per second from edge to cloud, by the median message.
        to_edge: The same from cloud to edge.
        message_bytes: The size of those messages, the smaller one if the directions differ.
    """

    latency_s: float
    latency_p90_s: float
    round_trips: int
    to_cloud: float
    to_edge: float
    message_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """What a check has found; the same on both sites.

    Attributes:
        edge: Facts of the edge.
        cloud: Facts of the cloud.
        difference: The first thing on which they differ that must be alike.
        measured: The link; None if there is a difference.
    """

    edge: SiteFacts
    cloud: SiteFacts
    difference: ConfigProblem | None
    measured: MeasuredLink | None

    def document(self) -> dict[str, Any]:
        """Return the report as JSON would have it."""
        difference, link = self.difference, self.measured
        return {
            "agree": difference is None,
            "difference": None
            if difference is None
            else {"key": difference.key, "found": str(difference.found), "fix": difference.fix},
            "sites": {
                facts.site: facts.model_dump(exclude={"site"}) | {"settings_sha256": facts.settings_digest}
                for facts in (self.edge, self.cloud)
            },
            "link": None
            if link is None
            else {
                "latency_s": link.latency_s,
                "latency_p90_s": link.latency_p90_s,
                "round_trips": link.round_trips,
                "bandwidth_bytes_per_s": {TO_CLOUD: link.to_cloud, TO_EDGE: link.to_edge},
                "message_bytes": link.message_bytes,
            },
            "suggested": {} if link is None else suggested_hints(self.edge, link),
            "advice": [] if link is None else list(advice(self.edge, self.cloud, link)),
        }

    def text(self) -> str:
        """Return the report as lines for a terminal."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        edge, cloud = self.edge, self.cloud
        yield f"{'':<13} {'edge':<20} cloud"
        for name in sorted({*edge.versions, *cloud.versions}, key=lambda name: (name in _NOT_COMPARED, name)):
            mine, theirs = (site.versions.get(name, "not installed") for site in (edge, cloud))
            yield f"{name:<13} {mine:<20} {theirs:<20}{'' if mine == theirs else ' (may differ)'}".rstrip()
        yield f"{'backend':<13} {edge.backend:<20} {cloud.backend}"
        for name, values in (
            ("settings", [f"{len(site.settings)} shared, sha256 {site.settings_digest}" for site in (edge, cloud)]),
            ("plan", [f"{site.policy} {site.fingerprint}" for site in (edge, cloud)]),
        ):
            yield f"{name:<13} edge   {values[0]}"
            yield f"{'':<13} cloud  {values[1]}"
        if self.measured is not None:
            yield from _link_lines(self.measured)
            yield from (f"{'advice':<13} {line}" for line in advice(edge, cloud, self.measured))


def read_facts(text: str) -> SiteFacts:
    """Return what the other site has told about itself.

    Raises:
        LinkError: It is not what this version of ds_ldt tells.
    """
    try:
        return SiteFacts.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise LinkError(
            f"The other site's answer is not understood ({where}: {first['msg']}). Fix: install the same version of "
            "ds_ldt on both sites, and let nothing but `ds-ldt check` use this port."
        ) from None


def suggested_hints(hints: SiteFacts, link: MeasuredLink) -> dict[str, float]:
    """Return key -> value for the hints that are further off than `HINT_TOLERANCE`.

    A plan for too much latency costs memory only and one for too little costs time, so it is the 90th percentile that
    is suggested. Of the two directions the slower one counts, since `ldt.link.bandwidth_mbps` is one number for both.

    Args:
        hints: Facts of a site.
        link: What was measured.
    """
    found = {}
    median, high = link.latency_s * 1e3, link.latency_p90_s * 1e3
    lowest, highest = median * (1 - HINT_TOLERANCE), high * (1 + HINT_TOLERANCE)
    if not min(lowest, median - _LATENCY_FLOOR_MS) <= hints.latency_ms <= max(highest, high + _LATENCY_FLOOR_MS):
        found["ldt.link.latency_ms"] = _rounded(high)
    slower = min(link.to_cloud, link.to_edge) / _MEGABIT
    if abs(hints.bandwidth_mbps - slower) > HINT_TOLERANCE * slower:
        found["ldt.link.bandwidth_mbps"] = _rounded(slower)
    return found


def advice(edge: SiteFacts, cloud: SiteFacts, link: MeasuredLink) -> Iterator[str]:
    """Yield what to change for the link that was measured, a sentence each.

    Args:
        edge: Facts of the edge.
        cloud: Facts of the cloud.
        link: What was measured.
    """
    hints: Mapping[str, float] = {
        "ldt.link.latency_ms": edge.latency_ms,
        "ldt.link.bandwidth_mbps": edge.bandwidth_mbps,
    }
    if (edge.latency_ms, edge.bandwidth_mbps) != (cloud.latency_ms, cloud.bandwidth_mbps):
        yield (
            f"give both sites the same hints: the cloud's ldt.link.latency_ms is {cloud.latency_ms:g} and its "
            f"ldt.link.bandwidth_mbps {cloud.bandwidth_mbps:g}, the edge's {edge.latency_ms:g} and "
            f"{edge.bandwidth_mbps:g}"
        )
    suggested = suggested_hints(edge, link)
    for key, value in suggested.items():
        yield f"set {key} to {value:g} on both sites, it is {hints[key]:g}"
    if suggested:
        options = " ".join(f"--set {key}={value:g}" for key, value in suggested.items())
        yield f"see what that changes: ds-ldt plan CONFIG {options}"
    slow = [site.site for site in (edge, cloud) if site.slow_start_after_idle]
    if slow and link.latency_s > _LONG_LATENCY_S:
        yield (
            f"on the {' and the '.join(slow)}: sysctl -w net.ipv4.tcp_slow_start_after_idle=0, else TCP starts slowly "
            "again after each pause, which costs several round trips at the start of a step"
        )
    under_way = max(link.to_cloud, link.to_edge) * 2 * link.latency_s
    small = [site.tcp_buffer_bytes for site in (edge, cloud) if site.tcp_buffer_bytes is not None]
    if small and under_way > _FULL_BUFFER * min(small):
        yield (
            "TCP's buffers may be what limits the bandwidth here: raise the last number of net.ipv4.tcp_rmem and "
            f"net.ipv4.tcp_wmem on both sites (the smallest is {min(small)}), then check again"
        )


def _link_lines(link: MeasuredLink) -> Iterator[str]:
    yield (
        f"{'latency':<13} {link.latency_s * 1e3:.4g} ms one way, 90th percentile {link.latency_p90_s * 1e3:.4g} ms "
        f"(half of {link.round_trips} round trips of 8 bytes, the median)"
    )
    size = link.message_bytes / 2**20
    yield (
        f"{'bandwidth':<13} edge to cloud {link.to_cloud / _MEGABIT:.4g} Mbit/s, cloud to edge "
        f"{link.to_edge / _MEGABIT:.4g} Mbit/s (one connection, the median of messages of {size:g} MiB)"
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")

"""The process groups that keep the streams apart: activations, gradients and control do not wait for each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_ldt.comm.grid import destroy_groups
from ds_ldt.comm.send_queue import Route, kept, wait_within
from ds_ldt.errors import LinkError
from ds_ldt.plan import Channel, Flow

_FAREWELL_S = 10.0
"""How long ranks that end in good order wait for each other."""

_FAREWELL_TAG = 3

_TAGGED_BACKENDS = frozenset({"gloo"})
"""Backends that tell messages on one group apart by tags, and wait on the host. Others get a group per channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One process group to be created: its backend and its ranks (None: all of them)."""

    name: str
    backend: str
    ranks: tuple[int, ...] | None = None


@dataclass(slots=True, kw_only=True)
class StreamGroups:
    """The process groups that keep the streams apart: activations, gradients and control do not wait for each other.

    Attributes:
        routes: Channel -> its route, for the channels of this rank.
        control: Group for announcements; always gloo, on CPU tensors.
        host_wait: True where `Work.wait(timeout)` blocks the host until the message is through (gloo); False where it
            orders the device's work instead and the backend's own watchdog bounds it.
    """

    routes: dict[Channel, Route]
    control: dist.ProcessGroup
    host_wait: bool
    _created: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        *,
        rank: int,
        channels: Iterable[Channel],
        timeout_s: float,
        backend: str,
        group_per_channel: bool | None = None,
    ) -> StreamGroups:
        """Creates the groups. Every rank of the world calls it with the same channels, backend and timeout.

        Args:
            rank: This rank.
            channels: The channels of all ranks, in any order.
            timeout_s: Seconds after which the backend gives up.
            backend: Backend of activations and gradients.
            group_per_channel: Default: what the backend needs (False for gloo, True for one without tags).

        Raises:
            LinkError: The groups could not be created.
        """
        ordered = sorted(dict.fromkeys(channels))
        if group_per_channel is None:
            group_per_channel = backend not in _TAGGED_BACKENDS
        groups: dict[str, dist.ProcessGroup] = {}
        for spec in group_specs(ordered, backend=backend, group_per_channel=group_per_channel):
            try:
                groups[spec.name] = dist.new_group(
                    ranks=None if spec.ranks is None else list(spec.ranks),
                    timeout=timedelta(seconds=timeout_s),
                    backend=spec.backend,
                )
            except RuntimeError as error:
                raise LinkError(
                    f"rank {rank} could not create the {spec.backend} group for {spec.name} within ldt.timeout_s = "
                    f"{timeout_s:g} s: {error}. Is every rank of both sites up, and does the network interface that "
                    "GLOO_SOCKET_IFNAME names reach the other site?"
                ) from error
        routes = {}
        for tag, channel in enumerate(ordered):
            if rank in (channel.source, channel.destination):
                name = str(channel) if group_per_channel else channel.flow.value
                routes[channel] = Route(group=groups[name], tag=0 if group_per_channel else tag)
        return cls(
            routes=routes,
            control=groups["control"],
            host_wait=backend in _TAGGED_BACKENDS,
            _created=[group for group in groups.values() if isinstance(group, dist.ProcessGroup)],
        )

    def wait_for_all(self) -> None:
        """Waits until every rank of both sites calls it too, for a few seconds at most. Raises nothing.

        torch's `monitored_barrier` would keep all ranks but the first for the timeout of the group, if that one does
        not come.
        """
        begin = time.monotonic()
        with contextlib.suppress(RuntimeError, ValueError):  # the latter where the group is gone, with the world
            rank, size = dist.get_rank(self.control), dist.get_world_size(self.control)
            others = range(1, size) if rank == 0 else range(1)
            for transfer in (dist.irecv, dist.isend) if rank == 0 else (dist.isend, dist.irecv):
                words = [torch.zeros(1, dtype=torch.uint8) for _ in others]
                works = [
                    kept(transfer(word, other, group=self.control, tag=_FAREWELL_TAG))
                    for word, other in zip(words, others, strict=True)
                ]
                for work in works:
                    wait_within(work, begin, _FAREWELL_S)

    def close(self) -> None:
        """Destroys the groups; peers that still wait on them see the connection closed."""
        groups, self._created = self._created, []
        destroy_groups(groups)
        self.routes = {}
        if groups:
            del self.control  # the threads and sockets of a group end when nobody holds it any more


def group_specs(channels: Sequence[Channel], *, backend: str, group_per_channel: bool) -> list[GroupSpec]:
    """The groups to create, in order. A pure function of the global channel list, so that all ranks agree."""
    if not group_per_channel:
        streams = [GroupSpec(name=flow.value, backend=backend) for flow in (Flow.ACTIVATION, Flow.GRADIENT)]
    else:
        streams = [
            GroupSpec(name=str(channel), backend=backend, ranks=tuple(sorted((channel.source, channel.destination))))
            for channel in sorted(channels)
        ]
    return [*streams, GroupSpec(name="control", backend="gloo")]

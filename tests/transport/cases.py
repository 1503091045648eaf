"""Targets of test_transport.py: rank 0 is the edge, every other rank a cloud stage of a domain of its own.

The layout is that of three chunks on two stages, so each domain has two channels per direction and flow on one pair of
ranks: boundaries 0 and 2 lead to the cloud, 1 and 3 back.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ldt.comm.groups import StreamGroups
from ds_ldt.comm.transport import Transport
from ds_ldt.comm.wire import DEFAULT_SCHEMA, WireGuard, WireSchema, WireTensor, signature_of
from ds_ldt.errors import LDTError
from ds_ldt.plan import Channel, Flow

MODES = ("tags", "group per channel", "device order")
"""How channels are told apart, and who waits. The last is the path of backends whose waits only order a device."""

MIXED = WireSchema(
    tensors=(
        WireTensor(name="states", dtype="float", gradient=True),
        WireTensor(name="bytes", dtype="int8"),
        WireTensor(name="positions", dtype="int32", optional=True),
        WireTensor(name="mask", dtype="bool", optional=True),
    ),
    uniform=True,
)


def channel(domain: int, boundary: int, flow: Flow = Flow.ACTIVATION) -> Channel:
    """A channel of the layout above."""
    cloud = domain + 1
    outward = (boundary % 2 == 0) == (flow is Flow.ACTIVATION)
    source, destination = (0, cloud) if outward else (cloud, 0)
    return Channel(domain=domain, boundary=boundary, flow=flow, source=source, destination=destination)


def all_channels() -> list[Channel]:
    """Every channel of all domains, in no particular order."""
    found = [channel(d, b, f) for d in range(dist.get_world_size() - 1) for b in range(4) for f in Flow]
    random.Random(dist.get_rank()).shuffle(found)
    return found


def transport(mode: str = "tags", *, schema: WireSchema = DEFAULT_SCHEMA, **options: Any) -> Transport:
    """A transport of this rank over groups of its own."""
    timeout_s = options.setdefault("timeout_s", 30.0)
    options.setdefault("receive_window", 3)
    rank = dist.get_rank()
    groups = StreamGroups.create(
        rank=rank,
        channels=all_channels(),
        timeout_s=timeout_s,
        backend="gloo",
        group_per_channel=None if mode == "tags" else True,
    )
    groups.host_wait = mode != "device order"
    guard = WireGuard(schema, "edge" if rank == 0 else "cloud")
    return Transport(rank=rank, groups=groups, device="cpu", guard=guard, **options)


def message(of: Channel, micro_batch: int, step: int = 0) -> tuple[Tensor, ...]:
    """A message whose shape and values tell where it belongs."""
    length = 1 + (3 * micro_batch + 5 * of.boundary + of.domain) % 11
    value = micro_batch + 100 * of.boundary + 1000 * of.domain + 10_000 * (of.flow is Flow.GRADIENT) + 1e5 * step
    return (torch.full((2, length), value),)


def error_of(call: Callable[..., object], *args: object) -> str:
    """Class and text of the error that the call raises."""
    try:
        call(*args)
    except LDTError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _expect(channels: Iterable[Channel], count: int, step: int = 0) -> dict[Channel, list[Any]]:
    return {c: [(m, signature_of(message(c, m, step))) for m in _order(c, count)] for c in channels}


def _order(of: Channel, count: int) -> list[int]:
    """Each channel has its own order of micro-batches, known to both ends."""
    order = list(range(count))
    if of.boundary >= 2:
        random.Random(str(of)).shuffle(order)
    return order


def deep_and_interleaved(mode: str, window: int, count: int, steps: int) -> None:
    """Everything of a step is sent before anything is received, channel by channel in another order at each end."""
    link, rank = transport(mode, receive_window=window), dist.get_rank()
    mine = sorted(c for c in all_channels() if rank in (c.source, c.destination))
    inbound, outbound = [c for c in mine if c.destination == rank], [c for c in mine if c.source == rank]
    for step in range(steps):
        link.begin_step(_expect(inbound, count, step))
        for place in range(count):
            for out in outbound if place % 2 else reversed(outbound):
                link.send(out, _order(out, count)[place], message(out, _order(out, count)[place], step))
        shuffled = random.Random(step + rank).sample(inbound, len(inbound))
        for incoming in shuffled:
            for micro_batch in _order(incoming, count):
                (found,) = link.receive(incoming, micro_batch)
                assert torch.equal(found, message(incoming, micro_batch, step)[0]), (incoming, micro_batch, step)
        link.end_step()
        assert all(len(outbox) == 0 for outbox in link._outboxes.values())
    expected_bytes = {c: 4 * steps * sum(message(c, m)[0].numel() for m in range(count)) for c in outbound}
    assert dict(link.bytes_sent) == expected_bytes
    link.close()


def streams_of_constants(count: int) -> None:
    """Each domain has its own constant; the gradients of each stream have to be those of its own activations."""
    link, rank, domains = transport(), dist.get_rank(), dist.get_world_size() - 1

    def numbers(domain: int, micro_batch: int) -> Tensor:
        return torch.full((3,), 10.0 ** (domain + 1) + micro_batch)

    one = signature_of((torch.zeros(3),))
    messages = [(m, one) for m in range(count)]
    if rank == 0:
        link.begin_step({channel(d, 0, Flow.GRADIENT): messages for d in range(domains)})
        for micro_batch in range(count):
            for domain in range(domains):
                link.send(channel(domain, 0), micro_batch, (numbers(domain, micro_batch),))
        for micro_batch in range(count):
            for domain in reversed(range(domains)):
                (gradient,) = link.receive(channel(domain, 0, Flow.GRADIENT), micro_batch)
                assert torch.equal(gradient, -2 * numbers(domain, micro_batch))
    else:
        link.begin_step({channel(rank - 1, 0): messages})
        for micro_batch in range(count):
            time.sleep(0.002 * (domains - rank))  # the streams run at different speeds
            (activation,) = link.receive(channel(rank - 1, 0), micro_batch)
            link.send(channel(rank - 1, 0, Flow.GRADIENT), micro_batch, (-2 * activation,))
    link.end_step()
    link.close()


def mixed_messages() -> None:
    """Several tensors in a message, of every kind that travels, some without elements, some not contiguous."""
    link = transport(schema=MIXED)
    strided = torch.arange(12.0).reshape(3, 4).T.to(torch.bfloat16)
    small = torch.tensor([-128, 127], dtype=torch.int8)
    positions, mask = torch.arange(6, dtype=torch.int32).reshape(2, 3), torch.tensor([True, False, True])
    messages: list[tuple[Tensor, ...]] = [
        (strided, small),
        (torch.zeros(0, 5), torch.zeros(0, dtype=torch.int8), positions),
        (torch.tensor(3.5, dtype=torch.float16), small, positions[:0], mask),
        (torch.ones(4).expand(3, 4), small, positions, mask[::2]),
    ]
    if dist.get_rank() == 0:
        link.begin_step({})
        for micro_batch, tensors in enumerate(messages):
            link.send(channel(0, 0), micro_batch, tensors)
    else:
        link.begin_step({channel(0, 0): [(m, signature_of(tensors)) for m, tensors in enumerate(messages)]})
        seen = set()
        for micro_batch, tensors in enumerate(messages):
            found = link.receive(channel(0, 0), micro_batch)
            assert signature_of(found) == signature_of(tensors)
            assert all(torch.equal(*pair) for pair in zip(found, tensors, strict=True))
            seen |= {tensor.data_ptr() for tensor in found if tensor.numel()}
            messages[micro_batch] = found  # kept alive, so that equal addresses would mean a shared buffer
        assert len(seen) == sum(tensor.numel() > 0 for tensors in messages for tensor in tensors)
    link.end_step()
    link.close()


def sends_do_not_wait(seconds: float) -> float:
    """The receiver sleeps first; the sender sends, drops its references and overwrites what memory it gets."""
    link, size = transport(receive_window=1), 500_000
    one = signature_of((torch.empty(size),))
    if dist.get_rank() == 0:
        link.begin_step({})
        begin = time.monotonic()
        for micro_batch in range(10):
            link.send(channel(0, 0), micro_batch, (torch.full((size,), float(micro_batch)),))
            torch.full((size,), -1.0)
        took = time.monotonic() - begin
        gc.collect()
        while len(link._outboxes[channel(0, 0)]):  # let go of without any call
            time.sleep(0.01)
    else:
        time.sleep(seconds)
        took = 0.0
        link.begin_step({channel(0, 0): [(m, one) for m in range(10)]})
        for micro_batch in range(10):
            (found,) = link.receive(channel(0, 0), micro_batch)
            assert float(found.min()) == float(found.max()) == micro_batch
    link.end_step()
    link.close()
    return took


def refused_sends() -> list[Any]:
    """The guard and the channel's owner object before anything is posted; what comes after arrives in its place."""
    seen: list[Any] = []
    link = transport(schema=MIXED, on_send=lambda *sent: seen.append((sent[0], sent[1], len(sent[2]))))
    good = (torch.ones(2, 3), torch.ones(1, dtype=torch.int8))
    if dist.get_rank() == 0:
        link.begin_step({})
        labels = torch.ones(5, dtype=torch.int64)
        said = [
            error_of(link.send, channel(0, 0), 0, (torch.ones(2, 3), labels)),
            error_of(link.send, channel(0, 3, Flow.GRADIENT), 0, (labels,)),
            error_of(link.send, channel(0, 1), 0, good),
        ]
        link.send(channel(0, 0), 0, good)
    else:
        link.begin_step({channel(0, 0): [(0, signature_of(good))]})
        said = [error_of(link.send, channel(0, 1), 0, (good[0], good[1].long()))]
        link.receive(channel(0, 0), 0)
    link.end_step()
    link.close()
    return [*said, seen]


def wrong_order() -> list[str]:
    """Receives out of order, unknown, left over or after the end."""
    link, first, second = transport(), channel(0, 0), channel(0, 2)
    if dist.get_rank() == 0:
        link.begin_step({})
        for micro_batch in range(2):
            link.send(first, micro_batch, message(first, micro_batch))
        link.end_step()
        link.close()
        return []
    said = [error_of(link.begin_step, {channel(0, 1): []})]
    link.begin_step(_expect([first], 2))
    said += [error_of(link.receive, first, 1), error_of(link.receive, second, 0)]
    link.receive(first, 0)
    said += [error_of(link.end_step), error_of(link.begin_step, {})]
    link.receive(first, 1)
    said += [error_of(link.receive, first, 2)]
    link.end_step()
    link.close()
    return [*said, error_of(link.begin_step, {})]


def silent_peer(who_waits: str) -> tuple[str, float]:
    """Rank 1 does nothing; rank 0 waits for a message of it, or for it to take one."""
    link, incoming, out = transport(timeout_s=1.5), channel(0, 1), channel(0, 0)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(4)
        return "", 0.0
    begin = time.monotonic()
    if who_waits == "receiver":
        link.begin_step(_expect([incoming], 4))
        said = error_of(link.receive, incoming, 0)
    else:
        link.begin_step({})
        link.send(out, 3, message(out, 3))
        said = error_of(link.end_step)
    took = time.monotonic() - begin
    link.abort()
    return said, took


def dead_peer() -> tuple[list[str], float]:
    """Rank 1 ends without a word while rank 0 waits for it."""
    link, incoming, out = transport(timeout_s=30.0), channel(0, 1), channel(0, 0)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os._exit(3)
    link.begin_step(_expect([incoming], 4))
    begin = time.monotonic()
    said = [error_of(link.receive, incoming, 0), error_of(link.send, out, 0, message(out, 0))]
    took = time.monotonic() - begin
    link.abort()
    return said, took


def abort_while_others_wait() -> tuple[str, float]:
    """Rank 0 gives up with a send under way; rank 1, waiting for something else, learns it at once."""
    link, incoming, out = transport(timeout_s=30.0), channel(0, 2), channel(0, 0)
    if dist.get_rank() == 0:
        link.begin_step({})
        link.send(out, 0, message(out, 0))
        time.sleep(0.5)
    begin = time.monotonic()
    if dist.get_rank() == 0:
        link.abort()
        said = error_of(link.send, out, 1, message(out, 1))
    else:
        link.begin_step(_expect([incoming], 1))
        said = error_of(link.receive, incoming, 0)
        link.abort()
    return said, time.monotonic() - begin


def steps_that_open_at_once(lengths: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Steps whose first messages are awaited beforehand: of the same, smaller, larger sizes, and fewer of them.

    Returns the number of standing receives and of spent ones on rank 1 when each step has begun.
    """
    link, opening, other = transport(schema=MIXED, receive_window=2), channel(0, 0), channel(0, 2)
    found, flags = [], torch.ones(2, dtype=torch.int8)
    for step, sizes in enumerate(lengths):
        payloads = [(torch.full((size,), float(100 * step + m)), flags) for m, size in enumerate(sizes)]
        signatures = [signature_of(payload) for payload in payloads]
        first = {opening: signatures[:3]}
        if dist.get_rank() == 0:
            link.begin_step({}, first)
            for micro_batch, payload in enumerate(payloads):
                link.send(opening, micro_batch, payload)
                link.send(other, micro_batch, payload)
        else:
            link.begin_step({c: list(enumerate(signatures)) for c in (opening, other)}, first)
            inbox = link._inboxes[opening]
            found.append((len(inbox.standing), len(inbox.spent)))
            for micro_batch, payload in enumerate(payloads):
                for incoming in (opening, other):
                    received = link.receive(incoming, micro_batch)
                    assert all(torch.equal(*pair) for pair in zip(received, payload, strict=True)), (step, micro_batch)
        link.end_step()
    link.close()
    return found

"""Targets of test_control.py."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ds_ldt.comm.control import ControlLink
from ds_ldt.comm.groups import StreamGroups
from ds_ldt.comm.step_header import Announcement, StepId, StepKind
from ds_ldt.comm.wire import DEFAULT_SCHEMA, TensorSignature, WireGuard, WireSchema, WireTensor
from ds_ldt.errors import LDTError


def _link(timeout_s: float = 20.0, schema: WireSchema = DEFAULT_SCHEMA) -> ControlLink:
    rank = dist.get_rank()
    groups = StreamGroups.create(rank=rank, channels=[], timeout_s=timeout_s, backend="gloo")
    guard = WireGuard(schema, "edge" if rank == 0 else "cloud")
    return ControlLink(rank=rank, groups=groups, timeout_s=timeout_s, guard=guard)


def _step(step: int, *, domain: int = 0, kind: StepKind = StepKind.TRAIN, count: int = 300) -> StepId:
    return StepId(kind=kind, step=step, domain=domain, num_micro_batches=count, fingerprint=99)


def _announcement(step: StepId, *, distinct: bool) -> Announcement:
    lengths = [5 + (m if distinct else 0) + step.domain for m in range(step.num_micro_batches)]
    return Announcement(
        step=step, signatures=tuple(((TensorSignature(torch.float32, (1, length), True),),) for length in lengths)
    )


def steps_with_and_without_overflow() -> None:
    """Rank 0 announces six steps to two domains; every second one overflows."""
    link, rank = _link(), dist.get_rank()
    for step in range(6):
        if rank == 0:
            for domain in (0, 1):
                link.announce(domain + 1, _announcement(_step(step, domain=domain), distinct=step % 2 == 0))
        else:
            link.expect(0)
            expected = _step(step, domain=rank - 1)
            assert link.receive(0, expected) == _announcement(expected, distinct=step % 2 == 0)
    link.close()


def different_calls() -> str:
    """The edge evaluates while the cloud trains."""
    link = _link()
    if dist.get_rank() == 0:
        link.announce(1, _announcement(_step(7, kind=StepKind.EVAL), distinct=False))
        link.close()
        return ""
    return _error_of(link, _step(7))


def silent_edge() -> str:
    """The edge never announces."""
    link = _link(timeout_s=1.0)
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(2.5)
        return ""
    return _error_of(link, _step(7))


def undeclared_announcement() -> str:
    """The edge wants to announce integers; then a dishonest one does."""
    link = _link()
    integers = Announcement(step=_step(0, count=1), signatures=(((TensorSignature(torch.int64, (3,), False),),),))
    if dist.get_rank() == 1:
        return _error_of(link, _step(0, count=1))
    try:
        link.announce(1, integers)
    except LDTError as error:
        said = f"{type(error).__name__}: {error}"
    dishonest = WireSchema(tensors=(WireTensor(name="ids", dtype="int64"),), uniform=True)
    link._guard = WireGuard(dishonest, "edge")
    link.announce(1, integers)
    link.close()
    return said


def _error_of(link: ControlLink, step: StepId) -> str:
    try:
        link.receive(0, step)
    except LDTError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

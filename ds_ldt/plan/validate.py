"""Prove that a plan can be run. Each rule is one function; a violation raises `ScheduleError` with the place marked.

The rules, in the order in which they are applied (each may rely on those before it):

1. rows          every rank of a slice has a row
2. instructions  every instruction names a compute of its own rank, and the right channel for it
3. closing       training ends with the gradient reduction and the optimizer step, evaluation without; nowhere else
4. groups        [load or receive] pass [send]: what a pass needs is right before it, what it gives right after it
5. complete      every virtual stage of every micro-batch of every domain runs once forward and, in training, once
                 back; where the backward is split, its weight gradient once too
6. local order   a backward comes after the forward whose values it uses, a weight gradient after its backward
7. channels      the destination posts its receives in the order in which the source sends
8. progress      no deadlock, whatever the delays; on request also if a send must meet a posted receive
9. in flight     no rank has more micro-batches in flight than allowed; one is in flight until its weight gradients

A plan holds one slice. The others do the same and share nothing with it, so what is proven of one holds for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ds_ldt.plan.deadlock import describe_stall, find_stall
from ds_ldt.plan.dependencies import (
    NEEDED_BY,
    computes_of,
    incoming_boundary,
    local_predecessor,
    outgoing_boundary,
    passes_of,
)
from ds_ldt.plan.instructions import Channel, Compute, Flow, Instruction, Kind, Op
from ds_ldt.plan.plan import Plan, in_flight_counts
from ds_ldt.plan.shape import PipelineShape
from ds_ldt.plan.text import schedule_error

_CLOSING = (Kind.REDUCE_GRADS, Kind.OPTIMIZER_STEP)
_SHOWN = 5


def validate(plan: Plan, *, max_in_flight: int | Sequence[int] | None = None, posted_ahead: int | None = None) -> None:
    """Return if the plan can be run.

    Args:
        plan: The plan.
        max_in_flight: The most micro-batches of one domain in flight on any rank, or one number for each stage; None
            means no limit.
        posted_ahead: Receives of each channel that the transport keeps posted, if its sends wait for a posted receive;
            `min_posted_receives` says how many it takes. None: its sends never keep a rank from going on.

    Raises:
        ScheduleError: Some rule is violated. The text names it and shows the orders with the place marked.
    """
    _check_rows(plan)
    _check_instructions(plan)
    _check_closing(plan)
    _check_groups(plan)
    _check_complete(plan)
    _check_local_order(plan)
    _check_channels(plan)
    _check_progress(plan, posted_ahead)
    _check_in_flight(plan, max_in_flight)


def _check_rows(plan: Plan) -> None:
    found, expected = len(plan.rows), plan.shape.one_slice.num_ranks
    if found != expected:
        raise schedule_error(plan, f"it has rows for {found} ranks, expected {expected}")


def _check_instructions(plan: Plan) -> None:
    shape = plan.shape.one_slice
    channels = shape.channels()
    for rank, row in enumerate(plan.rows):
        known: set[tuple[Kind, Op, int, int, int | None, Channel | None]] = set()
        for position, instruction in enumerate(row):
            compute = instruction.serves
            if compute is not None and 0 <= compute.micro_batch < shape.num_micro_batches:
                # What follows looks at nothing else, and is the same for every micro-batch.
                what = (
                    instruction.kind, compute.op, compute.virtual_stage, compute.domain, instruction.chunk,
                    instruction.channel,
                )  # fmt: skip
                if what in known:
                    continue
                known.add(what)
            fault = _instruction_fault(shape, channels, rank, instruction)
            if fault is not None:
                raise schedule_error(plan, fault, rank=rank, position=position)


def _instruction_fault(
    shape: PipelineShape, channels: Mapping[tuple[int, int, Flow], Channel], rank: int, instruction: Instruction
) -> str | None:
    compute = instruction.serves
    if instruction.kind in _CLOSING:
        idle = compute is None and instruction.chunk is None and instruction.channel is None
        return None if idle else "a closing reduction belongs to no virtual stage, micro-batch, domain or channel"
    if compute is None:
        return "it must name virtual stage, micro-batch and domain"
    fault = _place_fault(shape, rank, compute)
    if fault is not None:
        return fault
    if instruction.chunk != shape.chunks[compute.virtual_stage]:
        chunk = shape.chunks[compute.virtual_stage]
        return f"its chunk is {instruction.chunk}, but virtual stage {compute.virtual_stage} is of chunk {chunk}"
    boundary = _boundary(shape, instruction.kind, compute)
    flow = Flow.ACTIVATION if compute.op is Op.FORWARD else Flow.GRADIENT
    channel = None if boundary is None else channels[boundary, compute.domain, flow]
    return None if instruction.channel == channel else f"its channel is ({instruction.channel}), expected ({channel})"


def _place_fault(shape: PipelineShape, rank: int, compute: Compute) -> str | None:
    limits = (shape.num_virtual_stages, shape.num_micro_batches, shape.num_domains)
    found = (compute.virtual_stage, compute.micro_batch, compute.domain)
    if not all(0 <= index < limit for index, limit in zip(found, limits, strict=True)):
        return f"{compute} does not exist: virtual stages, micro-batches and domains are {limits}"
    owner = shape.rank_of(compute.virtual_stage, compute.domain)
    return None if owner == rank else f"{compute} belongs to {shape.describe_rank(owner)}"


def _boundary(shape: PipelineShape, kind: Kind, compute: Compute) -> int | None:
    if kind.is_receive:
        return incoming_boundary(compute, shape)
    return outgoing_boundary(compute, shape) if kind.is_send else None


def _check_closing(plan: Plan) -> None:
    expected = _CLOSING if plan.training else ()
    for rank, row in enumerate(plan.rows):
        body = row[: len(row) - len(expected)]
        found = tuple(instruction.kind for instruction in row[len(body) :])
        misplaced = [position for position, instruction in enumerate(body) if instruction.kind in _CLOSING]
        if found != expected or misplaced:
            want = "end with " + " and ".join(expected) + ", once" if expected else "contain no closing reduction"
            position = misplaced[0] if misplaced else max(0, len(row) - 1)
            raise schedule_error(plan, f"a row must {want}", rank=rank, position=position)


def _check_groups(plan: Plan) -> None:
    groups: dict[tuple[Op, int], tuple[Kind, ...]] = {}
    for rank, row in enumerate(plan.rows):
        position = 0
        while position < len(row) and row[position].kind not in _CLOSING:
            owner = row[position].serves
            assert owner is not None
            what = owner.op, owner.virtual_stage
            expected = groups[what] if what in groups else groups.setdefault(what, _expected_group(plan, owner))
            members = row[position : position + len(expected)]
            found = tuple(instruction.kind for instruction in members)
            same = all(instruction.serves is owner or instruction.serves == owner for instruction in members)
            if found != expected or not same:
                fault = f"expected {', '.join(expected)} of {owner} in a row, found {', '.join(found)}"
                raise schedule_error(plan, fault, rank=rank, position=position)
            position += len(expected)


def _expected_group(plan: Plan, compute: Compute) -> tuple[Kind, ...]:
    shape = plan.shape
    if compute.op is Op.WEIGHT:
        return (Kind.WEIGHT_PASS,)
    if compute.op is Op.FORWARD:
        receive, run, send = Kind.RECV_ACTIVATION, Kind.FORWARD_PASS, Kind.SEND_ACTIVATION
    else:
        receive, run, send = Kind.RECV_GRAD, Kind.BACKWARD_PASS, Kind.SEND_GRAD
    group = [run]
    if incoming_boundary(compute, shape) is not None:
        group.insert(0, receive)
    elif compute.op is Op.FORWARD:
        group.insert(0, Kind.LOAD_MICRO_BATCH)
    if outgoing_boundary(compute, shape) is not None:
        group.append(send)
    return tuple(group)


def _check_complete(plan: Plan) -> None:
    shape = plan.shape.one_slice
    num_micro_batches, num_domains = shape.num_micro_batches, shape.num_domains
    seen = {what: bytearray(num_micro_batches * num_domains) for what in passes_of(shape, training=plan.training)}
    for rank, row in enumerate(plan.rows):
        for position, instruction in enumerate(row):
            compute = instruction.compute
            if compute is None:
                continue
            places, place = (
                seen.get((compute.op, compute.virtual_stage)),
                compute.micro_batch * num_domains + compute.domain,
            )
            if places is None:
                whole = compute.op is Op.WEIGHT and plan.training
                fault = (
                    f"{compute} is a part of B, which is not split" if whole else f"an evaluation runs no {compute}"
                )
                raise schedule_error(plan, fault, rank=rank, position=position)
            if places[place]:
                raise schedule_error(plan, f"{compute} runs twice", rank=rank, position=position)
            places[place] = 1
    if all(all(places) for places in seen.values()):
        return
    missing = sorted(
        compute
        for compute in computes_of(shape, training=plan.training)
        if not seen[compute.op, compute.virtual_stage][compute.micro_batch * num_domains + compute.domain]
    )
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    rank = shape.rank_of(missing[0].virtual_stage, missing[0].domain)
    names = ", ".join(map(str, missing[:_SHOWN]))
    raise schedule_error(plan, f"{names}{more} never run", rank=rank, position=len(plan.rows[rank]))


def _check_local_order(plan: Plan) -> None:
    shape = plan.shape.one_slice
    num_micro_batches, num_domains = shape.num_micro_batches, shape.num_domains
    done = {what: bytearray(num_micro_batches * num_domains) for what in passes_of(shape, training=plan.training)}
    for rank, row in enumerate(plan.rows):
        for position, instruction in enumerate(row):
            compute = instruction.compute
            if compute is None:
                continue
            place = compute.micro_batch * num_domains + compute.domain
            needed = NEEDED_BY.get(compute.op)
            if needed is not None and not done[needed, compute.virtual_stage][place]:
                fault = f"{compute} runs before {local_predecessor(compute)}, whose values it uses"
                raise schedule_error(plan, fault, rank=rank, position=position)
            done[compute.op, compute.virtual_stage][place] = 1


def _check_channels(plan: Plan) -> None:
    sent: dict[Channel, list[int | None]] = defaultdict(list)
    received: dict[Channel, list[tuple[int | None, int]]] = defaultdict(list)
    for row in plan.rows:
        for position, instruction in enumerate(row):
            if instruction.channel is None:
                continue
            if instruction.kind.is_send:
                sent[instruction.channel].append(instruction.micro_batch)
            else:
                received[instruction.channel].append((instruction.micro_batch, position))
    for channel in sorted({*sent, *received}):
        pairs = zip(sent[channel], received[channel], strict=True)
        for nth, (sent_micro_batch, (micro_batch, position)) in enumerate(pairs):
            if sent_micro_batch != micro_batch:
                fault = (
                    f"message {nth} of channel ({channel}) is sent for micro-batch {sent_micro_batch} "
                    f"but received as micro-batch {micro_batch}"
                )
                raise schedule_error(plan, fault, rank=channel.destination, position=position)


def _check_progress(plan: Plan, posted_ahead: int | None) -> None:
    for window in (None,) if posted_ahead is None else (None, posted_ahead):
        stuck = find_stall(plan, posted_ahead=window)
        if stuck:
            rank = min(stuck)
            how = "" if window is None else f"sends wait for one of {window} posted receives, "
            fault = how + describe_stall(plan, stuck)
            raise schedule_error(plan, fault, rank=rank, position=stuck[rank])


def _check_in_flight(plan: Plan, max_in_flight: int | Sequence[int] | None) -> None:
    if max_in_flight is None:
        return
    shape = plan.shape.one_slice
    limits = max_in_flight if isinstance(max_in_flight, Sequence) else [max_in_flight] * shape.num_stages
    for rank, row in enumerate(plan.rows):
        limit = limits[shape.stage_of(rank)]
        passes = [(position, compute) for position, instruction in enumerate(row) if (compute := instruction.compute)]
        counts = in_flight_counts(compute for _, compute in passes)
        for (position, compute), count in zip(passes, counts, strict=True):
            if count > limit:
                fault = f"{count} micro-batches of the domain of {compute} are in flight, {limit} are allowed"
                raise schedule_error(plan, fault, rank=rank, position=position)

"""A second, independent executor of plans: it moves numbers instead of tensors, in any interleaving of the ranks.

A forward of virtual stage s on value x gives (x, s) nested once more; a backward likewise. So a value tells its whole
story, and a message that went to the wrong micro-batch, domain or stage cannot go unnoticed.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from ds_ldt.plan import Channel, Instruction, Kind, Plan

Story = tuple[Any, ...]


def sample_of(domain: int, micro_batch: int) -> Story:
    return ("sample", domain, micro_batch)


@dataclass
class Outcome:
    outputs: dict[tuple[int, int], Story] = field(default_factory=dict)  # (domain, micro-batch) as labelled -> output
    gradients: dict[tuple[int, int, int], Story] = field(default_factory=dict)  # (virtual stage, domain, micro-batch)
    weights: dict[tuple[int, int, int], Story] = field(default_factory=dict)  # the same, of backwards that are split
    kept: list[int] = field(default_factory=list)  # for each rank, the most values kept for backwards
    undelivered: int = 0


def interpret(plan: Plan, seed: int) -> Outcome:
    """Run the ranks in a random interleaving to their ends; fails if one is stuck or takes the wrong message."""
    chooser = random.Random(seed)
    ranks = [_Rank(plan, row) for row in plan.instructions]
    channels: dict[Channel, deque[tuple[int, Story]]] = defaultdict(deque)
    outcome = Outcome()
    waiting = {index for index, rank in enumerate(ranks) if rank.todo}
    while waiting:
        able = sorted(index for index in waiting if ranks[index].is_able(channels))
        assert able, f"stuck at {[str(ranks[index].todo[0]) for index in sorted(waiting)]}"
        index = chooser.choice(able)
        ranks[index].step(channels, outcome)
        if not ranks[index].todo:
            waiting.remove(index)
    outcome.kept = [rank.peak for rank in ranks]
    outcome.undelivered = sum(map(len, channels.values()))
    return outcome


class _Rank:
    def __init__(self, plan: Plan, row: tuple[Instruction, ...]) -> None:
        self.plan = plan
        self.todo = deque(row)
        self.inbox: dict[tuple[int, int, int, bool], Story] = {}
        self.outbox: dict[tuple[int, int, int, bool], Story] = {}
        self.kept: dict[tuple[int, int, int], Story] = {}
        self.owed: dict[tuple[int, int, int], Story] = {}
        self.peak = 0

    def is_able(self, channels: dict[Channel, deque[tuple[int, Story]]]) -> bool:
        head = self.todo[0]
        return not head.kind.is_receive or bool(channels[head.channel])

    def step(self, channels: dict[Channel, deque[tuple[int, Story]]], outcome: Outcome) -> None:
        now = self.todo.popleft()
        place = (now.virtual_stage, now.domain, now.micro_batch)
        match now.kind:
            case Kind.LOAD_MICRO_BATCH:
                self.inbox[*place, True] = sample_of(now.domain, now.micro_batch)
            case Kind.RECV_ACTIVATION | Kind.RECV_GRAD:
                sent_as, story = channels[now.channel].popleft()
                assert sent_as == now.micro_batch, f"{now} takes the message of micro-batch {sent_as}"
                self.inbox[*place, now.kind is Kind.RECV_ACTIVATION] = story
            case Kind.SEND_ACTIVATION | Kind.SEND_GRAD:
                story = self.outbox.pop((*place, now.kind is Kind.SEND_ACTIVATION))
                channels[now.channel].append((now.micro_batch, story))
            case Kind.FORWARD_PASS:
                self._forward(place, outcome)
            case Kind.BACKWARD_PASS:
                self._backward(place, outcome)
            case Kind.WEIGHT_PASS:
                assert place not in outcome.weights
                outcome.weights[place] = self.owed.pop(place)
            case Kind.REDUCE_GRADS:
                assert not self.owed, f"{sorted(self.owed)} are still owed"

    def _forward(self, place: tuple[int, int, int], outcome: Outcome) -> None:
        stage, domain, micro_batch = place
        given = self.inbox.pop((*place, True))
        output = ("F", stage, given)
        if stage == self.plan.shape.num_boundaries:
            outcome.outputs[domain, micro_batch] = output
        else:
            self.outbox[*place, True] = output
        if self.plan.training:
            self.kept[place] = given
            self.peak = max(self.peak, len(self.kept) + len(self.owed))

    def _backward(self, place: tuple[int, int, int], outcome: Outcome) -> None:
        stage, domain, micro_batch = place
        shape = self.plan.shape
        given = self.kept.pop(place)
        if stage == shape.num_boundaries:
            story = ("loss of", outcome.outputs[domain, micro_batch])
        else:
            story = self.inbox.pop((*place, False), ("no gradient",))
        outcome.gradients[place] = (story, given)
        if shape.splits(stage):
            self.owed[place] = (story, given)
        if stage > 0 and shape.carries_gradient(stage - 1):
            self.outbox[*place, False] = ("B", stage, story)


def expected_outcome(plan: Plan) -> Outcome:
    """What every interleaving must give, written down without any schedule."""
    shape, outcome = plan.shape, Outcome()
    for domain in range(shape.num_domains):
        for micro_batch in range(shape.num_micro_batches):
            values = [sample_of(domain, micro_batch)]
            for stage in range(shape.num_virtual_stages):
                values.append(("F", stage, values[-1]))
            outcome.outputs[domain, micro_batch] = values[-1]
            story: Story = ("loss of", values[-1])
            for stage in reversed(range(shape.num_virtual_stages)) if plan.training else ():
                outcome.gradients[stage, domain, micro_batch] = (story, values[stage])
                if shape.splits(stage):
                    outcome.weights[stage, domain, micro_batch] = (story, values[stage])
                carries = stage > 0 and shape.carries_gradient(stage - 1)
                story = ("B", stage, story) if carries else ("no gradient",)
    return outcome

"""What `ds-ldt plan --memory` says: the bytes of every rank, and what is not known of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds_ldt.config.schema import JobConfig
from ds_ldt.plan import Plan
from ds_ldt.plan.cost_file import Known
from ds_ldt.plan.memory import Footprint, PassBytes, RankMemory, StageWeights, estimate, recipe_of

_RANKS_SHOWN = 16
_COLUMNS = ("weights", "gradients", "optimizer", "activations", "messages", "closing", "peak")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of every rank.

    Attributes:
        ranks: Of each rank.
        lacks: What is not known and counts as nothing.
    """

    ranks: tuple[RankMemory, ...]
    lacks: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return it as JSON would have it."""
        return {"ranks": {str(one.rank): one.document() for one in self.ranks}, "lacks": list(self.lacks)}

    def lines(self, plan: Plan) -> Iterator[str]:
        """Yield it as text.

        Args:
            plan: The plan whose ranks they are.
        """
        yield "memory in MB (1e6 bytes), an estimate" + "".join(f"; not known: {what}" for what in self.lacks)
        yield f"rank{'':36} " + " ".join(f"{name:>11}" for name in _COLUMNS)
        for one in self.ranks[:_RANKS_SHOWN]:
            sizes = " ".join(f"{getattr(one, name) / 1e6:>11.4g}" for name in _COLUMNS)
            yield f"  {plan.shape.describe_rank(one.rank):<38} {sizes}"
        if len(self.ranks) > _RANKS_SHOWN:
            yield f"  and {len(self.ranks) - _RANKS_SHOWN} more (--json lists all)"
        yield "  closing: temporary tensors at the end of a step, when nothing is in flight. A process takes more than"
        yield "  its tensors: python and its libraries, and what an allocator does not give back"


def memory_report(job: JobConfig, plan: Plan, known: Known, footprint: Footprint | None) -> MemoryReport:
    """Estimate the bytes of every rank.

    Args:
        job: The configuration.
        plan: Its plan.
        known: Hints, or measured costs: what is known of activations and messages without a model.
        footprint: What is known of the model, if one was named.
    """
    lacks: list[str] = []
    if footprint is None:
        footprint = _without_model(plan, known)
        lacks.append("weights, gradients and optimizer state (name the model with --model)")
        if known.activation_bytes is None:
            lacks.append("activations (--model, --costs, or ldt.schedule.layer_activation_mb)")
    ranks = estimate(plan, footprint, recipe_of(job), receive_window=plan.shape.num_stages + 1)
    return MemoryReport(ranks=ranks, lacks=tuple(lacks))


def _without_model(plan: Plan, known: Known) -> Footprint:
    shape = plan.shape
    cells = zip(shape.chunks, shape.stages, strict=True)
    held = known.activation_bytes or {}
    sizes = tuple(known.costs.bytes_over(boundary) for boundary in range(shape.num_boundaries))
    return Footprint(
        weights=(StageWeights(trained=0, frozen=0, largest=0),) * shape.num_stages,
        passes=tuple(PassBytes(held=held.get(cell, 0.0), forward_peak=held.get(cell, 0.0)) for cell in cells),
        activation_bytes=sizes,
        gradient_bytes=sizes,
        sample_bytes=0,
    )

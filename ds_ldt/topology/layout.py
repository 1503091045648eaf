"""From the `pipeline_num_layers` matrix to virtual stages: which layers each stage holds, and in what order they run.

A cell (chunk, stage) holds a contiguous range of pipeline layers, or none. Cells are visited chunk by chunk, and stage
by stage within a chunk. The cells that hold layers are the virtual stages:

    [[2, 13, 13],          chunk 0:   s0 on the edge -> s1 on stage 1 -> s2 on stage 2
     [2,  0,  0]]          chunk 1:   s3 on the edge

A model of two modalities has a matrix for each (`ds_ldt.config.layer_matrix`). Its layers are numbered through in the
order in which a micro-batch meets them, so a layer has the same global pipeline layer index in every layout:

    leading, vision_encoder, joining layers, text_decoder, trailing

Pure arithmetic: every process computes the same layout from the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_ldt.config.layer_matrix import (
    Cell,
    Matrix,
    as_configured,
    cells_in_order,
    form_problem,
    matrices_of,
    place_problem,
    sum_problem,
    total,
)
from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.errors import ConfigError, ConfigProblem

LEADING, BETWEEN, TRAILING = "leading", "between", "trailing"
"""The parts of a model that join cells without being counted in a matrix."""

Configured = Sequence[Sequence[int]] | Mapping[str, Sequence[Sequence[int]]]
"""What `ldt.pipeline_num_layers` may be: a matrix, or one for each modality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStage:
    """A contiguous range of layers that runs without a message in between.

    Attributes:
        index: Place in the visiting order, 0 to S-1.
        chunk: The chunk of the first cell in it.
        stage: The physical stage that holds it.
        start: First global pipeline layer index.
        stop: One past the last global pipeline layer index.
    """

    index: int
    chunk: int
    stage: int
    start: int
    stop: int

    @property
    def num_layers(self) -> int:
        """Number of pipeline layers, at least 1."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
    """Where a pipeline layer stands in the model.

    Attributes:
        part: `leading`, `between` or `trailing`; else the modality (`vision_encoder`, `text_decoder`), or `layers` in
            a model of one modality.
        index: Its number within the part, from 0: the block's own index in the model, whatever cell holds it.
    """

    part: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layers of every cell. Build it with `Layout.build`, which validates.

    Attributes:
        matrices: (modality, V x P layer counts) as configured, in the order in which a micro-batch meets them; one
            entry named `layers` where the configuration is a single matrix.
        num_leading: Layers before the configured ones, held by the head (e.g. the embedding).
        num_between: Layers between two modalities, on the edge (e.g. merger and text embedding); 0 where there is one.
        num_trailing: Layers after the configured ones, held by the tail (e.g. the final norm and the output layer).
        virtual_stages: The virtual stages in visiting order.
    """

    matrices: tuple[tuple[str, Matrix], ...]
    num_leading: int
    num_between: int = 0
    num_trailing: int
    virtual_stages: tuple[VirtualStage, ...]

    @property
    def matrix(self) -> Matrix:
        """V x P layer counts, those of all modalities added up."""
        return total(dict(self.matrices))

    @property
    def configured(self) -> list[list[int]] | dict[str, list[list[int]]]:
        """`ldt.pipeline_num_layers` as JSON has it: a matrix, or one for each modality."""
        return as_configured(dict(self.matrices))

    @property
    def num_chunks(self) -> int:
        """V, the number of passes over the stages."""
        return len(self.matrix)

    @property
    def num_stages(self) -> int:
        """P, the number of physical stages; stage 0 is the edge."""
        return len(self.matrix[0])

    @property
    def num_layers(self) -> int:
        """Number of pipeline layers, leading and trailing ones included."""
        return self.virtual_stages[-1].stop

    @property
    def num_virtual_stages(self) -> int:
        """S, the number of virtual stages."""
        return len(self.virtual_stages)

    @property
    def num_boundaries(self) -> int:
        """S - 1. Boundary b lies between virtual stages b and b + 1, which are always on different stages."""
        return len(self.virtual_stages) - 1

    @classmethod
    def build(
        cls,
        configured: Configured,
        *,
        num_layers: int | Mapping[str, int] | None = None,
        num_leading: int = 0,
        num_between: int = 0,
        num_trailing: int = 0,
        allow_exposed_edge: bool = False,
    ) -> Layout:
        """Validate what is configured and lay the layers out.

        Leading layers join cell (0, 0) and trailing layers cell (V-1, 0). The layers between two modalities join the
        cell of the edge in the chunk in which the second one begins, behind the layers of the first and before those
        of the second. Empty cells are skipped; cells that follow each other on the same stage become one virtual
        stage.

        Args:
            configured: V x P layer counts, without the joining layers; a mapping where there are two modalities.
            num_layers: The number of layers to distribute, or a mapping modality -> number for a model of two; None
                if it is not known yet.
            num_leading: Layers that join the head.
            num_between: Layers that stand between two modalities.
            num_trailing: Layers that join the tail.
            allow_exposed_edge: Accept a head (tail) that holds leading (trailing) layers only.

        Raises:
            ConfigError: What is configured is malformed, a sum is not `num_layers`, a stage is left empty, or layers
                that have to be on the edge are not.
        """
        joining = {"num_leading": num_leading, "num_between": num_between, "num_trailing": num_trailing}
        _raise(form_problem(configured))
        matrices = matrices_of(configured)
        _raise(None if num_layers is None else sum_problem(matrices, num_layers))
        _raise(
            place_problem(
                matrices,
                num_leading=num_leading,
                num_trailing=num_trailing,
                allow_exposed_edge=allow_exposed_edge,
            )
        )
        cells = cells_in_order(matrices, **joining)
        return cls(matrices=tuple(matrices.items()), virtual_stages=_virtual_stages(cells), **joining)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells that hold layers, in visiting order. Neighbours on one stage share a virtual stage."""
        return tuple(
            cells_in_order(
                dict(self.matrices),
                num_leading=self.num_leading,
                num_between=self.num_between,
                num_trailing=self.num_trailing,
            )
        )

    def virtual_stages_of(self, stage: int) -> tuple[VirtualStage, ...]:
        """Return the virtual stages that a physical stage holds, in visiting order."""
        return tuple(virtual for virtual in self.virtual_stages if virtual.stage == stage)

    def virtual_stage_of_layer(self, layer: int) -> VirtualStage:
        """Return the virtual stage that holds a global pipeline layer.

        Raises:
            IndexError: There is no such layer.
        """
        for virtual in self.virtual_stages:
            if virtual.start <= layer < virtual.stop:
                return virtual
        raise IndexError(f"layer {layer} is not one of the {self.num_layers} pipeline layers 0..{self.num_layers - 1}")

    def stage_of_layer(self, layer: int) -> int:
        """Return the physical stage that holds a global pipeline layer; IndexError if there is no such layer."""
        return self.virtual_stage_of_layer(layer).stage

    @property
    def parts(self) -> dict[str, range]:
        """The parts of the model in pipeline order -> their global pipeline layer indices, which may be none."""
        counts = [(LEADING, self.num_leading)]
        for name, matrix in self.matrices:
            counts += [(BETWEEN, self.num_between)] if len(counts) > 1 else []
            counts.append((name, sum(map(sum, matrix))))
        counts.append((TRAILING, self.num_trailing))
        found, start = {}, 0
        for name, count in counts:
            found[name] = range(start, start + count)
            start += count
        return found

    def place_of(self, layer: int) -> LayerPlace:
        """Return the part that a global pipeline layer belongs to and its index in it; IndexError if there is none."""
        self.virtual_stage_of_layer(layer)
        part, held = next((part, held) for part, held in self.parts.items() if layer in held)
        return LayerPlace(part=part, index=layer - held.start)

    def blocks_of(self, virtual: VirtualStage) -> dict[str, range]:
        """Return what a virtual stage holds of each modality, numbered within it; modalities it lacks are left out."""
        found = {}
        for name, _ in self.matrices:
            part = self.parts[name]
            first, stop = max(part.start, virtual.start), min(part.stop, virtual.stop)
            if first < stop:
                found[name] = range(first - part.start, stop - part.start)
        return found

    def modality_of_boundary(self, boundary: int) -> str:
        """Return whose hidden states cross a boundary: a modality, or `layers` in a model of one modality."""
        first = self.virtual_stages[boundary + 1].start
        # Joining layers turn those of the first modality into those of the second.
        crossing = [name for name, _ in self.matrices if first <= self.parts[name].stop]
        return crossing[0] if crossing else self.matrices[-1][0]

    @property
    def edge_boundaries(self) -> tuple[int, ...]:
        """The boundaries over which the edge sends activations, in order: one for each virtual stage but the tail."""
        return tuple(virtual.index for virtual in self.virtual_stages[:-1] if virtual.stage == EDGE_STAGE)


def _raise(problem: ConfigProblem | None) -> None:
    if problem is not None:
        raise ConfigError.from_problems([problem])


def _virtual_stages(cells: Iterable[Cell]) -> tuple[VirtualStage, ...]:
    """Number the layers through and join cells that follow each other on one stage."""
    found: list[VirtualStage] = []
    start = 0
    for cell in cells:
        stop = start + cell.configured + cell.joining
        if found and found[-1].stage == cell.stage:
            found[-1] = replace(found[-1], stop=stop)
        else:
            found.append(VirtualStage(index=len(found), chunk=cell.chunk, stage=cell.stage, start=start, stop=stop))
        start = stop
    return tuple(found)

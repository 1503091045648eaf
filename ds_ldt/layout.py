"""From the `pipeline_num_layers` matrix to virtual stages: which layers each stage holds, and in what order they run.

A cell (chunk, stage) holds a contiguous range of pipeline layers, or none. Cells are visited chunk by chunk, and stage
by stage within a chunk. The cells that hold layers are the virtual stages:

    [[2, 13, 13],          chunk 0:   s0 on the edge -> s1 on stage 1 -> s2 on stage 2
     [2,  0,  0]]          chunk 1:   s3 on the edge

Pure arithmetic: every process computes the same layout from the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ds_ldt.checks import Cell, cells_in_order, matrix_form, matrix_sites, matrix_sum
from ds_ldt.errors import ConfigError


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
class Layout:
    """The layers of every cell. Build it with `Layout.build`, which validates.

    Attributes:
        matrix: V x P layer counts, as configured.
        num_leading: Layers before the configured ones, held by the head (e.g. the embedding).
        num_trailing: Layers after the configured ones, held by the tail (e.g. the final norm and the output layer).
        virtual_stages: The virtual stages in visiting order.
    """

    matrix: tuple[tuple[int, ...], ...]
    num_leading: int
    num_trailing: int
    virtual_stages: tuple[VirtualStage, ...]

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
        matrix: Sequence[Sequence[int]],
        *,
        num_layers: int | None = None,
        num_leading: int = 0,
        num_trailing: int = 0,
        allow_exposed_edge: bool = False,
    ) -> Layout:
        """Validate a matrix and lay the layers out.

        Leading layers join cell (0, 0) and trailing layers cell (V-1, 0). Empty cells are skipped; cells that follow
        each other on the same stage become one virtual stage.

        Args:
            matrix: V x P layer counts, without leading and trailing layers.
            num_layers: The number of layers that the matrix has to distribute; None if it is not known yet.
            num_leading: Layers that join the head.
            num_trailing: Layers that join the tail.
            allow_exposed_edge: Accept a head (tail) that holds leading (trailing) layers only.

        Raises:
            ConfigError: The matrix is malformed, its sum is not `num_layers`, a stage is left empty, or the first or
                last layers are not on the edge.
        """
        problem = matrix_form(matrix)
        if problem is not None:
            raise ConfigError.from_problems([problem])
        rows = tuple(tuple(row) for row in matrix)
        problem = None if num_layers is None else matrix_sum(rows, num_layers)
        problem = problem or matrix_sites(
            rows, num_leading=num_leading, num_trailing=num_trailing, allow_exposed_edge=allow_exposed_edge
        )
        if problem is not None:
            raise ConfigError.from_problems([problem])
        cells = cells_in_order(rows, num_leading=num_leading, num_trailing=num_trailing)
        return cls(
            matrix=rows,
            num_leading=num_leading,
            num_trailing=num_trailing,
            virtual_stages=_virtual_stages(cells),
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

"""From the `pipeline_num_layers` matrix to virtual stages: which layers each stage holds, and in what order they run.

A cell (chunk, stage) holds a contiguous range of pipeline layers, or none. Cells are visited chunk by chunk, and stage
by stage within a chunk. The cells that hold layers are the virtual stages:

    [[2, 13, 13],          chunk 0:   s0 on the edge -> s1 on stage 1 -> s2 on stage 2
     [2,  0,  0]]          chunk 1:   s3 on the edge

Pure arithmetic: every process computes the same layout from the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_ldt.errors import Absent, ConfigError

KEY = "ldt.pipeline_num_layers"
EDGE_STAGE = 0
_MIN_CHUNKS = 2
_MIN_STAGES = 2


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
        cells = _checked_matrix(matrix)
        _check_sum(cells, num_layers)
        virtual_stages = _virtual_stages(cells, num_leading, num_trailing)
        _check_sites(cells, virtual_stages)
        if not allow_exposed_edge:
            _check_exposure(cells, virtual_stages, num_leading, num_trailing)
        return cls(matrix=cells, num_leading=num_leading, num_trailing=num_trailing, virtual_stages=virtual_stages)

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


def _checked_matrix(matrix: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the matrix as tuples, or raise ConfigError: rectangular, at least 2 x 2, whole numbers >= 0."""
    expected = "a list of chunks, each a list of layer counts, one count per stage"
    fix = 'write it as in "pipeline_num_layers": [[2, 13, 13], [2, 0, 0]]'
    if not _is_list(matrix) or not all(_is_list(row) for row in matrix):
        raise ConfigError.of(KEY, found=matrix, expected=expected, fix=fix)
    if len(matrix) < _MIN_CHUNKS:
        raise ConfigError.of(
            KEY,
            found=Absent(f"{len(matrix)} chunk{'s' * (len(matrix) != 1)}: {list(map(list, matrix))}"),
            expected=f"at least {_MIN_CHUNKS} chunks, because the first and the last layers are both on the edge",
            fix="add a last chunk that holds the last layers on stage 0, e.g. [2, 0, 0]",
        )
    for chunk, row in enumerate(matrix):
        if len(row) < _MIN_STAGES or len(row) != len(matrix[0]):
            raise ConfigError.of(
                f"{KEY}[{chunk}]",
                found=list(row),
                expected=f"{max(len(matrix[0]), _MIN_STAGES)} layer counts (the edge and one per cloud stage), "
                "the same number in every chunk",
                fix="write 0 where a stage holds no layers of a chunk",
            )
        for stage, count in enumerate(row):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError.of(
                    f"{KEY}[{chunk}][{stage}]",
                    found=count,
                    expected="a whole number of layers, 0 or more",
                    fix=f"write how many layers stage {stage} holds in chunk {chunk}",
                )
    return tuple(tuple(row) for row in matrix)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_sum(cells: tuple[tuple[int, ...], ...], num_layers: int | None) -> None:
    total = sum(map(sum, cells))
    if num_layers is not None and total != num_layers:
        difference = f"{abs(num_layers - total)} {'more' if num_layers > total else 'fewer'}"
        raise ConfigError.of(
            KEY,
            found=Absent(f"{[list(row) for row in cells]}, whose sum is {total}"),
            expected=f"a sum of {num_layers}, the number of layers of the model",
            fix=f"distribute {difference}, so that every layer is held exactly once",
        )


def _virtual_stages(
    cells: tuple[tuple[int, ...], ...], num_leading: int, num_trailing: int
) -> tuple[VirtualStage, ...]:
    found: list[VirtualStage] = []
    start = 0
    for chunk, row in enumerate(cells):
        for stage, configured in enumerate(row):
            joining_head = num_leading if (chunk, stage) == (0, EDGE_STAGE) else 0
            joining_tail = num_trailing if (chunk, stage) == (len(cells) - 1, EDGE_STAGE) else 0
            stop = start + joining_head + configured + joining_tail
            if stop == start:
                continue
            if found and found[-1].stage == stage:
                last = found.pop()
                found.append(
                    VirtualStage(index=last.index, chunk=last.chunk, stage=stage, start=last.start, stop=stop)
                )
            else:
                found.append(VirtualStage(index=len(found), chunk=chunk, stage=stage, start=start, stop=stop))
            start = stop
    return tuple(found)


def _check_sites(cells: tuple[tuple[int, ...], ...], virtual_stages: tuple[VirtualStage, ...]) -> None:
    """Every cloud stage holds a layer; the first and the last layers are on the edge."""
    for stage in range(1, len(cells[0])):
        if not any(row[stage] for row in cells):
            raise ConfigError.of(
                KEY,
                found=Absent(f"no layers on stage {stage}: {[list(row) for row in cells]}"),
                expected="at least one layer on every cloud stage",
                fix=f"give stage {stage} layers in some chunk, or remove its column and its ranks",
            )
    for virtual, which, cell in (
        (virtual_stages[0], "first", "[0][0]"),
        (virtual_stages[-1], "last", f"[{len(cells) - 1}][0]"),
    ):
        if virtual.stage != EDGE_STAGE:
            raise ConfigError.of(
                f"{KEY}[{virtual.chunk}]",
                found=Absent(f"the {which} layers on stage {virtual.stage}: {[list(row) for row in cells]}"),
                expected=f"the {which} layers on stage 0, the edge, which holds the samples and the labels",
                fix=f"give the edge layers in {KEY}{cell}"
                + (" and none to the cloud after them" if which == "last" else ""),
            )


def _check_exposure(
    cells: tuple[tuple[int, ...], ...],
    virtual_stages: tuple[VirtualStage, ...],
    num_leading: int,
    num_trailing: int,
) -> None:
    """Refuse a hop directly behind the leading layers or directly before the trailing ones, unless asked for."""
    head, tail = virtual_stages[0], virtual_stages[-1]
    for exposed, cell, which, what in (
        (
            num_leading and head.num_layers == num_leading,
            "[0][0]",
            "first",
            "the embedding output would be sent, from which the token ids are read off",
        ),
        (
            num_trailing and tail.num_layers == num_trailing,
            f"[{len(cells) - 1}][0]",
            "last",
            "the gradient sent back gives the labels away",
        ),
    ):
        if exposed:
            raise ConfigError.of(
                f"{KEY}{cell}",
                found=0,
                expected=f"at least 1 of the {which} layers of the model on the edge ({what})",
                fix='move layers to the edge, or set "allow_exposed_edge": true in the "ldt" section',
            )

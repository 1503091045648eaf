"""The rules of `pipeline_num_layers`: how many layers each cell holds, and where they may lie.

The setting is one V x P matrix, or one for each modality of a model. Here it is always a mapping, in which a matrix
alone is the entry `layers`. A micro-batch meets the layers in this order:

    leading layers      on the edge, in cell (0, 0)        e.g. the embedding, or the patch embedding
    vision_encoder      as its matrix says
    joining layers      on the edge, between the two       e.g. merger and text embedding: they need the token ids
    text_decoder        as its matrix says
    trailing layers     on the edge, in cell (V-1, 0)      e.g. the final norm and the output layer

Each rule is a small function that returns the problem it finds, or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ds_ldt.config.rules import EDGE_STAGE, MATRIX_KEY, MIN_STAGES, is_whole
from ds_ldt.errors import Absent, ConfigProblem, shown

MIN_CHUNKS = 2

LAYERS = "layers"
"""The name of a matrix that stands alone: the layers of a model of one modality."""

VISION, TEXT = "vision_encoder", "text_decoder"
MODALITIES = (VISION, TEXT)
"""The modalities in the order in which a micro-batch meets them."""

Matrix = tuple[tuple[int, ...], ...]
Matrices = dict[str, Matrix]
"""Modality, or `layers`, -> its matrix, in the order in which a micro-batch meets them."""

Place = tuple[int, int]
"""(chunk, stage): places compare in visiting order."""

_FIX_FORM = f'write it as in "pipeline_num_layers": {{"{VISION}": [[4, 20], [0, 0]], "{TEXT}": [[1, 26], [1, 0]]}}'
_FIX_EXPOSED = 'move layers to the edge, or accept it with "allow_exposed_edge": true in the "ldt" section'
_ENTRANCES = {
    LAYERS: "a layer on the edge before the first hop, because token ids are read off embedding outputs",
    VISION: f"a layer of {VISION} on the edge before the first hop, because pixels are read off patch embeddings",
    TEXT: f"a layer of {TEXT} on the edge after the embedding, because token ids are read off embedding outputs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One visit of a stage.

    Attributes:
        chunk: Chunk index.
        stage: Physical stage.
        configured: Layers that the matrices give to it.
        joining: Layers that join it without being counted in a matrix.
    """

    chunk: int
    stage: int
    configured: int
    joining: int


def matrices_of(configured: Any) -> Matrices:
    """Return well-formed matrices by modality, in the order in which a micro-batch meets them."""
    by_name = (
        {name: configured[name] for name in MODALITIES} if isinstance(configured, Mapping) else {LAYERS: configured}
    )
    return {name: tuple(map(tuple, matrix)) for name, matrix in by_name.items()}


def as_configured(matrices: Matrices) -> list[list[int]] | dict[str, list[list[int]]]:
    """Return matrices as JSON has them: one alone, or one for each modality."""
    lists = {name: [list(row) for row in matrix] for name, matrix in matrices.items()}
    return lists.get(LAYERS, lists)


def total(matrices: Matrices) -> Matrix:
    """Return the layers of all modalities in every cell."""
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*matrices.values(), strict=True))


def cells_in_order(matrices: Matrices, *, num_leading: int, num_between: int, num_trailing: int) -> list[Cell]:
    """Return the cells that hold layers, in visiting order.

    Args:
        matrices: Matrices of which `place_problem` finds nothing to say.
        num_leading: Layers that join cell (0, 0).
        num_between: Layers between two modalities, which join the edge in the chunk in which the second one begins.
        num_trailing: Layers that join cell (V-1, 0).
    """
    counts = total(matrices)
    joining = {(0, EDGE_STAGE): num_leading}
    for place, number in ((_join_place(matrices), num_between), ((len(counts) - 1, EDGE_STAGE), num_trailing)):
        joining[place] = joining.get(place, 0) + number
    cells = (
        Cell(chunk=chunk, stage=stage, configured=count, joining=joining.get((chunk, stage), 0))
        for chunk, row in enumerate(counts)
        for stage, count in enumerate(row)
    )
    return [cell for cell in cells if cell.configured + cell.joining]


# --- the form -------------------------------------------------------------------------------------------------------


def form_problem(configured: object) -> ConfigProblem | None:
    """Check that a matrix, or the one of each modality, is rectangular, at least 2 x 2, of whole numbers >= 0.

    Args:
        configured: `pipeline_num_layers`.
    """
    if not isinstance(configured, Mapping):
        return _matrix_form(configured, MATRIX_KEY)
    for name in configured:
        if name not in MODALITIES:
            return ConfigProblem(
                key=_key(name),
                found=configured[name],
                expected=f"the modalities {' and '.join(MODALITIES)}",
                fix="rename or remove it",
            )
    for name in MODALITIES:
        if name not in configured:
            return ConfigProblem(
                key=_key(name),
                found=Absent(),
                expected=f"a matrix for each of {' and '.join(MODALITIES)}",
                fix=f"{_FIX_FORM}, or a matrix alone for a model of one modality",
            )
        problem = _matrix_form(configured[name], _key(name))
        if problem is not None:
            return problem
    return _same_size(matrices_of(configured))


def _matrix_form(matrix: object, key: str) -> ConfigProblem | None:
    if not _is_list(matrix) or not all(_is_list(row) for row in matrix):
        return ConfigProblem(
            key=key,
            found=matrix,
            expected="a list of chunks, each a list of layer counts, one count per stage",
            fix=f'write it as in "{key.rpartition(".")[2]}": [[2, 13, 13], [2, 0, 0]]',
        )
    if len(matrix) < MIN_CHUNKS:
        lists = [list(row) for row in matrix]
        return ConfigProblem(
            key=key,
            found=Absent(f"{lists}, which is {len(matrix)} chunk{'' if len(matrix) == 1 else 's'}"),
            expected=f"at least {MIN_CHUNKS} chunks, because the first and the last layers are both on the edge",
            fix="add a last chunk that holds the last layers on stage 0, e.g. [2, 0, 0]",
        )
    return _rows_form(matrix, key)


def _rows_form(matrix: Sequence[Sequence[object]], key: str) -> ConfigProblem | None:
    width = max(len(matrix[0]), MIN_STAGES)
    for chunk, row in enumerate(matrix):
        if len(row) != width:
            return ConfigProblem(
                key=f"{key}[{chunk}]",
                found=row,
                expected=f"{width} layer counts (one for the edge and one per cloud stage), as many in every chunk",
                fix="write 0 where a stage holds no layers of a chunk",
            )
        for stage, count in enumerate(row):
            if not is_whole(count, 0):
                return ConfigProblem(
                    key=f"{key}[{chunk}][{stage}]",
                    found=count,
                    expected="a whole number of layers, 0 or more",
                    fix=f"write how many layers stage {stage} holds in chunk {chunk}",
                )
    return None


def _same_size(matrices: Matrices) -> ConfigProblem | None:
    (chunks, stages), (other_chunks, other_stages) = ((len(rows), len(rows[0])) for rows in matrices.values())
    if (chunks, stages) == (other_chunks, other_stages):
        return None
    return ConfigProblem(
        key=_key(TEXT),
        found=Absent(f"{other_chunks} chunks of {other_stages} stages"),
        expected=f"{chunks} chunks of {stages} stages, as in {_key(VISION)}",
        fix="write 0 where a stage holds no layers of a modality",
    )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


# --- the sums -------------------------------------------------------------------------------------------------------


def sum_problem(matrices: Matrices, num_layers: int | Mapping[str, int]) -> ConfigProblem | None:
    """Check that matrices distribute exactly the layers that a model has.

    Args:
        matrices: Well-formed matrices.
        num_layers: Number of layers to distribute; a mapping from each modality of the model to its number.
    """
    one = LAYERS in matrices
    if one and isinstance(num_layers, Mapping):
        return ConfigProblem(
            key=MATRIX_KEY,
            found=as_configured(matrices),
            expected=f"a matrix for each modality of the model, {' and '.join(num_layers)}",
            fix=f'write {{"{VISION}": [[...]], "{TEXT}": [[...]]}}',
        )
    if not one and not isinstance(num_layers, Mapping):
        return ConfigProblem(
            key=MATRIX_KEY,
            found=as_configured(matrices),
            expected="one matrix, because the model has one modality",
            fix='write it as in "pipeline_num_layers": [[2, 13, 13], [2, 0, 0]]',
        )
    for name, matrix in matrices.items():
        wanted = num_layers[name] if isinstance(num_layers, Mapping) else num_layers
        found = sum(map(sum, matrix))
        if found != wanted:
            owner = "the model" if one else f"the model's {name}"
            change = f"add {wanted - found} to" if wanted > found else f"take {found - wanted} from"
            return ConfigProblem(
                key=_key(name),
                found=Absent(f"{[list(row) for row in matrix]}, whose sum is {found}"),
                expected=f"a sum of {wanted}, the number of layers of {owner}",
                fix=f"{change} the counts, so that every layer is held exactly once",
            )
    return None


# --- the places -----------------------------------------------------------------------------------------------------


def place_problem(
    matrices: Matrices, *, num_leading: int, num_trailing: int, allow_exposed_edge: bool
) -> ConfigProblem | None:
    """Check where layers are: some on every cloud stage, both ends and the join on the edge, vision before text.

    Args:
        matrices: Well-formed matrices.
        num_leading: Layers that join cell (0, 0).
        num_trailing: Layers that join cell (V-1, 0).
        allow_exposed_edge: Accept that outputs of embeddings, or gradients of the output layer, are sent.
    """
    problem = _missing_modality(matrices) or _empty_stage(matrices)
    if problem is not None:
        return problem
    cells = cells_in_order(matrices, num_leading=num_leading, num_between=0, num_trailing=num_trailing)
    problem = _head(matrices, cells[0]) or _order(matrices) or _tail(matrices, cells[-1])
    if problem is not None or allow_exposed_edge:
        return problem
    return _exposed_samples(matrices) or _exposed_labels(matrices)


def _missing_modality(matrices: Matrices) -> ConfigProblem | None:
    for name, matrix in matrices.items():
        if name != LAYERS and not _held(matrix):
            return ConfigProblem(
                key=_key(name),
                found=Absent("no layer in any cell"),
                expected="at least one layer of each modality",
                fix="give the layers of the model to cells, or write a matrix alone for a model of one modality",
            )
    return None


def _empty_stage(matrices: Matrices) -> ConfigProblem | None:
    """Check that every cloud stage holds a layer."""
    for stage, column in enumerate(zip(*total(matrices), strict=True)):
        if stage != EDGE_STAGE and not any(column):
            return ConfigProblem(
                key=MATRIX_KEY,
                found=Absent(f"{shown(as_configured(matrices))}, with no layers on stage {stage}"),
                expected="at least one layer on every cloud stage",
                fix=f"give stage {stage} layers in some chunk, or remove its column and its ranks",
            )
    return None


def _head(matrices: Matrices, first: Cell) -> ConfigProblem | None:
    """Check that the first layers are on the edge."""
    if first.stage == EDGE_STAGE:
        return None
    name, matrix = next(iter(matrices.items()))
    return ConfigProblem(
        key=f"{_key(name)}[0]",
        found=Absent(f"{[list(row) for row in matrix]}, with the first layers on stage {first.stage}"),
        expected="the first layers on stage 0, the edge, which holds the samples and the labels",
        fix=f"give layers to {_key(name)}[0][0]",
    )


def _tail(matrices: Matrices, last: Cell) -> ConfigProblem | None:
    """Check that the last layers are on the edge."""
    if last.stage == EDGE_STAGE:
        return None
    name = next(name for name, matrix in matrices.items() if matrix[last.chunk][last.stage])
    if name != LAYERS:
        return ConfigProblem(
            key=_cell_key(name, (last.chunk, last.stage)),
            found=matrices[name][last.chunk][last.stage],
            expected="0: the last layers are on stage 0, the edge, which holds the labels",
            fix="give the cloud stages of the last chunk no layers",
        )
    matrix = matrices[name]
    return ConfigProblem(
        key=f"{MATRIX_KEY}[{len(matrix) - 1}]",
        found=Absent(f"{[list(row) for row in matrix]}, with the last layers on stage {last.stage}"),
        expected="the last layers on stage 0, the edge, which holds the samples and the labels",
        fix=f"give layers to {MATRIX_KEY}[{len(matrix) - 1}][0] and none to the cloud stages of the last chunk",
    )


def _order(matrices: Matrices) -> ConfigProblem | None:
    """Check that vision ends before text begins, and that the edge is visited in between."""
    if LAYERS in matrices:
        return None
    last, first = _held(matrices[VISION])[-1], _held(matrices[TEXT])[0]
    if last <= _join_place(matrices):
        return None
    if last > first:
        expected = f"0: every layer of {VISION} comes before the first of {TEXT}, which is in chunk {first[0]}"
    else:
        expected = (
            f"0: {TEXT} begins in chunk {first[0]}, and before that both meet on the edge, which has the token ids"
        )
    return ConfigProblem(
        key=_cell_key(VISION, last),
        found=matrices[VISION][last[0]][last[1]],
        expected=expected,
        fix=f"end {VISION} on stage 0 of the chunk in which {TEXT} begins, or in a chunk before",
    )


def _exposed_samples(matrices: Matrices) -> ConfigProblem | None:
    """Check that a layer of each modality stands between its embedding and the link, where any is in the cloud."""
    for place, (name, matrix) in enumerate(matrices.items()):
        chunk, stage = _held(matrix)[0]
        if stage != EDGE_STAGE:
            return ConfigProblem(
                key=_cell_key(name, (chunk if place else 0, EDGE_STAGE)),
                found=0,
                expected=f"1 or more: {_ENTRANCES[name]}",
                fix=_FIX_EXPOSED,
            )
    return None


def _exposed_labels(matrices: Matrices) -> ConfigProblem | None:
    """Check that a layer stands between the link and the labels."""
    name, matrix = list(matrices.items())[-1]
    last_hop = max(place for held in map(_held, matrices.values()) for place in held if place[1] != EDGE_STAGE)
    if _held(matrix)[-1] > last_hop:
        return None
    of_name = "" if name == LAYERS else f" of {name}"
    return ConfigProblem(
        key=_cell_key(name, (len(matrix) - 1, EDGE_STAGE)),
        found=0,
        expected=f"1 or more: a layer{of_name} on the edge after the last hop, because gradients give the labels away",
        fix=_FIX_EXPOSED,
    )


def _join_place(matrices: Matrices) -> Place:
    """Return the cell of the joining layers: on the edge, in the chunk in which the last modality begins."""
    return _held(list(matrices.values())[-1])[0][0], EDGE_STAGE


def _held(matrix: Matrix) -> list[Place]:
    """Return the places that hold layers, in visiting order."""
    return [(chunk, stage) for chunk, row in enumerate(matrix) for stage, count in enumerate(row) if count]


def _key(name: object) -> str:
    return MATRIX_KEY if name == LAYERS else f"{MATRIX_KEY}.{name}"


def _cell_key(name: str, place: Place) -> str:
    return f"{_key(name)}[{place[0]}][{place[1]}]"

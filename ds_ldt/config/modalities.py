"""The rules of a model of two modalities: where its vision encoder and its text decoder may lie.

`pipeline_num_layers` is then one matrix for each modality, and a micro-batch meets the layers in this order:

    leading layers      on the edge, in cell (0, 0)        e.g. the patch embedding
    vision_encoder      as its matrix says
    joining layers      on the edge, between the two       e.g. merger and text embedding: they need the token ids
    text_decoder        as its matrix says
    trailing layers     on the edge, in cell (V-1, 0)      e.g. the final norm and the output layer

Each rule is a small function that returns the problem it finds, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ds_ldt.config.rules import (
    EDGE_STAGE,
    MATRIX_KEY,
    Cell,
    Matrices,
    Matrix,
    empty_stage,
    matrix_form,
    matrix_sum,
)
from ds_ldt.errors import Absent, ConfigProblem, shown

VISION, TEXT = "vision_encoder", "text_decoder"
MODALITIES = (VISION, TEXT)
"""The modalities in the order in which a micro-batch meets them."""

_FIX_FORM = f'write it as in "pipeline_num_layers": {{"{VISION}": [[4, 20], [0, 0]], "{TEXT}": [[1, 26], [1, 0]]}}'
_FIX_EXPOSED = 'move layers to the edge, or accept it with "allow_exposed_edge": true in the "ldt" section'

Place = tuple[int, int]
"""(chunk, stage): places compare in visiting order."""


def mapping_form(value: Mapping[object, object]) -> ConfigProblem | None:
    """Check that a mapping holds a matrix for every modality, all of the same shape and none without layers."""
    for name in value:
        if name not in MODALITIES:
            return ConfigProblem(
                key=f"{MATRIX_KEY}.{name}",
                found=value[name],
                expected=f"the modalities {' and '.join(MODALITIES)}",
                fix="rename or remove it",
            )
    for name in MODALITIES:
        if name not in value:
            return ConfigProblem(
                key=f"{MATRIX_KEY}.{name}",
                found=Absent(),
                expected=f"a matrix for each of {' and '.join(MODALITIES)}",
                fix=f"{_FIX_FORM}, or a matrix alone for a model of one modality",
            )
        problem = matrix_form(value[name], key=f"{MATRIX_KEY}.{name}")
        if problem is not None:
            return problem
    sizes = {name: _size(value[name]) for name in MODALITIES}  # type: ignore[arg-type]
    if sizes[VISION] != sizes[TEXT]:
        (chunks, stages), (other_chunks, other_stages) = sizes[VISION], sizes[TEXT]
        return ConfigProblem(
            key=f"{MATRIX_KEY}.{TEXT}",
            found=Absent(f"{other_chunks} chunks of {other_stages} stages"),
            expected=f"{chunks} chunks of {stages} stages, as in {MATRIX_KEY}.{VISION}",
            fix="write 0 where a stage holds no layers of a modality",
        )
    return None


def matrices_sum(matrices: Matrices, depths: Mapping[str, int]) -> ConfigProblem | None:
    """Check that each matrix distributes exactly the layers of its modality.

    Args:
        matrices: Modality -> its matrix, well-formed.
        depths: Modality -> number of layers that the model has of it.
    """
    for name, matrix in matrices.items():
        problem = matrix_sum(matrix, depths[name], key=f"{MATRIX_KEY}.{name}", owner=f"the model's {name}")
        if problem is not None:
            return problem
    return None


def matrices_sites(matrices: Matrices, *, allow_exposed_edge: bool) -> ConfigProblem | None:
    """Check where layers are: vision before text, the join and both ends on the edge, no idle stage.

    Args:
        matrices: Modality -> its matrix, well-formed and of one shape.
        allow_exposed_edge: Accept that embeddings of pixels or tokens, or gradients of the output layer, are sent.
    """
    for name in MODALITIES:
        if not _held(matrices[name]):
            return ConfigProblem(
                key=f"{MATRIX_KEY}.{name}",
                found=Absent("no layer in any cell"),
                expected="at least one layer of each modality",
                fix="give the layers of the model to cells, or write a matrix alone for a model of one modality",
            )
    problem = (
        empty_stage(total(matrices), found=shown(listed(matrices))) or _order(matrices) or _last_on_edge(matrices)
    )
    if problem is not None or allow_exposed_edge:
        return problem
    return _exposed_pixels(matrices[VISION]) or _exposed_tokens(matrices[TEXT]) or _exposed_labels(matrices)


def total(matrices: Matrices) -> Matrix:
    """Return the layers of all modalities in every cell."""
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*matrices.values(), strict=True))


def listed(matrices: Matrices) -> dict[str, list[list[int]]]:
    """Return matrices as JSON would have them."""
    return {name: [list(row) for row in matrix] for name, matrix in matrices.items()}


def join_place(matrices: Matrices) -> Place:
    """Return the cell of the joining layers: on the edge, in the chunk in which the text decoder begins."""
    return _held(matrices[TEXT])[0][0], EDGE_STAGE


def matrices_cells(matrices: Matrices, *, num_leading: int, num_between: int, num_trailing: int) -> list[Cell]:
    """Return the cells that hold layers, in visiting order.

    Args:
        matrices: Modality -> its matrix, of which `matrices_sites` finds nothing to say.
        num_leading: Layers that join cell (0, 0).
        num_between: Layers that stand between the modalities.
        num_trailing: Layers that join cell (V-1, 0).
    """
    counts = total(matrices)
    joining = {(0, EDGE_STAGE): num_leading}
    for place, number in ((join_place(matrices), num_between), ((len(counts) - 1, EDGE_STAGE), num_trailing)):
        joining[place] = joining.get(place, 0) + number
    cells = (
        Cell(chunk=chunk, stage=stage, configured=count, joining=joining.get((chunk, stage), 0))
        for chunk, row in enumerate(counts)
        for stage, count in enumerate(row)
    )
    return [cell for cell in cells if cell.configured + cell.joining]


def _held(matrix: Matrix) -> list[Place]:
    """Return the places that hold layers, in visiting order."""
    return [(chunk, stage) for chunk, row in enumerate(matrix) for stage, count in enumerate(row) if count]


def _size(matrix: Matrix) -> tuple[int, int]:
    return len(matrix), len(matrix[0])


def _order(matrices: Matrices) -> ConfigProblem | None:
    """Check that vision ends before text begins, and that the edge is visited in between."""
    last, first = _held(matrices[VISION])[-1], _held(matrices[TEXT])[0]
    if last <= join_place(matrices):
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


def _last_on_edge(matrices: Matrices) -> ConfigProblem | None:
    """Check that nothing comes after the last cell of the edge, where the trailing layers are."""
    last_chunk = len(matrices[TEXT]) - 1
    for name in MODALITIES:
        late = [place for place in _held(matrices[name]) if place > (last_chunk, EDGE_STAGE)]
        if late:
            return ConfigProblem(
                key=_cell_key(name, late[0]),
                found=matrices[name][late[0][0]][late[0][1]],
                expected="0: the last layers are on stage 0, the edge, which holds the labels",
                fix="give the cloud stages of the last chunk no layers",
            )
    return None


def _exposed_pixels(vision: Matrix) -> ConfigProblem | None:
    """Check that a vision block stands between the pixels and the link, where any is in the cloud."""
    if _held(vision)[0][1] == EDGE_STAGE:
        return None
    return ConfigProblem(
        key=_cell_key(VISION, (0, EDGE_STAGE)),
        found=0,
        expected=f"1 or more: a layer of {VISION} on the edge before the first hop, because pixels are read off patch "
        "embeddings",
        fix=_FIX_EXPOSED,
    )


def _exposed_tokens(text: Matrix) -> ConfigProblem | None:
    """Check that a decoder layer stands between the token ids and the link."""
    chunk, stage = _held(text)[0]
    if stage == EDGE_STAGE:
        return None
    return ConfigProblem(
        key=_cell_key(TEXT, (chunk, EDGE_STAGE)),
        found=0,
        expected=f"1 or more: a layer of {TEXT} on the edge after the embedding, because token ids are read off "
        "embedding outputs",
        fix=_FIX_EXPOSED,
    )


def _exposed_labels(matrices: Matrices) -> ConfigProblem | None:
    """Check that a decoder layer stands between the link and the labels."""
    last_hop = max(place for matrix in matrices.values() for place in _held(matrix) if place[1] != EDGE_STAGE)
    if _held(matrices[TEXT])[-1] > last_hop:
        return None
    return ConfigProblem(
        key=_cell_key(TEXT, (len(matrices[TEXT]) - 1, EDGE_STAGE)),
        found=0,
        expected=f"1 or more: a layer of {TEXT} on the edge after the last hop, because gradients give "
        "the labels away",
        fix=_FIX_EXPOSED,
    )


def _cell_key(name: str, place: Place) -> str:
    return f"{MATRIX_KEY}.{name}[{place[0]}][{place[1]}]"


def by_modality(value: object, accepts: Callable[[float], bool]) -> object:
    """Check a number or a mapping from each modality to one; pydantic would list a fault once for each form.

    Args:
        value: What a setting holds.
        accepts: Whether a number will do.

    Raises:
        ValueError: It is neither, or a number will not do.
    """
    if isinstance(value, Mapping) and set(value) != set(MODALITIES):
        raise ValueError("not the modalities")
    for number in value.values() if isinstance(value, Mapping) else (value,):
        if not isinstance(number, int | float) or isinstance(number, bool) or not accepts(number):
            raise ValueError("no such number")
    return value

"""From a collated batch to what enters the pipeline. Runs on the edge only: nothing here crosses the link as it is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ldt.errors import Absent, ConfigProblem, SampleError

IGNORE_INDEX = -100

_USED = ("input_ids", "attention_mask", "position_ids", "labels")
# Some tokenizers emit these; the supported models take and ignore them.
_IGNORED = ("token_type_ids",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatches:
    """Reads the batches of one model of text: `prepare_batch` with its vocabulary.

    Attributes:
        vocab_size: Rows of the model's embedding.
    """

    vocab_size: int

    def __call__(self, batch: Any) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Turn a collated batch into `(inputs, labels)`; see `prepare_batch`."""
        return prepare_batch(batch, vocab_size=self.vocab_size)


def prepare_batch(batch: Any, *, vocab_size: int | None = None) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Turn a collated batch into `(inputs, labels)`, the form that a pipeline takes.

    The batch means what it means to `model(**batch, use_cache=False)` of transformers: without `position_ids` every
    row counts 0..S-1, padded or not; sequences packed into one row are kept apart where `position_ids` restart, but
    only in a batch without `attention_mask`. A mask of ones says nothing and is dropped.

    Args:
        batch: A mapping with `input_ids` (B, S) and optionally `attention_mask` (B, S) of 0 and 1, `position_ids`
            (B, S) or (1, S), and `labels` (B, S), not shifted. Or a pair `(inputs, labels)`, whose inputs are such a
            mapping, the ids alone, or a tuple `(input_ids, position_ids[, mask])`.
        vocab_size: Rows of the model's embedding, to which ids and labels are held; None leaves them unchecked.

    Returns:
        `((input_ids int64, position_ids int32[, padding mask bool]), labels int64)`, each (B, S). Labels are None if
        the batch has none.

    Raises:
        SampleError: The batch holds something that is not supported, shapes disagree, or an id or a label is out of
            range; a ConfigError that names the row.
    """
    fields = fields_of(batch)
    input_ids = input_ids_of(fields)
    labels = like_ids(input_ids, "labels", fields)
    if vocab_size is not None:
        check_range(input_ids, labels, vocab_size)
    mask = like_ids(input_ids, "attention_mask", fields)
    position_ids = _positions(input_ids, fields.get("position_ids"))
    inputs: tuple[Tensor, ...] = (input_ids.long(), position_ids)
    if mask is not None and mask_matters(mask.bool(), None if fields.get("position_ids") is None else position_ids):
        inputs = (*inputs, mask.bool())
    return inputs, None if labels is None else labels.long()


def count_targets(labels: Tensor) -> int:
    """Return how many targets the loss averages over: labels other than -100, after the shift by one."""
    return int(count_target_tensor(labels))


def count_target_tensor(labels: Tensor) -> Tensor:
    """Return `count_targets` as a scalar int64 tensor on the device of `labels` (B, S), without waiting for it."""
    return (labels[..., 1:] != IGNORE_INDEX).sum()


def fields_of(batch: Any, *, used: tuple[str, ...] = _USED) -> dict[str, Any]:
    """Return a batch as a dictionary of fields, all of them known.

    Args:
        batch: See `prepare_batch`.
        used: The fields that are known.

    Raises:
        SampleError: It has another form, or another field.
    """
    if isinstance(batch, Mapping):
        fields = dict(batch)
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, labels = batch
        fields = dict(inputs) if isinstance(inputs, Mapping) else _fields_of_tuple(inputs)
        if fields.setdefault("labels", labels) is not labels:
            raise batch_problem(
                "labels", Absent("two of them"), "labels once", "give them in the mapping or beside it"
            )
    else:
        raise batch_problem(
            None,
            Absent(type(batch).__name__),
            "a mapping with input_ids and labels, or a pair (inputs, labels)",
            "let the collate function return one of these",
        )
    for name in fields:
        if name not in used and name not in _IGNORED:
            raise batch_problem(
                name,
                Absent("a field that the pipeline has no use for"),
                f"only {', '.join(used)}",
                "drop it in the collate function",
            )
    return fields


def _fields_of_tuple(inputs: Any) -> dict[str, Any]:
    parts = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    names = ("input_ids", "position_ids", "attention_mask")
    if not 1 <= len(parts) <= len(names):
        raise batch_problem(None, Absent(f"{len(parts)} inputs"), f"at most {', '.join(names)}", "drop the others")
    return dict(zip(names, parts, strict=False))


def _positions(input_ids: Tensor, given: Any) -> Tensor:
    """Return position ids (B, S) int32, those given or 0..S-1."""
    rows, length = input_ids.shape
    if given is None:
        return torch.arange(length, dtype=torch.int32, device=input_ids.device).repeat(rows, 1)
    positions = tensor_of("position_ids", given)
    if tuple(positions.shape) not in ((rows, length), (1, length)):
        raise batch_problem(
            "position_ids", shape_of(positions), f"shape {(rows, length)}", "give one position per token"
        )
    least, largest = positions.aminmax()
    bound = torch.iinfo(torch.int32)
    if int(least) < bound.min or int(largest) > bound.max:
        row = int(((positions < bound.min) | (positions > bound.max)).nonzero()[0][0])
        found = Absent(f"{int(least)} to {int(largest)}")
        raise batch_problem("position_ids", found, "positions that int32 holds", "count tokens from 0", row=row)
    return positions.to(torch.int32).expand(rows, length).contiguous()


def mask_matters(mask: Tensor, given_positions: Tensor | None) -> bool:
    """Tell whether leaving a padding mask (B, S) out would change anything.

    Args:
        mask: True where a token is real.
        given_positions: Positions (B, S) by which packed sequences are told apart, None if the batch gave none.
    """
    if not bool(mask.all()):
        return True
    if given_positions is None or bool((given_positions.diff(dim=1) == 1).all()):
        return False
    # transformers keeps packed sequences apart only where there is no attention_mask at all. Follow it, but say so.
    warnings.warn(
        "A batch has position_ids that restart (packed sequences) and an attention_mask of ones. As in transformers, "
        "the sequences of a row then attend to each other. Drop attention_mask to keep them apart.",
        stacklevel=3,
    )
    return True


def input_ids_of(fields: dict[str, Any]) -> Tensor:
    """Return the token ids (B, S) of a batch, of whatever integer dtype."""
    input_ids = tensor_of("input_ids", fields.get("input_ids"))
    if input_ids.ndim != 2:
        raise batch_problem(
            "input_ids", shape_of(input_ids), "a tensor of shape (batch, sequence)", "collate into rows"
        )
    if not input_ids.numel():
        raise batch_problem(
            "input_ids", shape_of(input_ids), "at least one row of at least one token", "leave out empty samples"
        )
    return input_ids


def like_ids(input_ids: Tensor, name: str, fields: dict[str, Any]) -> Tensor | None:
    """Return an optional field, which must have the shape of the ids."""
    if fields.get(name) is None:
        return None
    tensor = tensor_of(name, fields[name])
    if tensor.shape != input_ids.shape:
        raise batch_problem(
            name, shape_of(tensor), f"shape {tuple(input_ids.shape)}, that of input_ids", "give one per token"
        )
    return tensor


def tensor_of(name: str, value: Any) -> Tensor:
    """Return a field that must be a tensor of integers or booleans."""
    if not isinstance(value, Tensor):
        found = Absent() if value is None else Absent(type(value).__name__)
        raise batch_problem(name, found, "a tensor", "let the collate function add it")
    if value.is_floating_point() or value.is_complex():
        raise batch_problem(name, Absent(f"dtype {value.dtype}"), "integers or booleans", "convert it when collating")
    return value


def shape_of(tensor: Tensor) -> Absent:
    """Return the shape of a tensor as an error shows it."""
    return Absent(f"shape {tuple(tensor.shape)}")


def check_range(input_ids: Tensor, labels: Tensor | None, vocab_size: int) -> None:
    """Check that token ids and labels are rows of the embedding: beyond it a kernel fails without naming a sample.

    Args:
        input_ids: (B, S), padded places too, for all are looked up.
        labels: (B, S); -100 marks what is no target.
        vocab_size: Rows of the embedding.

    Raises:
        SampleError: One is not; it names the row and the position.
    """
    _check_range("input_ids", input_ids, vocab_size, f"token ids from 0 to {vocab_size - 1}")
    if labels is not None:
        shifted = labels.where(labels != IGNORE_INDEX, 0)
        expected = f"labels from 0 to {vocab_size - 1}, or {IGNORE_INDEX} for what is no target"
        _check_range("labels", shifted, vocab_size, expected)


def _check_range(name: str, values: Tensor, vocab_size: int, expected: str) -> None:
    if values.numel() == 0 or values.dtype == torch.bool:
        return
    least, largest = values.aminmax()
    if int(least) >= 0 and int(largest) < vocab_size:
        return
    row, position = ((values < 0) | (values >= vocab_size)).nonzero()[0].tolist()
    raise batch_problem(
        name,
        Absent(f"{int(values[row, position])} at position {position}"),
        f"{expected} (the model's vocab_size is {vocab_size})",
        "use the tokenizer that belongs to the model, and look at what makes this field of the sample",
        row=row,
    )


def batch_problem(name: str | None, found: object, expected: str, fix: str, *, row: int | None = None) -> SampleError:
    """Return the error for something wrong with a field of a batch, or with the batch as a whole (None)."""
    problem = ConfigProblem(key=f"batch.{name}" if name else "batch", found=found, expected=expected, fix=fix)
    return SampleError.of_row(row, problem)

"""What a collated batch becomes, what is refused, and what the loss of a micro-batch is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from ds_ldt.errors import ConfigError, SampleError
from ds_ldt.models import causal_lm_loss, count_targets, family_of, prepare_batch
from ds_ldt.models.batch import TextBatches
from tests.models.tiny import FAMILY_NAMES, LENGTH, ROWS, VOCABULARY, batch_of, tiny_config

IDS = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % VOCABULARY


def logits_like(labels: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*labels.shape, VOCABULARY, generator=generator).requires_grad_()


def test_plain_batch_gets_positions_and_no_mask() -> None:
    (ids, positions), labels = prepare_batch({"input_ids": IDS, "labels": IDS})
    assert torch.equal(ids, IDS)
    assert torch.equal(labels, IDS)
    assert (positions.dtype, positions.shape) == (torch.int32, IDS.shape)
    assert torch.equal(positions, torch.arange(LENGTH, dtype=torch.int32).expand_as(IDS))


def test_mask_of_ones_is_dropped_and_padding_is_kept_as_bool() -> None:
    assert len(prepare_batch(batch_of("ones"))[0]) == 2
    _, _, mask = prepare_batch(batch_of("left"))[0]
    assert mask.dtype == torch.bool
    assert mask.logical_not().sum() == 7


def test_positions_of_one_row_are_given_to_every_row() -> None:
    row = torch.tensor([[*range(4), *range(LENGTH - 4)]])
    _, positions = prepare_batch({"input_ids": IDS, "position_ids": row})[0]
    assert torch.equal(positions, row.expand_as(IDS).int())
    assert positions.is_contiguous()


def test_forms_of_a_batch_mean_the_same() -> None:
    batch = batch_of("left")
    wanted, labels = prepare_batch(batch)
    without_labels = {key: value for key, value in batch.items() if key != "labels"}
    for form in (
        BatchEncoding(batch),
        (without_labels, batch["labels"]),
        [wanted, batch["labels"]],
        {**batch, "token_type_ids": torch.zeros_like(IDS)},
        {**batch, "labels": batch["labels"].int(), "input_ids": batch["input_ids"].int()},
    ):
        found, found_labels = prepare_batch(form)
        assert [tensor.dtype for tensor in found] == [torch.int64, torch.int32, torch.bool]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert torch.equal(found_labels, labels)


def test_batch_without_labels_has_none() -> None:
    assert prepare_batch({"input_ids": IDS})[1] is None
    assert prepare_batch((IDS, None))[1] is None


def test_mask_of_ones_beside_packed_positions_is_kept_as_transformers_does_and_said() -> None:
    batch = {**batch_of("packed"), "attention_mask": torch.ones_like(IDS)}
    with pytest.warns(UserWarning, match="Drop attention_mask to keep them apart"):
        inputs, _ = prepare_batch(batch)
    assert len(inputs) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(prepare_batch(batch_of("packed"))[0]) == 2


WRONG: dict[str, tuple[Any, list[str]]] = {
    "no ids": ({"labels": IDS}, ["batch.input_ids", "found nothing"]),
    "text": ({"input_ids": "abc"}, ["batch.input_ids", "str"]),
    "one row": ({"input_ids": IDS[0]}, ["batch.input_ids", "(11,)", "(batch, sequence)"]),
    "float ids": ({"input_ids": IDS.float()}, ["batch.input_ids", "torch.float32"]),
    "labels": ({"input_ids": IDS, "labels": IDS[:, :-1]}, ["batch.labels", "(3, 10)", "(3, 11)"]),
    "mask": ({"input_ids": IDS, "attention_mask": IDS[None]}, ["batch.attention_mask", "(1, 3, 11)"]),
    "positions": ({"input_ids": IDS, "position_ids": IDS[:2]}, ["batch.position_ids", "(2, 11)"]),
    "embeddings": ({"inputs_embeds": IDS}, ["batch.inputs_embeds", "input_ids, attention_mask"]),
    "cache": ({"input_ids": IDS, "cache": None}, ["batch.cache", "collate"]),
    "count": ({"input_ids": IDS, "num_items_in_batch": 3}, ["batch.num_items_in_batch"]),
    "labels twice": (({"input_ids": IDS, "labels": IDS}, IDS + 1), ["batch.labels", "two of them"]),
    "a tensor": (IDS, ["batch", "Tensor", "a pair (inputs, labels)"]),
    "four inputs": (((IDS, IDS, IDS, IDS), IDS), ["batch", "4 inputs"]),
}


@pytest.mark.parametrize("batch, fragments", WRONG.values(), ids=WRONG)
def test_wrong_batch_is_refused_by_name(batch: Any, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare_batch(batch)
    assert [fragment for fragment in fragments if fragment not in str(raised.value)] == []


def changed(field: str, value: int, row: int = 1, position: int = 4) -> dict[str, Tensor]:
    batch = {"input_ids": IDS.clone(), "labels": IDS.clone()}
    batch[field][row, position] = value
    return batch


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "field, value",
    [
        ("input_ids", VOCABULARY),
        ("input_ids", -1),
        ("input_ids", -100),
        ("input_ids", 2**30),
        ("labels", VOCABULARY),
        ("labels", -1),
        ("labels", -101),
    ],
)
def test_S66_ids_and_labels_beyond_the_vocabulary_are_refused_by_row(
    field: str, value: int, dtype: torch.dtype
) -> None:
    batch = {name: tensor.to(dtype) for name, tensor in changed(field, value).items()}
    with pytest.raises(SampleError) as raised:
        TextBatches(vocab_size=VOCABULARY)(batch)
    text = str(raised.value)
    assert f"row 1: batch.{field}: found {value} at position 4, expected " in text
    assert f"from 0 to {VOCABULARY - 1}" in text and f"vocab_size is {VOCABULARY}" in text
    assert raised.value.row == 1


def test_S66_ids_and_labels_of_the_whole_vocabulary_are_taken() -> None:
    read = TextBatches(vocab_size=VOCABULARY)
    for batch in (changed("input_ids", VOCABULARY - 1), changed("input_ids", 0), changed("labels", -100)):
        (ids, _), labels = read(batch)
        assert torch.equal(ids, batch["input_ids"]) and torch.equal(labels, batch["labels"])
    assert read({"input_ids": IDS})[1] is None


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_S66_each_family_checks_against_its_own_embedding(family: str) -> None:
    read = family_of(tiny_config(family)).batches(tiny_config(family))
    with pytest.raises(SampleError, match=r"batch\.input_ids: found 61 at position 4"):
        read(changed("input_ids", VOCABULARY))


def test_S30_micro_batch_without_a_target_has_loss_0_and_no_nan() -> None:
    labels = torch.full((2, 7), -100)
    labels[:, 0] = 5  # the first label of a row is never a target
    logits = logits_like(labels)
    loss = causal_lm_loss(logits, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    assert count_targets(labels) == 0


def test_S30_losses_weighted_by_their_targets_equal_one_big_batch() -> None:
    labels = IDS.clone()
    labels[0, 3:] = -100
    labels[1] = -100
    logits = logits_like(labels)
    whole = causal_lm_loss(logits, labels)
    counts = [count_targets(labels[row : row + 1]) for row in range(ROWS)]
    parts = [causal_lm_loss(logits[row : row + 1], labels[row : row + 1]) for row in range(ROWS)]
    assert counts == [2, 0, LENGTH - 1]
    weighted = sum(count * part for count, part in zip(counts, parts, strict=True)) / count_targets(labels)
    assert weighted.item() == pytest.approx(whole.item(), abs=1e-6)
    assert sum(parts).item() / ROWS != pytest.approx(whole.item(), abs=1e-2)


def test_S31_labels_are_shifted_once() -> None:
    labels = IDS[:1]
    perfect = torch.nn.functional.one_hot(labels.roll(-1, dims=1), VOCABULARY).float() * 100
    assert causal_lm_loss(perfect, labels).item() == pytest.approx(0.0, abs=1e-6)
    assert causal_lm_loss(perfect.roll(-1, dims=1), labels).item() > 10


def test_loss_is_computed_in_float32() -> None:
    logits = logits_like(IDS).to(torch.bfloat16)
    loss = causal_lm_loss(logits, IDS)
    assert loss.dtype == torch.float32
    assert loss.item() == causal_lm_loss(logits.float(), IDS).item()


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_S66_a_micro_batch_of_nothing_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(SampleError, match=r"batch\.input_ids: found shape .*, expected at least one row of"):
        prepare_batch({"input_ids": torch.zeros(shape, dtype=torch.int64)})


def test_S66_positions_that_would_be_others_in_int32_are_refused_by_row() -> None:
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    positions[1, 2] = 2**32
    with pytest.raises(SampleError, match=r"row 1: batch\.position_ids: found 0 to 4294967296, expected positions"):
        prepare_batch({"input_ids": IDS, "position_ids": positions})

"""The pipeline layers, run one after another, compute what transformers computes: loss, logits and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, PreTrainedModel

from ds_ldt.models import count_targets, prepare_batch
from tests.models.tiny import FAMILY_NAMES, Sequence, batch_of, samples_of, tiny_config, tiny_model

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, bool], tuple[PreTrainedModel, Sequence]]:
    """Each family, tied and untied, as transformers has it and as pipeline layers with the same weights."""
    pairs = {}
    for family in FAMILY_NAMES:
        for tied in (False, True):
            model = tiny_model(tiny_config(family, tie_word_embeddings=tied))
            pairs[family, tied] = (model, Sequence(model.config).load(model))
    return pairs


def assert_parity(model: PreTrainedModel, layers: Sequence, batch: dict[str, Tensor]) -> None:
    # A cache, which transformers makes even in training, would switch off the detection of packed sequences.
    model.zero_grad()
    for module in layers.modules.values():
        module.zero_grad()
    expected, found = model(**batch, use_cache=False).loss, layers.loss(batch)
    expected.backward()
    found.backward()
    assert found.item() == pytest.approx(expected.item(), abs=TOLERANCE)
    gradients = layers.named(lambda parameter: parameter.grad)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == wanted.keys()
    worst = {name: float((gradients[name] - wanted[name]).abs().max()) for name in wanted}
    assert {name: error for name, error in worst.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("kind", ["plain", "ones", "right", "left", "packed", "ignored"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_S31_loss_and_gradients_equal_transformers(
    models: dict[tuple[str, bool], tuple[PreTrainedModel, Sequence]], family: str, tied: bool, kind: str
) -> None:
    assert_parity(*models[family, tied], batch_of(kind))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_packed_samples_equal_the_samples_on_their_own(family: str, attention: str) -> None:
    """transformers' own collator puts samples of 5, 1, 2 and 9 tokens into one row."""
    model = tiny_model(tiny_config(family), attention=attention)
    layers = Sequence(model.config).load(model)
    samples = samples_of(5, 1, 2, 9)
    packed = DataCollatorWithFlattening()(samples)
    assert packed["input_ids"].shape == (1, 17)
    counts = [len(sample["labels"]) - 1 for sample in samples]
    assert count_targets(packed["labels"]) == sum(counts)
    single = [{name: torch.tensor([values]) for name, values in sample.items()} for sample in samples]
    wanted = sum(layers.loss(one) * count for one, count in zip(single, counts, strict=True)) / sum(counts)
    found = layers.loss(packed)
    assert found.item() == pytest.approx(wanted.item(), abs=TOLERANCE)
    parameters = [parameter for module in layers.modules.values() for parameter in module.parameters()]
    for one, other in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    mixed = layers.loss({name: packed[name] for name in ("input_ids", "labels")})
    assert mixed.item() != pytest.approx(wanted.item(), abs=1e-3), "without positions samples see each other"


SLIDING: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SLIDING)
def test_sliding_windows_equal_transformers(family: str, attention: str) -> None:
    model = tiny_model(tiny_config(family, **SLIDING[family]), attention=attention)
    layers = Sequence(model.config).load(model)
    full = Sequence(tiny_config(family)).load(model)
    for kind in ("plain", "left", "packed"):
        assert_parity(model, layers, batch_of(kind))
        assert not torch.allclose(full.logits(batch_of(kind)), layers.logits(batch_of(kind)), atol=1e-3)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_eager_attention_equals_transformers(family: str) -> None:
    model = tiny_model(tiny_config(family), attention="eager")
    layers = Sequence(model.config).load(model)
    assert layers.specs[1].module_args[0]._attn_implementation == "eager"
    for kind in ("plain", "right", "packed"):
        assert_parity(model, layers, batch_of(kind))


ROPE_TYPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [2.0, 3.0, 4.0],
        "original_max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_rope_scaling_equals_transformers(rope_type: str) -> None:
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPE_TYPES[rope_type]}
    config = tiny_config("llama", rope_parameters=parameters, max_position_embeddings=8)
    model = tiny_model(config)
    layers = Sequence(config).load(model)
    for kind in ("plain", "packed"):
        assert_parity(model, layers, batch_of(kind))


def test_dynamic_rope_does_not_depend_on_the_micro_batches_before() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = tiny_config("llama", rope_parameters=parameters, max_position_embeddings=4)
    layers = Sequence(config).load(tiny_model(config))
    longer = torch.randint(3, 60, (1, 30))
    shorter = {"input_ids": longer[:, :9]}
    before = layers.logits(shorter)
    layers.logits({"input_ids": longer})
    assert torch.equal(layers.logits(shorter), before)


def test_packed_sequences_do_not_see_each_other() -> None:
    config = tiny_config("qwen2")
    layers = Sequence(config).load(tiny_model(config))
    batch = batch_of("packed")
    before = layers.logits(batch)
    batch["input_ids"][0, 0] = 3 + (batch["input_ids"][0, 0] - 2) % 50
    after = layers.logits(batch)
    assert not torch.allclose(after[0, :4], before[0, :4])
    assert torch.allclose(after[0, 4:], before[0, 4:], atol=1e-6)


def test_caller_s_config_is_left_alone() -> None:
    config = tiny_config("llama")
    before = (config._attn_implementation, config.use_cache, config.to_json_string())
    Sequence(config)
    assert (config._attn_implementation, config.use_cache, config.to_json_string()) == before


def test_inference_mode_and_training_may_alternate_on_the_same_batch() -> None:
    config = tiny_config("qwen3")
    layers = Sequence(config).load(tiny_model(config))
    inputs, _ = prepare_batch(batch_of("left"))
    with torch.inference_mode():
        quiet = layers.logits(inputs_as_batch(inputs))
    logits = layers.logits(inputs_as_batch(inputs))
    logits.sum().backward()
    assert torch.equal(quiet, logits)


def inputs_as_batch(inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], None]:
    return inputs, None

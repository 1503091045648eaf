"""Qwen2.5-VL as pipeline layers, run one after another, is what transformers computes: loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.tiny import Sequence, tiny_model
from tests.models.tiny_vl import KINDS, tiny_vl_config, vl_batch_of

TOLERANCE = 1e-5

Models = dict[tuple[str, bool], tuple[PreTrainedModel, Sequence]]


@pytest.fixture(scope="module")
def models() -> Models:
    """Tied and untied, sdpa and eager: as transformers has it, and as pipeline layers with the same weights."""
    pairs = {}
    for attention in ("sdpa", "eager"):
        for tied in (False, True):
            model = tiny_model(tiny_vl_config(tie_word_embeddings=tied), attention=attention)
            pairs[attention, tied] = (model, Sequence(model.config).load(model))
    return pairs


def gradients_of_transformers(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients under the names of the published files; a parameter that was not used has a zero gradient."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        key = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        gradients[key] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return loss.item(), gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradients_equal_transformers(models: Models, attention: str, tied: bool, kind: str) -> None:
    model, layers = models[attention, tied]
    batch = vl_batch_of(kind)
    wanted_loss, wanted = gradients_of_transformers(model, batch)
    for module in layers.modules.values():
        module.zero_grad()
    loss = layers.loss(batch)
    loss.backward()
    found = layers.named(lambda parameter: parameter.grad)
    assert loss.item() == pytest.approx(wanted_loss, abs=TOLERANCE)
    assert found.keys() == wanted.keys()
    worst = {name: float((found[name] - wanted[name]).abs().max()) for name in wanted}
    assert {name: error for name, error in worst.items() if not error <= TOLERANCE} == {}

"""Names of the weights of a model with a vision encoder, in both spellings, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ldt.models import checked_config, family_of
from ds_ldt.models.qwen2_5_vl.keys import VisionLanguageKeyMap
from tests.models.tiny import tiny_model
from tests.models.tiny_vl import tiny_vl_config

KEYS = ("weight", "mlp.up_proj.weight", "attn.qkv.bias")
MAPS = st.builds(
    VisionLanguageKeyMap,
    num_vision_blocks=st.integers(1, 60),
    num_decoder_layers=st.integers(1, 100),
    tied=st.booleans(),
)


def as_modules_say(key: str) -> str:
    """The name that transformers' modules have for what a published file calls `key`."""
    if key.startswith("visual."):
        return f"model.{key}"
    return key.replace("model.", "model.language_model.", 1)


@given(MAPS, st.integers(0, 10_000), st.sampled_from(KEYS))
def test_S43_both_spellings_of_a_key_lead_to_its_layer(keys: VisionLanguageKeyMap, number: int, key: str) -> None:
    layer = number % keys.num_layers
    published = keys.hf_key(layer, key)
    assert keys.locate(published) == (layer, key)
    assert keys.locate(as_modules_say(published)) == (layer, key)


@given(MAPS)
def test_layers_are_numbered_in_the_order_of_a_micro_batch(keys: VisionLanguageKeyMap) -> None:
    prefixes = [keys.prefix(layer) for layer in range(keys.num_layers)]
    assert prefixes == [
        "visual.patch_embed.",
        *(f"visual.blocks.{index}." for index in range(keys.num_vision_blocks)),
        "visual.merger.",
        "model.embed_tokens.",
        *(f"model.layers.{index}." for index in range(keys.num_decoder_layers)),
        "model.norm.",
        "lm_head.",
    ]
    assert keys.layers_with_weights == tuple(range(keys.num_layers - keys.tied))


@pytest.mark.parametrize(
    "key",
    [
        "visual.blocks.4.norm1.weight",
        "model.visual.blocks.04.norm1.weight",
        "vision_tower.blocks.0.norm1.weight",
        "model.model.layers.0.mlp.up_proj.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
        "model.language_model.layers.3.mlp.up_proj.weight",
        "visual",
    ],
)
def test_S43_key_of_no_layer_is_located_nowhere(key: str) -> None:
    assert VisionLanguageKeyMap(num_vision_blocks=4, num_decoder_layers=3, tied=False).locate(key) is None


@pytest.mark.parametrize("layer", [-1, 12])
def test_layer_out_of_range_is_an_index_error(layer: int) -> None:
    with pytest.raises(IndexError, match="not one of the 12"):
        VisionLanguageKeyMap(num_vision_blocks=4, num_decoder_layers=3, tied=True).prefix(layer)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_expected_shapes_are_those_of_transformers(tied: bool) -> None:
    config = tiny_vl_config(tie_word_embeddings=tied)
    family = family_of(config)
    keys, shapes = family.key_map(config), family.expected_shapes(checked_config(config))
    found = {keys.hf_key(layer, key): shape for layer, state in shapes.items() for key, shape in state.items()}
    wanted = {name: tuple(parameter.shape) for name, parameter in tiny_model(config).named_parameters()}
    assert {as_modules_say(name): shape for name, shape in found.items()} == wanted

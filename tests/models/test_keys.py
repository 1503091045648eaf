"""Names of weights, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ldt.models import FAMILIES, KeyMap, checked_config
from ds_ldt.models.weight_names import is_recomputed
from tests.models.tiny import FAMILY_NAMES, tiny_config, tiny_model

KEYS = ("weight", "mlp.up_proj.weight", "self_attn.q_proj.bias")
MAPS = st.builds(KeyMap, num_decoder_layers=st.integers(1, 200), tied=st.booleans())


@given(MAPS, st.integers(0, 10_000), st.sampled_from(KEYS))
def test_S44_every_layer_s_key_is_found_again(keys: KeyMap, number: int, key: str) -> None:
    layer = number % keys.num_layers
    assert keys.locate(keys.hf_key(layer, key)) == (layer, key)


@given(MAPS)
def test_S44_decoder_layer_i_is_pipeline_layer_i_plus_1(keys: KeyMap) -> None:
    for index in range(keys.num_decoder_layers):
        assert keys.prefix(index + 1) == f"model.layers.{index}."
    assert keys.prefix(0) == "model.embed_tokens."
    assert (keys.prefix(keys.norm), keys.prefix(keys.head)) == ("model.norm.", "lm_head.")
    assert keys.layers_with_weights == tuple(range(keys.num_decoder_layers + (2 if keys.tied else 3)))


@pytest.mark.parametrize(
    "hf_key",
    [
        "model.layers.4.mlp.weight",
        "model.layers.04.mlp.weight",
        "model.layers.x.weight",
        "layers.0.weight",
        "lm_head",
        "",
    ],
)
def test_key_of_no_layer_is_located_nowhere(hf_key: str) -> None:
    assert KeyMap(num_decoder_layers=4, tied=False).locate(hf_key) is None


def test_layer_out_of_range_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="layer 7 is not one of the 7"):
        KeyMap(num_decoder_layers=4, tied=True).prefix(7)


def test_old_rotary_frequencies_are_recomputed() -> None:
    assert is_recomputed("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_recomputed("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_expected_shapes_are_those_of_transformers(family: str, tied: bool) -> None:
    config = tiny_config(family, tie_word_embeddings=tied)
    keys = FAMILIES[family].key_map(config)
    shapes = FAMILIES[family].expected_shapes(checked_config(config))
    found = {keys.hf_key(layer, key): shape for layer, state in shapes.items() for key, shape in state.items()}
    wanted = {name: tuple(parameter.shape) for name, parameter in tiny_model(config).named_parameters()}
    assert found == wanted

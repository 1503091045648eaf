"""What the layers of Qwen2.5-VL promise beside their numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ldt.comm.wire import TensorSignature
from ds_ldt.models import build_layers, checked_config, family_of, read_hf_config
from ds_ldt.models.registry import layout_of
from ds_ldt.runtime.pretrained import initialize_layers
from ds_ldt.topology.layout import Layout
from tests.models.tiny import Sequence, tiny_model
from tests.models.tiny_vl import KINDS, tiny_vl_config, vl_batch, vl_batch_of

MATRICES = {"vision_encoder": [[1, 2], [1, 0], [0, 0]], "text_decoder": [[0, 0], [1, 1], [1, 0]]}
Values = Tensor | tuple[Tensor, ...]


@pytest.fixture(scope="module")
def layers() -> Sequence:
    model = tiny_model(tiny_vl_config())
    return Sequence(model.config).load(model)


def layout() -> Layout:
    return layout_of(MATRICES, tiny_vl_config(), allow_exposed_edge=False)


def outputs(layers: Sequence, batch: dict[str, Tensor]) -> Iterator[Values]:
    """What each layer returns."""
    values, _, local = layers.read(batch)
    for index, func in enumerate(layers.funcs):
        values = func(values, local) if index in layers.local_layers else func(values)
        yield values


def memos(layers: Sequence) -> tuple[Any, Any]:
    return layers.modules[1].memo, layers.modules[layers.keys.embedding + 1].memo


def test_layout_meets_the_modalities_in_order() -> None:
    found = layout()
    assert [(v.stage, v.start, v.stop) for v in found.virtual_stages] == [
        (0, 0, 2),
        (1, 2, 4),
        (0, 4, 8),
        (1, 8, 9),
        (0, 9, 12),
    ]
    assert [found.modality_of_boundary(b) for b in range(4)] == ["vision_encoder"] * 2 + ["text_decoder"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_crosses_a_boundary_fits_the_wire_schema(layers: Sequence, kind: str) -> None:
    schema, found = family_of(tiny_vl_config()).wire_schema(layout()), layout()
    for index, values in enumerate(outputs(layers, vl_batch_of(kind))):
        boundary = next((v.index for v in found.virtual_stages[:-1] if v.stop == index + 1), None)
        if boundary is None:
            continue
        declared = schema.tensors_at(boundary)
        assert len(declared) >= len(values) >= len([tensor for tensor in declared if not tensor.optional])
        for wanted, tensor in zip(declared, values, strict=False):
            signature = TensorSignature(dtype=tensor.dtype, shape=tuple(tensor.shape), gradient=tensor.requires_grad)
            assert wanted.mismatch(signature) is None
            assert tensor.requires_grad == wanted.gradient


@pytest.mark.parametrize("kind", ["two sizes", "text only", "left"])
def test_shapes_on_the_meta_device_are_those_of_a_run(layers: Sequence, kind: str) -> None:
    config = tiny_vl_config()
    with torch.device("meta"):
        copies = [spec.build() for spec in build_layers(config)]
    values, _, local = layers.read(vl_batch_of(kind))
    values, local = (tuple(tensor.to("meta") for tensor in tensors) for tensors in (values, local))
    for index, wanted in enumerate(outputs(layers, vl_batch_of(kind))):
        values = copies[index](values, local) if index in layers.local_layers else copies[index](values)
        found, wanted = ((v,) if isinstance(v, Tensor) else v for v in (values, wanted))
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in wanted], index


def test_windows_and_masks_are_rebuilt_once_for_each_micro_batch(layers: Sequence) -> None:
    before = [memo.num_builds for memo in memos(layers)]
    for kind in ("one image", "text only", "left"):
        layers.logits(vl_batch_of(kind))
    assert [memo.num_builds for memo in memos(layers)] == [number + 3 for number in before]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_S14_micro_batch_without_an_image_gives_vision_gradients_of_zero(tied: bool) -> None:
    layers = Sequence(tiny_vl_config(tie_word_embeddings=tied))
    layers.loss(vl_batch_of("text only")).backward()
    vision = [p for i in range(layers.keys.embedding) for p in layers.modules[i].parameters()]
    assert len(vision) > 40
    assert all(p.grad is not None and not p.grad.any() for p in vision)
    decoder = layers.modules[layers.keys.embedding + 1]
    assert all(p.grad is not None and p.grad.any() for p in decoder.parameters())


def test_block_s_own_index_decides_what_it_sees() -> None:
    model = tiny_model(tiny_vl_config())
    batch = vl_batch([[(1, 10, 6)]])
    wanted = Sequence(model.config).load(model).logits(batch)
    for blocks in ([0, 3], [1, 2], []):
        other = Sequence(tiny_vl_config(vision={"fullatt_block_indexes": blocks})).load(model)
        assert not torch.allclose(other.logits(batch), wanted, atol=1e-4)


def test_packed_sequences_do_not_see_each_other() -> None:
    model = tiny_model(tiny_vl_config())
    layers = Sequence(model.config).load(model)
    ids = vl_batch([[]], seed=3)["input_ids"]
    first = torch.arange(ids.shape[1]) < 3
    positions = torch.where(first, 0, 3).neg() + torch.arange(ids.shape[1])
    batch = {"input_ids": ids, "position_ids": positions.expand(4, 1, -1)}
    wanted = model(**batch, use_cache=False).logits
    assert torch.allclose(layers.logits(batch), wanted, atol=1e-6)
    changed = {**batch, "input_ids": torch.where(first, 7, ids)}
    assert torch.equal(layers.logits(changed)[:, 3:], layers.logits(batch)[:, 3:])
    apart = {"input_ids": changed["input_ids"], "position_ids": batch["position_ids"][1:]}
    assert not torch.allclose(layers.logits(apart)[:, 3:], layers.logits(batch)[:, 3:], atol=1e-4)


def test_bfloat16_is_bit_equal_to_transformers() -> None:
    model = tiny_model(tiny_vl_config())
    rotary = (model.model.visual.rotary_pos_emb, model.model.language_model.rotary_emb)
    kept = [module.inv_freq.clone() for module in rotary]
    model.bfloat16()
    for module, frequencies in zip(rotary, kept, strict=True):  # as from_pretrained leaves them
        module.inv_freq = frequencies
    layers = Sequence(model.config)
    for module in layers.modules.values():
        module.bfloat16()
    layers.load(model)
    batch = vl_batch_of("left")
    assert torch.equal(layers.logits(batch), model(**batch, use_cache=False).logits)


def test_random_weights_are_distributed_as_in_transformers() -> None:
    config = checked_config(tiny_vl_config(vision={"initializer_range": 0.5}, text={"initializer_range": 0.1}))
    family = family_of(config)
    layers = Sequence(config)
    initialize_layers(layers.modules, family, config, seed=3)
    weights = layers.named(lambda parameter: parameter.detach())
    for key, wanted in (
        ("visual.patch_embed.proj.weight", 0.5),
        ("visual.blocks.2.attn.qkv.weight", 0.5),
        ("visual.merger.mlp.0.weight", 0.5),
        ("model.embed_tokens.weight", 0.1),
        ("model.layers.1.mlp.up_proj.weight", 0.1),
        ("lm_head.weight", 0.1),
    ):
        assert weights[key].std().item() == pytest.approx(wanted, rel=0.15), key
    assert weights["visual.blocks.0.norm1.weight"].eq(1).all()
    assert weights["visual.blocks.0.attn.qkv.bias"].eq(0).all()


PUBLISHED = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
    "image_token_id": 151655,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "in_chans": 3,
        "spatial_patch_size": 14,
        "tokens_per_second": 2,
    },
}


def test_config_in_the_published_form_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = checked_config(read_hf_config(tmp_path))
    family = family_of(config)
    assert family.depths(config) == {"vision_encoder": 32, "text_decoder": 36}
    assert family.key_map(config).tied
    shapes = family.expected_shapes(config)
    assert sum(math.prod(shape) for state in shapes.values() for shape in state.values()) == 3_754_622_976


def test_attention_over_images_is_the_one_asked_for() -> None:
    config = checked_config(tiny_vl_config(), attn_implementation="eager")
    assert config.vision_config._attn_implementation == config.text_config._attn_implementation == "eager"

"""What the pipeline layers promise beside their numbers: names, one tensor for a tie, memory of masks, dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_ldt.comm.wire import TensorSignature
from ds_ldt.models import build_layers, family_of, prepare_batch
from ds_ldt.models.attention import AttentionMemo
from ds_ldt.models.registry import layout_of
from tests.models.tiny import FAMILY_NAMES, LENGTH, ROWS, Sequence, batch_of, tiny_config, tiny_model


@pytest.fixture(scope="module")
def layers() -> Sequence:
    model = tiny_model(tiny_config("qwen2"))
    return Sequence(model.config).load(model)


def memo_of(layers: Sequence) -> AttentionMemo:
    return layers.modules[1].memo


def test_layers_keep_what_transformers_calls_their_weights(layers: Sequence) -> None:
    names = {layers.keys.hf_key(i, key) for i, module in layers.modules.items() for key in module.state_dict()}
    assert names == tiny_model(tiny_config("qwen2")).state_dict().keys()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_S42_tied_embedding_is_one_tensor(family: str) -> None:
    layers = Sequence(tiny_config(family, tie_word_embeddings=True))
    assert sorted(layers.modules) == [0, 1, 2, 3, 4]
    assert len(layers.specs) == 6
    layers.loss(batch_of("plain")).backward()
    assert layers.modules[0].weight.grad.count_nonzero(dim=1).min() > 0  # a tie gives every row a gradient


def test_what_crosses_a_boundary_fits_the_wire_schema(layers: Sequence) -> None:
    config = tiny_config("qwen2")
    schema = family_of(config).wire_schema(layout_of([[1, 1], [1, 0]], config, allow_exposed_edge=False))
    assert schema.uniform
    for kind, count in (("plain", 2), ("packed", 2), ("left", 3)):
        values, _ = prepare_batch(batch_of(kind))
        for func in layers.funcs[:-2]:
            values = func(values)
            assert len(values) == count
            for declared, tensor in zip(schema.tensors, values, strict=False):
                signature = TensorSignature(
                    dtype=tensor.dtype, shape=tuple(tensor.shape), gradient=tensor.requires_grad
                )
                assert declared.mismatch(signature) is None
                assert tensor.requires_grad == declared.gradient
        assert isinstance(layers.funcs[-2](values), Tensor)


def test_token_ids_go_no_further_than_the_embedding(layers: Sequence) -> None:
    batch = batch_of("left")
    sent = layers.funcs[0](prepare_batch(batch)[0])
    assert not any(torch.equal(tensor.long(), batch["input_ids"]) for tensor in sent[1:])


def test_masks_and_rotary_tables_are_built_once_per_micro_batch(layers: Sequence) -> None:
    before = memo_of(layers).num_builds
    for kind in ("plain", "left", "packed"):
        layers.logits(batch_of(kind))
    assert memo_of(layers).num_builds == before + 3


def test_memo_sees_new_values_in_an_old_tensor(layers: Sequence) -> None:
    (ids, positions), _ = prepare_batch({"input_ids": batch_of("plain")["input_ids"]})
    values = layers.funcs[0]((ids, positions))
    before = layers.funcs[1](values)[0]
    positions.copy_(batch_of("packed")["position_ids"])
    assert not torch.allclose(layers.funcs[1](values)[0], before)


def test_memo_holds_one_micro_batch_and_lets_go(layers: Sequence) -> None:
    layers.logits(batch_of("left"))
    held = memo_of(layers)._held
    layers.logits(batch_of("plain"))
    assert memo_of(layers)._held is not held
    memo_of(layers).clear()
    assert memo_of(layers)._held == ()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["plain", "left", "packed"])
def test_S32_activation_checkpointing_changes_no_gradient(layers: Sequence, kind: str, reentrant: bool) -> None:
    def gradients(step: int) -> dict[str, Tensor]:
        for module in layers.modules.values():
            module.zero_grad()
        values = layers.funcs[0](prepare_batch(batch_of(kind))[0])
        for start in range(1, len(layers.funcs), step):
            segment = layers.funcs[start : start + step]

            def run(*inputs: Tensor, segment: list = segment) -> Tensor | tuple[Tensor, ...]:
                values = inputs
                for func in segment:
                    values = func(values if isinstance(values, Tensor) or len(values) > 1 else values[0])
                return values

            inputs = values if isinstance(values, tuple) else (values,)
            values = checkpoint(run, *inputs, use_reentrant=reentrant) if step < 99 else run(*inputs)
        values.square().mean().backward()
        return {name: gradient.clone() for name, gradient in layers.named(lambda p: p.grad).items()}

    wanted = gradients(99)
    for step in (1, 2):
        found = gradients(step)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16()], ids=["to", "bfloat16"])
def test_rotary_frequencies_stay_float32_under_bfloat16(convert) -> None:
    config = tiny_config("llama", max_position_embeddings=4096)
    layers = Sequence(config)
    for module in layers.modules.values():
        convert(module)
        assert not list(module.buffers())
    positions = torch.tensor([[999, 1000, 1001]], dtype=torch.int32)
    hidden = torch.zeros(1, 3, config.hidden_size, dtype=torch.bfloat16)
    _, (cos, sin), _ = memo_of(layers).look_up(hidden, positions, None, "full_attention")
    frequencies = 10000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    angles = (positions.double()[..., None] * frequencies).repeat(1, 1, 2)
    assert (cos.dtype, sin.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (cos.double() - angles.cos()).abs().max() < 4e-3
    assert (sin.double() - angles.sin()).abs().max() < 4e-3


def test_bfloat16_layers_equal_the_bfloat16_model() -> None:
    model = tiny_model(tiny_config("qwen3")).to(torch.bfloat16)
    rounded = model(**batch_of("left")).logits
    # What from_pretrained(dtype=bfloat16) builds; `.to` alone also rounds the rotary frequencies.
    model.model.rotary_emb = family_of(model.config).rotary_class(model.config)
    layers = Sequence(model.config)
    for module in layers.modules.values():
        module.to(torch.bfloat16)
    layers.load(model)
    assert torch.equal(layers.logits(batch_of("left")), model(**batch_of("left")).logits)
    assert not torch.equal(layers.logits(batch_of("left")), rounded)


def test_layers_can_be_built_and_run_on_the_meta_device() -> None:
    for kind in ("plain", "left"):
        with torch.device("meta"):
            layers = Sequence(tiny_config("mistral", sliding_window=4))
        values, _ = prepare_batch(batch_of(kind))
        values = tuple(tensor.to("meta") for tensor in values)
        for func in layers.funcs[:-1]:
            values = func(values)
        assert (values.device.type, tuple(values.shape)) == ("meta", (ROWS, LENGTH, 24))


def test_tracing_on_meta_does_not_spoil_the_next_real_micro_batch(layers: Sequence) -> None:
    wanted = layers.logits(batch_of("left"))
    spec = layers.specs[1]
    with torch.device("meta"):
        traced = spec.build()
    values = (torch.empty(2, 5, 24, device="meta"), torch.empty(2, 5, dtype=torch.int32, device="meta"))
    assert traced.memo is memo_of(layers)
    traced(values)
    assert torch.equal(layers.logits(batch_of("left")), wanted)


def test_copied_layers_compute_the_same(layers: Sequence) -> None:
    values = layers.funcs[0](prepare_batch(batch_of("left"))[0])
    assert torch.equal(copy.deepcopy(layers.modules[1])(values)[0], layers.modules[1](values)[0])


def test_lists_of_layers_do_not_share_a_memo() -> None:
    config = tiny_config("llama")
    first, second = (build_layers(config)[1].module_kwargs["memo"] for _ in range(2))
    assert first is not second

"""Hugging Face -> layer files -> Hugging Face changes no bit, and every site gets its own files only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.hf_weights import HFWeights
from ds_ldt.checkpointing.layer_files import LayerFiles, read_layer
from ds_ldt.checkpointing.to_hf import convert_to_hf
from tests.conversion.models import CONFIG, MATRIX, assert_same_tensors, rewrite, save_model, tensors_of
from tests.models.tiny import FAMILY_NAMES, batch_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_S42_round_trip_is_bit_exact_and_keeps_the_tie(
    tmp_path: Path, tied: bool, dtype: torch.dtype, sharded: bool
) -> None:
    hf = save_model(tmp_path / "hf", tie_word_embeddings=tied, dtype=dtype, sharded=sharded)
    assert (hf / "model.safetensors.index.json").exists() == sharded
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    names = convert_to_hf(
        tmp_path / "edge", tmp_path / "cloud", tmp_path / "out", max_shard_size="10KB" if sharded else "5GB"
    )

    wanted, found = tensors_of(hf), tensors_of(tmp_path / "out")
    assert_same_tensors(found, wanted)
    assert ("lm_head.weight" in found) == (not tied)
    assert (tmp_path / "out" / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    assert AutoConfig.from_pretrained(tmp_path / "out").tie_word_embeddings is tied
    assert (len(names) > 1) == sharded
    if sharded:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(names)
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in wanted.values())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_converted_model_gives_the_same_logits(tmp_path: Path, family: str, tied: bool) -> None:
    hf = save_model(tmp_path / "hf", family=family, tie_word_embeddings=tied)
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out")
    batch = batch_of("left")
    before, loading = AutoModelForCausalLM.from_pretrained(hf, output_loading_info=True)
    after, loading_after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    assert not any(loading_after.values())
    assert torch.equal(before(**batch).logits, after(**batch).logits)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert (tmp_path / "out" / "generation_config.json").is_file()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_S44_decoder_layer_i_is_in_file_i_plus_1_with_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    hf = save_model(tmp_path / "hf", dtype=dtype)

    def mark(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if key.startswith("model.layers."):
                tensor.fill_(int(key.split(".")[2]))
        tensors["model.embed_tokens.weight"].fill_(90)
        tensors["model.norm.weight"].fill_(91)
        tensors["lm_head.weight"].fill_(92)

    rewrite(hf, mark)
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    places = {0: "edge", 1: "edge", 2: "cloud", 3: "cloud", 4: "edge", 5: "edge", 6: "edge"}
    for layer, constant in enumerate([90, 0, 1, 2, 3, 91, 92]):
        state = read_layer(tmp_path / places[layer] / f"layer_{layer:02d}-model_states.pt")
        assert {tensor.dtype for tensor in state.values()} == {dtype}
        assert all(torch.equal(tensor, torch.full_like(tensor, constant)) for tensor in state.values())
    # gate, up and down keep their own names and shapes
    mlp = read_layer(tmp_path / "cloud" / "layer_02-model_states.pt")
    assert {k: tuple(t.shape) for k, t in mlp.items() if k.startswith("mlp.")} == {
        "mlp.gate_proj.weight": (40, 24),
        "mlp.up_proj.weight": (40, 24),
        "mlp.down_proj.weight": (24, 40),
    }


def test_each_site_gets_its_own_layers_and_only_the_edge_the_tokenizer(tmp_path: Path) -> None:
    hf = save_model(tmp_path / "hf", tie_word_embeddings=True)
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    assert sorted(path.name for path in (tmp_path / "cloud").iterdir()) == [
        "config.json",
        "layer_02-model_states.pt",
        "layer_03-model_states.pt",
        "manifest.json",
    ]
    assert sorted(path.name for path in (tmp_path / "edge").iterdir()) == [
        "config.json",
        "generation_config.json",
        *(f"layer_{layer:02d}-model_states.pt" for layer in (0, 1, 4, 5)),
        "manifest.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    manifest = LayerFiles(tmp_path / "cloud").manifest
    assert manifest is not None
    assert (manifest.site, manifest.family, manifest.tied, manifest.num_layers) == ("cloud", "qwen2", True, 7)
    assert (manifest.pipeline_num_layers, sorted(manifest.layers)) == (MATRIX, [2, 3])
    assert manifest.layers[2].tensors["mlp.down_proj.weight"] == {"shape": [24, 40], "dtype": "float32"}


def test_one_site_alone_gives_the_same_files(tmp_path: Path) -> None:
    hf = save_model(tmp_path / "hf")
    both = convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    alone = convert_to_layers(hf, config=CONFIG, cloud=tmp_path / "again")
    assert alone == {"cloud": both["cloud"]}


def test_S42_tied_head_on_disk_is_accepted_as_a_copy(tmp_path: Path) -> None:
    hf = save_model(tmp_path / "hf", tie_word_embeddings=True)
    wanted = tensors_of(hf)
    rewrite(hf, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    assert 6 not in LayerFiles(tmp_path / "edge").paths
    convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), wanted)


def test_old_rotary_frequencies_on_disk_are_left_out(tmp_path: Path) -> None:
    hf = save_model(tmp_path / "hf", family="llama")
    wanted = tensors_of(hf)
    rewrite(hf, lambda tensors: tensors.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3)}))
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), wanted)


def test_conversion_reads_one_layer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = save_model(tmp_path / "hf", sharded=True)
    events: list[tuple[str, int]] = []
    get = HFWeights.get

    def spy(self: HFWeights, layer: int, key: str) -> torch.Tensor:
        events.append(("read", layer))
        return get(self, layer, key)

    def spy_write(directory: Path, layer: int, state: dict[str, torch.Tensor]) -> object:
        events.append(("write", layer))
        return write_layer(directory, layer, state)

    from ds_ldt.checkpointing import from_hf as to_layers

    write_layer = to_layers.write_layer
    monkeypatch.setattr(HFWeights, "get", spy)
    monkeypatch.setattr(to_layers, "write_layer", spy_write)
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    # every layer is written before the next is read, and nothing is read twice
    assert list(dict.fromkeys(events)) == [(what, n) for n in (0, 1, 4, 5, 6, 2, 3) for what in ("read", "write")]
    assert len([event for event in events if event[0] == "read"]) == len(tensors_of(hf))


def test_export_holds_one_shard_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = save_model(tmp_path / "hf")
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    from ds_ldt.checkpointing import shards

    sizes: list[int] = []
    save = shards.save_file

    def spy(tensors: dict[str, torch.Tensor], *arguments: object, **options: object) -> None:
        sizes.append(sum(t.numel() * t.element_size() for t in tensors.values()))
        save(tensors, *arguments, **options)

    monkeypatch.setattr(shards, "save_file", spy)
    convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out", max_shard_size=12_000)
    assert len(sizes) > 4
    assert max(sizes) <= 12_000
    assert sum(sizes) == sum(t.numel() * t.element_size() for t in tensors_of(hf).values())

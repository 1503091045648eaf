"""Adapters of two sites: which base they may be exported and merged with, in shards of which size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from ds_ldt.checkpointing.adapter import export_adapter, merge_adapter
from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.to_hf import convert_to_hf
from ds_ldt.config.lora import LoraSettings
from ds_ldt.models.lora import lora_config
from tests.conversion.checkpoints import LORA, save_adapters, save_both
from tests.conversion.models import CONFIG, assert_same_tensors, edit_json, rewrite, save_model, tensors_of
from tests.conversion.test_checkpoints import OTHER_CONFIGS
from tests.conversion.test_errors import nothing_new, refused
from tests.models.tiny import batch_of


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, converted, and a checkpoint of adapters on it."""
    root = tmp_path_factory.mktemp("originals")
    save_model(root / "hf", family="llama")
    convert_to_layers(root / "hf", config=CONFIG, edge=root / "edge", cloud=root / "cloud")
    save_adapters(root, root / "hf")
    return root


@pytest.fixture
def work(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals, tmp_path / "work")


def adapter_of(work: Path, base: Path | None = None) -> list[str]:
    return export_adapter(work / "lora_edge", work / "lora_cloud", work / "out", hf_config=base or work / "hf")


def test_adapter_of_a_checkpoint_is_what_the_layers_held(work: Path) -> None:
    names = adapter_of(work)
    assert len(names) == 2 * 2 * 4
    held = {}
    for path in work.glob("lora_*/step2/layer_*.pt"):
        held |= {f"{path.name[6:8]}.{key}": value for key, value in torch.load(path, weights_only=True).items()}
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(work / "hf"), str(work / "out"))
    found = {name: value for name, value in loaded.named_parameters() if "lora_" in name}
    for layer in range(4):
        name = f"layers.{layer}.mlp.down_proj.lora_B.default.weight"
        assert torch.equal(found[f"base_model.model.model.{name}"], held[f"0{layer + 1}.{name.split('.', 2)[2]}"])


def test_S56_adapters_of_two_runs_are_refused(work: Path) -> None:
    save_adapters(work, work / "hf", target="other", run="b" * 16, save="2" * 16)
    refused(
        lambda: export_adapter(work / "lora_edge", work / "other_cloud", work / "out", hf_config=work / "hf"),
        "not of one save",
        "a" * 16,
        "b" * 16,
    )
    nothing_new(work)


@pytest.mark.parametrize("converted", [True, False])
def test_export_of_adapters_where_there_are_none_says_so(work: Path, converted: bool) -> None:
    edge, cloud = (work / "edge", work / "cloud") if converted else save_both(work)
    refused(
        lambda: export_adapter(edge, cloud, work / "out", hf_config=work / "hf"),
        "hold no adapters",
        "without --adapter and --merge",
    )


@pytest.mark.parametrize("changes, said", OTHER_CONFIGS.values(), ids=OTHER_CONFIGS)
def test_S59_adapter_is_not_exported_for_a_base_of_another_config(
    work: Path, changes: dict[str, Any], said: str
) -> None:
    edit_json(work / "hf" / "config.json", **changes)
    refused(lambda: adapter_of(work), f"{work / 'hf'} is of another model", said)
    nothing_new(work)


def other_weights(work: Path) -> Path:
    shutil.copytree(work / "hf", work / "instruct")
    rewrite(work / "instruct", lambda tensors: tensors["model.norm.weight"].add_(1e-3))
    return work / "instruct"


@pytest.mark.parametrize("form", ["hugging face", "converted"])
def test_S59_adapter_is_not_exported_for_a_base_of_other_weights(work: Path, form: str) -> None:
    base = other_weights(work)
    if form == "converted":
        convert_to_layers(base, config=CONFIG, edge=work / "instruct_edge")
        base = work / "instruct_edge"
    refused(lambda: adapter_of(work, base), f"{base} is of another model", "They differ in weights: ")
    nothing_new(work)


@pytest.mark.parametrize("form", ["no weights", "converted"])
def test_adapter_is_exported_for_its_base_in_other_forms(work: Path, form: str) -> None:
    base = work / "edge"
    if form == "no weights":
        base = work / "config_only"
        base.mkdir()
        shutil.copy(work / "hf" / "config.json", base)
    adapter_of(work, base)
    merge_adapter(work / "hf", work / "out", work / "merged")


def test_S59_adapter_is_not_merged_into_another_model(work: Path) -> None:
    adapter_of(work)
    base = other_weights(work)
    refused(lambda: merge_adapter(base, work / "out", work / "merged"), f"{base} is of another model", "weights: ")
    edit_json(work / "hf" / "config.json", rms_norm_eps=1e-3)
    refused(lambda: merge_adapter(work / "hf", work / "out", work / "merged"), "rms_norm_eps", "0.001")
    assert not (work / "merged").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}', '{"format": 7, "model": null}'])
def test_damaged_origin_of_an_adapter_is_named(work: Path, content: str) -> None:
    adapter_of(work)
    (work / "out" / "ds_ldt_adapter.json").write_text(content)
    refused(lambda: merge_adapter(work / "hf", work / "out", work / "merged"), "ds_ldt_adapter.json")


def test_adapter_made_elsewhere_is_merged(work: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(work / "hf")
    made = get_peft_model(base, lora_config(LoraSettings(**LORA), task_type="CAUSAL_LM"))
    made.save_pretrained(work / "elsewhere")
    merge_adapter(work / "hf", work / "elsewhere", work / "merged")
    wanted = made.merge_and_unload().state_dict()
    assert_same_tensors(tensors_of(work / "merged"), {key: wanted[key] for key in tensors_of(work / "merged")})


def test_S72_base_of_an_adapter_is_found_from_anywhere(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    export_adapter("lora_edge", "lora_cloud", "out", hf_config="hf")
    (work / "elsewhere").mkdir()
    monkeypatch.chdir(work / "elsewhere")
    base = json.loads((work / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(work / "hf")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "../out")
    assert loaded(**batch_of("left")).logits.isfinite().all()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_S69_merged_model_is_written_in_shards_of_the_size_asked_for(work: Path, tied: bool) -> None:
    if tied:
        shutil.rmtree(work / "hf")
        save_model(work / "hf", tie_word_embeddings=True)
        convert_to_layers(work / "hf", config=CONFIG, edge=work / "edge", cloud=work / "cloud", overwrite=True)
        save_adapters(work, work / "hf")
    adapter_of(work)
    merge_adapter(work / "hf", work / "out", work / "whole")
    assert [path.name for path in (work / "whole").glob("*.safetensors")] == ["model.safetensors"]
    merge_adapter(work / "hf", work / "out", work / "merged", max_shard_size="0.02MB")
    shards = sorted((work / "merged").glob("model-*-of-*.safetensors"))
    index = json.loads((work / "merged" / "model.safetensors.index.json").read_text())
    assert len(shards) > 2
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert all(path.stat().st_size < 22_000 for path in shards)
    assert_same_tensors(tensors_of(work / "merged"), tensors_of(work / "whole"))
    assert not torch.equal(
        tensors_of(work / "merged")["model.layers.1.mlp.down_proj.weight"],
        tensors_of(work / "hf")["model.layers.1.mlp.down_proj.weight"],
    )
    AutoModelForCausalLM.from_pretrained(work / "merged")


def test_S68_merged_model_has_what_lies_beside_its_base(work: Path) -> None:
    (work / "hf" / "additional_chat_templates").mkdir()
    (work / "hf" / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (work / "hf" / "LICENSE").write_text("of the base")
    adapter_of(work)
    for _ in range(2):
        merge_adapter(work / "hf", work / "out", work / "merged", overwrite=True)
    assert (work / "merged" / "LICENSE").read_text() == "of the base"
    assert (work / "merged" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert (work / "merged" / "tokenizer.json").read_bytes() == (work / "hf" / "tokenizer.json").read_bytes()


def test_trained_weights_are_exported_for_an_instruct_base_of_one_config(work: Path) -> None:
    """A whole model brings its own weights: only the config is compared."""
    edge, cloud = save_both(work)
    convert_to_hf(edge, cloud, work / "out", hf_config=other_weights(work))
    assert_same_tensors(tensors_of(work / "out"), tensors_of(work / "hf"))

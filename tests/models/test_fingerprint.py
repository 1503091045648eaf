"""The fingerprint of a model: the same for every form of one model, another for every other model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from ds_ldt.checkpointing.fingerprint import SAMPLE_BYTES, fingerprint_of, settings_of
from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.hf_weights import HFWeights
from ds_ldt.checkpointing.to_hf import convert_to_hf
from ds_ldt.comm.agreement import shared_facts
from ds_ldt.comm.collectives import MAX_TEXT_BYTES
from ds_ldt.comm.identity import ModelFingerprint, RunIdentity
from ds_ldt.config.schema import load_config
from ds_ldt.models.family import WIRE_SCHEMA
from ds_ldt.models.registry import checked_config, family_of, read_hf_config
from tests.conversion.models import CONFIG, MATRIX, edit_json, rewrite, save_model
from tests.harness import GroupPool
from tests.models.tiny import FAMILY_NAMES, ROWS, tiny_config
from tests.models.tiny_vl import tiny_vl_config


def fingerprint(directory: Path) -> ModelFingerprint:
    config = checked_config(read_hf_config(directory))
    return fingerprint_of(config, HFWeights(directory, family_of(config).key_map(config)))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_form_of_one_model_has_the_same_fingerprint(tmp_path: Path, family: str) -> None:
    hf = save_model(tmp_path / "hf", family=family)
    wanted = fingerprint(hf)
    assert fingerprint(save_model(tmp_path / "sharded", family=family, sharded=True)) == wanted
    written = convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    assert written["edge"].model == written["cloud"].model == wanted
    convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out")
    assert fingerprint(tmp_path / "out") == wanted
    AutoConfig.from_pretrained(hf).save_pretrained(tmp_path / "out")  # as a later release writes it: other keys
    assert fingerprint(tmp_path / "out") == wanted


CHANGES = {"rope_theta": 5e5, "rms_norm_eps": 1e-3, "num_key_value_heads": 4, "attention_bias": True, "vocab_size": 99}


@pytest.mark.parametrize("key", CHANGES)
def test_another_config_is_another_model_and_the_setting_is_named(key: str) -> None:
    one, other = tiny_config("llama"), tiny_config("llama")
    if key == "rope_theta":
        other.rope_parameters = {**one.rope_parameters, "rope_theta": CHANGES[key]}
    else:
        setattr(other, key, CHANGES[key])
    found = fingerprint_of(one, "w").difference(fingerprint_of(other, "w"))
    assert found is not None
    assert key in found
    assert fingerprint_of(one, "w").difference(fingerprint_of(tiny_config("mistral"), "w")) == (
        "model_type: llama, mistral"
    )


@pytest.mark.parametrize("key", ["eos_token_id", "use_cache", "_name_or_path", "dtype", "attention_dropout"])
def test_what_says_nothing_of_the_model_is_no_difference(tmp_path: Path, key: str) -> None:
    hf = save_model(tmp_path / "hf")
    before = fingerprint(hf)
    edit_json(hf / "config.json", **{key: {"use_cache": False, "dtype": "bfloat16"}.get(key, 0)})
    assert before.difference(fingerprint(hf)) is None


@pytest.mark.parametrize("row", [0, 1, -1])
def test_a_change_of_one_number_at_either_end_of_a_weight_is_another_model(tmp_path: Path, row: int) -> None:
    hf = save_model(tmp_path / "hf")
    before = fingerprint(hf)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"][row, 3] += 1e-3

    rewrite(hf, change)
    assert "weights: " in str(before.difference(fingerprint(hf)))


def test_of_large_weights_only_the_ends_are_read(tmp_path: Path) -> None:
    hf = save_model(tmp_path / "hf", vocab_size=4096, hidden_size=24)
    before, row = fingerprint(hf), 4 * 24
    for index, is_seen in ((0, True), (2048, False), (4095, True)):
        shutil.copytree(hf, tmp_path / str(index))

        def change(tensors: dict[str, torch.Tensor], index: int = index) -> None:
            tensors["model.embed_tokens.weight"][index] += 1

        rewrite(tmp_path / str(index), change)
        assert (fingerprint(tmp_path / str(index)).weights != before.weights) == is_seen
    assert 4096 * row > 2 * SAMPLE_BYTES, "the embedding would be read whole"


def test_facts_of_a_vision_language_model_fit_into_the_message_that_the_sites_exchange() -> None:
    config = tiny_vl_config()
    found = fingerprint_of(config, "0" * 64)
    facts = shared_facts(load_config(CONFIG), layers=list(range(90)), wire=WIRE_SCHEMA, base_seed=1, fingerprint=found)
    assert len(json.dumps(facts).encode()) < MAX_TEXT_BYTES / 2
    assert "model config vision_config.depth" in facts
    other = replace(found, settings=settings_of(config) | {"image_token_id": 3})
    assert found.difference(other) == f"image_token_id: {config.image_token_id}, 3"


def test_a_fingerprint_survives_the_manifest() -> None:
    found = fingerprint_of(tiny_config("qwen3"), "w")
    assert ModelFingerprint.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_a_resumed_run_remembers_its_ancestors_once() -> None:
    first, second = RunIdentity(run="a"), RunIdentity(run="b")
    second = second.resuming(first)
    assert second.resumed_from == ("a",)
    assert second.resuming(first).resumed_from == ("a",)
    assert RunIdentity(run="c").resuming(second) == RunIdentity(run="c", resumed_from=("a", "b"))
    assert first.resuming(RunIdentity(run="z", resumed_from=("a",))).resumed_from == ("z",)


def test_S56_sites_that_start_from_different_models_are_told_before_a_layer_is_built(
    groups: GroupPool, tmp_path: Path
) -> None:
    base, other, windowed = (save_model(tmp_path / name, family="mistral") for name in ("base", "other", "windowed"))
    rewrite(other, lambda tensors: tensors["model.layers.0.input_layernorm.weight"].add_(1))
    edit_json(windowed / "config.json", sliding_window=3)
    for hf in (base, other, windowed):
        layers = Path(f"{hf}_layers")
        convert_to_layers(hf, config=CONFIG, edge=layers / "edge", cloud=layers / "cloud")

    def layers_of(hf: Path, site: str) -> Path:
        return Path(f"{hf}_layers", site)

    def sources(edge: Path, cloud: Path) -> dict[str, str]:
        return {"edge": str(edge), "cloud": str(cloud)}

    cases = [
        (sources(layers_of(base, "edge"), layers_of(other, "cloud")), CONFIG, {}),
        (sources(base, other), CONFIG, {}),
        (sources(layers_of(base, "edge"), layers_of(windowed, "cloud")), CONFIG, {}),
        (sources(layers_of(base, "edge"), layers_of(base, "cloud")), CONFIG, {"seed": 5}),
        (sources(layers_of(base, "edge"), base), CONFIG, {}),
        (sources(layers_of(base, "edge"), layers_of(other, "cloud")), CONFIG, {"load_weights": False}),
    ]
    told = groups.run(2, "tests.models.end_to_end:told_of_another_model", cases, deadline_s=60)
    assert told[0] == told[1]
    wanted = ["model weights", "model weights", "sliding_window", "base_seed", "accepted", "model weights"]
    for text, fact in zip(told[0], wanted, strict=True):
        assert fact in text
        assert text == "accepted" or text.count("Fix: ") == 1


def test_S59_adapters_are_not_loaded_onto_another_base(groups: GroupPool, tmp_path: Path) -> None:
    base, other, turned = (save_model(tmp_path / name, family="llama") for name in ("base", "other", "turned"))
    rewrite(other, lambda tensors: tensors["model.layers.3.mlp.up_proj.weight"].add_(1))
    parameters = json.loads((turned / "config.json").read_text())["rope_parameters"]
    edit_json(turned / "config.json", rope_parameters={**parameters, "rope_theta": 5e5})
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "ldt": {"pipeline_num_layers": MATRIX, "lora": {"r": 2, "target_modules": ["q_proj"]}},
    }
    bases = [str(base), str(other), str(turned)]
    for site, found in groups.run(
        2, "tests.models.end_to_end:adapters_on_another_base", settings, bases, str(tmp_path / "saved"), deadline_s=90
    ):
        assert [is_as_it_should_be for _, is_as_it_should_be in found] == [True, True, True], site
        assert found[0][0] == "accepted"
        assert "holds only what was trained on top of llama" in found[1][0]
        assert "rope_theta: " in found[2][0]

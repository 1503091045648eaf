"""`from_pretrained`: every rank loads its own layers, from whatever it is given, and nothing depends on the split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_ldt.runtime.module
from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.hf_weights import HFWeights
from ds_ldt.checkpointing.layer_files import read_layer
from ds_ldt.config.schema import load_config
from ds_ldt.errors import CheckpointError, ConfigError
from ds_ldt.models import causal_lm_loss, checked_config, count_targets, family_of, from_pretrained
from ds_ldt.models.batch import TextBatches
from ds_ldt.runtime.pretrained import dtype_of, initialize_layers
from ds_ldt.topology.layout import Layout
from tests.conversion.models import CONFIG, rewrite, save_model, tensors_of
from tests.models.tiny import VOCABULARY, tiny_config

RANKS = {"edge": 0, "cloud": 1}


class OneProcessModule:
    """Stands in for `LDTPipelineModule`: builds the layers of one stage, as it does, without process groups."""

    def __init__(self, layers: list[Any], *, config: Any, **options: Any) -> None:
        self.layers, self.config, self.options = layers, config, options
        layout = Layout.build(config.ldt.pipeline_num_layers, num_leading=1, num_trailing=2)
        stage = OneProcessModule.stage
        tied = isinstance(layers[0], ds_ldt.runtime.module.TiedLayerSpec)
        indices = [i for i in range(len(layers) - tied) if layout.stage_of_layer(i) == stage]
        self.built = {index: layers[index].build() for index in indices}

    stage = 0

    def owned_layers(self) -> dict[int, nn.Module]:
        return self.built

    def inject_adapters(self) -> None:
        assert self.config.ldt.lora is None  # test_lora has the others, with real modules


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call `on("cloud", source, ...)` to be a rank of that site in a job of two processes."""
    monkeypatch.setattr(ds_ldt.runtime.module, "LDTPipelineModule", OneProcessModule)

    def load(site: str, source: Any, *, config: Any = CONFIG, **options: Any) -> Any:
        variables = {"RANK": RANKS[site], "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**variables, "MASTER_PORT": 29500}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(OneProcessModule, "stage", RANKS[site])
        return from_pretrained(source, config=config, **options)

    return load


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for name, options in {"hf": {"sharded": True}, "tied": {"tie_word_embeddings": True}}.items():
        save_model(root / name, **options)
        convert_to_layers(root / name, config=CONFIG, edge=root / f"{name}_ldt/edge", cloud=root / f"{name}_ldt/cloud")
    return root


def weights_of(module: Any) -> dict[str, Tensor]:
    config = module.layers[1].module_args[0]
    keys = family_of(config).key_map(config)
    return {keys.hf_key(i, k): t for i, layer in module.owned_layers().items() for k, t in layer.state_dict().items()}


@pytest.mark.parametrize("name", ["hf", "tied"])
@pytest.mark.parametrize("form", ["{}", "{}_ldt", "{}_ldt/{}"], ids=["hf", "both sites", "own site"])
def test_sites_together_load_every_weight_once(on: Any, saved: Path, name: str, form: str) -> None:
    edge, cloud = (weights_of(on(site, saved / form.format(name, site))) for site in ("edge", "cloud"))
    wanted = tensors_of(saved / name)
    assert not edge.keys() & cloud.keys()
    assert (edge | cloud).keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in (edge | cloud).items())
    assert {key.split(".mlp")[0] for key in cloud if ".mlp.up" in key} == {"model.layers.1", "model.layers.2"}


def test_module_gets_what_the_family_says(on: Any, saved: Path) -> None:
    module = on("edge", saved / "hf", seed=7, activation_checkpoint_interval=2)
    assert len(module.layers) == 7
    fingerprint = module.options.pop("fingerprint")
    assert (fingerprint.family, fingerprint.settings["hidden_size"]) == ("qwen2", 24)
    assert module.options.pop("wire").tensors[0].name == "hidden_states"
    names = module.options.pop("layer_names")
    assert module.options.pop("batch_fn").batch_fn == TextBatches(vocab_size=VOCABULARY)
    assert (names[0], names[4], names[6]) == ("model.embed_tokens", "model.layers.3", "lm_head")
    assert module.options == {
        "model_type": "qwen2",
        "loss_fn": causal_lm_loss,
        "num_leading": 1,
        "num_between": 0,
        "num_trailing": 2,
        "depths": None,
        "local_layers": (),
        "parts": {"embedding": (0,), "text_decoder": (1, 2, 3, 4), "head": (5, 6)},
        "count_targets": count_targets,
        "loss_reduction": "token",
        "base_seed": 7,
        "activation_checkpoint_interval": 2,
    }


def test_rank_reads_no_weight_of_another(on: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    get = HFWeights.get
    monkeypatch.setattr(HFWeights, "get", lambda self, layer, key: (read.append(layer), get(self, layer, key))[1])
    on("cloud", saved / "hf")
    assert set(read) == {2, 3}


def test_cloud_needs_nothing_of_the_edge(on: Any, saved: Path) -> None:
    names = {path.name for path in (saved / "hf_ldt/cloud").iterdir()}
    assert names == {"config.json", "manifest.json", "layer_02-model_states.pt", "layer_03-model_states.pt"}
    loaded = on("cloud", saved / "hf_ldt/cloud").owned_layers()
    stored = read_layer(saved / "hf_ldt/cloud/layer_03-model_states.pt")
    assert all(torch.equal(tensor, stored[key]) for key, tensor in loaded[3].state_dict().items())


def test_directory_of_the_other_site_is_refused_before_any_group(on: Any, saved: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        on("edge", saved / "hf_ldt/cloud")
    assert "lacks layers [0, 1, 4, 5, 6] of this rank" in str(raised.value)
    assert "written for the cloud of pipeline_num_layers [[1, 2], [1, 0]]" in str(raised.value)


def test_directory_for_another_layout_is_refused(on: Any, saved: Path) -> None:
    config = {**CONFIG, "ldt": {"pipeline_num_layers": [[2, 1], [1, 0]]}}
    with pytest.raises(CheckpointError, match=r"lacks layers \[2\] of this rank.*convert the model again"):
        on("edge", saved / "hf_ldt/edge", config=config)


def test_wrong_weights_are_refused(on: Any, tmp_path: Path) -> None:
    hf = save_model(tmp_path / "hf")
    rewrite(hf, lambda tensors: tensors.update({"visual.x": torch.ones(1), "model.norm.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"shape of model\.norm\.weight: \(3,\)[\s\S]*unexpected: visual\.x"):
        on("edge", hf)


def test_layout_that_does_not_fit_is_refused(on: Any, saved: Path) -> None:
    config = {**CONFIG, "ldt": {"pipeline_num_layers": [[2, 2], [1, 0]]}}
    with pytest.raises(ConfigError, match="a sum of 4"):
        on("edge", saved / "hf_ldt/edge", config=config)


def test_S34_random_weights_do_not_depend_on_the_split(on: Any) -> None:
    config = tiny_config("llama", num_hidden_layers=4, tie_word_embeddings=True)
    wide = {**CONFIG, "ldt": {"pipeline_num_layers": [[1, 1], [2, 0]]}}
    found = [weights_of(on("edge", config)) | weights_of(on("cloud", config))]
    torch.rand(5)  # whatever was drawn before does not matter either
    found.append(weights_of(on("edge", config, config=wide)) | weights_of(on("cloud", config, config=wide)))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    other = weights_of(on("edge", config, seed=5))
    key = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(other[key], found[0][key])
    assert not torch.equal(found[0]["model.layers.1.mlp.up_proj.weight"], found[0][key])


def test_random_weights_are_distributed_as_in_transformers(on: Any) -> None:
    config = tiny_config("qwen2", num_hidden_layers=4, hidden_size=128, intermediate_size=256)
    weights = weights_of(on("edge", config)) | weights_of(on("cloud", config))
    assert weights["model.layers.2.mlp.up_proj.weight"].std().item() == pytest.approx(0.2, rel=0.05)
    assert torch.equal(weights["model.layers.2.self_attn.q_proj.bias"], torch.zeros(128))
    assert torch.equal(weights["model.norm.weight"], torch.ones(128))
    assert torch.equal(weights["model.embed_tokens.weight"][0], torch.zeros(128))  # the padding token


def test_random_initialisation_leaves_the_random_state_alone() -> None:
    config = checked_config(tiny_config("qwen3"))
    family = family_of(config)
    layer = family.layers(config)[1].build()
    before = torch.get_rng_state()
    initialize_layers({1: layer}, family, config, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_config_of_a_directory_can_be_used_without_its_weights(on: Any, saved: Path) -> None:
    random, loaded = on("cloud", saved / "hf", load_weights=False), on("cloud", saved / "hf")
    key = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(weights_of(random)[key], weights_of(loaded)[key])


@pytest.mark.parametrize(
    "section, dtype",
    [
        ({}, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bf16": {"enabled": False}}, torch.float32),
    ],
)
def test_parameters_have_the_dtype_that_deepspeed_computes_in(section: dict[str, Any], dtype: torch.dtype) -> None:
    assert dtype_of(load_config({**CONFIG, **section})) == dtype


@pytest.mark.parametrize("form", ["{}", "{}_ldt"])
def test_weights_are_cast_on_loading_and_the_default_dtype_comes_back(on: Any, saved: Path, form: str) -> None:
    module = on("edge", saved / form.format("hf"), dtype=torch.bfloat16)
    wanted = tensors_of(saved / "hf")
    assert all(torch.equal(tensor, wanted[key].bfloat16()) for key, tensor in weights_of(module).items())
    assert {tensor.dtype for tensor in weights_of(module).values()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32

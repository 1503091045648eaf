"""Checkpoints of two sites are joined if they are of one save and of the model that is named; else refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.layer_files import LayerFiles
from ds_ldt.checkpointing.to_hf import convert_to_hf
from ds_ldt.topology.ranks import Site
from tests.conversion.checkpoints import SITES, save_adapters, save_both, save_half
from tests.conversion.models import CONFIG, assert_same_tensors, edit_json, rewrite, save_model, tensors_of
from tests.conversion.test_errors import nothing_new, refused

RUN_A, RUN_B = "a" * 16, "b" * 16


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and an "instruct" one of the same config, both converted."""
    root = tmp_path_factory.mktemp("originals")
    save_model(root / "hf", family="llama")
    shutil.copytree(root / "hf", root / "instruct")
    rewrite(root / "instruct", lambda tensors: [tensor.add_(0.5) for tensor in tensors.values()])
    for name, prefix in (("hf", ""), ("instruct", "instruct_")):
        convert_to_layers(root / name, config=CONFIG, edge=root / f"{prefix}edge", cloud=root / f"{prefix}cloud")
    return root


@pytest.fixture
def work(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals, tmp_path / "work")


def export(work: Path, edge: Path, cloud: Path, **options: Any) -> list[str]:
    return convert_to_hf(edge, cloud, work / "out", **{"hf_config": work / "hf", **options})


def trained(_: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor + 1 for key, tensor in state.items()}


@pytest.mark.parametrize("suffix", ["", "-model_00"])
@pytest.mark.parametrize("place", ["apart", "together", "tags"])
def test_checkpoints_of_one_save_are_exported(work: Path, place: str, suffix: str) -> None:
    roots = {site: work / ("saved" if place == "together" else f"saved_{site}") for site in SITES}
    tags = {site: save_half(work / site, roots[site], site, change=trained, suffix=suffix) for site in SITES}
    if place == "tags":
        roots = tags
        for tag in tags.values():
            (tag.parent / "latest").write_text("another")
    refused(lambda: export(work, roots["edge"], roots["cloud"], hf_config=None), "--hf-config")
    export(work, roots["edge"], roots["cloud"])
    wanted = {key: tensor + 1 for key, tensor in tensors_of(work / "hf").items()}
    assert_same_tensors(tensors_of(work / "out"), wanted)


def test_where_both_sites_saved_into_one_directory_only_files_of_the_manifests_count(work: Path) -> None:
    for site in SITES:
        tag = save_half(work / site, work / "saved", site)
    shutil.copy(tag / "layer_02-model_states.pt", tag / "layer_09-model_states.pt")
    (tag / "layer_03-model_01-model_states.pt").write_text("left by something else")
    assert sorted(LayerFiles(work / "saved", "cloud").paths) == [2, 3]
    export(work, work / "saved", work / "saved")
    assert_same_tensors(tensors_of(work / "out"), tensors_of(work / "hf"))


def test_S56_halves_of_two_runs_with_one_tag_are_refused(work: Path) -> None:
    edge, _ = save_both(work, target="run_a", run=RUN_A, save="1" * 16)
    _, cloud = save_both(work, target="run_b", run=RUN_B, save="2" * 16, change=trained)
    named = (f"{edge}/step2", f"{cloud}/step2", RUN_A, RUN_B, "1" * 16, "2" * 16, "'step2'", "name the directories")
    refused(lambda: export(work, edge, cloud), *named)
    refused(lambda: export(work, edge / "step2", cloud / "step2"), *named)
    nothing_new(work)


def test_S56_halves_of_two_saves_of_one_run_with_one_tag_are_refused(work: Path) -> None:
    edge, _ = save_both(work, target="first", save="1" * 16)
    _, cloud = save_both(work, target="again", save="2" * 16)
    refused(lambda: export(work, edge, cloud), "not of one save", "save " + "1" * 16, "save " + "2" * 16)


@pytest.mark.parametrize("converted", SITES)
def test_S56_trained_half_with_a_converted_one_is_refused(work: Path, converted: Site) -> None:
    saved = dict(zip(SITES, save_both(work), strict=True))
    sites = {**saved, converted: work / converted}
    refused(
        lambda: export(work, sites["edge"], sites["cloud"]),
        "One half is trained and the other is not",
        f"{work / converted} is converted from llama",
        RUN_A,
    )
    nothing_new(work)


def test_S56_halves_of_base_and_instruct_model_are_refused(work: Path) -> None:
    refused(
        lambda: export(work, work / "edge", work / "instruct_cloud"),
        "converted from different models",
        f"the edge's {work / 'edge'} from llama",
        f"the cloud's {work / 'instruct_cloud'} from llama",
        "They differ in weights: ",
    )


def test_S57_latest_of_the_sites_that_differs_is_said_and_a_common_save_is_named(work: Path) -> None:
    edge, cloud = save_both(work, tag="step2", save="1" * 16)
    save_half(work / "edge", edge, "edge", tag="step4", save="2" * 16)
    refused(
        lambda: export(work, edge, cloud),
        "`latest` of the edge names 'step4', that of the cloud 'step2'",
        f"name {edge / 'step2'} and {cloud / 'step2'}, which are of one save",
    )
    export(work, edge / "step2", cloud / "step2")
    assert_same_tensors(tensors_of(work / "out"), tensors_of(work / "hf"))


def test_S57_of_several_tags_latest_decides(work: Path) -> None:
    edge, cloud = save_both(work, tag="step5", save="1" * 16, global_steps=5, change=trained)
    save_both(work, tag="step2", save="2" * 16)
    export(work, edge, cloud)
    assert_same_tensors(tensors_of(work / "out"), tensors_of(work / "hf"))


def test_swapped_checkpoints_are_refused(work: Path) -> None:
    edge, cloud = save_both(work)
    refused(lambda: export(work, cloud, edge), "holds the cloud's half", "given as the edge's", "swap")


def test_layer_files_that_no_manifest_describes_are_refused(work: Path) -> None:
    edge, cloud = save_both(work)
    (cloud / "step2" / "ldt_checkpoint_cloud.json").unlink()
    refused(lambda: export(work, edge, cloud), f"{cloud}/step2", "manifest.json or ldt_checkpoint_cloud.json")
    (work / "edge" / "manifest.json").unlink()
    refused(lambda: export(work, work / "edge", work / "cloud"), str(work / "edge"), "manifest.json")


def test_converted_layers_with_checkpoints_beside_them_are_refused(work: Path) -> None:
    """They would be exported as if nothing had been trained."""
    save_half(work / "edge", work / "edge", "edge")
    refused(
        lambda: export(work, work / "edge", work / "cloud"), "converted layers and checkpoints", "name the directory"
    )


def test_latest_that_is_missing_or_names_nothing_is_refused(work: Path) -> None:
    edge, cloud = save_both(work)
    (edge / "latest").write_text("../step2")
    refused(lambda: export(work, edge, cloud), "latest", "'../step2'")
    (edge / "latest").unlink()
    refused(lambda: export(work, edge, cloud), "no file `latest`", "step2")


@pytest.mark.parametrize("damage", ["missing", "cut", "bit", "other"])
def test_file_other_than_the_one_that_was_saved_is_named(work: Path, damage: str) -> None:
    edge, cloud = save_both(work)
    path = cloud / "step2" / "layer_02-model_states.pt"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        path.write_bytes(bytes(changed))
    else:
        shutil.copy(cloud / "step2" / "layer_03-model_states.pt", path)
    refused(lambda: export(work, edge, cloud), str(path))
    nothing_new(work)


OTHER_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12}, "num_attention_heads: 4, 2"),
    "rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters.rope_theta: "),
    "norm": ({"rms_norm_eps": 1e-4}, "rms_norm_eps: "),
    "family": (
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4},
        "model_type: llama, mistral",
    ),
}


@pytest.mark.parametrize("source", ["checkpoint", "converted"])
@pytest.mark.parametrize("changes, said", OTHER_CONFIGS.values(), ids=OTHER_CONFIGS)
def test_S59_config_of_another_model_of_equal_shapes_is_refused(
    work: Path, changes: dict[str, Any], said: str, source: str
) -> None:
    edge, cloud = save_both(work) if source == "checkpoint" else (work / "edge", work / "cloud")
    edit_json(work / "hf" / "config.json", **changes)
    refused(lambda: export(work, edge, cloud), f"{work / 'hf'}/config.json is of another model", said, "--hf-config")
    nothing_new(work)


def test_S59_what_says_nothing_of_the_model_may_differ(work: Path) -> None:
    edge, cloud = save_both(work)
    edit_json(work / "hf" / "config.json", eos_token_id=7, use_cache=False, attention_dropout=0.1)
    export(work, edge, cloud)


def test_S59_model_of_a_list_of_layers_has_nothing_to_compare(work: Path) -> None:
    edge, cloud = save_both(work, model=None)
    edit_json(work / "hf" / "config.json", rms_norm_eps=1e-4)
    export(work, edge, cloud)


def test_S77_plain_export_of_adapters_names_the_options_in_one_line(work: Path) -> None:
    edge, cloud = save_adapters(work, work / "hf")
    said = refused(lambda: export(work, edge, cloud), "hold adapters", "--adapter", "--merge", RUN_A)
    assert "\n" not in said


def test_S77_plain_export_without_frozen_parameters_says_so_in_one_line(work: Path) -> None:
    edge, cloud = save_both(work, frozen_excluded=True, change=lambda layer, state: {} if layer < 3 else state)
    said = refused(lambda: export(work, edge, cloud), "frozen", "exclude_frozen_parameters=False")
    assert "\n" not in said
    nothing_new(work)


def test_checkpoint_of_another_format_is_refused(work: Path) -> None:
    edge, cloud = save_both(work)
    edit_json(edge / "step2" / "ldt_checkpoint_edge.json", format=1)
    refused(lambda: export(work, edge, cloud), "ldt_checkpoint_edge.json", "format 1, expected 2")


def test_layers_of_the_other_sites_layout_are_listed(work: Path) -> None:
    edge, cloud = save_both(work, more={2: {"weight": torch.ones(1)}})
    refused(lambda: export(work, edge, cloud), "twice: ", "layer_02-model_states.pt")

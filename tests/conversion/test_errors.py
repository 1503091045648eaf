"""Whatever is missing, surplus, damaged, stale or of the wrong site is named, and nothing is left half written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.layer_files import LayerFiles, digest, read_layer, write_layer
from ds_ldt.checkpointing.shards import parse_size
from ds_ldt.checkpointing.to_hf import convert_to_hf
from ds_ldt.errors import CheckpointError, ConfigError
from tests.conversion.checkpoints import save_both
from tests.conversion.models import CONFIG, assert_same_tensors, edit_json, rewrite, save_model, tensors_of

OTHER_SPLIT = {**CONFIG, "ldt": {"pipeline_num_layers": [[1, 1], [2, 0]]}}
MLP = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied and an untied model, the latter also as layer files."""
    root = tmp_path_factory.mktemp("originals")
    save_model(root / "hf")
    save_model(root / "tied", tie_word_embeddings=True)
    save_model(root / "sharded", sharded=True)
    convert_to_layers(root / "hf", config=CONFIG, edge=root / "edge", cloud=root / "cloud")
    convert_to_layers(root / "tied", config=CONFIG, edge=root / "tied_edge", cloud=root / "tied_cloud")
    return root


@pytest.fixture
def work(originals: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(originals, tmp_path / "work")


def refused(action: Callable[[], Any], *fragments: str, error: type[Exception] = CheckpointError) -> str:
    """Run what has to fail, with all of these in its message; return the message."""
    with pytest.raises(error) as raised:
        action()
    assert [fragment for fragment in fragments if fragment not in str(raised.value)] == [], str(raised.value)
    return str(raised.value)


def to_layers(work: Path, hf: str = "hf", **options: Any) -> Any:
    return convert_to_layers(work / hf, config=CONFIG, edge=work / "new_edge", cloud=work / "new_cloud", **options)


def to_hf(work: Path, prefix: str = "", **options: Any) -> Any:
    return convert_to_hf(work / f"{prefix}edge", work / f"{prefix}cloud", work / "out", **options)


def nothing_new(work: Path) -> None:
    left = [path.name for path in work.iterdir() if path.name.startswith((".", "new_", "out"))]
    assert left == []


def test_missing_surplus_and_misshapen_weights_are_listed_together(work: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(MLP)
        tensors.pop("lm_head.weight")
        tensors["model.norm.weight"] = torch.ones(7)
        tensors["model.layers.4.mlp.up_proj.weight"] = torch.ones(1)
        tensors["model.layers.1.mlp.extra"] = torch.ones(1)

    rewrite(work / "hf", spoil)
    refused(
        lambda: to_layers(work),
        f"missing: {MLP}",
        "missing: lm_head.weight (set tie_word_embeddings",
        "shape of model.norm.weight: (7,), the config asks for (24,)",
        "unexpected: model.layers.4.mlp.up_proj.weight",
        "unexpected: model.layers.1.mlp.extra",
    )
    nothing_new(work)


def test_S42_tied_head_on_disk_that_differs_is_an_error(work: Path) -> None:
    rewrite(work / "tied", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(61, 24)}))
    refused(lambda: to_layers(work, "tied"), "lm_head.weight differs from the embedding", "tie_word_embeddings")
    nothing_new(work)


def test_model_without_safetensors_is_refused(work: Path) -> None:
    (work / "hf" / "model.safetensors").rename(work / "hf" / "pytorch_model.bin")
    refused(lambda: to_layers(work), "holds neither model.safetensors nor", "converted")


def test_truncated_weights_name_the_file(work: Path) -> None:
    path = work / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(lambda: to_layers(work), str(path), "missing or damaged")
    nothing_new(work)


def test_missing_shard_names_the_file(work: Path) -> None:
    shard = sorted((work / "sharded").glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(lambda: to_layers(work, "sharded"), str(shard), "missing or damaged")
    nothing_new(work)


@pytest.mark.parametrize(
    "content, fragment",
    [
        ("{", "is not an index"),
        ("[]", "is not an index"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "names files outside its directory"),
    ],
)
def test_bad_index_is_named(work: Path, content: str, fragment: str) -> None:
    (work / "sharded" / "model.safetensors.index.json").write_text(content)
    refused(lambda: to_layers(work, "sharded"), "model.safetensors.index.json", fragment)


def test_index_that_promises_a_weight_its_file_lacks_is_refused(work: Path) -> None:
    index = work / "sharded" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    other = next(name for name in weight_map.values() if name != weight_map[MLP])
    edit_json(index, weight_map={**weight_map, MLP: other})
    refused(lambda: to_layers(work, "sharded"), other, f"has no {MLP}")


def test_layout_has_to_fit_the_model(work: Path) -> None:
    config = {**CONFIG, "ldt": {"pipeline_num_layers": [[1, 1], [1, 0]]}}
    refused(lambda: convert_to_layers(work / "hf", config=config, edge=work / "new"), "a sum of 4", error=ConfigError)


def test_quantised_model_is_refused_by_name(work: Path) -> None:
    edit_json(work / "hf" / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    refused(lambda: to_layers(work), "quantization_config", error=ConfigError)


@pytest.mark.parametrize("edge, cloud", [("new", "new"), ("new", "new/cloud"), ("hf/edge", "new"), ("hf", "new")])
def test_directories_may_not_overlap(work: Path, edge: str, cloud: str) -> None:
    refused(lambda: convert_to_layers(work / "hf", config=CONFIG, edge=work / edge, cloud=work / cloud), "overlap")


def test_no_target_is_refused(work: Path) -> None:
    refused(lambda: convert_to_layers(work / "hf", config=CONFIG), "nothing to write")


def test_earlier_conversion_is_replaced_on_request_only_and_leaves_no_stale_layer(work: Path) -> None:
    to_layers(work)
    refused(lambda: to_layers(work), "is not empty", "--overwrite")
    config = {**CONFIG, "ldt": {"pipeline_num_layers": [[2, 1], [1, 0]]}}
    convert_to_layers(work / "hf", config=config, edge=work / "new_edge", cloud=work / "new_cloud", overwrite=True)
    assert sorted(LayerFiles(work / "new_edge").paths) == [0, 1, 2, 4, 5, 6]
    assert sorted(LayerFiles(work / "new_cloud").paths) == [3]


def test_foreign_files_are_never_replaced(work: Path) -> None:
    to_layers(work)
    (work / "new_cloud" / "notes.txt").write_text("mine")
    refused(lambda: to_layers(work, overwrite=True), "not written by this tool: notes.txt")
    (work / "other").mkdir()
    (work / "other" / "config.json").write_text("{}")
    refused(lambda: convert_to_layers(work / "hf", config=CONFIG, edge=work / "other", overwrite=True), "config.json")
    (work / "out").mkdir()
    (work / "out" / "thesis.tex").write_text("mine")
    refused(lambda: to_hf(work, overwrite=True), "not written by this tool: thesis.tex")
    assert (work / "out" / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path.parent.parent / "hf")])
def test_foreign_directories_are_never_replaced(work: Path, make: Callable[[Path], Any]) -> None:
    to_hf(work)
    make(work / "out" / "mine")
    refused(lambda: to_hf(work, overwrite=True), "not written by this tool: mine")


def test_exported_model_is_replaced_on_request_only(work: Path) -> None:
    to_hf(work, max_shard_size="10KB")
    refused(lambda: to_hf(work), "is not empty", "--overwrite")
    assert to_hf(work, overwrite=True) == ["model.safetensors"]
    assert_same_tensors(tensors_of(work / "out"), tensors_of(work / "hf"))
    assert not (work / "out" / "model.safetensors.index.json").exists()


def test_S35_missing_layer_is_named_and_the_tied_gap_is_not(work: Path) -> None:
    assert to_hf(work, "tied_") == ["model.safetensors"]
    convert_to_layers(work / "tied", config=OTHER_SPLIT, cloud=work / "tied_cloud", overwrite=True)
    refused(
        lambda: to_hf(work, "tied_", overwrite=True),
        "missing: layer_03-model_states.pt, which holds model.layers.2.*",
        "the tied output layer 6 needs no file",
    )
    save_both(work, omit={6})
    refused(
        lambda: to_hf(work, "saved_", hf_config=work / "hf", overwrite=True),
        "missing: layer_06-model_states.pt, which holds lm_head.*",
    )


def test_S35_file_of_a_tied_head_has_to_be_a_copy(work: Path) -> None:
    embedding = read_layer(work / "tied_edge" / "layer_00-model_states.pt")
    save_both(work, "tied_", more={6: embedding})
    to_hf(work, "saved_", hf_config=work / "tied")
    assert_same_tensors(tensors_of(work / "out"), tensors_of(work / "tied"))
    save_both(work, "tied_", more={6: {"weight": torch.zeros(61, 24)}})
    refused(
        lambda: to_hf(work, "saved_", hf_config=work / "tied", overwrite=True),
        "layer_06",
        "differs from the embedding",
    )
    assert_same_tensors(tensors_of(work / "out"), tensors_of(work / "tied"))  # the earlier export is still whole


def test_layer_in_both_directories_is_named(work: Path) -> None:
    config = {**CONFIG, "ldt": {"pipeline_num_layers": [[2, 1], [1, 0]]}}
    convert_to_layers(work / "hf", config=config, edge=work / "edge", overwrite=True)
    refused(lambda: to_hf(work), "twice: ", "layer_02-model_states.pt")
    nothing_new(work)


def test_files_and_manifest_have_to_agree(work: Path) -> None:
    (work / "cloud" / "layer_03-model_states.pt").unlink()
    shutil.copy(work / "edge" / "layer_04-model_states.pt", work / "cloud")
    refused(lambda: to_hf(work), "missing: layer_03-model_states.pt", "not in the manifest: layer_04-model_states.pt")


@pytest.mark.parametrize("damage", [lambda b: b[:200], lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"x" * 99])
def test_damaged_layer_file_is_named(work: Path, damage: Callable[[bytes], bytes]) -> None:
    path = work / "cloud" / "layer_02-model_states.pt"
    path.write_bytes(damage(path.read_bytes()))
    refused(lambda: to_hf(work), str(path), "missing or damaged")
    nothing_new(work)


@pytest.mark.parametrize(
    "change, fragment",
    [
        (lambda state: state["mlp.up_proj.weight"].view(-1)[7].add_(1e-3), "the values of its tensors"),
        (lambda state: state.update(bias=torch.ones(1)), "presence of bias"),
        (lambda state: state.update({k: v.bfloat16() for k, v in state.items()}), "shape, dtype or presence of input"),
    ],
    ids=["value", "key", "dtype"],
)
def test_file_other_than_the_one_described_is_named(
    work: Path, change: Callable[[dict[str, torch.Tensor]], Any], fragment: str
) -> None:
    path = work / "cloud" / "layer_02-model_states.pt"
    state = read_layer(path)
    change(state)
    write_layer(work / "cloud", 2, state)
    refused(lambda: to_hf(work), str(path), fragment)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran_code"),))


def test_layer_file_that_would_run_code_is_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    torch.save({"weight": Payload()}, work / "cloud" / "layer_02-model_states.pt")
    refused(lambda: to_hf(work), "layer_02-model_states.pt", "missing or damaged")
    assert not (work / "ran_code").exists()


@pytest.mark.parametrize(
    "content, fragment",
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format": "else"}', "does not describe"),
        (None, "version 3, expected 2"),
        ('{"format": "ds_ldt layer files", "version": 2, "layers": {}}', "of which model"),
    ],
)
def test_bad_manifest_is_named(work: Path, content: str | None, fragment: str) -> None:
    path = work / "cloud" / "manifest.json"
    edit_json(path, version=3)
    if content is not None:
        path.write_text(content)
    refused(lambda: to_hf(work), str(path), fragment)


def test_swapped_sites_are_refused(work: Path) -> None:
    refused(lambda: convert_to_hf(work / "cloud", work / "edge", work / "out"), "given as the edge's", "swap")


def test_sites_of_different_models_are_refused(work: Path) -> None:
    refused(
        lambda: convert_to_hf(work / "edge", work / "tied_cloud", work / "out"),
        "converted from different models",
        "tied_cloud",
        "tie_word_embeddings: default, true",
    )


def test_layer_of_another_shape_is_listed(work: Path) -> None:
    def change(layer: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if layer == 2:
            state["mlp.up_proj.weight"] = torch.ones(2, 3)
            del state["mlp.down_proj.weight"]
        return state

    save_both(work, change=change)
    refused(
        lambda: to_hf(work, "saved_", hf_config=work / "hf"),
        "layer_02-model_states.pt: missing: mlp.down_proj.weight",
        "shape of mlp.up_proj.weight: (2, 3), the model has (40, 24)",
    )
    nothing_new(work)


def test_missing_config_is_asked_for(work: Path) -> None:
    (work / "edge" / "config.json").unlink()
    refused(lambda: to_hf(work), "config.json", "--hf-config")
    to_hf(work, hf_config=work / "hf")
    assert (work / "out" / "tokenizer.json").is_file()


def test_tensor_parallel_and_doubled_files_are_refused(work: Path) -> None:
    edge, _ = save_both(work, suffix="-model_01")
    refused(lambda: LayerFiles(edge, "edge"), "tensor-parallel rank 1", "tensor_parallel_size 1")
    shutil.copy(work / "edge" / "layer_00-model_states.pt", work / "edge" / "layer_00-model_00-model_states.pt")
    refused(lambda: LayerFiles(work / "edge"), "both layer 0", "stale")


def test_directory_without_layer_files_is_refused(work: Path) -> None:
    refused(lambda: LayerFiles(work / "hf"), "holds no layer files")
    refused(lambda: LayerFiles(work / "nowhere"), "is not a directory")


def test_export_of_weights_in_another_dtype_says_so_in_the_config(work: Path) -> None:
    save_both(work, change=lambda _, state: {key: tensor.bfloat16() for key, tensor in state.items()})
    to_hf(work, "saved_", hf_config=work / "hf")
    assert json.loads((work / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    wanted = {key: tensor.bfloat16() for key, tensor in tensors_of(work / "hf").items()}
    assert_same_tensors(tensors_of(work / "out"), wanted)


def test_digest_depends_on_names_dtypes_shapes_and_values_and_on_nothing_else() -> None:
    base = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(1)}
    same = [
        {"b": torch.ones(1), "a": torch.arange(6.0).reshape(2, 3)},
        {"a": torch.arange(6.0).reshape(3, 2).T.contiguous().T.reshape(2, 3), "b": torch.ones(4)[2:3]},
        {"a": torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]).T, "b": torch.ones(1)},
    ]
    other = [
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"].reshape(3, 2), "b": base["b"]},
        {"a": base["a"].view(torch.int32), "b": base["b"]},
        {"a": base["a"] + 1e-6, "b": base["b"]},
        {"a": base["a"]},
        {**base, "c": torch.empty(0)},
    ]
    assert {digest(state) for state in same} == {digest(base)}
    assert len({digest(state) for state in (base, *other)}) == 1 + len(other)


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("10K", 10_000), (123, 123)])
def test_sizes_are_decimal(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5 GiB", "lots"])
def test_bad_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-shard-size"):
        parse_size(text)

"""Qwen2.5-VL: Hugging Face -> layer files -> Hugging Face changes no bit, in whichever of two spellings it came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.layer_files import LayerFiles
from ds_ldt.checkpointing.to_hf import convert_to_hf
from ds_ldt.errors import CheckpointError
from tests.conversion.models import assert_same_tensors, rewrite, tensors_of
from tests.models.test_vl_keys import as_modules_say
from tests.models.tiny import tiny_model
from tests.models.tiny_vl import tiny_vl_config, vl_batch_of

MATRICES = {"vision_encoder": [[1, 2], [1, 0], [0, 0]], "text_decoder": [[0, 0], [1, 1], [1, 0]]}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "ldt": {"pipeline_num_layers": MATRICES},
}


def save_vl_model(directory: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a tiny model as transformers does, in the published spelling, with processor files beside it."""
    model = tiny_model(tiny_vl_config(**changes)).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (directory / name).write_text("{}")
    return directory


def respell(tensors: dict[str, Tensor]) -> None:
    """Give tensors the names that transformers' modules have."""
    for key in list(tensors):
        tensors[as_modules_say(key)] = tensors.pop(key)


def there_and_back(hf: Path, root: Path) -> Path:
    convert_to_layers(hf, config=CONFIG, edge=root / "edge", cloud=root / "cloud")
    convert_to_hf(root / "edge", root / "cloud", root / "out")
    return root / "out"


@pytest.mark.parametrize("spelling", ["published", "modules"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_S43_round_trip_is_bit_exact_in_both_spellings(tmp_path: Path, tied: bool, spelling: str) -> None:
    hf = save_vl_model(tmp_path / "hf", tie_word_embeddings=tied, dtype=torch.bfloat16 if tied else torch.float32)
    wanted = tensors_of(hf)
    assert {"visual.merger.ln_q.weight", "model.layers.2.mlp.up_proj.weight"} < wanted.keys()
    if spelling == "modules":
        rewrite(hf, respell)
        assert "model.language_model.norm.weight" in tensors_of(hf)
    out = there_and_back(hf, tmp_path)
    assert_same_tensors(tensors_of(out), wanted)
    assert (out / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    assert ("lm_head.weight" in wanted) == (not tied)


def test_converted_model_is_the_one_that_transformers_loads(tmp_path: Path) -> None:
    hf = save_vl_model(tmp_path / "hf")
    out = there_and_back(hf, tmp_path)
    before = Qwen2_5_VLForConditionalGeneration.from_pretrained(hf)
    after, loading = Qwen2_5_VLForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    batch = vl_batch_of("mixed")
    assert torch.equal(before(**batch).logits, after(**batch).logits)


def test_sites_get_their_own_layers_and_only_the_edge_the_processor(tmp_path: Path) -> None:
    convert_to_layers(save_vl_model(tmp_path / "hf"), config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    assert sorted(LayerFiles(tmp_path / "cloud").paths) == [2, 3, 8]
    assert sorted(LayerFiles(tmp_path / "edge").paths) == [0, 1, 4, 5, 6, 7, 9, 10, 11]
    assert {path.name for path in (tmp_path / "cloud").iterdir() if "layer_" not in path.name} == {
        "config.json",
        "manifest.json",
    }
    assert (tmp_path / "edge/preprocessor_config.json").is_file()


def test_S43_key_that_belongs_to_no_layer_is_an_error(tmp_path: Path) -> None:
    hf = save_vl_model(tmp_path / "hf")

    def move_tower(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("visual.")]:
            tensors[key.replace("visual.", "vision_tower.")] = tensors.pop(key)

    rewrite(hf, move_tower)
    with pytest.raises(CheckpointError) as raised:
        convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge")
    assert "missing: visual.blocks.0.attn.qkv.weight" in str(raised.value)
    assert "unexpected: vision_tower.blocks.0.attn.qkv.weight" in str(raised.value)
    assert not (tmp_path / "edge").exists()


def test_S43_weight_under_both_of_its_names_is_an_error(tmp_path: Path) -> None:
    hf = save_vl_model(tmp_path / "hf")
    rewrite(hf, lambda tensors: tensors.update({"model.visual.merger.ln_q.weight": torch.ones(16)}))
    with pytest.raises(CheckpointError, match=r"model\.visual\.merger\.ln_q\.weight and visual\.merger\.ln_q\.weight"):
        convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge")

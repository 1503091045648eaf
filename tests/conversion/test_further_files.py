"""What lies beside the weights of a model reaches the edge and the export byte for byte; the cloud gets none of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.further_files import MAX_UNKNOWN_BYTES, further_files
from ds_ldt.checkpointing.layer_files import Manifest
from ds_ldt.checkpointing.to_hf import convert_to_hf
from tests.conversion.models import CONFIG, edit_json, save_model
from tests.conversion.test_errors import refused

KEPT = (
    "LICENSE",
    "NOTICE.txt",
    "README.md",
    "USE_POLICY.md",
    "a_tokenizer_of_tomorrow.dat",
    "additional_chat_templates/rag.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "merges.txt",
    "qwen.tiktoken",
    "spiece.model",
    "tekken.json",
    "vocab.json",
)
LEFT = {
    "adapter_model.safetensors": "weights",
    "consolidated.00.pth": "weights",
    "flax_model.msgpack": "weights",
    "model.gguf": "weights",
    "model.onnx": "weights",
    "pytorch_model.bin": "weights",
    "pytorch_model.bin.index.json": "weights",
    "tf_model.h5": "weights",
    "training_args.bin": "weights",
    "modeling_custom.py": "code",
    "additional_chat_templates/notes.txt": "no template",
    ".gitattributes": "a hidden file",
    "latest": "a name that ds_ldt writes itself",
}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    directory = save_model(tmp_path / "hf", sharded=True)
    (directory / "additional_chat_templates").mkdir()
    for name in (*KEPT, *LEFT):
        (directory / name).write_bytes(b"\xff\x00 " + name.encode() + b"\r\n")
    (directory / "original").mkdir()
    (directory / "original" / "params.json").write_text("{}")
    return directory


def beside(directory: Path) -> dict[str, bytes]:
    """The files of a directory without weights and layers, by name."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix not in (".safetensors", ".pt") and "index" not in path.name
    }


def test_S68_what_lies_beside_the_weights_goes_there_and_back_byte_for_byte(
    tmp_path: Path, hf: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("DeepSpeed"), "propagate", True)
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    (said,) = {message for message in caplog.messages if message.startswith(f"left where they are in {hf}: ")}
    assert all(f"{name} ({reason}" in said for name, reason in {**LEFT, "original": "a directory"}.items())
    assert not any(f"{name} (" in said for name in KEPT)

    convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out")
    wanted = {name: content for name, content in beside(hf).items() if name not in LEFT and "original" not in name}
    assert set(KEPT) < wanted.keys()
    assert beside(tmp_path / "out") == wanted
    assert beside(tmp_path / "edge").keys() == wanted.keys() | {"manifest.json"}
    assert beside(tmp_path / "cloud").keys() == {"config.json", "manifest.json"}


def test_S68_conversion_and_export_replace_what_they_wrote(tmp_path: Path, hf: Path) -> None:
    for _ in range(2):
        convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud", overwrite=True)
        convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "additional_chat_templates" / "mine.txt").write_text("mine")
    refused(
        lambda: convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out", overwrite=True),
        "not written by this tool: additional_chat_templates/mine.txt",
    )


def test_documents_of_a_directory_that_is_no_model_are_never_replaced(tmp_path: Path, hf: Path) -> None:
    convert_to_layers(save_model(tmp_path / "bare"), config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("my project")
    refused(
        lambda: convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out", overwrite=True),
        "not written by this tool: README.md",
    )


def test_export_takes_what_the_named_model_has_first_and_of_the_edge_only_what_was_converted(
    tmp_path: Path, hf: Path
) -> None:
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    (tmp_path / "edge" / "my_samples.jsonl").write_text("private")
    named = save_model(tmp_path / "named")
    (named / "LICENSE").write_text("of the named model")
    convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out", hf_config=named)
    found = beside(tmp_path / "out")
    assert found["LICENSE"] == b"of the named model"
    assert "tekken.json" in found
    assert "my_samples.jsonl" not in found


def test_links_out_of_the_directory_are_not_followed_for_unknown_names(tmp_path: Path, hf: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (hf / "innocent.json").symlink_to(secret)
    (hf / "nowhere.json").symlink_to(tmp_path / "nowhere")
    (hf / "within.json").symlink_to(hf / "tekken.json")
    found = further_files([hf])
    assert "within.json" in found.paths
    assert "innocent.json (a link out of the directory)" in found.left_out[hf]
    assert "nowhere.json (not a file, or a link that leads nowhere)" in found.left_out[hf]


def test_snapshot_in_the_cache_of_the_hub_is_made_of_links(tmp_path: Path, hf: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.parent.mkdir(parents=True)
    hf.rename(blobs)
    snapshot.mkdir()
    for path in blobs.iterdir():
        if path.is_file():
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (snapshot / "secret.txt").symlink_to("/etc/hostname")
    found = further_files([snapshot])
    assert {"LICENSE", "tekken.json", "a_tokenizer_of_tomorrow.dat"} < found.paths.keys()
    assert "secret.txt" not in found.paths
    convert_to_layers(snapshot, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    assert not (tmp_path / "edge" / "LICENSE").is_symlink()


def test_large_files_of_unknown_name_are_left_out(tmp_path: Path, hf: Path) -> None:
    for name in ("video.mp4", "tokenizer.json"):
        with (hf / name).open("wb") as stream:
            stream.truncate(MAX_UNKNOWN_BYTES + 1)
    found = further_files([hf])
    assert "video.mp4 (larger than 64 MiB)" in found.left_out[hf]
    assert "tokenizer.json" in found.paths


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "additional_chat_templates/../../secret"])
def test_names_in_a_manifest_stay_within_the_directory(tmp_path: Path, hf: Path, name: str) -> None:
    convert_to_layers(hf, config=CONFIG, edge=tmp_path / "edge", cloud=tmp_path / "cloud")
    (tmp_path / "secret").write_text("secret")
    listed = Manifest.read(tmp_path / "edge").other_files
    edit_json(tmp_path / "edge" / "manifest.json", other_files=[*listed, name])
    assert name not in further_files([tmp_path / "edge"]).paths
    convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "deep" / "out")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]

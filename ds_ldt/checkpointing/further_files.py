"""What lies beside the weights of a model: tokenizer, templates, licence. It goes to the edge and into the export.

Copied are the files that transformers' own saving leaves, whatever their size, and every other small file beside them:
an unknown name may be that of a tokenizer which a later release reads, or a licence that has to stay with the weights.
Left out, with a line in the log, are weights in other formats, code, directories and what is large.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deepspeed.utils import logger

from ds_ldt.checkpointing.hf_weights import INDEX_FILE, SINGLE_FILE
from ds_ldt.checkpointing.layer_files import MANIFEST_FILE, Manifest
from ds_ldt.checkpointing.manifest import LATEST_FILE
from ds_ldt.models.registry import CONFIG_FILE

MAX_UNKNOWN_BYTES = 64 << 20
"""Size up to which a file of unknown name is copied. The largest tokenizer files published have about 35 MB."""

TEMPLATES = "additional_chat_templates"

# How to turn text and images into numbers, and how to generate. All that transformers' `save_pretrained` of a
# tokenizer, a processor or a generation config writes, as far as the families that are supported use it.
MODEL_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json"),
    *("video_preprocessor_config.json", "audio_tokenizer_config.json", "modelcard.json"),
)
_DOCUMENT = re.compile(r"(README|LICEN[CS]E|NOTICE|COPYING|USE_POLICY)(\.(md|txt))?")
_TEMPLATE = re.compile(rf"{TEMPLATES}/[^/]+\.jinja")

_WEIGHT_SUFFIXES = (
    *("safetensors", "bin", "pt", "pth", "ckpt", "gguf", "ggml", "onnx", "onnx_data", "h5", "msgpack", "npz", "npy"),
    *("pkl", "pickle", "tflite", "mlmodel", "mlpackage", "nemo", "pdparams", "engine", "llamafile", "zip"),
    *("tar", "gz", "zst"),
)
_WEIGHTS = re.compile(rf".*\.({'|'.join(_WEIGHT_SUFFIXES)})(\.index\.json|\.data.*|\.\d+)?", re.IGNORECASE)
_OWN_WEIGHTS = re.compile(rf"{re.escape(SINGLE_FILE)}|{re.escape(INDEX_FILE)}|model-\d+-of-\d+\.safetensors")
_CODE_SUFFIXES = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib")
_RESERVED = (MANIFEST_FILE, LATEST_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherFiles:
    """Files that belong to a model beside its config and weights.

    Attributes:
        paths: Name within the model's directory ("/" between the parts) -> where the file is.
        left_out: For each directory that holds such, what is not among them, and why.
    """

    paths: dict[str, Path]
    left_out: dict[Path, str]

    @property
    def num_bytes(self) -> int:
        """Their size."""
        return sum(path.stat().st_size for path in self.paths.values())

    def log(self) -> None:
        """Say what is left out."""
        for directory, names in self.left_out.items():
            logger.warning(f"left where they are in {directory}: {names}")

    def copy(self, destination: Path) -> list[str]:
        """Copy them into a directory, byte for byte; return their names."""
        for name, path in self.paths.items():
            target = destination / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        return list(self.paths)


def further_files(directories: Iterable[Path]) -> FurtherFiles:
    """Find what lies beside the weights of a model.

    Args:
        directories: Where to look: Hugging Face model directories, or directories that `ds-ldt convert` wrote, of
            which only what the conversion put there counts. A name is taken from the first that has it.
    """
    paths: dict[str, Path] = {}
    left_out: dict[Path, str] = {}
    for directory in dict.fromkeys(directories):
        reasons = {name: _reason_to_leave_out(directory, name) for name in _names_in(directory)}
        for name in (name for name, reason in reasons.items() if reason is None):
            paths.setdefault(name, directory / name)
        told = [f"{name} ({reason})" for name, reason in reasons.items() if reason is not None]
        if told:
            left_out[directory] = ", ".join(told)
    return FurtherFiles(paths=paths, left_out=left_out)


def is_further_file(directory: Path, name: str) -> bool:
    """Tell whether a file of a model directory has a name that only a model's files have.

    Names that any directory may have, as README.md, count beside a config.json.
    """
    if name in MODEL_FILES or _TEMPLATE.fullmatch(name):
        return True
    return _DOCUMENT.fullmatch(name) is not None and (directory / CONFIG_FILE).is_file()


def _names_in(directory: Path) -> list[str]:
    """Return what a conversion copied into a directory, or else everything but config and weights."""
    if (directory / MANIFEST_FILE).is_file():
        return [name for name in Manifest.read(directory).other_files if name != CONFIG_FILE]
    names = [path.name for path in directory.iterdir()]
    if (directory / TEMPLATES).is_dir():
        names.remove(TEMPLATES)
        names += [f"{TEMPLATES}/{path.name}" for path in (directory / TEMPLATES).iterdir()]
    return sorted(name for name in names if name != CONFIG_FILE and not _OWN_WEIGHTS.fullmatch(name))


def _reason_to_leave_out(directory: Path, name: str) -> str | None:
    """Say why a file is not copied; None if it is."""
    path = directory / name
    if path.is_dir():
        return "a directory"
    if not path.is_file():
        return "not a file, or a link that leads nowhere"
    if name in MODEL_FILES:
        return None
    reasons = {
        "a link out of the directory": _leads_out(directory, path),
        "weights or an archive": _WEIGHTS.fullmatch(name) is not None,
        "code": path.suffix in _CODE_SUFFIXES,
        "a hidden file": path.name.startswith("."),
        "a name that ds_ldt writes itself": name in _RESERVED,
        "no template": "/" in name and not _TEMPLATE.fullmatch(name),
        f"larger than {MAX_UNKNOWN_BYTES >> 20} MiB": path.stat().st_size > MAX_UNKNOWN_BYTES,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _leads_out(directory: Path, path: Path) -> bool:
    """Whether a file is a link to elsewhere. In a hub's cache all are, to `blobs` beside `snapshots/<revision>`."""
    root, target = directory.resolve(), path.resolve()
    within = root in target.parents
    in_cache = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    return not (within or in_cache)

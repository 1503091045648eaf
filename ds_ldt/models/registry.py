"""From a config of transformers to its family, refusing by name whatever a split model could not do right."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.pipe import LayerSpec
from transformers import AutoConfig, PreTrainedConfig

from ds_ldt.errors import Absent, ConfigError, ConfigProblem
from ds_ldt.models.attention import MASK_FUNCTIONS
from ds_ldt.models.config_values import rope_problems, trial_problem, value_problems
from ds_ldt.models.families import FAMILIES
from ds_ldt.models.family import ModelFamily, model_problem
from ds_ldt.topology.layout import Layout

CONFIG_FILE = "config.json"
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")

_SHOWN = 300
"""Characters of what transformers says."""


def family_of(config: PreTrainedConfig) -> ModelFamily:
    """Return the family of a model config.

    Raises:
        ConfigError: The architecture is not supported.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError.of(
            "model.model_type",
            found=config.model_type,
            expected=f"one of {', '.join(sorted(FAMILIES))}",
            fix="choose a model of a supported family, or describe your model as a list of LayerSpec",
        )
    return family


def read_hf_config(directory: str | os.PathLike[str]) -> PreTrainedConfig:
    """Read `config.json` of a directory, without a network and without running code from the directory.

    Raises:
        ConfigError: There is none, or transformers cannot read it.
    """
    path = Path(directory, CONFIG_FILE)
    if not path.is_file():
        raise ConfigError.of(
            "model",
            found=Absent(f"no {path}"),
            expected=f"a directory that holds {CONFIG_FILE}",
            fix="name a downloaded Hugging Face model or a directory written by ds-ldt convert",
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types here; all mean the same to the user
        problems = list(_problems_of_file(path))
        if problems:
            raise ConfigError.from_problems(problems, where=str(path)) from error
        message = " ".join(line.strip() for line in str(error).splitlines())
        raise ConfigError.of(
            "model",
            found=Absent(f"{path}, which transformers refuses: {message[:_SHOWN] or type(error).__name__}"),
            expected=f"the config of a supported family ({', '.join(sorted(FAMILIES))})",
            fix="check the file against the one that was published with the model",
        ) from error
    return config


def _problems_of_file(path: Path) -> Iterator[ConfigProblem]:
    """Yield what can be named in a config that transformers does not read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(content, dict):
        text = content.get("text_config")
        yield from value_problems(text if isinstance(text, dict) else content)


def checked_config(config: PreTrainedConfig, *, attn_implementation: str | None = None) -> PreTrainedConfig:
    """Return a copy of a config that is ready to build layers from.

    Args:
        config: Any config of a supported family. It is not changed.
        attn_implementation: `sdpa` or `eager`; by default what the config says, and `sdpa` if it says nothing.

    Raises:
        ConfigError: The config asks for something that is not supported; all such things are listed.
    """
    family = family_of(config)
    config = copy.deepcopy(config)
    problems = list(_problems(config, family, attn_implementation))
    if not problems:
        found = trial_problem(config, family)
        problems += [] if found is None else [found]
    if problems:
        raise ConfigError.from_problems(problems, where=f"the {family.name} model config")
    # Left at None, transformers builds no mask at all: packed sequences would silently see each other.
    config._attn_implementation = attn_implementation or config._attn_implementation or ATTENTION_IMPLEMENTATIONS[0]
    config.get_text_config().use_cache = False
    return config


def build_layers(config: PreTrainedConfig, *, attn_implementation: str | None = None) -> list[LayerSpec]:
    """Return a model as pipeline layers: embedding, decoder layers, final norm, output layer.

    Calling the built layers one after another computes what the model of transformers computes. No process group is
    needed, and no weight is allocated before a layer is built. One call is meant for one process and one model: the
    decoder layers of a list share the masks and rotary tables of a micro-batch.

    Args:
        config: The config of a supported family.
        attn_implementation: `sdpa` or `eager`; by default what the config says, and `sdpa` if it says nothing.

    Returns:
        N + 3 layers. Build both ends of a tied pair through one module (as `PipelineModule` does): their
        `TiedLayerSpec`s have one key.

    Raises:
        ConfigError: The architecture or a feature of the config is not supported.
    """
    return family_of(config).layers(checked_config(config, attn_implementation=attn_implementation))


def layout_of(matrix: Any, config: PreTrainedConfig, *, allow_exposed_edge: bool) -> Layout:
    """Return the layout of a model of transformers: embedding in the head, norm and output layer in the tail.

    Merger and text embedding of a model with a vision encoder are on the edge, between its two parts.

    Raises:
        ConfigError: The matrix is malformed or does not fit the model, or leaves the edge exposed.
    """
    family = family_of(config)
    return Layout.build(
        matrix,
        num_layers=family.depths(config),
        num_leading=family.num_leading,
        num_between=family.num_between,
        num_trailing=family.num_trailing,
        allow_exposed_edge=allow_exposed_edge,
    )


def _problems(config: PreTrainedConfig, family: ModelFamily, attention: str | None) -> Iterator[ConfigProblem]:
    architecture = family.model_class.__name__
    named = getattr(config, "architectures", None)
    if named and architecture not in named:
        yield model_problem("architectures", named, f'["{architecture}"]', "choose the causal language model")
    if getattr(config, "quantization_config", None) is not None:
        yield model_problem("quantization_config", Absent("a quantised model"), "none", "use the unquantised weights")
    if getattr(config, "is_causal", None) is False:
        yield model_problem("is_causal", False, "true", "a split model is trained causally only; remove the key")
    wanted = attention or config._attn_implementation
    if wanted is not None and wanted not in ATTENTION_IMPLEMENTATIONS:
        allowed = " or ".join(ATTENTION_IMPLEMENTATIONS)
        yield model_problem("attn_implementation", wanted, allowed, "leave it out to get sdpa")
    text = config.get_text_config()
    if text.num_hidden_layers < 1:
        yield model_problem("num_hidden_layers", text.num_hidden_layers, "at least 1", "correct config.json")
    yield from value_problems(text.to_dict())
    yield from rope_problems(text.to_dict())
    yield from _mask_problems(text, family)
    yield from family.problems(config)


def _mask_problems(config: PreTrainedConfig, family: ModelFamily) -> Iterator[ConfigProblem]:
    kinds = family.mask_kinds(config)
    unknown = sorted(set(kinds) - MASK_FUNCTIONS.keys())
    if unknown:
        yield model_problem(
            "layer_types", unknown, " or ".join(MASK_FUNCTIONS), "use a model with these attentions only"
        )
    if len(kinds) != config.num_hidden_layers:
        yield model_problem(
            "layer_types",
            Absent(f"{len(kinds)} entries"),
            f"{config.num_hidden_layers}, one per decoder layer",
            "correct config.json",
        )
    window = config.sliding_window if "sliding_attention" in kinds else None
    if "sliding_attention" in kinds and not (isinstance(window, int) and window > 0):
        yield model_problem("sliding_window", config.sliding_window, "a window in tokens", "correct config.json")

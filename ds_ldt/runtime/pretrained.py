"""`from_pretrained`: a Hugging Face model as an `LDTPipelineModule`, of which each rank loads its own layers only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from ds_ldt.checkpointing.fingerprint import fingerprint_of
from ds_ldt.checkpointing.hf_weights import HFWeights
from ds_ldt.checkpointing.layer_files import MANIFEST_FILE, LayerFiles, shape_problems
from ds_ldt.comm.identity import ModelFingerprint
from ds_ldt.comm.launch import prepare_environment
from ds_ldt.config.deepspeed_settings import precision
from ds_ldt.config.schema import ConfigSource, JobConfig, load_config
from ds_ldt.errors import CheckpointError
from ds_ldt.models.batch import count_targets
from ds_ldt.models.causal_lm import causal_lm_loss
from ds_ldt.models.family import ModelFamily
from ds_ldt.models.positions import WatchedBatches
from ds_ldt.models.registry import checked_config, family_of, layout_of, read_hf_config
from ds_ldt.topology.layout import Layout
from ds_ldt.topology.ranks import RankMap, Site

if TYPE_CHECKING:
    from ds_ldt.runtime.module import LDTPipelineModule

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

ModelSource: TypeAlias = str | os.PathLike[str] | PreTrainedConfig


def from_pretrained(
    source: ModelSource,
    *,
    config: ConfigSource,
    load_weights: bool = True,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    seed: int = 1234,
    **module_options: Any,
) -> LDTPipelineModule:
    """Build the pipeline of a Hugging Face model and load the layers that this rank holds.

    Call it on every rank, with the launcher's environment variables set. What `source` is decides where weights come
    from; it may differ from site to site as long as the model is the same:

    - a directory written by `ds-ldt convert` for this rank's site: the layer files in it. This is how two sites
      start: the cloud needs its own directory and nothing else. A directory that contains both as `edge/` and
      `cloud/` serves where one machine plays both sites;
    - a Hugging Face model directory: this rank's layers out of its safetensors files;
    - a `PreTrainedConfig`: random weights, by transformers' own initialisation. The weights of a layer depend on
      `seed` and on its index, and not on how the model is split.

    Args:
        source: See above.
        config: The DeepSpeed JSON with its "ldt" section: a path, a mapping or a `JobConfig`.
        load_weights: False: take only the config from `source` and initialise at random, as if it were a config.
        dtype: dtype of the parameters. By default bfloat16 or float16 if DeepSpeed's `bf16` or `fp16` section is
            enabled, otherwise float32; never the dtype on disk.
        attn_implementation: `sdpa` (the default) or `eager`.
        seed: For random weights, and for dropout (`base_seed` of the module).
        module_options: Passed on to `LDTPipelineModule`, e.g. `activation_checkpoint_interval`.

    Returns:
        The module, with loss function, batch function, target count and wire schema of the family. Its
        `loss_reduction` is "token" unless the configuration says otherwise.

    Raises:
        ConfigError: The configuration or the model is not supported, or they do not fit together; before any process
            group exists.
        CheckpointError: Weights are missing, damaged, of the wrong shape, or of the other site.
    """
    # Conversion imports this package as well, and needs neither an engine nor process groups.
    from ds_ldt.runtime.module import LDTPipelineModule

    environment = prepare_environment()
    job = load_config(config, world_size=environment.world_size)
    rank_map = RankMap.from_config(job)
    directory = None
    if not isinstance(source, PreTrainedConfig):
        directory = _site_directory(Path(source), rank_map.site(environment.rank))
        source = read_hf_config(directory)
    model_config = checked_config(source, attn_implementation=attn_implementation)
    family = family_of(model_config)
    layout = layout_of(job.ldt.pipeline_num_layers, model_config, allow_exposed_edge=job.ldt.allow_exposed_edge)
    weights = _open_weights(directory, family, model_config) if directory and load_weights else None
    if isinstance(weights, LayerFiles):
        check_holds(weights, layers_of(job, model_config, rank_map.coord(environment.rank).stage))

    with no_init_weights(), _default_dtype(dtype or dtype_of(job)):
        module = LDTPipelineModule(
            family.layers(model_config),
            config=job,
            **pipeline_options(family, model_config, layout),
            fingerprint=_fingerprint(model_config, weights, seed),
            base_seed=seed,
            **module_options,
        )
    if weights is None:
        initialize_layers(module.owned_layers(), family, model_config, seed=seed)
    else:
        load_layers(module.owned_layers(), weights)
    module.inject_adapters()
    return module


def pipeline_options(family: ModelFamily, config: PreTrainedConfig, layout: Layout) -> dict[str, Any]:
    """Return what `LDTPipelineModule` has to know of a model beside its layers.

    Args:
        family: The family of the model.
        config: The checked config of the model.
        layout: The layout of its layers.
    """
    depths, keys = family.depths(config), family.key_map(config)
    return {
        "loss_fn": causal_lm_loss,
        "wire": family.wire_schema(layout),
        "num_leading": family.num_leading,
        "num_between": family.num_between,
        "num_trailing": family.num_trailing,
        "depths": depths if isinstance(depths, dict) else None,
        "local_layers": family.local_layers(config),
        "parts": family.parts(config),
        "layer_names": [keys.module_name(layer) for layer in range(keys.num_layers)],
        "model_type": family.name,
        "batch_fn": WatchedBatches(family.batches(config), config),
        "count_targets": count_targets,
        "loss_reduction": "token",
    }


def load_layers(owned: Mapping[int, nn.Module], weights: HFWeights | LayerFiles) -> None:
    """Copy weights into layers, casting to the dtype the layers have; nothing is read but these layers.

    Args:
        owned: Pipeline layer index -> layer.
        weights: A Hugging Face directory (read tensor by tensor) or layer files (read layer by layer).

    Raises:
        CheckpointError: Weights are missing, damaged or of the wrong shape, or there are more than the layers have.
    """
    targets = {index: layer.state_dict() for index, layer in owned.items()}
    if isinstance(weights, HFWeights):
        weights.check({index: {k: tuple(v.shape) for k, v in state.items()} for index, state in targets.items()})
    for index, target in targets.items():
        if isinstance(weights, HFWeights):
            for key, tensor in target.items():
                tensor.copy_(weights.get(index, key))
        else:
            _load_layer_file(target, index, weights)


def initialize_layers(
    owned: Mapping[int, nn.Module], family: ModelFamily, config: PreTrainedConfig, *, seed: int
) -> None:
    """Give layers random weights as transformers would, drawn in float32 on the CPU under the seed `seed + index`.

    Args:
        owned: Pipeline layer index -> layer, on any device, of any dtype.
        family: The family of the model.
        config: The checked config of the model.
        seed: The seed of the model.
    """
    specs, initialize = family.layers(config), family.initializer(config)
    for index, layer in owned.items():
        with no_init_weights(), _default_dtype(torch.float32), torch.device("cpu"):
            fresh = specs[index].build()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed + index)
            for submodule in fresh.modules():
                initialize(index, submodule)
        layer.load_state_dict(fresh.state_dict())


def layers_of(job: JobConfig, config: PreTrainedConfig, stage: int) -> tuple[int, ...]:
    """Return the pipeline layers with weights that a stage holds.

    Raises:
        ConfigError: The layout does not fit the model.
    """
    layout = layout_of(job.ldt.pipeline_num_layers, config, allow_exposed_edge=job.ldt.allow_exposed_edge)
    keys = family_of(config).key_map(config)
    return tuple(layer for layer in keys.layers_with_weights if layout.stage_of_layer(layer) == stage)


def check_holds(files: LayerFiles, layers: tuple[int, ...]) -> None:
    """Check that a directory of layer files holds all layers of a stage.

    Raises:
        CheckpointError: Layers are missing; they are listed.
    """
    missing = [layer for layer in layers if layer not in files.paths]
    if missing:
        written_for = ""
        if files.manifest is not None:
            written_for = (
                f" It was written for the {files.manifest.site} of pipeline_num_layers "
                f"{files.manifest.pipeline_num_layers}."
            )
        raise CheckpointError(
            f"{files.directory} lacks layers {missing} of this rank.{written_for} Fix: name the directory of this "
            "rank's site, or convert the model again with this configuration."
        )


def dtype_of(job: JobConfig) -> torch.dtype:
    """Return the dtype in which DeepSpeed will compute."""
    return _DTYPES[precision(job.deepspeed)]


def _site_directory(directory: Path, site: Site) -> Path:
    """Return the directory of a site where one directory holds both."""
    nested = directory / site
    return nested if (nested / MANIFEST_FILE).is_file() else directory


def _open_weights(directory: Path, family: ModelFamily, config: PreTrainedConfig) -> HFWeights | LayerFiles:
    if (directory / MANIFEST_FILE).is_file():
        return LayerFiles(directory)
    return HFWeights(directory, family.key_map(config))


def _fingerprint(config: PreTrainedConfig, weights: HFWeights | LayerFiles | None, seed: int) -> ModelFingerprint:
    """The model that this rank takes part in, whichever form its directory has."""
    if isinstance(weights, LayerFiles):
        assert weights.manifest is not None, "layer files are recognised by their manifest"
        return fingerprint_of(config, weights.manifest.model.weights)
    return fingerprint_of(config, f"random, seed {seed}" if weights is None else weights)


def _load_layer_file(target: Mapping[str, torch.Tensor], index: int, files: LayerFiles) -> None:
    state = files.read(index)
    problems = shape_problems({k: tuple(v.shape) for k, v in target.items()}, state)
    if problems:
        listing = "".join(f"\n  {problem}" for problem in problems)
        raise CheckpointError(f"{files.paths[index]} does not fit layer {index} of the model:{listing}")
    for key, tensor in target.items():
        tensor.copy_(state[key])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters in this dtype while the context lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

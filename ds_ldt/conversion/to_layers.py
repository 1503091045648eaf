"""Hugging Face directory -> one directory of layer files for each site."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedConfig

from ds_ldt.checks import EDGE_STAGE
from ds_ldt.config import ConfigSource, load_config
from ds_ldt.conversion.directories import EDGE_ONLY_FILES, StagedDirectory, check_apart, copy_files
from ds_ldt.errors import CheckpointError
from ds_ldt.identity import ModelFingerprint
from ds_ldt.layout import Layout
from ds_ldt.models.fingerprint import fingerprint_of
from ds_ldt.models.hf_files import HFWeights
from ds_ldt.models.layer_files import (
    MANIFEST_FILE,
    LayerEntry,
    Manifest,
    Site,
    is_layer_file,
    write_layer,
)
from ds_ldt.models.registry import CONFIG_FILE, checked_config, family_of, layout_of, read_hf_config

PathLike = str | os.PathLike[str]


def convert_to_layers(
    hf_directory: PathLike,
    *,
    config: ConfigSource,
    edge: PathLike | None = None,
    cloud: PathLike | None = None,
    overwrite: bool = False,
) -> dict[Site, Manifest]:
    """Split a Hugging Face model into layer files, the edge's and the cloud's in a directory each.

    Each layer is read, written and forgotten before the next. Values and dtypes are kept. The edge also gets the
    tokenizer; the cloud gets config.json and nothing else beside its layers.

    Args:
        hf_directory: A model saved as safetensors, in one file or in shards.
        config: The DeepSpeed JSON whose "ldt" section says which layers are the edge's.
        edge: Directory to write for the edge; None: do not write it.
        cloud: Directory to write for the cloud; None: do not write it.
        overwrite: Replace directories that an earlier conversion wrote.

    Returns:
        The manifest of each directory written.

    Raises:
        ConfigError: The model is not supported, or the layout does not fit it.
        CheckpointError: Weights are missing, surplus, damaged or of the wrong shape; or a directory may not be
            written.
    """
    source = Path(hf_directory)
    targets: dict[Site, Path] = {}
    if edge is not None:
        targets["edge"] = Path(edge)
    if cloud is not None:
        targets["cloud"] = Path(cloud)
    if not targets:
        raise CheckpointError("There is nothing to write. Fix: name a directory for the edge, the cloud or both.")
    check_apart([source, *targets.values()])
    job = load_config(config)
    model_config = checked_config(read_hf_config(source))
    layout = layout_of(job.ldt.pipeline_num_layers, model_config, allow_exposed_edge=job.ldt.allow_exposed_edge)
    family = family_of(model_config)
    weights = HFWeights(source, family.key_map(model_config))
    weights.check(family.expected_shapes(model_config))
    fingerprint = fingerprint_of(model_config, weights)

    with ExitStack() as stack:
        staged = {
            site: stack.enter_context(StagedDirectory(target, is_ours=_is_ours, overwrite=overwrite))
            for site, target in targets.items()
        }
        manifests = {
            site: _write_site(site, directory.path, weights, layout, model_config, fingerprint)
            for site, directory in staged.items()
        }
        for directory in staged.values():
            directory.commit()
    return manifests


def _write_site(
    site: Site,
    directory: Path,
    weights: HFWeights,
    layout: Layout,
    config: PreTrainedConfig,
    fingerprint: ModelFingerprint,
) -> Manifest:
    """Write the layers of one site, and the manifest last."""
    keys = weights.keys
    entries: dict[int, LayerEntry] = {}
    for layer in keys.layers_with_weights:
        if (layout.stage_of_layer(layer) == EDGE_STAGE) == (site == "edge"):
            entries[layer] = write_layer(directory, layer, weights.layer(layer))
    names = (CONFIG_FILE, *EDGE_ONLY_FILES) if site == "edge" else (CONFIG_FILE,)
    manifest = Manifest(
        site=site,
        family=family_of(config).name,
        pipeline_num_layers=layout.configured,
        num_layers=keys.num_layers,
        tied=keys.tied,
        model=fingerprint,
        layers=entries,
        other_files=copy_files(names, [weights.directory], directory),
    )
    manifest.write(directory)
    return manifest


def _is_ours(directory: Path, name: str) -> bool:
    """Tell whether an earlier conversion wrote a file: its manifest names it, or it is a layer file beside it."""
    if not (directory / MANIFEST_FILE).is_file():
        return False
    return name == MANIFEST_FILE or is_layer_file(name) or name in Manifest.read(directory).other_files

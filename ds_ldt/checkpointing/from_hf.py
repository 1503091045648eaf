"""Hugging Face directory -> one directory of layer files for each site."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ds_ldt.checkpointing.disk_space import check_free, writing
from ds_ldt.checkpointing.fingerprint import fingerprint_of
from ds_ldt.checkpointing.further_files import FurtherFiles, further_files
from ds_ldt.checkpointing.hf_weights import HFWeights
from ds_ldt.checkpointing.layer_files import (
    MANIFEST_FILE,
    Manifest,
    is_layer_file,
    write_layer,
)
from ds_ldt.checkpointing.staging import StagedDirectory, check_apart
from ds_ldt.comm.identity import ModelFingerprint
from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.config.schema import ConfigSource, JobConfig, load_config
from ds_ldt.errors import CheckpointError
from ds_ldt.models.registry import CONFIG_FILE, checked_config, family_of, layout_of, read_hf_config
from ds_ldt.topology.layout import Layout
from ds_ldt.topology.ranks import Site

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

    Each layer is read, written and forgotten before the next. Values and dtypes are kept. The edge also gets what lies
    beside the weights, tokenizer and licence (:mod:`ds_ldt.checkpointing.further_files`); the cloud gets config.json
    and nothing else beside its layers.

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
            written, or has no space.
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
    model = _Model.read(source, load_config(config))
    needed = {site: model.num_bytes(site) for site in targets}
    with ExitStack() as stack:
        check_free({targets[site]: num_bytes for site, num_bytes in needed.items()})
        staged = {
            site: stack.enter_context(
                StagedDirectory(target, is_ours=_is_ours, overwrite=overwrite, needed_bytes=needed[site])
            )
            for site, target in targets.items()
        }
        manifests: dict[Site, Manifest] = {}
        for site, directory in staged.items():
            with writing(targets[site], needed[site]):
                manifests[site] = model.write(site, directory.path)
        for directory in staged.values():
            directory.commit()
    return manifests


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What is converted, checked."""

    weights: HFWeights
    layout: Layout
    family: str
    fingerprint: ModelFingerprint

    @classmethod
    def read(cls, source: Path, job: JobConfig) -> _Model:
        config = checked_config(read_hf_config(source))
        layout = layout_of(job.ldt.pipeline_num_layers, config, allow_exposed_edge=job.ldt.allow_exposed_edge)
        family = family_of(config)
        weights = HFWeights(source, family.key_map(config))
        weights.check(family.expected_shapes(config))
        return cls(weights=weights, layout=layout, family=family.name, fingerprint=fingerprint_of(config, weights))

    def num_bytes(self, site: Site) -> int:
        """The size of what a site gets."""
        config = self.weights.directory / CONFIG_FILE
        return self.weights.num_bytes(self._layers_of(site)) + self._beside(site).num_bytes + config.stat().st_size

    def write(self, site: Site, directory: Path) -> Manifest:
        """Write the layers of a site and what lies beside them, and the manifest last."""
        entries = {layer: write_layer(directory, layer, self.weights.layer(layer)) for layer in self._layers_of(site)}
        shutil.copyfile(self.weights.directory / CONFIG_FILE, directory / CONFIG_FILE)
        beside = self._beside(site)
        beside.log()
        manifest = Manifest(
            site=site,
            family=self.family,
            pipeline_num_layers=self.layout.configured,
            num_layers=self.weights.keys.num_layers,
            tied=self.weights.keys.tied,
            model=self.fingerprint,
            layers=entries,
            other_files=[CONFIG_FILE, *beside.copy(directory)],
        )
        manifest.write(directory)
        return manifest

    def _beside(self, site: Site) -> FurtherFiles:
        return further_files([self.weights.directory] if site == "edge" else [])

    def _layers_of(self, site: Site) -> list[int]:
        layers = self.weights.keys.layers_with_weights
        return [layer for layer in layers if (self.layout.stage_of_layer(layer) == EDGE_STAGE) == (site == "edge")]


def _is_ours(directory: Path, name: str) -> bool:
    """Tell whether an earlier conversion wrote a file: its manifest names it, or it is a layer file beside it."""
    if not (directory / MANIFEST_FILE).is_file():
        return False
    return name == MANIFEST_FILE or is_layer_file(name) or name in Manifest.read(directory).other_files

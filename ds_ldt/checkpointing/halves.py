"""The halves of one model: what the edge and the cloud hold, proved to belong together before any of it is joined."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from ds_ldt.checkpointing.fingerprint import fingerprint_of, weights_digest
from ds_ldt.checkpointing.hf_weights import INDEX_FILE, SINGLE_FILE, HFWeights
from ds_ldt.checkpointing.layer_files import MANIFEST_FILE, LayerFiles, Manifest
from ds_ldt.checkpointing.manifest import LATEST_FILE, CheckpointManifest, manifest_name
from ds_ldt.comm.identity import ModelFingerprint
from ds_ldt.errors import CheckpointError
from ds_ldt.models.registry import CONFIG_FILE, family_of
from ds_ldt.topology.ranks import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The layer files of both sites: converted from one model, or of one save of one run.

    Attributes:
        edge: Those of the edge.
        cloud: Those of the cloud.
    """

    edge: LayerFiles
    cloud: LayerFiles

    @property
    def both(self) -> tuple[LayerFiles, LayerFiles]:
        """The edge's and the cloud's."""
        return self.edge, self.cloud

    @property
    def places(self) -> str:
        """Their directories, for a message."""
        return " and ".join(dict.fromkeys(str(files.directory) for files in self.both))

    @property
    def model(self) -> ModelFingerprint | None:
        """The model before its training; None if that is not known."""
        return self.edge.model

    @property
    def checkpoint(self) -> CheckpointManifest | None:
        """The edge's manifest of the checkpoint; None of converted layers. That of the cloud is of the same save."""
        return self.edge.checkpoint

    @property
    def num_bytes(self) -> int:
        """Size of all layer files."""
        return sum(files.num_bytes for files in self.both)

    def check_config(self, config: PreTrainedConfig, directory: Path) -> None:
        """Check that a config is that of the model whose layers these are.

        Args:
            config: The checked config.
            directory: Where it was read.

        Raises:
            CheckpointError: It is of another model; the settings that differ are named.
        """
        if self.model is not None:
            _compare(self.model, fingerprint_of(config, self.model.weights), self.places, directory / CONFIG_FILE)

    def check_base(self, config: PreTrainedConfig, directory: Path) -> None:
        """Check that a directory holds the base model on which these adapters were trained.

        Args:
            config: Its checked config.
            directory: The directory. Without weights in it only the config is compared.

        Raises:
            CheckpointError: It is another model; settings or weights that differ are named.
        """
        if self.model is not None:
            found = fingerprint_of(config, _weights_in(directory, config) or self.model.weights)
            _compare(self.model, found, self.places, directory)


def open_halves(edge: Path, cloud: Path) -> Halves:
    """Open the directories of both sites and check that they belong together.

    Raises:
        CheckpointError: They do not: halves of different models, runs or saves, a trained half with a merely converted
            one, or the sites swapped. Both are named.
    """
    halves = Halves(edge=_open(edge, "edge"), cloud=_open(cloud, "cloud"))
    first, second = halves.both
    if first.manifest is not None and second.manifest is not None:
        difference = first.manifest.model.difference(second.manifest.model)
        if difference is not None:
            raise CheckpointError(
                f"The directories were converted from different models: the edge's {first.directory} from "
                f"{first.manifest.model}, the cloud's {second.directory} from {second.manifest.model}. They differ in "
                f"{difference} (the edge's first). Fix: convert one model for both sites"
            )
    elif first.checkpoint is not None and second.checkpoint is not None:
        if first.checkpoint.save != second.checkpoint.save:
            raise CheckpointError(_not_one_save(edge, cloud, halves))
    else:
        raise CheckpointError(
            f"One half is trained and the other is not: the edge's {_described(first)}, the cloud's "
            f"{_described(second)}. Fix: name the checkpoint directories of both sites, or the converted directories "
            "of both"
        )
    return halves


def check_adapter_base(adapter_of: ModelFingerprint, adapter: Path, config: PreTrainedConfig, base: Path) -> None:
    """Check that an adapter was trained on a base model.

    Args:
        adapter_of: The model on which it was trained.
        adapter: Its directory.
        config: The checked config of the base model.
        base: Directory of the base model.

    Raises:
        CheckpointError: It was trained on another.
    """
    found = fingerprint_of(config, _weights_in(base, config) or adapter_of.weights)
    _compare(adapter_of, found, str(adapter), base)


def _open(directory: Path, site: Site) -> LayerFiles:
    files = LayerFiles(directory, site)
    if files.manifest is None:
        return files
    if files.manifest.site != site:
        raise CheckpointError(
            f"{files.directory} holds the layers of the {files.manifest.site}, but was given as the {site}'s. "
            "Fix: swap the directories."
        )
    if (directory / LATEST_FILE).is_file():
        raise CheckpointError(
            f"{directory} holds converted layers and checkpoints as well. Fix: name the directory of a tag in it for "
            "what was trained, or move the checkpoints elsewhere"
        )
    return files


def _described(files: LayerFiles) -> str:
    what = f"converted from {files.model}" if files.checkpoint is None else f"checkpoint {files.checkpoint}"
    return f"{files.directory} is {what}"


def _not_one_save(edge: Path, cloud: Path, halves: Halves) -> str:
    """Say which saves two checkpoints are of, and name a pair that belongs together if there is one."""
    first, second = halves.both
    latest = ""
    if None not in (first.tag, second.tag) and first.tag != second.tag:
        latest = f" `{LATEST_FILE}` of the edge names {first.tag!r}, that of the cloud {second.tag!r}."
    pair = _common_save(edge, cloud)
    fix = "the directories of one save" if pair is None else f"{pair[0]} and {pair[1]}, which are of one save"
    return (
        f"The sites' checkpoints are not of one save: the edge's {_described(first)}, the cloud's "
        f"{_described(second)}.{latest} Halves of different runs or moments make no model. Fix: name {fix}"
    )


def _common_save(edge: Path, cloud: Path) -> tuple[Path, Path] | None:
    """Return the directories of the newest save that both checkpoint directories hold; None if there is none."""
    first, second = _saves_in(edge, "edge"), _saves_in(cloud, "cloud")
    both = max(first.keys() & second.keys(), key=lambda save: first[save][0], default=None)
    return None if both is None else (first[both][1], second[both][1])


def _saves_in(root: Path, site: Site) -> dict[str, tuple[str, Path]]:
    found: dict[str, tuple[str, Path]] = {}
    for path in root.glob(f"*/{manifest_name(site)}"):
        try:
            manifest = CheckpointManifest.read(path.parent, site)
        except CheckpointError:
            continue  # another tag than the one asked for; it is no use as a proposal
        found[manifest.save] = (manifest.saved_at, path.parent)
    return found


def _weights_in(directory: Path, config: PreTrainedConfig) -> str | None:
    """Return the digest of the weights in a directory as they were before any training; None if it holds none."""
    if (directory / MANIFEST_FILE).is_file():
        return Manifest.read(directory).model.weights
    if (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file():
        return weights_digest(HFWeights(directory, family_of(config).key_map(config)))
    return None


def _compare(wanted: ModelFingerprint, found: ModelFingerprint, what: str, where: Path) -> None:
    difference = wanted.difference(found)
    if difference is not None:
        raise CheckpointError(
            f"{where} is of another model than {what}: {found}, not {wanted}. They differ in {difference} "
            f"({where} last). Fix: name the model that was trained with --hf-config"
        )

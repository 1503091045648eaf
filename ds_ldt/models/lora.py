"""Low-rank adapters, by PEFT: which modules of the whole model get one, and putting them into the layers of a rank.

PEFT chooses modules by the names that they have in the whole model. So a layer is shown to PEFT inside empty modules
that give it its place, e.g. `model.layers.3`; what is written of layer indices and of patterns then means the same as
for the unsplit model. Every rank lays the adapters of the whole model out on the meta device first: all of PEFT's
objections are found there, equally on every rank, before any process group exists.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_ldt.config.lora import LoraSettings
from ds_ldt.errors import Absent, ConfigError, ConfigProblem

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
"""PEFT's name of the one adapter."""

_ALL_LINEAR = "all-linear"
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """Where the adapters of a model go.

    Attributes:
        settings: As configured, with the target modules that were meant.
        names: Name of each layer in the whole model; None for one without a module of its own.
        targets: Names of the modules that get an adapter.
    """

    settings: LoraSettings
    names: tuple[str | None, ...]
    targets: frozenset[str]

    def put_into(self, layer: nn.Module, index: int, *, seed: int) -> nn.Module:
        """Put the adapters of a layer into it and freeze everything else.

        Start values are drawn on the CPU under `seed`, in the order of the modules, whatever else a rank holds.

        Args:
            layer: The layer, with its base weights loaded.
            index: Its pipeline layer index.
            seed: What its start values depend on.

        Returns:
            The layer, or what takes its place if it is a target itself.
        """
        from peft.utils.constants import DUMMY_TARGET_MODULES

        name = self.names[index]
        assert name is not None, f"layer {index} has no name"
        mine = [target for target in self.targets if target == name or target.startswith(name + ".")]
        # PEFT refuses a model without a target; with this one it only freezes, and sees to whole modules and biases.
        targets = sorted(mine) or DUMMY_TARGET_MODULES
        config = lora_config(self.settings, target_modules=targets, layers_to_transform=None, layers_pattern=None)
        with torch.random.fork_rng(devices=[]), _rank_means_no_warning():
            torch.default_generator.manual_seed(seed)
            return _inject(config, {name: layer})[0].get_submodule(name)


def plan_adapters(
    settings: LoraSettings,
    layers: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    model_type: str | None = None,
) -> AdapterPlan:
    """Find out which modules of a model get an adapter.

    Args:
        settings: The "lora" section.
        layers: Every pipeline layer, as `LDTPipelineModule` takes them.
        names: Name of each layer in the unsplit model; by default `model.layers.{index}`.
        model_type: transformers' name of the architecture, from which PEFT's default targets follow.

    Raises:
        ConfigError: PEFT is missing, or refuses the settings for this model; or a name matches nothing.
    """
    _check_installed()
    named = _names_of(layers, names or [f"model.layers.{index}" for index in range(len(layers))])
    built = {name: _on_meta(layers[index]) for index, name in enumerate(named) if name is not None}
    modules = dict(_root_of(built).named_modules())
    wanted = _resolved(settings, modules, model_type)
    embeddings = frozenset(name for name, layer in built.items() if isinstance(layer, nn.Embedding))
    problems = list(_problems(wanted, modules, embeddings))
    if problems:
        raise ConfigError.from_problems(problems)
    try:
        with _rank_means_no_warning():
            _, targets = _inject(lora_config(wanted), built)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise ConfigError.of(
            "ldt.lora",
            found=Absent(f"settings that PEFT refuses: {str(error).strip().splitlines()[0]}"),
            expected="settings that fit this model",
            fix="change target_modules or what the message names",
        ) from error
    if embeddings & set(targets):
        raise ConfigError.from_problems([_embedding("target_modules", min(embeddings & set(targets)))])
    return AdapterPlan(settings=wanted, names=named, targets=frozenset(targets))


def lora_config(settings: LoraSettings, **changes: Any) -> LoraConfig:
    """Return PEFT's own configuration.

    Args:
        settings: The "lora" section.
        changes: Fields of `LoraConfig` to set otherwise.
    """
    from peft import LoraConfig

    values = {**settings.model_dump(), **changes}
    values["lora_alpha"] = _whole(values["lora_alpha"])
    values["alpha_pattern"] = {name: _whole(value) for name, value in values["alpha_pattern"].items()}
    return LoraConfig(**values)


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _check_installed() -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ConfigError.of(
            "ldt.lora",
            found=Absent(f"no PEFT to make adapters with ({error})"),
            expected="the package peft",
            fix="pip install ds_ldt[lora]",
        ) from error


def _names_of(layers: Sequence[Any], names: Sequence[str]) -> tuple[str | None, ...]:
    """Leave out layers without a module of their own: plain functions, and a tied module at its second place."""
    tied: set[str] = set()
    found: list[str | None] = []
    for layer, name in zip(layers, names, strict=True):
        again = isinstance(layer, TiedLayerSpec) and layer.key in tied
        if isinstance(layer, TiedLayerSpec):
            tied.add(layer.key)
        found.append(name if isinstance(layer, LayerSpec | nn.Module) and not again else None)
    return tuple(found)


def _on_meta(layer: LayerSpec | nn.Module) -> nn.Module:
    if isinstance(layer, nn.Module):
        return copy.deepcopy(layer).to("meta")
    with torch.device("meta"):
        module: nn.Module = layer.build()
    return module


def _root_of(layers: Mapping[str, nn.Module]) -> nn.Module:
    """Give layers their places in a whole model that holds nothing else."""
    root = nn.Module()
    for name, layer in layers.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module(last, layer)
    return root


def _inject(config: LoraConfig, layers: Mapping[str, nn.Module]) -> tuple[nn.Module, list[str]]:
    """Let PEFT put adapters into layers; return the model around them and the names of what got one."""
    from peft import LoraModel

    tuner = LoraModel(_root_of(layers), config, ADAPTER)
    return tuner.model, tuner.targeted_module_names


def _resolved(settings: LoraSettings, modules: Mapping[str, nn.Module], model_type: str | None) -> LoraSettings:
    """Replace target modules that PEFT would choose for a whole model."""
    targets = settings.target_modules
    if targets is None:
        targets = _defaults(model_type)
    elif targets == _ALL_LINEAR:
        linear = (name for name, module in modules.items() if isinstance(module, nn.Linear) and name != _HEAD)
        shortest = (name if name.rpartition(".")[2].isdigit() else name.rpartition(".")[2] for name in linear)
        targets = sorted(set(shortest))
    return settings.model_copy(update={"target_modules": targets})


def _defaults(model_type: str | None) -> list[str] | str:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    if model_type not in DEFAULTS:
        raise ConfigError.of(
            "ldt.lora.target_modules",
            found=None,
            expected=f"names of modules: PEFT has no default for {model_type or 'a list of layers'}",
            fix='write e.g. "target_modules": ["q_proj", "v_proj"]',
        )
    chosen = DEFAULTS[model_type]
    return chosen if isinstance(chosen, str) else sorted(chosen)


def _problems(
    settings: LoraSettings, modules: Mapping[str, nn.Module], embeddings: Iterable[str]
) -> Iterator[ConfigProblem]:
    """Find names that match nothing, and embeddings among the modules that are to be trained whole."""
    every = list(filter(None, modules))
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        for name in _listed(getattr(settings, key)):
            is_expression = isinstance(getattr(settings, key), str)
            if not any(re.fullmatch(name, m) if is_expression else _is(m, name) for m in every):
                yield _nothing(key, name)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(settings, key):
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in every):
                yield _nothing(key, pattern)
    numbers = {int(match[1]) for name in every if (match := re.match(r".*?\.[^.]*\.(\d+)\.", name))}
    absent = [index for index in settings.layers_to_transform or [] if index not in numbers]
    if absent:
        yield _nothing("layers_to_transform", absent)
    for name in settings.modules_to_save or []:
        if any(_is(embedding, name) for embedding in embeddings):
            yield _embedding("modules_to_save", name)


def _embedding(key: str, name: str) -> ConfigProblem:
    """An adapter would lose what the embedding passes on besides, a copy the tie to the output layer."""
    return ConfigProblem(
        key=f"ldt.lora.{key}", found=name, expected="no embedding: it stays frozen", fix="take it off the list"
    )


def _listed(names: Iterable[str] | str | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _is(module: str, name: str) -> bool:
    """Whether a name means a module, as PEFT reads lists of names."""
    return module == name or module.endswith(f".{name}")


def _nothing(key: str, name: object) -> ConfigProblem:
    tied = f" (a tied {_HEAD} is the embedding, which stays frozen)" if name == _HEAD else ""
    return ConfigProblem(
        key=f"ldt.lora.{key}",
        found=name,
        expected=f"something that the model has; no module matches{tied}",
        fix="correct it, or take it off",
    )


def _rank_means_no_warning() -> warnings.catch_warnings[None]:
    """PEFT warns of what it does not find in the part of the model it is shown; the whole has been checked."""
    return warnings.catch_warnings(action="ignore")

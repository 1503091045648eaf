"""The "lora" section: PEFT's own names, checked for their form without PEFT.

PEFT checks the rest when the adapters are laid out (`ds_ldt.models.lora`). Settings of PEFT's `LoraConfig` that
cannot be honoured layer by layer over two sites are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ds_ldt.config.messages import Section
from ds_ldt.errors import ConfigError, ConfigProblem

_NAMES = "a list of names of modules, or a regular expression"
_FLAG = "true or false"

_OF_THE_BASE = "it changes the base weights, so that the adapter would not fit the model it is published for"
_OF_THE_DATA = "its start values depend on passes of the whole model over data"
_ON_ONE_MACHINE = "it needs the whole model in one process"
_IN_THE_FORWARD = "it depends on token ids, which the cloud never sees"
REFUSED: Mapping[str, str] = {
    "loftq_config": _OF_THE_BASE,
    "kasa_config": _OF_THE_BASE,
    "eva_config": _OF_THE_DATA,
    "corda_config": _OF_THE_DATA,
    "lora_ga_config": _OF_THE_DATA,
    "monteclora_config": "it adds a term to the loss in every layer, which only the edge computes",
    "velora_config": "it replaces backward passes, which the plan times and orders",
    "arrow_config": "it mixes several adapters, and one is trained",
    "use_bdlora": "it is for serving under tensor parallelism",
    "megatron_config": "it is for Megatron's own tensor parallelism",
    "megatron_core": "it is for Megatron's own tensor parallelism",
    "alora_invocation_tokens": _IN_THE_FORWARD,
    "trainable_token_indices": "PEFT replaces the embedding, which also passes positions on, by its own",
    "ensure_weight_tying": "tied embeddings stay frozen here",
    "layer_replication": "pipeline_num_layers counts the layers of the base model",
    "target_parameters": "it is for mixtures of experts, which are not supported yet",
    "use_qalora": "quantised base weights (QLoRA) are not supported",
    "qalora_group_size": "quantised base weights (QLoRA) are not supported",
    "runtime_config": _ON_ONE_MACHINE,
    "fan_in_fan_out": "PEFT finds it out from the type of a layer",
    "inference_mode": "it would train nothing",
    "task_type": "it follows from the model",
    "base_model_name_or_path": "it is written when the adapter is exported",
    "peft_type": "it is LORA",
}
"""Settings of PEFT's `LoraConfig` that are refused -> why."""


class LoraSettings(Section):
    """Low-rank adapters: the fields of PEFT's `LoraConfig` that can be honoured, with its names and defaults.

    Attributes:
        r: Rank.
        lora_alpha: Adapters are scaled by `lora_alpha / r`.
        target_modules: Which modules get adapters; None for PEFT's own choice for the type of the model.
        exclude_modules: Which modules get none although they are targets.
        lora_dropout: Probability of dropout before an adapter.
        bias: Which biases are trained.
        use_rslora: Scale by `lora_alpha / sqrt(r)`.
        use_dora: Train magnitudes apart from directions.
        init_lora_weights: Start values; true: adapters change nothing at the start.
        layers_to_transform: Indices of the decoder layers that get adapters, as the whole model counts them.
        layers_pattern: Name of the list of layers that `layers_to_transform` counts.
        rank_pattern: Regular expression of module names -> another rank.
        alpha_pattern: Regular expression of module names -> another `lora_alpha`.
        modules_to_save: Modules that are trained whole.
        lora_bias: Give the second matrix of an adapter a bias.
    """

    r: int = Field(default=8, ge=1, description="a whole number >= 1", examples=[8])
    lora_alpha: float = Field(default=8, gt=0, description="a number > 0", examples=[16])
    target_modules: list[str] | str | None = Field(
        default=None, description=f'{_NAMES}, or "all-linear", or null', examples=[["q_proj", "v_proj"]]
    )
    exclude_modules: list[str] | str | None = Field(
        default=None, description=f"{_NAMES}, or null", examples=[["down_proj"]]
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="a number >= 0 and < 1", examples=[0.05])
    bias: Literal["none", "all", "lora_only"] = Field(
        default="none", description='one of "none", "all", "lora_only"', examples=["none"]
    )
    use_rslora: bool = Field(default=False, description=_FLAG, examples=[True])
    use_dora: bool = Field(default=False, description=_FLAG, examples=[True])
    init_lora_weights: Literal[True, False, "gaussian"] = Field(
        default=True,
        description='true, false or "gaussian" (other start values change the base weights or need data)',
        examples=[True],
    )
    layers_to_transform: list[int] | None = Field(
        default=None, description="a list of indices of decoder layers (whole numbers >= 0), or null", examples=[[3]]
    )
    layers_pattern: list[str] | str | None = Field(
        default=None, description="a name or a list of names, or null", examples=["layers"]
    )
    rank_pattern: dict[str, int] = Field(
        default={}, description="an object from names to whole numbers >= 1", examples=[{"layers.3.mlp.up_proj": 4}]
    )
    alpha_pattern: dict[str, float] = Field(
        default={}, description="an object from names to numbers > 0", examples=[{"layers.3.mlp.up_proj": 4}]
    )
    modules_to_save: list[str] | None = Field(
        default=None, description="a list of names of modules, or null", examples=[["lm_head"]]
    )
    lora_bias: bool = Field(default=False, description=_FLAG, examples=[True])

    @model_validator(mode="before")
    @classmethod
    def _no_refused(cls, value: object) -> object:
        found = [key for key in value if key in REFUSED] if isinstance(value, Mapping) else []
        if found:
            raise ConfigError.from_problems(
                ConfigProblem(
                    key=f"ldt.lora.{key}",
                    found=value[key],  # type: ignore[index]
                    expected=f"nothing: {REFUSED[key]}",
                    fix="remove it",
                )
                for key in found
            )
        return value

    @field_validator("target_modules", "exclude_modules", "layers_pattern", "modules_to_save", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        names = [value] if isinstance(value, str) else value
        is_list = isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)
        if value is not None and not is_list:
            raise ValueError("no names")
        return value

    @field_validator("layers_to_transform", mode="before")
    @classmethod
    def _indices(cls, value: object) -> object:
        indices = [value] if type(value) is int else value
        if indices is not None and not (isinstance(indices, list) and indices and all(map(_is_index, indices))):
            raise ValueError("no indices")
        return indices

    @field_validator("rank_pattern", "alpha_pattern", mode="before")
    @classmethod
    def _patterns(cls, value: object, info: Any) -> object:
        kind: Any = int if info.field_name == "rank_pattern" else int | float
        numbers = value.values() if isinstance(value, Mapping) else [None]
        if not all(isinstance(number, kind) and not isinstance(number, bool) and number > 0 for number in numbers):
            raise ValueError("no numbers by name")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> LoraSettings:
        problems = []
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            problems.append(
                ConfigProblem(
                    key="ldt.lora.layers_to_transform",
                    found=self.layers_to_transform,
                    expected="null, because ldt.lora.target_modules is not a list of names",
                    fix="write the indices into the regular expression, or list the names",
                )
            )
        if self.use_dora and self.lora_bias:
            problems.append(
                ConfigProblem(key="ldt.lora.lora_bias", found=True, expected="false with use_dora", fix="remove it")
            )
        if problems:
            raise ConfigError.from_problems(problems)
        return self


def adapters_and_freeze(lora: LoraSettings | None, freeze: Iterable[str]) -> ConfigProblem | None:
    """Find `ldt.freeze` beside adapters, which freeze everything else already."""
    if lora is None or not list(freeze):
        return None
    return ConfigProblem(
        key="ldt.freeze",
        found=list(freeze),
        expected="nothing beside ldt.lora, with which all but the adapters is frozen",
        fix="remove it; ldt.lora.layers_to_transform and exclude_modules say where no adapters go",
    )


def _is_index(value: object) -> bool:
    return type(value) is int and value >= 0

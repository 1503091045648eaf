"""The part of the JSON that belongs to DeepSpeed: what is passed on, and what is refused by name.

DeepSpeed ignores unknown keys in silence, and a setting that ds_ldt does not honour would be ignored too. So every key
at every depth is known (`ds_ldt.config.deepspeed_keys`), or refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ds_ldt.config.deepspeed_keys import BATCH_KEYS, DTYPES, TABLE
from ds_ldt.config.deepspeed_standing import Setting, Standing, flattened
from ds_ldt.config.messages import unknown_key
from ds_ldt.config.rules import GivenBatch, is_whole
from ds_ldt.errors import Absent, ConfigProblem

ELSEWHERE: Mapping[str, str] = {
    path.rpartition(".")[2]: path
    for path, setting in reversed(flattened(TABLE).items())
    if setting.standing is Standing.HONOURED and path.rpartition(".")[2] not in ("enabled", "type", "params")
}
"""Last part of the path of a setting that does something -> its path; of several, the first of the table."""

_MEANT: Mapping[str, str] = {
    "max_grad_norm": 'remove it, and write e.g. "gradient_clipping": 1.0 at the top',
    "clip_grad": 'remove it, and write e.g. "gradient_clipping": 1.0 at the top',
    "seed": "remove it; it is base_seed= of LDTPipelineModule, or seed= of ds_ldt.models.from_pretrained",
}
"""Names that other trainers have for what is said elsewhere here -> what to do."""


def deepspeed_problems(
    settings: Mapping[str, Any], *, elsewhere: Mapping[str, str] | None = None
) -> Iterator[ConfigProblem]:
    """Yield what is wrong with DeepSpeed's settings (the JSON without its "ldt" section), one problem per setting.

    Args:
        settings: The JSON without its "ldt" section.
        elsewhere: Names of settings that are not DeepSpeed's -> their paths, for hints.
    """
    yield from _section_problems(settings, TABLE, "", {**ELSEWHERE, **(elsewhere or {})})
    yield from _batch_problems(settings)
    yield from _combination_problems(settings)
    yield from _recipe_problems(settings)


def precision(settings: Mapping[str, Any]) -> str:
    """Return in what a model computes: "bf16", "fp16" or "fp32"."""
    return next((name for name in ("bf16", "fp16") if _look_up(settings, f"{name}.enabled") == (True, True)), "fp32")


def shards_optimizer(settings: Mapping[str, Any]) -> bool:
    """Return whether weights and optimizer states are trained as slices of flat fp32 buffers, one for each replica."""
    _, stage = _look_up(settings, "zero_optimization.stage")
    return precision(settings) != "fp32" or bool(stage)


def batch_numbers(settings: Mapping[str, Any]) -> GivenBatch:
    """Return the batch numbers that are given; the settings have passed `deepspeed_problems`."""
    return GivenBatch(
        train=settings.get("train_batch_size"),
        micro=settings.get("train_micro_batch_size_per_gpu"),
        accumulation=settings.get("gradient_accumulation_steps"),
    )


def _look_up(settings: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    value: Any = settings
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False, None
        value = value[name]
    return True, value


def _advice_on_auto(value: object) -> str | None:
    if value == "auto":
        return 'write the value: "auto" is filled in by other trainers and is not supported here'
    return None


def _section_problems(
    content: Mapping[str, Any], keys: Mapping[str, Setting], prefix: str, elsewhere: Mapping[str, str]
) -> Iterator[ConfigProblem]:
    """Yield what is wrong with a section and the sections inside it."""
    for name, value in sorted(content.items(), key=lambda item: item[0] in keys):  # unknown ones first
        setting = keys.get(name)
        if setting is None:
            yield _unknown(f"{prefix}{name}", value, keys, elsewhere)
        elif not setting.accepts(value):
            fix = _advice_on_auto(value) or setting.advice(name)
            yield ConfigProblem(key=f"{prefix}{name}", found=value, expected=setting.expected, fix=fix)
        elif setting.keys is not None and isinstance(value, Mapping):
            yield from _section_problems(value, setting.keys, f"{prefix}{name}.", elsewhere)


def _unknown(key: str, value: object, keys: Mapping[str, Setting], elsewhere: Mapping[str, str]) -> ConfigProblem:
    """Return the problem of a key that is not in the table."""
    unwanted = {
        name: f"expected {setting.expected}" for name, setting in keys.items() if setting.standing is Standing.REFUSED
    }
    known = keys.keys() - unwanted.keys() | (set() if "." in key else {"ldt"})
    owner = "this section" if "." in key else 'DeepSpeed or "ldt"'
    problem = unknown_key(key, value, known=known, owner=owner, elsewhere=elsewhere, unwanted=unwanted)
    meant = _MEANT.get(key)
    return problem if meant is None else replace(problem, fix=meant)


def _batch_problems(settings: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    for key in BATCH_KEYS:
        value = settings.get(key)
        if value is not None and not is_whole(value, 1):
            yield ConfigProblem(
                key=key,
                found=value,
                expected="a whole number >= 1, without quotes",
                fix='remove it where it follows from the other two, or write the number: "auto" is filled in by other '
                "trainers and is not supported here"
                if value == "auto"
                else f'write e.g. "{key}": 4',
            )


def _combination_problems(settings: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield settings that do not go together."""
    if all(_look_up(settings, f"{section}.enabled") == (True, True) for section in ("bf16", "fp16")):
        yield ConfigProblem(
            key="fp16.enabled",
            found=True,
            expected="false where bf16.enabled is true: a model computes in one precision",
            fix="enable one of the two",
        )
    computes, (_, dtype) = precision(settings), _look_up(settings, "data_types.param_dtype")
    if any(dtype in names for names in DTYPES.values()) and dtype not in DTYPES[computes]:
        yield ConfigProblem(
            key="data_types.param_dtype",
            found=dtype,
            expected=f'"{computes}", in which the model computes',
            fix='remove it; e.g. "bf16": {"enabled": true} chooses what a model computes in',
        )
    if settings.get("wall_clock_breakdown") is True and settings.get("steps_per_print") is None:
        yield ConfigProblem(
            key="wall_clock_breakdown",
            found=True,
            expected="steps_per_print beside it, which says after how many steps times are printed",
            fix='write e.g. "steps_per_print": 10',
        )


def _recipe_problems(settings: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield what is missing or left to others in the optimizer and the scheduler."""
    for section, required, example in (
        ("optimizer", {"type": '"AdamW"'}, "AdamW"),
        ("scheduler", {"type": '"WarmupLR"', "params": '{"warmup_num_steps": 10}'}, "WarmupLR"),
    ):
        content = settings.get(section)
        if not isinstance(content, Mapping):
            continue
        for name in required:
            if name not in content:
                yield ConfigProblem(
                    key=f"{section}.{name}",
                    found=Absent(),
                    expected=f"{name} of the {section}: DeepSpeed drops or fails on the section without it",
                    fix=f'write e.g. "{name}": {required[name]}, or remove the section',
                )
        params = content.get("params")
        for name, value in params.items() if isinstance(params, Mapping) else ():
            if (section, name) == ("optimizer", "max_grad_norm"):
                yield ConfigProblem(
                    key="optimizer.params.max_grad_norm",
                    found=value,
                    expected="no such key (DeepSpeed refuses it)",
                    fix='remove it, and write e.g. "gradient_clipping": 1.0 at the top',
                )
            elif value == "auto":
                yield ConfigProblem(
                    key=f"{section}.params.{name}",
                    found=value,
                    expected=f"a value that {content.get('type', example)} takes",
                    fix=_advice_on_auto(value) or "write the value",
                )

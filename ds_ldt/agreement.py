"""Do both sites mean the same job? Asked once, before a layer is built.

Each site reads its own copy of the JSON. Two copies that drift apart would end in a hang or, worse, in a run that
trains something else than either file says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config import get_gradient_clipping

from ds_ldt.config import JobConfig
from ds_ldt.errors import Absent, ConfigError, ConfigProblem
from ds_ldt.grid import LDTPipelineGrid
from ds_ldt.reduce import bounded, exchange_text
from ds_ldt.wire import WireSchema

# What decides the arithmetic of a step. Paths, monitors and printing may differ between the sites.
_SHARED_SETTINGS = ("optimizer", "scheduler", "bf16", "fp16", "zero_optimization", "data_types")

_LONGEST_FACT = 300
"""Characters; a longer fact is compared by its digest, so that all of them fit into one message."""


def shared_settings(job: JobConfig) -> dict[str, str]:
    """The settings that both sites must agree on, as short texts by name: what is known without a model."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch_size,
        "gradient_accumulation_steps": job.num_micro_batches,
        "ldt.pipeline_num_layers": job.ldt.configured_layers,
        "ldt.edge": job.ldt.edge.model_dump(),
        "ldt.cloud": job.ldt.cloud.model_dump(),
        "ldt.schedule": job.ldt.schedule.model_dump(),
        "ldt.loss_reduction": job.ldt.loss_reduction,
        "gradient_clipping": get_gradient_clipping(job.deepspeed),
        **({"ldt.lora": job.ldt.lora.model_dump()} if job.ldt.lora is not None else {}),
        **({"ldt.freeze": job.ldt.freeze} if job.ldt.freeze else {}),
        **{key: job.deepspeed[key] for key in _SHARED_SETTINGS if key in job.deepspeed},
    }
    return _as_texts(settings)


def shared_facts(job: JobConfig, *, num_layers: int, wire: WireSchema) -> dict[str, str]:
    """The facts that both sites must agree on, as short texts by name: the shared settings and the model's part."""
    model: dict[str, Any] = {
        "number of layers": num_layers,
        "wire schema": [[str(t) for t in wire.tensors], wire.uniform],
    }
    if wire.per_boundary:
        model["wire schema by boundary"] = _by_boundary(wire)
    return shared_settings(job) | _as_texts(model)


def _as_texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: _short(json.dumps(value, sort_keys=True, default=str)) for name, value in facts.items()}


def _by_boundary(wire: WireSchema) -> dict[int, list[str]]:
    return {boundary: [str(tensor) for tensor in declared] for boundary, declared in (wire.per_boundary or {}).items()}


def _short(text: str) -> str:
    if len(text) <= _LONGEST_FACT:
        return text
    return f"{text[:80]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def differences(
    edge: Mapping[str, str], cloud: Mapping[str, str], *, fix: str = "give both sites the same JSON and the same model"
) -> list[ConfigProblem]:
    """One problem for each fact on which the sites differ, in alphabetical order; ``fix`` says what to do."""
    return [
        ConfigProblem(
            key=name,
            found=Absent(f"edge {edge.get(name, 'nothing')}, cloud {cloud.get(name, 'nothing')}"),
            expected="the same on both sites",
            fix=fix,
        )
        for name in sorted({*edge, *cloud})
        if edge.get(name) != cloud.get(name)
    ]


def agree(job: JobConfig, grid: LDTPipelineGrid, *, num_layers: int, wire: WireSchema) -> None:
    """Compare the facts of the two sites.

    Raises:
        ConfigError: on every rank of both sites, if they differ; all differences are listed.
        LinkError: the other site did not answer within ``ldt.timeout_s``.
    """
    mine = shared_facts(job, num_layers=num_layers, wire=wire)
    with bounded("the comparison of the two sites' configurations", grid):
        edge, cloud = (json.loads(text) for text in exchange_text(json.dumps(mine), grid))
    problems = differences(edge, cloud)
    if problems:
        raise ConfigError.from_problems(problems)


def agree_on(values: Mapping[str, object], grid: LDTPipelineGrid) -> None:
    """Compare values of a script, such as the number of its steps, between the sites. All ranks call it.

    Args:
        values: by what names them, e.g. ``--steps``. They cross the link: name nothing that belongs to the edge alone.
        grid: the groups.

    Raises:
        ConfigError: on every rank of both sites, if they differ; all differences are listed.
        LinkError: the other site did not answer within ``ldt.timeout_s``.
    """
    with bounded("the comparison of the two sites' arguments", grid):
        edge, cloud = (json.loads(text) for text in exchange_text(json.dumps(_as_texts(values)), grid))
    problems = differences(edge, cloud, fix="give both sites the same")
    if problems:
        raise ConfigError.from_problems(problems, where="what the two sites were started with")

"""Do both sites mean the same job? Asked once, before a layer is built.

Each site reads its own copy of the JSON. Two copies that drift apart would end in a hang or, worse, in a run that
trains something else than either file says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.pipe import LayerSpec
from deepspeed.runtime.config import get_gradient_clipping

from ds_ldt.comm.collectives import bounded, exchange_text, ranks_where
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.identity import ModelFingerprint, draw_identity
from ds_ldt.comm.wire import WireSchema
from ds_ldt.config.schema import JobConfig
from ds_ldt.errors import Absent, ConfigError, ConfigProblem

# What decides the arithmetic or the plan of a step. These may differ, as no other rank depends on them: paths
# (ldt.trace, ldt.measured_costs), monitors and printing; ldt.timeout_s, as each rank bounds its own waits; activation
# checkpoints, as what is computed anew has the same bits; ldt.allow_exposed_edge, which each site has accepted by now.
_SHARED_SETTINGS = (
    *("optimizer", "scheduler", "bf16", "fp16", "zero_optimization", "data_types"),
    "dataloader_drop_last",  # one edge replica that drops a batch would be ahead of the others
)

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
        "ldt.link": job.ldt.link.model_dump(),
        "ldt.loss_reduction": job.ldt.loss_reduction,
        "gradient_clipping": get_gradient_clipping(job.deepspeed),
        **({"ldt.lora": job.ldt.lora.model_dump()} if job.ldt.lora is not None else {}),
        **({"ldt.freeze": job.ldt.freeze} if job.ldt.freeze else {}),
        **{key: job.deepspeed[key] for key in _SHARED_SETTINGS if key in job.deepspeed},
    }
    return _as_texts(settings)


def shared_facts(
    job: JobConfig, *, layers: Sequence[Any], wire: WireSchema, base_seed: int, fingerprint: ModelFingerprint | None
) -> dict[str, str]:
    """The facts that both sites must agree on, as short texts by name: the shared settings and the model's part.

    Args:
        job: the configuration.
        layers: every layer of the model, as specs, modules or functions.
        wire: what may cross a boundary.
        base_seed: seed of initial weights and of what layers draw.
        fingerprint: which model it is, if that is known.
    """
    model: dict[str, Any] = {
        "number of layers": len(layers),
        "kinds of layers": [_kind(layer) for layer in layers],
        "base_seed": base_seed,
        "wire schema": [[str(t) for t in wire.tensors], wire.uniform],
        **({} if fingerprint is None else fingerprint.facts()),
    }
    if wire.per_boundary:
        model["wire schema by boundary"] = _by_boundary(wire)
    return shared_settings(job) | _as_texts(model)


def _kind(layer: Any) -> str:
    """The name of a layer's class; of a function, which may be made anew on each site, only that it is one."""
    made = layer.typename if isinstance(layer, LayerSpec) else type(layer)
    return str(getattr(made, "__name__", "function"))


def _as_texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: _short(json.dumps(value, sort_keys=True, default=str)) for name, value in facts.items()}


def _by_boundary(wire: WireSchema) -> dict[int, list[str]]:
    return {boundary: [str(tensor) for tensor in declared] for boundary, declared in (wire.per_boundary or {}).items()}


def _short(text: str) -> str:
    if len(text) <= _LONGEST_FACT:
        return text
    return f"{text[:80]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def site_differences(
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


def agree(job: JobConfig, grid: LDTPipelineGrid, **model: Any) -> str:
    """Compare the facts of the two sites, and within each site those of every rank; and give the run an identity.

    Args:
        job: the configuration.
        grid: the groups.
        model: the rest of what :func:`shared_facts` takes.

    Returns:
        The identity of the run, drawn by the first rank of the edge.

    Raises:
        ConfigError: on every rank of both sites, if they differ; all differences are listed.
        LinkError: the other site did not answer within ``ldt.timeout_s``.
    """
    with bounded("the comparison of the two sites' configurations", grid):
        told = {"run": draw_identity(), "facts": shared_facts(job, **model)}
        edge = _compare(told, grid, of="JSON and the same model", within="settings within a site")
    return str(edge["run"])


def agree_on(values: Mapping[str, object], grid: LDTPipelineGrid) -> None:
    """Compare values of a script, such as the number of its steps, on every rank of both sites.

    Args:
        values: by what names them, e.g. ``--steps``. They cross the link: name nothing that belongs to the edge alone.
        grid: the groups.

    Raises:
        ConfigError: on every rank of both sites, if they differ; all differences are listed.
        LinkError: the other site did not answer within ``ldt.timeout_s``.
    """
    with bounded("the comparison of the two sites' arguments", grid):
        _compare({"facts": _as_texts(values)}, grid, of="arguments", within="arguments within a site")


def _compare(told: dict[str, Any], grid: LDTPipelineGrid, *, of: str, within: str) -> dict[str, Any]:
    """Compare the facts that each rank was told; return what the first rank of the edge tells."""
    edge, cloud = (json.loads(text) for text in exchange_text(json.dumps(told), grid))
    problems = site_differences(edge["facts"], cloud["facts"], fix=f"give both sites the same {of}")
    leaders = edge if grid.site == "edge" else cloud
    others = _differences_within(told["facts"], leaders["facts"], grid, of=of)
    odd = ranks_where(bool(others), grid)
    if problems or others:
        raise ConfigError.from_problems([*problems, *others])
    if odd:
        raise ConfigError.of(
            within,
            found=Absent(f"rank(s) {', '.join(map(str, odd))} that differ from the first rank of their site"),
            expected=f"the same {of} on every machine of a site",
            fix="see the messages of those ranks",
        )
    return dict(edge)


def _differences_within(
    mine: Mapping[str, str], leaders: Mapping[str, str], grid: LDTPipelineGrid, *, of: str
) -> list[ConfigProblem]:
    """What this rank was told otherwise than the first rank of its site: machines of a site have copies, too."""
    return [
        ConfigProblem(
            key=name,
            found=Absent(
                f"{leaders.get(name, 'nothing')} on rank {grid.site_ranks[0]}, {mine.get(name, 'nothing')} on rank "
                f"{grid.global_rank} of the {grid.site}"
            ),
            expected="the same on every rank of a site",
            fix=f"give every machine of a site the same {of}",
        )
        for name in sorted({*mine, *leaders})
        if mine.get(name) != leaders.get(name)
    ]

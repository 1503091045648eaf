"""The example configurations: each loads for its number of processes, fits its model, and can be planned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from ds_ldt.config.schema import JobConfig, load_config
from ds_ldt.errors import ConfigError
from ds_ldt.plan import PipelineShape, build_plan
from ds_ldt.topology.layout import Layout
from ds_ldt.topology.ranks import RankMap

FOLDER = Path(__file__).parent.parent / "ds_configs"
SMOLLM2_LAYERS = 30
VL_LAYERS = {
    "vl_photographs": {"vision_encoder": 6, "text_decoder": 6},
    "vl_3_stage_3_chunks_2_domains": {"vision_encoder": 32, "text_decoder": 36},
}
WORLD_SIZES = {
    "smollm2_lora": 3,
    "smollm2_quickstart": 3,
    "text_2_stage_1_domain": 2,
    "text_2_stage_2_domains": 3,
    "text_2_stage_3_chunks": 2,
    "text_2_stage_bf16": 3,
    "text_3_stage_2_domains_2_edge_replicas": 6,
    "text_3_stage_4_domains_2_edge_replicas": 10,
    "vl_3_stage_3_chunks_2_domains": 5,
    "vl_photographs": 2,
}


def layout_of(name: str, job: JobConfig) -> Layout:
    """The layers of SmolLM2-135M, or those of the model with a vision encoder that an example is for."""
    is_vl = name in VL_LAYERS
    return Layout.build(
        job.ldt.pipeline_num_layers,
        num_layers=VL_LAYERS[name] if is_vl else SMOLLM2_LAYERS,
        num_leading=1,
        num_between=2 if is_vl else 0,
        num_trailing=2,
    )


def test_every_example_is_tested() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(WORLD_SIZES)


@pytest.mark.parametrize("name, world_size", WORLD_SIZES.items())
def test_example_loads_and_plans(name: str, world_size: int) -> None:
    job = load_config(FOLDER / f"{name}.json", world_size=world_size)
    layout = layout_of(name, job)
    shape = PipelineShape.from_layout(
        layout,
        num_micro_batches=job.num_micro_batches,
        num_domains=job.num_domains,
        num_replicas=job.num_replicas,
    )
    ranks = RankMap.from_config(job)
    for training in (True, False):
        plan = build_plan(
            shape,
            policy=job.ldt.schedule.policy,
            training=training,
            max_in_flight=job.ldt.schedule.max_in_flight,
        )
        per_rank = [plan.for_rank(rank) for rank in ranks.ranks()]
        assert all(per_rank)
        stages = [virtual.stage for virtual in layout.virtual_stages]
        for channel in plan.channels():
            assert channel.destination in ranks.peers(channel.source, stages=stages)


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_example_is_refused_for_another_number_of_processes(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("E*Te + (P-1)*D*Tc")):
        load_config(FOLDER / f"{name}.json", world_size=WORLD_SIZES[name] + 1)


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_example_is_a_deepspeed_config(name: str) -> None:
    job = load_config(FOLDER / f"{name}.json")
    # Outside a job DeepSpeed takes the data parallel size for 1.
    settings = job.deepspeed | {"train_batch_size": job.train_batch_size // job.num_domains}
    config = DeepSpeedConfig(settings)
    assert config.gradient_accumulation_steps == job.num_micro_batches
    assert config.optimizer_name == "adamw"
    assert config.bfloat16_config.enabled is (name == "text_2_stage_bf16")


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_example_names_no_absolute_path(name: str) -> None:
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert not re.search(r'"\s*(/|~|[A-Za-z]:\\)', text)


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_example_name_tells_its_sizes(name: str) -> None:
    job = load_config(FOLDER / f"{name}.json")
    told = {unit: int(number) for number, unit in re.findall(r"(\d+)_(stage|chunk|domain|edge_replica)", name)}
    sizes = {
        "stage": job.num_stages,
        "chunk": layout_of(name, job).num_chunks,
        "domain": job.num_domains,
        "edge_replica": job.num_replicas,
    }
    assert told == {unit: sizes[unit] for unit in told}

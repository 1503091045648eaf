"""The configuration of a job: a DeepSpeed JSON with an "ldt" section, checked before any process group exists.

    job = load_config("ds_configs/text_2_stage_2_domains.json", world_size=3)
    job.ldt.pipeline_num_layers, job.num_micro_batches, job.deepspeed

Every fault found is listed in one `ConfigError`. The text depends on the configuration only, so every rank of a
job raises the same one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from ds_ldt.config.deepspeed_keys import BATCH_KEYS
from ds_ldt.config.deepspeed_settings import ELSEWHERE, batch_numbers, deepspeed_problems
from ds_ldt.config.json_file import read_json
from ds_ldt.config.layer_matrix import (
    LAYERS,
    MODALITIES,
    Matrices,
    Matrix,
    as_configured,
    form_problem,
    matrices_of,
    place_problem,
)
from ds_ldt.config.lora import LoraSettings, adapters_and_freeze
from ds_ldt.config.messages import Section, paths_of, translated
from ds_ldt.config.rules import (
    complete_batch,
    edge_divides_cloud,
    one_for_each_chunk,
    weights_can_wait,
    world_size_fits,
)
from ds_ldt.errors import Absent, ConfigError, ConfigProblem

_WEEK_S = 604800.0
_SIZE = "a whole number >= 1"
_SECTION = "an object with named settings"
_EACH = f"or one for each of {' and '.join(MODALITIES)}"


def _by_modality(accepts: Callable[[float], bool]) -> BeforeValidator:
    """Accept a number or one for each modality; pydantic alone would list a fault once for each form."""

    def checked(value: object) -> object:
        if isinstance(value, Mapping) and set(value) != set(MODALITIES):
            raise ValueError("not the modalities")
        for number in value.values() if isinstance(value, Mapping) else (value,):
            if not isinstance(number, int | float) or isinstance(number, bool) or not accepts(number):
                raise ValueError("no such number")
        return value

    return BeforeValidator(checked)


Positive = Annotated[float | dict[str, float], _by_modality(lambda number: 0 < number < math.inf)]
NotNegative = Annotated[float | dict[str, float], _by_modality(lambda number: 0 <= number < math.inf)]
"""A number, or where the modalities of a model differ one for each of them."""


class SiteConfig(Section):
    """Sizes of one site.

    Attributes:
        data_parallel_size: Replicas E on the edge, domains D in the cloud. E divides D.
        tensor_parallel_size: Ranks that share one stage of one replica or domain; only 1 in this version.
    """

    data_parallel_size: int = Field(default=1, ge=1, description=_SIZE, examples=[2])
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=1, description="1 (other tensor parallel sizes are not supported yet)", examples=[1]
    )


class ScheduleConfig(Section):
    """How the micro-batches are ordered.

    Attributes:
        policy: Name of the schedule policy; "auto" takes the one that is best for the link.
        max_in_flight: Most micro-batches of one domain that a rank may hold at once; None: what the policy asks for.
        memory_gb: Gigabytes (1e9 bytes) of a rank that the activations in flight may take; None for no limit. It
            limits once "auto" has measured a micro-batch, or from the start if `layer_activation_mb` gives it.
        layer_activation_mb: Megabytes (1e6 bytes) that a layer keeps of one micro-batch until its backward; a hint.
        layer_forward_ms: Milliseconds of one layer's forward of one micro-batch; a hint, used until it is measured.
            Only its ratio to the latency matters: too low a value plans for more micro-batches in flight than needed.
        split_backward: Run the backwards of the cloud in two halves: the gradients of the inputs first, which the next
            rank waits for; those of the weights when there is nothing else to do.
        measure_steps: Training steps that "auto" measures, the first of several as a warm-up; 0: it uses the hints.
    """

    policy: Literal["ldt_1f1b", "closed_form", "greedy", "auto"] = Field(
        default="auto", description='one of "ldt_1f1b", "closed_form", "greedy", "auto"', examples=["auto"]
    )
    max_in_flight: int | None = Field(default=None, ge=1, description=f"{_SIZE}, or null", examples=[8])
    memory_gb: float | None = Field(default=None, gt=0, description="gigabytes, a number > 0, or null", examples=[16])
    layer_activation_mb: Positive | None = Field(
        default=None, description=f"megabytes, a number > 0, {_EACH}, or null", examples=[40]
    )
    layer_forward_ms: Positive = Field(default=2.0, description=f"milliseconds, a number > 0, {_EACH}", examples=[2])
    split_backward: bool = Field(default=False, description="true or false", examples=[True])
    measure_steps: int = Field(default=3, ge=0, description="a whole number >= 0", examples=[3])


class LinkConfig(Section):
    """What is known of the wide-area link beforehand: hints for planning.

    Attributes:
        latency_ms: One-way latency in milliseconds. A hint for planning.
        bandwidth_mbps: Bandwidth of an edge replica in megabits per second, each way; 0 means unlimited. A hint.
        message_mb: Megabytes (1e6 bytes) of the activations of one micro-batch at a boundary, and of their gradient;
            of the largest one where sizes differ. A hint.
    """

    latency_ms: float = Field(default=20.0, ge=0, description="milliseconds, a number >= 0", examples=[20])
    bandwidth_mbps: float = Field(
        default=1000.0, ge=0, description="megabits per second, a number >= 0 (0: unlimited)", examples=[1000]
    )
    message_mb: NotNegative = Field(default=1.0, description=f"megabytes, a number >= 0, {_EACH}", examples=[1])


class TraceConfig(Section):
    """Which steps are recorded.

    Attributes:
        path: Directory of this site into which each rank writes `rank_<rank>.json`.
        steps: The first and the last training step to record, counted from 1.
    """

    path: str = Field(min_length=1, description="the path of a directory", examples=["trace"])
    steps: tuple[int, int] = Field(description="two whole numbers, first <= last, from 1 on", examples=[[3, 4]])

    @field_validator("steps", mode="before")
    @classmethod
    def _range(cls, value: object) -> object:
        if isinstance(value, list | tuple) and len(value) == 2:  # noqa: PLR2004
            first, last = value
            if all(type(step) is int for step in value) and 1 <= first <= last:
                return (first, last)
        raise ValueError("no range of steps")


class LDTConfig(Section):
    """The "ldt" section.

    Attributes:
        pipeline_num_layers: Layers per cell of a V x P matrix: a row per chunk, a column per stage, stage 0 the edge.
            For a model of two modalities a mapping from each modality to such a matrix.
        edge: Sizes of the edge.
        cloud: Sizes of the cloud.
        schedule: The schedule policy and its memory cap.
        link: Hints about the link.
        timeout_s: Seconds without an answer from a peer after which the job ends.
        allow_exposed_edge: Accept no decoder layer before the first hop or after the last one.
        loss_reduction: Mean over target tokens or over micro-batches; None for the model's default ("token" for
            Hugging Face models, "micro_batch" for lists of layers).
        activation_checkpoint_interval: Layers between checkpoints, by chunk, 0 for none; None: DeepSpeed's setting.
        freeze: Names of parts of the model that are not trained; an unknown name is answered with those there are.
        lora: Settings of PEFT's `LoraConfig`: adapters trained in place of the model; None to train the model itself.
        measured_costs: File into which rank 0 writes what "auto" measured, for `ds-ldt plan --costs`; None for none.
        trace: Steps that each rank records as a Chrome trace, for `ds-ldt draw --trace` and Perfetto; None for none.
    """

    pipeline_num_layers: Matrix | Matrices = Field(
        description="a list of chunks, each a list of layer counts, one count per stage",
        examples=[[[2, 13, 13], [2, 0, 0]]],
    )
    edge: SiteConfig = Field(default=SiteConfig(), description=_SECTION, examples=[{"data_parallel_size": 1}])
    cloud: SiteConfig = Field(default=SiteConfig(), description=_SECTION, examples=[{"data_parallel_size": 2}])
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description=_SECTION, examples=[{"policy": "auto"}])
    link: LinkConfig = Field(default=LinkConfig(), description=_SECTION, examples=[{"latency_ms": 20}])
    timeout_s: float = Field(
        default=300.0, gt=0, le=_WEEK_S, description=f"seconds, a number > 0 and <= {_WEEK_S:.0f}", examples=[300]
    )
    allow_exposed_edge: bool = Field(default=False, description="true or false", examples=[True])
    loss_reduction: Literal["token", "micro_batch"] | None = Field(
        default=None, description='one of "token", "micro_batch", null', examples=["token"]
    )
    activation_checkpoint_interval: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, description="whole numbers of layers >= 0, one for each chunk, or null", examples=[[1, 0]]
    )
    freeze: list[str] = Field(
        default=[], description="a list of names of parts of the model", examples=[["vision_encoder"]]
    )
    lora: LoraSettings | None = Field(
        default=None, description=f"{_SECTION}, or null", examples=[{"r": 8, "target_modules": ["q_proj"]}]
    )
    measured_costs: str | None = Field(
        default=None, min_length=1, description="the path of a file, or null", examples=["costs.json"]
    )
    trace: TraceConfig | None = Field(
        default=None, description=f"{_SECTION}, or null", examples=[{"path": "trace", "steps": [3, 4]}]
    )

    @field_validator("pipeline_num_layers", mode="before")
    @classmethod
    def _matrix(cls, value: object) -> object:
        problem = form_problem(value)
        if problem is not None:
            raise ConfigError.from_problems([problem])
        matrices = matrices_of(value)
        return matrices.get(LAYERS, matrices)

    @model_validator(mode="after")
    def _sizes(self) -> LDTConfig:
        # A model may bring leading and trailing layers, of which this section knows nothing: they get the benefit of
        # the doubt here, and `Layout.build` looks again when the model is known.
        matrices = self.matrices
        found = [
            edge_divides_cloud(self.edge.data_parallel_size, self.cloud.data_parallel_size),
            one_for_each_chunk(self.activation_checkpoint_interval, len(next(iter(matrices.values())))),
            place_problem(matrices, num_leading=1, num_trailing=1, allow_exposed_edge=self.allow_exposed_edge),
            adapters_and_freeze(self.lora, self.freeze),
            *self._hints(),
        ]
        problems = [problem for problem in found if problem is not None]
        if problems:
            raise ConfigError.from_problems(problems)
        return self

    def _hints(self) -> Iterator[ConfigProblem]:
        """Find hints for each modality of a model that has one."""
        for path in ("schedule.layer_activation_mb", "schedule.layer_forward_ms", "link.message_mb"):
            value = attrgetter(path)(self)
            if isinstance(value, dict) and LAYERS in self.matrices:
                yield ConfigProblem(
                    key=f"ldt.{path}",
                    found=value,
                    expected="one number, because ldt.pipeline_num_layers is one matrix",
                    fix="write a number",
                )

    @property
    def matrices(self) -> Matrices:
        """`pipeline_num_layers` as a mapping: each modality -> its matrix; `layers` -> a matrix that stands alone."""
        return matrices_of(self.pipeline_num_layers)

    @property
    def num_stages(self) -> int:
        """P, the edge included."""
        return len(next(iter(self.matrices.values()))[0])

    @property
    def configured_layers(self) -> list[list[int]] | dict[str, list[list[int]]]:
        """`pipeline_num_layers` as JSON has it."""
        return as_configured(self.matrices)


LDT_PATHS: Mapping[str, str] = {
    path.rpartition(".")[2]: path
    for path in reversed(paths_of(LDTConfig, "ldt."))
    if path.rpartition(".")[2] not in ("path", "r", "bias")
}
"""Last part of the path of a setting of the "ldt" section -> its path; of several, the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A checked configuration; `load_config` builds it.

    Attributes:
        ldt: The "ldt" section.
        deepspeed: The rest of the JSON with all three batch numbers, fit to be passed to DeepSpeed unchanged.
        micro_batch_size: Samples per micro-batch and domain.
        num_micro_batches: M, micro-batches per domain and step (`gradient_accumulation_steps`).
        train_batch_size: Samples per step over all domains.
    """

    ldt: LDTConfig
    deepspeed: dict[str, Any]
    micro_batch_size: int
    num_micro_batches: int
    train_batch_size: int

    @property
    def num_domains(self) -> int:
        """D, the number of data-parallel cloud pipelines."""
        return self.ldt.cloud.data_parallel_size

    @property
    def num_replicas(self) -> int:
        """E, the number of data-parallel copies of the edge stage."""
        return self.ldt.edge.data_parallel_size

    @property
    def slice_size(self) -> int:
        """K = D/E, the number of domains that each edge replica serves."""
        return self.num_domains // self.num_replicas

    @property
    def num_stages(self) -> int:
        """P, the edge included."""
        return self.ldt.num_stages

    @property
    def world_size(self) -> int:
        """E*Te + (P-1)*D*Tc, the number of processes of the job."""
        on_edge = self.num_replicas * self.ldt.edge.tensor_parallel_size
        return on_edge + (self.num_stages - 1) * self.num_domains * self.ldt.cloud.tensor_parallel_size


ConfigSource = str | PathLike[str] | Mapping[str, Any] | JobConfig


def load_config(source: ConfigSource, *, world_size: int | None = None) -> JobConfig:
    """Read and check a configuration.

    Args:
        source: Path of a JSON file, its content as a mapping (never changed), or a `JobConfig` (returned as is).
        world_size: Number of processes launched, to be checked; None where none are.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: Something is wrong; all faults found are listed.
    """
    where = None
    if isinstance(source, JobConfig):
        job = source
    elif isinstance(source, Mapping):
        job = _job(copy.deepcopy(dict(source)), where)
    elif isinstance(source, str | PathLike):
        where = str(source)
        job = _job(read_json(source), where)
    else:
        raise ConfigError.of(
            "config",
            found=Absent(f"an object of type {type(source).__name__}"),
            expected="the path of a JSON file or its content as a dict",
            fix="pass one of the two",
        )
    if world_size is not None:
        problem = world_size_fits(
            world_size,
            edge=(job.num_replicas, job.ldt.edge.tensor_parallel_size),
            cloud=(job.num_domains, job.ldt.cloud.tensor_parallel_size),
            num_stages=job.num_stages,
        )
        if problem is not None:
            raise ConfigError.from_problems([problem], where=where)
    return job


def _job(settings: dict[str, Any], where: str | None) -> JobConfig:
    """Check a whole configuration.

    Args:
        settings: The content of the JSON; it becomes part of the result.
        where: Name of the file, for messages.
    """
    section = settings.pop("ldt", None)
    problems = list(deepspeed_problems(settings, elsewhere=LDT_PATHS))
    try:
        ldt = _ldt_config(section)
    except ConfigError as error:
        raise ConfigError.from_problems([*problems, *error.problems], where=where) from None
    too_early = weights_can_wait(settings, split_backward=ldt.schedule.split_backward)
    if too_early is not None:
        problems.append(too_early)
    if problems:
        raise ConfigError.from_problems(problems, where=where)
    batch = complete_batch(
        batch_numbers(settings), num_domains=ldt.cloud.data_parallel_size, num_replicas=ldt.edge.data_parallel_size
    )
    if isinstance(batch, ConfigProblem):
        raise ConfigError.from_problems([batch], where=where)
    return JobConfig(
        ldt=ldt,
        deepspeed=settings | dict(zip(BATCH_KEYS, (batch.train, batch.micro, batch.accumulation), strict=True)),
        micro_batch_size=batch.micro,
        num_micro_batches=batch.accumulation,
        train_batch_size=batch.train,
    )


def _ldt_config(section: object) -> LDTConfig:
    """Check the "ldt" section alone; ConfigError with all that is wrong with it."""
    if not isinstance(section, Mapping):
        raise ConfigError.of(
            "ldt",
            found=Absent() if section is None else section,
            expected='the section that describes the split, {"pipeline_num_layers": ..., "cloud": ...}',
            fix='add an "ldt" object to the JSON',
        )
    try:
        return LDTConfig.model_validate(dict(section))
    except ValidationError as error:
        known = {**ELSEWHERE, **LDT_PATHS}
        raise ConfigError.from_problems(translated(error, LDTConfig, elsewhere=known)) from None

"""Targets about half precision, loss scaling and ZeRO stage 1, and their oracle: the rules in plain torch, unsplit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn

import ds_ldt
from tests.engine.behaviour import Square, TiedLinear
from tests.engine.cases import weights_of
from tests.toy import WIDTH, Block, Points, Trace, build_unsplit, domain_batches, layer_classes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Sometimes(nn.Module):
    """A layer of which a part is used by some micro-batches only, and another part never."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.never = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.block(inputs) if inputs.is_meta or bool(inputs[0, 0] > 0) else inputs


def transposed(tied: TiedLinear, inputs: Tensor) -> Tensor:
    """The tail's use of the tied matrix, three of its columns."""
    return (inputs @ tied.weight.t())[..., :3]


class UnsplitTied(nn.Module):
    """The oracle: one parameter used twice."""

    def __init__(self, middle: int) -> None:
        super().__init__()
        for index, layer in enumerate(build_unsplit([TiedLinear, *[Square] * middle])):
            self.add_module(str(index), layer)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.children():
            hidden = layer(hidden)
        return transposed(self.get_submodule("0"), hidden)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        settings: the configuration.
        model: "plain", "tied", "sometimes" or "bare" (a first and a last layer that the matrix does not count).
        steps: how many.
        spoiled: (stage, replica, step): a gradient of this stage and replica becomes infinite in this step.
        frozen: stages of which nothing is trained; "some" freezes a bias of each layer.
        client: names of optimizer and scheduler that are passed as objects or callables instead of by the JSON.
    """

    settings: dict[str, Any]
    model: str = "plain"
    steps: int = 4
    spoiled: tuple[int, int, int] | None = None
    frozen: tuple[int, ...] | str = ()
    client: str = ""

    @property
    def num_layers(self) -> int:
        return sum(map(sum, self.settings["ldt"]["pipeline_num_layers"])) + 2 * (self.model == "bare")

    @property
    def dtype(self) -> torch.dtype:
        on = [name for name in ("bf16", "fp16") if self.settings.get(name, {}).get("enabled")]
        return DTYPES[on[0] if on else "fp32"]

    def classes(self) -> list[type[nn.Module]]:
        classes = layer_classes(self.num_layers)
        if self.model == "sometimes":  # on the edge, and on the cloud stage
            classes[1] = classes[2] = Sometimes
        return classes

    def freeze(self, layers: dict[int, nn.Module], stage_of: Callable[[int], int]) -> None:
        for index, layer in layers.items():
            for name, parameter in layer.named_parameters():
                frozen = name.endswith("bias") if self.frozen == "some" else stage_of(index) in self.frozen
                parameter.requires_grad_(not frozen)


def build(case: Case) -> ds_ldt.LDTPipelineModule:
    """The model of a case, split as configured."""
    options: dict[str, Any] = {"num_leading": 1, "num_trailing": 1} if case.model == "bare" else {}
    layers: list[Any] = [LayerSpec(one) for one in case.classes()]
    if case.model == "tied":
        middle = [LayerSpec(Square)] * (case.num_layers - 2)
        ends = [ds_ldt.TiedLayerSpec("m", TiedLinear), ds_ldt.TiedLayerSpec("m", TiedLinear, forward_fn=transposed)]
        layers = [ends[0], *middle, ends[1]]
    module = ds_ldt.LDTPipelineModule(
        layers,
        case.settings,
        nn.functional.mse_loss,
        batch_fn=lambda batch: (batch[0].to(case.dtype), batch[1].to(case.dtype)),
        **options,
    )
    case.freeze(module.owned_layers(), module.stage_owner)
    return module


def engine_of(case: Case) -> ds_ldt.LDTPipelineEngine:
    """The engine of a case, with its optimizer and scheduler as it wants them passed."""
    module = build(case)
    passed: dict[str, Any] = {}
    if case.client == "objects":
        passed["optimizer"] = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
        passed["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(passed["optimizer"], 2, gamma=0.5)
    elif case.client == "callables":
        passed["optimizer"] = lambda parameters: torch.optim.Adam(parameters, lr=0.01)
        passed["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    data = Points(96) if dist.get_rank() < module.job.num_replicas else None
    engine, _, _, _ = ds_ldt.initialize(model=module, training_data=data, **passed)
    if case.spoiled is not None and (engine.stage_id, engine.grid.data_parallel_id) == case.spoiled[:2]:
        step = case.spoiled[2]
        next(engine.module.parameters()).register_hook(
            lambda grad: torch.full_like(grad, float("inf")) if engine.global_steps == step else grad
        )
    return engine


def train(case: Case) -> dict[str, Any]:
    """Train a case; what this rank saw."""
    engine = engine_of(case)
    seen: dict[str, Any] = {name: [] for name in ("losses", "norms", "scales", "lrs", "skipped")}
    for _ in range(case.steps):
        seen["lrs"].append(engine.get_lr())
        seen["losses"].append(engine.train_batch().item())
        seen["norms"].append(float(engine.get_global_grad_norm()))
        seen["scales"].append(engine.cur_scale)
        seen["skipped"].append(engine.skipped_steps)
        assert all(p.grad is None or not p.grad.any() for p in engine.module.parameters()) or case.dtype in (
            torch.bfloat16,
            torch.float16,
        )
    if engine.using_sharded_optimizer:
        assert not any(gradient.any() for gradient in engine.optimizer.get_grads_for_reduction()[0])
        numbers = [partition.numel() for partition in engine.optimizer.fp32_groups_flat_partition]
        whole = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
        assert whole <= sum(numbers) * engine.grid.num_physical_replicas < whole + 9
    mean = engine.eval_batch(iter(_first_batches(case)) if engine.site == "edge" else None, num_micro_batches=1)
    found = {**seen, "weights": weights_of(engine), "eval": mean.item()}
    engine.destroy()
    return found


def _first_batches(case: Case) -> list[Any]:
    domains = case.settings["ldt"]["cloud"]["data_parallel_size"]
    replicas = case.settings["ldt"]["edge"]["data_parallel_size"]
    here = range(dist.get_rank() * domains // replicas, (dist.get_rank() + 1) * domains // replicas)
    return [next(domain_batches(Points(96), domain, domains, 2)) for domain in here]


def train_many(cases: list[Case]) -> list[dict[str, Any]]:
    """Several trainings one after the other in the same processes."""
    return [train(case) for case in cases]


@dataclass(slots=True)
class Scale:
    """The loss scale of fp16, by the published rule (hysteresis 1)."""

    value: float = 1.0
    window: int | None = None
    since: int = 0

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Scale:
        fp16 = settings.get("fp16", {})
        if not fp16.get("enabled"):
            return cls()
        if fp16.get("loss_scale"):
            return cls(value=fp16["loss_scale"])
        return cls(value=2.0 ** fp16["initial_scale_power"], window=fp16["loss_scale_window"])

    def update(self, overflow: bool) -> None:
        if self.window is None:
            return
        if overflow:
            self.value, self.since = self.value / 2, 0
            return
        self.since += 1
        if self.since > 1 and (self.since - 1) % self.window == 0:
            self.value *= 2


@dataclass(slots=True)
class Oracle:
    """The unsplit run of a case.

    Attributes:
        trace: losses, norms, weights.
        scales: the loss scale after each step.
        lrs: the learning rates of each step.
        skipped: how many steps were skipped, after each step.
        uneven: in how many equal shares the domains fall, where in some step a parameter was used by some shares only.
    """

    trace: Trace
    scales: list[float] = field(default_factory=list)
    lrs: list[list[float]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    uneven: set[int] = field(default_factory=set)


def train_unsplit(case: Case) -> Oracle:
    """One process, no ds_ldt: fp32 masters and accumulation, one backward per micro-batch, non-finite norms skip."""
    settings, dtype = case.settings, case.dtype
    model: nn.Module = build_unsplit(list(case.classes()))
    if case.model == "tied":
        model = UnsplitTied(case.num_layers - 2)
    layers = dict(enumerate(model.children()))
    case.freeze(layers, lambda index: 0 if index in (0, 1, case.num_layers - 2, case.num_layers - 1) else 1)
    model.to(dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in trained]
    optimizer, scheduler = _recipe(case, masters)
    scale = Scale.of(settings)
    domains = settings["ldt"]["cloud"]["data_parallel_size"]
    micro_batches = settings["gradient_accumulation_steps"]
    streams = [
        domain_batches(Points(96), d, domains, settings["train_micro_batch_size_per_gpu"]) for d in range(domains)
    ]
    oracle, skipped = Oracle(trace=Trace(losses=[], grad_norms=[])), 0
    for step in range(case.steps):
        oracle.lrs.append([group["lr"] for group in optimizer.param_groups])
        batches = [next(stream) for stream in streams for _ in range(micro_batches)]
        total, sums, used = _gradients(model, trained, batches, dtype, scale.value, micro_batches)
        for shares in (domains, settings["ldt"]["edge"]["data_parallel_size"]):
            by_share = used.view(shares, -1, len(trained)).any(dim=1)
            if bool((by_share.any(dim=0) & ~by_share.all(dim=0)).any()):
                oracle.uneven.add(shares)
        norm = torch.nn.utils.get_total_norm(sums)
        overflow = not bool(norm.isfinite()) or (case.spoiled is not None and case.spoiled[2] == step)
        if not overflow:
            _update(masters, sums, optimizer, settings["gradient_clipping"], norm)
            for parameter, master in zip(trained, masters, strict=True):
                parameter.data.copy_(master.data)
            if scheduler is not None:
                scheduler.step()
        skipped += overflow
        scale.update(overflow)
        oracle.trace.losses.append(total)
        oracle.trace.grad_norms.append(float("inf") if overflow else norm.item())
        oracle.scales.append(scale.value)
        oracle.skipped.append(skipped)
    for index, layer in layers.items():
        oracle.trace.weights[index] = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    return oracle


def _gradients(
    model: nn.Module, trained: list[nn.Parameter], batches: list[Any], dtype: torch.dtype, scale: float, divisor: int
) -> tuple[float, list[Tensor], Tensor]:
    """Mean loss and the fp32 gradients of a step; losses are divided by M, sums by D, as domains are averaged.

    What no micro-batch used has a gradient of zero, as in DeepSpeed. Last comes which batch used which parameter.
    """
    total, sums = 0.0, [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained]
    used = []
    for inputs, labels in batches:
        loss = nn.functional.mse_loss(model(inputs.to(dtype)), labels.to(dtype))
        total += loss.item() / len(batches)
        ((loss.float() * scale if scale != 1.0 else loss) / divisor).backward()
        used.append([parameter.grad is not None for parameter in trained])
        for parameter, accumulated in zip(trained, sums, strict=True):
            if parameter.grad is not None:
                accumulated += parameter.grad.float() * divisor / (scale * len(batches))
                parameter.grad = None
    return total, sums, torch.tensor(used)


def _update(
    masters: list[nn.Parameter], sums: list[Tensor], optimizer: torch.optim.Optimizer, clipping: float, norm: Tensor
) -> None:
    for master, accumulated in zip(masters, sums, strict=True):
        master.grad = accumulated
    if clipping:
        torch.nn.utils.clip_grads_with_norm_(masters, clipping, norm)
    optimizer.step()


def _recipe(case: Case, masters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
    if case.client == "objects":
        adamw = torch.optim.AdamW(masters, lr=0.01, weight_decay=0.1)
        return adamw, torch.optim.lr_scheduler.StepLR(adamw, 2, gamma=0.5)
    if case.client == "callables":
        adam = torch.optim.Adam(masters, lr=0.01)
        return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda n: 0.5**n)
    chosen = case.settings["optimizer"]
    params = {name: value for name, value in chosen["params"].items() if name not in ("torch_adam", "adam_w_mode")}
    kind = "AdamW" if chosen["type"] == "AdamW" or chosen["params"].get("adam_w_mode") else chosen["type"]
    optimizer = getattr(torch.optim, kind)(masters, **params)
    said = case.settings.get("scheduler")
    if said is None:
        return optimizer, None
    make = getattr(lr_schedules, said["type"], None) or getattr(torch.optim.lr_scheduler, said["type"])
    return optimizer, make(optimizer, **said["params"])

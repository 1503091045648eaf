"""Any optimizer and scheduler of the JSON, and those that a script brings, train as they would in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import lr_schedules
from torch import nn

from ds_ldt.config.schema import load_config
from ds_ldt.runtime.optimizer_checks import recipe_problems
from tests.engine.cases import config, layout
from tests.engine.parity import assert_parity
from tests.engine.recipes import DECAYING, DECAYS
from tests.harness import GroupPool
from tests.toy import Points, build_unsplit, layer_classes, train_unsplit

TARGETS = "tests.engine.recipes:"
STEPS = 3

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"lr": 0.01, "torch_adam": True, "adam_w_mode": False, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.05}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5}),
    ("NAdam", {"lr": 0.01}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
]
SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 8, "warmup_max_lr": 0.1, "warmup_num_steps": 2}),
    ("WarmupCosineLR", {"total_num_steps": 8, "warmup_num_steps": 2}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2, "cycle_momentum": False}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2}),
    ("CosineAnnealingLR", {"T_max": 4}),
]


class Scheduled:
    """An optimizer that steps its scheduler after itself, for the oracle, which knows none; keeps the rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any, rates: list[float]) -> None:
        self.optimizer, self.scheduler, self.rates = optimizer, scheduler, rates

    def step(self) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.rates.append(self.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def scheduler_of(name: str) -> Any:
    return getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)


def oracle(settings: dict[str, Any], make: Any) -> tuple[Any, list[float]]:
    rates: list[float] = []
    trace = train_unsplit(
        build_unsplit(layer_classes(4)),
        Points(96),
        loss_fn=nn.functional.mse_loss,
        make_optimizer=lambda parameters: Scheduled(*make(parameters), rates),  # type: ignore[arg-type,return-value]
        steps=STEPS,
        num_micro_batches=settings["gradient_accumulation_steps"],
        num_domains=2,
        micro_batch_size=settings["train_micro_batch_size_per_gpu"],
    )
    return trace, rates


def cases() -> list[tuple[str, dict[str, Any], str, Any]]:
    """(name, configuration, who brings the recipe, what makes the same in one process)."""

    def settings(optimizer: dict[str, Any] | None, scheduler: dict[str, Any] | None = None) -> dict[str, Any]:
        extra: dict[str, Any] = {} if scheduler is None else {"scheduler": scheduler}
        made = config([[2, 1], [1, 0]], num_domains=2, num_micro_batches=2, optimizer=None, **extra)
        return made if optimizer is None else {**made, "optimizer": optimizer}

    found: list[tuple[str, dict[str, Any], str, Any]] = []
    for name, params in OPTIMIZERS:
        own = {key: value for key, value in params.items() if key not in ("torch_adam", "adam_w_mode")}
        cls = getattr(torch.optim, name)
        made = settings({"type": name, "params": params})
        found.append((name, made, "json", lambda p, cls=cls, own=own: (cls(p, **own), None)))
    for name, params in SCHEDULERS:

        def scheduled(p: Any, name: str = name, params: dict[str, Any] = params) -> tuple[Any, Any]:
            optimizer = torch.optim.SGD(p, lr=0.05)
            return optimizer, scheduler_of(name)(optimizer, **params)

        json = settings({"type": "SGD", "params": {"lr": 0.05}}, {"type": name, "params": params})
        found.append((name, json, "json", scheduled))

    def decaying(p: Any) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(p, **DECAYING)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def grouped(p: Any) -> tuple[Any, Any]:
        everything = list(p)
        parts = [[one for one in everything if (one.ndim > 1) == matrices] for matrices in (True, False)]
        groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, DECAYS, strict=True)]
        return torch.optim.SGD(groups, lr=0.05), None

    found += [(source, settings(None), source, decaying) for source in ("instance", "callable")]
    found.append(("groups", settings(None), "groups", grouped))
    return found


def test_recipes_of_the_json_and_of_the_script_train_as_in_one_process(groups: GroupPool) -> None:
    everything = cases()
    runs = groups.run(3, TARGETS + "train_by_all", [(c[1], c[2]) for c in everything], STEPS, deadline_s=120)
    for number, (name, settings, _, make) in enumerate(everything):
        expected, rates = oracle(settings, make)
        ranks = [rank[number] for rank in runs]
        try:
            assert_parity(ranks, expected, "AdamW")
            for rank in ranks:
                assert rank["rates"] == pytest.approx(rates, rel=1e-6)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_an_optimizer_that_does_not_hold_what_is_trained_is_refused_on_every_rank(groups: GroupPool) -> None:
    adapters = {"r": 2, "target_modules": ["linear"], "layers_to_transform": [2]}  # in the cloud
    target = TARGETS + "optimizers_that_do_not_fit"
    edge, cloud = groups.run(2, target, config(layout(2, 2)), adapters, deadline_s=60)
    lacks = "optimizer: found one without {}"
    there = "found one on rank 1 that does not hold exactly what is trained there"
    foreign = "found one with a tensor of shape (8, 4), a tensor of shape (8,), a tensor of shape (8,)"
    expected = {
        "one lacks a bias, there": (there, lacks.format("2.linear.bias")),
        "callable takes matrices only": (
            lacks.format("0.linear.bias, 1.norm.weight, 1.norm.bias, 1.linear.bias"),
            lacks.format("2.norm.weight, 2.norm.bias, 2.linear.bias"),
        ),
        "listed for the JSON": (lacks.format("0.linear.weight"), lacks.format("2.norm.weight")),
        "another module's": (foreign, "2 settings are at fault"),
        "one more": ("one with a tensor of shape (7,) that the module does not have",) * 2,
        "none there": ("optimizer: found none on rank 1, and one on the others",) * 2,
        "frozen is left out": ("accepted", "accepted"),
        "before adapters": (there, "linear.lora_A.default.weight"),
        "after adapters": ("accepted", "accepted"),
    }
    assert edge.keys() == cloud.keys() == expected.keys()
    for name, (on_edge, in_cloud) in expected.items():
        assert on_edge in edge[name], name
        assert in_cloud in cloud[name], name
    assert "call module.inject_adapters() before you make the optimizer" in cloud["before adapters"]


def test_S80_objects_of_the_script_that_cannot_do_what_they_are_passed_for_are_refused_on_every_rank(
    groups: GroupPool,
) -> None:
    edge, cloud = groups.run(2, TARGETS + "arguments_that_do_not_fit", config(layout(2, 2)), deadline_s=60)
    there = "ds_ldt.initialize: found arguments on rank 0 that cannot be used"
    expected = {
        "waits for a loss": "lr_scheduler: found ReduceLROnPlateau, expected one whose step() needs no",
        "another's schedule": "lr_scheduler: found StepLR, expected a schedule of",
        "asks for a closure": "optimizer: found LBFGS, expected one whose step() needs no arguments; this one asks",
        "name of an optimizer": "optimizer: found str, expected an optimizer, or a function that makes one",
        "name of a schedule": "lr_scheduler: found str, expected a scheduler, or a function that makes one",
        "no function": "collate_fn: found str, expected a function of a list of samples",
        "two rates, one group": "scheduler.params.warmup_max_lr: found [0.1, 0.2], expected a number, or a list of 1",
        "two rates, two groups": "accepted",
        "asks for an increment": "accepted",
        "class": "accepted",
    }
    assert edge.keys() == cloud.keys() == {*expected, "loader on the edge"}
    for name, text in expected.items():
        assert text in edge[name], name
        assert text in cloud[name], name
    assert 'training_data: found "DataLoader", expected a map-style data set' in edge["loader on the edge"]
    assert there in cloud["loader on the edge"]


def test_layers_may_be_compiled_one_by_one(groups: GroupPool) -> None:
    settings = config(layout(2, 2), num_domains=2, num_micro_batches=2)
    for rank in groups.run(3, TARGETS + "compiled_equals_eager", settings, 3, deadline_s=120):
        assert rank["compiled"] == pytest.approx(rank["eager"], abs=1e-6)
        assert all(rank["compiled layers"]) and not any(rank["eager layers"])


@pytest.mark.parametrize(
    "changes, fragments",
    [
        ({"optimizer": {"type": "AdamWW"}}, ["optimizer.type", "AdamWW", 'did you mean "AdamW"']),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1, "momentun": 1}}}, ["momentun", 'did you mean "momentum"']),
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "bets": [0, 1]}}},
            ["optimizer.params.bets", 'did you mean "betas"'],
        ),
        ({"optimizer": {"type": "LBFGS", "params": {}}}, ["LBFGS", "closure"]),
        ({"optimizer": {"type": "SparseAdam", "params": {}}}, ["SparseAdam", "dense gradients"]),
        ({"optimizer": {"type": "Muon", "params": {}}}, ["Muon", "no marks on the weights"]),
        (
            {"optimizer": {"type": "Lamb", "params": {}}, "bf16": {"enabled": True}},
            ["Lamb", "slices of flattened parameters", "fp32 with ZeRO stage 0"],
        ),
        ({"scheduler": {"type": "WarmupLr", "params": {}}}, ["scheduler.type", 'did you mean "WarmupLR"']),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3}}},
            ["scheduler.params.total_num_steps: found nothing", "no default"],
        ),
        ({"scheduler": {"type": "ReduceLROnPlateau", "params": {}}}, ["ReduceLROnPlateau", "metrics"]),
    ],
)
def test_a_recipe_that_cannot_be_made_is_told_by_its_key(changes: dict[str, Any], fragments: list[str]) -> None:
    job = load_config({**config(layout(2, 2), optimizer=None), **changes})
    text = " ".join(map(str, recipe_problems(job)))
    assert all(fragment in text for fragment in fragments), text


@pytest.mark.parametrize("recipe", [*OPTIMIZERS, ("Adam", {"lr": 1, "bias_correction": True})])
def test_a_recipe_that_can_be_made_is_accepted(recipe: tuple[str, dict[str, Any]]) -> None:
    name, params = recipe
    job = load_config({**config(layout(2, 2), optimizer=None), "optimizer": {"type": name, "params": params}})
    assert list(recipe_problems(job)) == []


def _optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def _scheduler(name: str, **params: Any) -> dict[str, Any]:
    return {**_optimizer("SGD", lr=0.1), "scheduler": {"type": name, "params": params}}


_NUMBER = "expected a number, without quotes"
_FLAG = "expected true or false, without quotes"
_WHOLE = "expected a whole number, without quotes, decimal point or exponent"
WRONG_VALUES: dict[str, tuple[dict[str, Any], str, str]] = {
    "nesterov is text": (_optimizer("SGD", momentum=0.9, nesterov="false"), "nesterov", f'found "false", {_FLAG}'),
    "nesterov is a number": (_optimizer("SGD", momentum=0.9, nesterov=0), "nesterov", f"found 0, {_FLAG}"),
    "lr is text": (_optimizer("SGD", lr="0.1"), "lr", f'found "0.1", {_NUMBER}'),
    "lr is true": (_optimizer("SGD", lr=True), "lr", f"found true, {_NUMBER}"),
    "lr is null": (_optimizer("SGD", lr=None), "lr", f"found null, {_NUMBER}"),
    "lr is no number": (_optimizer("SGD", lr=float("nan")), "lr", f"found nan, {_NUMBER}"),
    "lr is infinite": (_optimizer("AdamW", lr=float("inf")), "lr", f"found inf, {_NUMBER}"),
    "lr is a list": (_optimizer("SGD", lr=[0.1]), "lr", f"found [0.1], {_NUMBER}"),
    "lr is negative": (_optimizer("SGD", lr=-0.1), "lr", "found -0.1, expected a number >= 0"),
    "lr of DeepSpeed's is text": (_optimizer("AdamW", lr="1e-4"), "lr", f'found "1e-4", {_NUMBER}'),
    "lr of DeepSpeed's is negative": (_optimizer("Adam", lr=-1), "lr", "found -1, expected a number >= 0"),
    "betas are text": (_optimizer("AdamW", betas=["0.9", "0.999"]), "betas", "expected a list of 2 numbers"),
    "one beta is text": (
        _optimizer("AdamW", torch_adam=True, betas=[0.9, "0.999"]),
        "betas[1]",
        'found "0.999", expected a number, without quotes',
    ),
    "one beta is missing": (_optimizer("AdamW", betas=[0.9]), "betas", "found [0.9], expected a list of 2 numbers"),
    "one beta is a boolean": (_optimizer("AdamW", betas=[True, 0.9]), "betas[0]", f"found true, {_NUMBER}"),
    "beta of 1": (_optimizer("Lion", betas=[0.9, 1.0]), "betas[1]", "found 1.0, expected a number >= 0 and < 1"),
    "eps of null": (_optimizer("AdamW", eps=None), "eps", f"found null, {_NUMBER}"),
    "weight decay is text": (_optimizer("Lamb", weight_decay="0"), "weight_decay", f'found "0", {_NUMBER}'),
    "amsgrad is text": (_optimizer("AdamW", torch_adam=True, amsgrad="no"), "amsgrad", f'found "no", {_FLAG}'),
    "amsgrad of DeepSpeed's": (_optimizer("AdamW", amsgrad=True), "amsgrad", '"torch_adam": true'),
    "switch is text": (_optimizer("AdamW", torch_adam="true"), "torch_adam", f'found "true", {_FLAG}'),
    "mode is text": (
        _optimizer("Adam", torch_adam=True, adam_w_mode="false"),
        "adam_w_mode",
        f'found "false", {_FLAG}',
    ),
    "mode is ignored": (_optimizer("AdamW", torch_adam=True, adam_w_mode=False), "adam_w_mode", '"type": "Adam"'),
    "states is text": (_optimizer("Adam", fp32_optimizer_states="yes"), "fp32_optimizer_states", f'"yes", {_FLAG}'),
    "foreach is a number": (_optimizer("SGD", foreach=1), "foreach", f"found 1, {_FLAG} or null"),
    "nesterov without momentum": (_optimizer("SGD", nesterov=True), "nesterov", "Nesterov momentum requires"),
    "rho out of range": (_optimizer("Adadelta", rho=2), "rho", "Invalid rho value: 2"),
    "etas the wrong way": (_optimizer("Rprop", etas=[1.5, 0.5]), "etas", "Invalid eta values"),
    "unknown to DeepSpeed's": (_optimizer("AdamW", fused=True), "fused", "expected one of the keys of FusedAdam"),
    "steps are text": (_scheduler("WarmupLR", warmup_num_steps="10"), "warmup_num_steps", f'found "10", {_WHOLE}'),
    "steps have a point": (_scheduler("WarmupLR", warmup_num_steps=1e3), "warmup_num_steps", f"1000.0, {_WHOLE}"),
    "steps are true": (_scheduler("StepLR", step_size=True), "step_size", f"found true, {_WHOLE}"),
    "no steps": (_scheduler("StepLR", step_size=0), "step_size", "a schedule; StepLR says: integer modulo by zero"),
    "maximum is text": (_scheduler("WarmupLR", warmup_max_lr="0.1"), "warmup_max_lr", f'found "0.1", {_NUMBER}'),
    "a maximum of several": (_scheduler("WarmupLR", warmup_max_lr=[0.1, "0.1"]), "warmup_max_lr[1]", '"0.1"'),
    "kind of warm-up": (_scheduler("WarmupLR", warmup_type="liner"), "warmup_type", 'expected one of "log", "linear"'),
    "cycle is text": (
        _scheduler("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_momentum="false"),
        "cycle_momentum",
        f'found "false", {_FLAG}',
    ),
    "second step is text": (
        _scheduler("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_second_step_size="5"),
        "cycle_second_step_size",
        f'found "5", {_NUMBER}',
    ),
    "momentum that is not there": (
        {**_scheduler("OneCycleLR", max_lr=0.1, total_steps=9), **_optimizer("Adagrad")},
        "",
        "optimizer must support momentum",
    ),
    "milestones are text": (
        _scheduler("MultiStepLR", milestones=["1"]),
        "milestones[0]",
        f'found "1", {_WHOLE}',
    ),
    "anneal": (_scheduler("OneCycleLR", max_lr=1, anneal_strategy="x"), "anneal_strategy", 'one of "cos", "linear"'),
    "function": (_scheduler("LambdaLR", lr_lambda="lambda e: 1"), "lr_lambda", "initialize(lr_scheduler=...)"),
    "schedulers": (
        _scheduler("SequentialLR", schedulers=["StepLR"], milestones=[1]),
        "schedulers[0]",
        "which JSON cannot hold",
    ),
    "negative rates": (_scheduler("ExponentialLR", gamma=-0.5), "gamma", "gives step 2 a learning rate of -0.05"),
    "negative warm-up": (
        _scheduler("WarmupLR", warmup_max_lr=-1.0, warmup_type="linear"),
        "warmup_max_lr",
        "learning rate of -",
    ),
    "no initial rate": (
        _scheduler("StepLR", step_size=1, last_epoch=5),
        "last_epoch",
        "StepLR says: param 'initial_lr' is not",
    ),
    "one of three": (
        _scheduler("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1, cycle_first_step_size=0),
        "cycle_first_step_size",
        "must be positive",
    ),
    "two that miss a third": (_scheduler("OneCycleLR", max_lr=0.1, epochs=3), "", "You must define either"),
    "a step that torch cannot take": (_optimizer("SGD", differentiable=True), "differentiable", "in-place"),
    "of another device": (_optimizer("AdamW", torch_adam=True, capturable=True), "capturable", "supported devices"),
    "fp16 moments": (
        _optimizer("AdamW", fp32_optimizer_states=False),
        "fp32_optimizer_states",
        "expected true: moments are fp32",
    ),
}


@pytest.mark.skipif(get_accelerator().device_name() != "cpu", reason="other accelerators have these operators")
@pytest.mark.parametrize("changes", [_optimizer("Lamb", max_coeff=10), _optimizer("Lion", betas=[0.9, 0.99])])
def test_S80_an_optimizer_that_deepspeed_cannot_build_here_is_refused_early(changes: dict[str, Any]) -> None:
    (problem,) = recipe_problems(load_config({**config(layout(2, 2), optimizer=None), **changes}))
    assert problem.key == "optimizer.type"
    assert "an optimizer that DeepSpeed can build for cpu, which it cannot for its Fused" in str(problem)


@pytest.mark.parametrize(
    "section, name, fix",
    [
        ("optimizer", "OneBitAdam", 'did you mean "Adam"'),
        ("optimizer", "DeepSpeedCPUAdam", 'did you mean "Adam"'),
        ("optimizer", "PagedAdamW", "use one of Adafactor, Adadelta"),
        ("scheduler", "LRScheduler", "use one of LRRangeTest"),
        ("scheduler", "cosine", 'did you mean "WarmupCosineLR"'),
    ],
)
def test_S80_no_name_is_suggested_that_would_be_refused(section: str, name: str, fix: str) -> None:
    changes = {**_scheduler("WarmupLR"), section: {"type": name, "params": {}}}
    (problem,) = recipe_problems(load_config({**config(layout(2, 2), optimizer=None), **changes}))
    assert problem.fix.startswith(fix)
    assert all(unusable not in problem.fix for unusable in ("SparseAdam", "LBFGS", "Muon", "ChainedScheduler"))


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_S80_a_value_that_does_not_fit_the_signature_names_its_setting(name: str) -> None:
    changes, key, text = WRONG_VALUES[name]
    job = load_config({**config(layout(2, 2), optimizer=None), **changes})
    (problem,) = recipe_problems(job)
    section = "scheduler" if "scheduler" in changes else "optimizer"
    assert problem.key == f"{section}.params" + (f".{key}" if key else "")
    assert text in str(problem)
    assert problem.fix


@pytest.mark.parametrize(
    "changes",
    [
        *(_scheduler(name, **params) for name, params in SCHEDULERS),
        _optimizer("SGD", lr=1, momentum=0, nesterov=False, foreach=None, weight_decay=0),
        _optimizer(
            "AdamW", lr=1, betas=(0, 0.999), eps=1, weight_decay=0, adam_w_mode=True, fp32_optimizer_states=True
        ),
        _optimizer("Adam", torch_adam=True, amsgrad=True, foreach=False, fused=False),
        _optimizer("Adafactor", eps=[None, 1e-3]),
        _scheduler("WarmupLR", warmup_max_lr=[0.1, 0.2], warmup_min_lr=[0, 0]),
        _scheduler("OneCycleLR", max_lr=0.1, total_steps=9, cycle_momentum=False),
        _scheduler("MultiStepLR", milestones=[1, 2], gamma=1),
        _scheduler("LambdaLR", lr_lambda=lambda step: 1 / (1 + step)),
        {
            **_optimizer("AdamW", lr=0.1),
            "scheduler": {"type": "OneCycle", "params": dict(cycle_min_lr=0.1, cycle_max_lr=1)},
        },
        {"scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": 10}}},
        {"scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": 1}}},
    ],
)
def test_S80_values_that_fit_are_accepted(changes: dict[str, Any]) -> None:
    job = load_config({**config(layout(2, 2), optimizer=None), **changes})
    assert list(recipe_problems(job)) == []

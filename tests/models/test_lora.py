"""Adapters trained over two sites equal those of the unsplit model, and PEFT loads what is exported."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ds_ldt.checkpointing.adapter import export_adapter, merge_adapter
from ds_ldt.config.lora import LoraSettings
from ds_ldt.config.schema import load_config
from ds_ldt.errors import CheckpointError, ConfigError
from ds_ldt.models import build_layers, count_targets, family_of, read_hf_config
from ds_ldt.models.lora import AdapterPlan, lora_config, plan_adapters
from ds_ldt.plan.trained_layers import gradient_boundaries, trained_layers
from ds_ldt.runtime.dry_run import footprint_of
from ds_ldt.runtime.rng import Place
from ds_ldt.topology.layout import Layout
from tests.conversion.models import save_model, tensors_of
from tests.harness import GroupPool
from tests.models.lora_cases import HALF, KINDS, STEPS, batches
from tests.models.test_generation import NEW, prompts, shortfall, wanted
from tests.models.tiny import ROWS, batch_of, tiny_config
from tests.models.tiny_vl import tiny_vl_config
from tests.toy import layer_classes

RATES = {"SGD": 0.5, "AdamW": 0.01}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DOMAINS = 2
FIRST, CLOUD, LAST = [0], [1, 2], [3]
"""Decoder layers of the head, the cloud and the tail."""
RANDOM = {"init_lora_weights": False, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, where its adapters are, and how many messages with gradients each site sends in a step."""

    name: str
    lora: dict[str, Any]
    sent: tuple[int, int]
    family: str = "qwen2"
    tied: bool = True
    optimizer: str = "SGD"
    clipping: float = 0.0
    deepspeed: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    resume: bool = False
    replicas: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return next((dtype for name, dtype in HALVES.items() if name in self.deepspeed), torch.float32)

    @property
    def is_half(self) -> bool:
        return self.dtype != torch.float32

    @property
    def loss_scale(self) -> float:
        return float(self.deepspeed.get("fp16", {}).get("loss_scale", 1))

    def settings(self) -> dict[str, Any]:
        params = {"lr": RATES[self.optimizer], **({"torch_adam": True} if self.optimizer == "AdamW" else {})}
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": len(KINDS) // DOMAINS,
            "gradient_clipping": self.clipping,
            "optimizer": {"type": self.optimizer, "params": params},
            "ldt": {
                "pipeline_num_layers": [[1, 2], [1, 0]],
                "edge": {"data_parallel_size": self.replicas},
                "cloud": {"data_parallel_size": DOMAINS},
                "schedule": {"measure_steps": 0, **self.schedule},
                "lora": self.lora,
            },
            **self.deepspeed,
        }


ANEW = {"activation_checkpoint_interval": 1}
CASES = (
    Case(
        name="everywhere",
        lora={**RANDOM, "bias": "lora_only", "rank_pattern": {"layers.1.self_attn.q_proj": 3}},
        sent=(4, 2),
        clipping=0.1,
        deepspeed={"pipeline": ANEW},
        resume=True,
    ),
    Case(
        name="S03 S46 in the cloud only",
        lora={**RANDOM, "layers_to_transform": CLOUD},
        sent=(4, 0),
        family="llama",
        tied=False,
        optimizer="AdamW",
        deepspeed={"pipeline": {**ANEW, "use_reentrant": True}},
    ),
    Case(name="S46 in the tail only", lora={**RANDOM, "layers_to_transform": LAST}, sent=(0, 0), optimizer="AdamW"),
    Case(
        name="in the head only",
        lora={**RANDOM, "layers_to_transform": FIRST, "use_rslora": True},
        sent=(4, 2),
        deepspeed={"pipeline": {**ANEW, "use_reentrant": True}},
    ),
    Case(
        name="S26 S46 bf16 and ZeRO 1 in the cloud only, frozen tie",
        lora={**RANDOM, "layers_to_transform": CLOUD},
        sent=(4, 0),
        deepspeed={"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
        resume=True,
    ),
    Case(
        name="magnitudes, a whole output layer, backwards in two halves",
        lora={"use_dora": True, "modules_to_save": ["lm_head"], "target_modules": "all-linear"},
        sent=(4, 2),
        family="llama",
        tied=False,
        schedule={"split_backward": True, "policy": "greedy"},
    ),
    Case(
        name="S34 dropout, checkpoints, resumed",
        lora={**RANDOM, "lora_dropout": 0.3},
        sent=(4, 2),
        deepspeed={"pipeline": ANEW},
        resume=True,
    ),
    Case(
        name="fp16",
        lora=RANDOM,
        sent=(4, 2),
        deepspeed={"fp16": {"enabled": True, "loss_scale": 64}},
    ),
    Case(
        name="E = 2, dropout, ZeRO 1",
        lora={**RANDOM, "lora_dropout": 0.2},
        sent=(2, 2),
        replicas=2,
        optimizer="AdamW",
        clipping=0.1,
        deepspeed={"zero_optimization": {"stage": 1}},
    ),
)


def unsplit(case: Case, model: Path, before: dict[str, Tensor], settings: LoraSettings) -> tuple[Any, Any, Any]:
    """Train by PEFT in one process, with float32 master weights: losses, norms, the model."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=case.dtype)
    peft_model = get_peft_model(base, lora_config(settings), autocast_adapter_dtype=False).train()
    peft_model.load_state_dict(before, strict=False)
    places: list[Place] = []
    seed_layers(peft_model, model, places)
    parameters = {name: p for name, p in peft_model.named_parameters() if p.requires_grad}
    assert parameters.keys() == before.keys()
    masters = [p.detach().float().clone().requires_grad_() for p in parameters.values()]
    optimizer = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[case.optimizer](
        masters, lr=RATES[case.optimizer], **({"weight_decay": 0.01} if case.optimizer == "AdamW" else {})
    )
    losses, norms = [], []
    for step in range(STEPS):
        drawn = list(batches(range(step, step + 1)))
        counts = [count_targets(batch["labels"]) for batch in drawn]
        total = 0.0
        for number, (batch, count) in enumerate(zip(drawn, counts, strict=True)):
            micro_batch, domain = divmod(number, DOMAINS)
            places[:] = [Place(base_seed=1234, step=step, domain=domain, micro_batch=micro_batch)]
            loss = peft_model(**batch, use_cache=False).loss * (count / sum(counts))
            (loss * case.loss_scale).backward()
            total += loss.item()
            for master, parameter in zip(masters, parameters.values(), strict=True):
                gradient = parameter.grad.float() / case.loss_scale
                master.grad = gradient.clone() if master.grad is None else master.grad + gradient
                parameter.grad = None
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters, case.clipping or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters.values(), strict=True):
                parameter.copy_(master)
        losses.append(total)
    return losses, norms, peft_model


def seed_layers(peft_model: PeftModel, model: Path, places: list[Place]) -> None:
    """Before each layer of an unsplit model runs in training, seed it as one of a split model is seeded."""
    config = read_hf_config(model)
    keys = family_of(config).key_map(config)

    def seeding(index: int) -> Any:
        def seed(module: nn.Module, inputs: Any) -> None:
            if module.training:
                torch.manual_seed(places[0].seed_of(index))

        return seed

    for index in range(keys.num_layers):
        peft_model.get_base_model().get_submodule(keys.module_name(index)).register_forward_pre_hook(seeding(index))


def start_values(model: Path, settings: LoraSettings) -> dict[str, Tensor]:
    """Adapters as this process alone would draw them, for all layers in one go."""
    config = read_hf_config(model)
    family, layers = family_of(config), build_layers(config)
    keys = family.key_map(config)
    names = [keys.module_name(index) for index in range(keys.num_layers)]
    plan = plan_adapters(settings, layers, names=names, model_type=family.name)
    return {
        f"base_model.model.{name}.{key}": parameter
        for index, name in enumerate(names)
        if plan.names[index] is not None
        for key, parameter in plan.put_into(layers[index].build(), index, seed=1234 + index).named_parameters()
        if parameter.requires_grad and "lora_" in key and "magnitude" not in key
    }


def planned(lora: dict[str, Any], **changes: Any) -> AdapterPlan:
    config = tiny_config("qwen2", num_hidden_layers=4, **changes)
    family = family_of(config)
    keys = family.key_map(config)
    names = [keys.module_name(index) for index in range(keys.num_layers)]
    return plan_adapters(LoraSettings(**lora), build_layers(config), names=names, model_type=family.name)


@pytest.mark.parametrize(
    "lora, count, example",
    [
        ({}, 8, "model.layers.3.self_attn.v_proj"),
        ({"target_modules": "all-linear"}, 28, "model.layers.0.mlp.down_proj"),
        ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 2}, 2, "model.layers.2.mlp.up_proj"),
        ({"target_modules": ["lm_head"]}, 1, "lm_head"),
        (
            {"target_modules": r".*layers\.[13]\..*_proj", "exclude_modules": ["o_proj"]},
            12,
            "model.layers.1.mlp.up_proj",
        ),
    ],
)
def test_targets_are_chosen_by_the_names_of_the_whole_model(lora: dict[str, Any], count: int, example: str) -> None:
    plan = planned(lora)
    assert len(plan.targets) == count
    assert example in plan.targets


@pytest.mark.parametrize(
    "lora, tied, message",
    [
        (
            {"target_modules": ["q_proj", "w_proj"]},
            False,
            'ldt.lora.target_modules: found "w_proj", expected something',
        ),
        ({"target_modules": r".*w_proj"}, False, 'ldt.lora.target_modules: found ".*w_proj"'),
        ({"exclude_modules": ["w_proj"]}, False, 'ldt.lora.exclude_modules: found "w_proj"'),
        ({"modules_to_save": ["head"]}, False, 'ldt.lora.modules_to_save: found "head"'),
        ({"rank_pattern": {"layers.4.self_attn.q_proj": 2}}, False, 'ldt.lora.rank_pattern: found "layers.4.self'),
        ({"layers_to_transform": [1, 4]}, False, "ldt.lora.layers_to_transform: found [4]"),
        ({"target_modules": ["lm_head"]}, True, "a tied lm_head is the embedding, which stays frozen"),
        ({"target_modules": ["embed_tokens"]}, False, "expected no embedding: it stays frozen"),
        ({"target_modules": ".*embed_tokens"}, False, "expected no embedding: it stays frozen"),
        ({"modules_to_save": ["embed_tokens"]}, False, 'ldt.lora.modules_to_save: found "embed_tokens"'),
        ({"target_modules": ["act_fn"]}, False, "settings that PEFT refuses: Target module SiLU"),
    ],
)
def test_what_matches_nothing_or_cannot_be_adapted_is_refused(lora: dict[str, Any], tied: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned(lora, tie_word_embeddings=tied)


def test_a_missing_peft_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=re.escape("pip install ds_ldt[lora]")):
        planned({})


def test_a_list_of_layers_is_named_by_index_and_has_no_default_targets() -> None:
    layers = [LayerSpec(layer_class) for layer_class in layer_classes(4)]
    with pytest.raises(ConfigError, match="PEFT has no default for a list of layers"):
        plan_adapters(LoraSettings(), layers)
    plan = plan_adapters(LoraSettings(target_modules=["linear"], layers_to_transform=[1, 3]), layers)
    assert plan.targets == {"model.layers.1.linear", "model.layers.3.linear"}


def test_a_dry_run_counts_adapters_as_trained_and_the_rest_as_frozen(tmp_path: Path) -> None:
    """r (in + out) numbers for each target; hidden size 24, of 4 heads 2 with keys and values; in layers 1 and 2."""
    config = tiny_config("llama", num_hidden_layers=4)
    config.save_pretrained(tmp_path)
    found = footprint_of(load_config(CASES[1].settings()), str(tmp_path), sequence_length=8)
    hidden, values, wide = config.hidden_size, config.hidden_size // 2, config.intermediate_size
    adapters = 2 * 8 * (hidden + hidden + hidden + values + wide + hidden)
    assert [weights.trained for weights in found.weights] == [0, adapters]
    whole = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    assert sum(weights.frozen for weights in found.weights) == whole
    assert found.gradient_boundaries == (False, True)
    assert found.passes[0].held < found.passes[2].held, "nothing is kept for a backward that does not come"


def test_names_of_a_model_with_a_vision_encoder_are_those_of_transformers() -> None:
    config = tiny_vl_config()
    family = family_of(config)
    keys = family.key_map(config)
    names = [keys.module_name(index) for index in range(keys.num_layers)]
    targets = LoraSettings(target_modules=["q_proj", "qkv", "visual.merger.mlp.0"])
    plan = plan_adapters(targets, build_layers(config), names=names, model_type=family.name)
    with torch.device("meta"):
        assert plan.targets <= {name for name, _ in family.model_class(config).named_modules()}
    assert {name.split(".")[1] for name in plan.targets} == {"visual", "language_model"}


@pytest.mark.parametrize("replicas", [1, 2])
def test_adapters_over_two_sites_equal_those_of_the_unsplit_model(
    groups: GroupPool, tmp_path: Path, replicas: int
) -> None:
    models, cases = {}, []
    chosen = [case for case in CASES if case.replicas == replicas]
    for case in chosen:
        key = (case.family, case.tied)
        if key not in models:
            models[key] = save_model(tmp_path / f"{case.family}", family=case.family, tie_word_embeddings=case.tied)
        folder = {
            "model": str(models[key]),
            "save_to": str(tmp_path / case.name),
            "evaluate": case is CASES[0],
            "resume": case.resume,
            "prompts": PROMPTS[:replicas],
            "resume_seed": 1234 if "lora_dropout" in case.lora else 99,
        }
        cases.append({**folder, "settings": case.settings()})
    ranks = groups.run(replicas + DOMAINS, "tests.models.lora_cases:train_all", cases, deadline_s=240)
    for number, case in enumerate(chosen):
        check(case, models[case.family, case.tied], tmp_path / case.name, [rank[number] for rank in ranks])


def planned_boundaries(case: Case) -> tuple[bool, ...] | None:
    """What `ds-ldt plan` says without the model; None if gradients cross everywhere."""
    ldt = load_config(case.settings()).ldt
    layout = Layout.build(ldt.pipeline_num_layers)
    return gradient_boundaries(trained_layers(ldt, layout), layout)


def check(case: Case, model: Path, saved: Path, ranks: list[dict[str, Any]]) -> None:
    """Compare what the ranks found with the oracle, and what they saved with what PEFT makes of it."""
    edge, cloud, replica = ranks[0], ranks[-2], ranks[-1]
    settings = LoraSettings(**case.lora)
    sent = [case.sent[rank >= case.replicas] for rank in range(len(ranks))]
    assert [rank["gradients_sent"] for rank in ranks] == sent, case.name
    assert planned_boundaries(case) in (None, *[rank["gradient_boundaries"] for rank in ranks]), case.name
    before = edge["before"] | cloud["before"]
    if not case.is_half:
        for name, value in start_values(model, settings).items():
            assert torch.equal(before[name], value), (case.name, name)
    if isinstance(settings.target_modules, str):
        settings = settings.model_copy(update={"target_modules": LINEAR})
    losses, norms, oracle = unsplit(case, model, before, settings)
    close = {"rel": 2e-2, "abs": 1e-2} if case.is_half else {"rel": 1e-4, "abs": 2e-6}
    after = edge["after"] | cloud["after"]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, **close), case.name
        assert rank["norms"] == pytest.approx(norms, **close), case.name
        assert rank["resumed"] == (rank["losses"][HALF:] if case.resume else None), case.name
        assert rank["frozen"] > 0
    for name, value in {**cloud["after"], **edge["after"]}.items():
        wanted = dict(oracle.named_parameters())[name].detach()
        assert torch.allclose(value, wanted, atol=2e-2 if case.is_half else 1e-4), (case.name, name)
        assert not torch.equal(value, before[name]), (case.name, name)
        again = {**cloud["after_resumed"], **edge["after_resumed"]}
        assert not case.resume or torch.equal(value, again[name]), (case.name, name)
    assert all(torch.equal(replica["after"][name], value) for name, value in cloud["after"].items())
    assert all(torch.equal(ranks[case.replicas - 1]["after"][name], value) for name, value in edge["after"].items())
    if settings.lora_dropout:
        without, _, _ = unsplit(case, model, before, settings.model_copy(update={"lora_dropout": 0.0}))
        assert without != pytest.approx(losses, abs=1e-3), case.name

    for path in saved.rglob("layer_*"):
        kept = torch.load(path, weights_only=True)
        assert all("lora_" in key or "bias" in key or "modules_to_save" in key for key in kept), path
    export_adapter(saved / "edge", saved / "cloud", saved / "adapter", hf_config=model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=case.dtype)
    loaded = PeftModel.from_pretrained(base, str(saved / "adapter"), autocast_adapter_dtype=False)
    oracle.load_state_dict(after, strict=False)
    batch = batch_of("left")
    with torch.no_grad():
        wanted_logits = oracle.eval()(**batch).logits
        assert torch.equal(loaded.eval()(**batch).logits, wanted_logits), case.name
        if edge["logits"] is not None:
            assert_same_as_split(loaded, edge["logits"])
    check_answers(case, loaded, [rank["answer"] for rank in ranks])
    check_merged(case, model, saved, loaded)


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def assert_same_as_split(loaded: PreTrainedModel, found: list[Tensor]) -> None:
    for batch, logits in zip(batches(range(1)), found, strict=True):
        values = loaded(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False).logits
        assert torch.equal(values, logits)


PROMPTS = [{**prompts(rows, padded=True, seed=rows), "max_new_tokens": NEW} for rows in (5, 3)]


def check_answers(case: Case, loaded: PeftModel, answers: list[Tensor | None]) -> None:
    """The split model answers what PEFT's model answers with what was exported, and the base model does not."""
    assert answers[case.replicas :] == [None] * DOMAINS
    loaded.generation_config.eos_token_id = None
    for prompt, answer in zip(PROMPTS, answers[: case.replicas], strict=False):
        if case.is_half:
            assert shortfall(loaded, answer, prompt) <= 4, case.name
        else:
            assert torch.equal(answer, wanted(loaded, prompt)), case.name
        if "bias" not in case.lora:  # PEFT cannot undo trained biases
            with loaded.disable_adapter():
                assert not torch.equal(answer, wanted(loaded, prompt)), case.name


def check_merged(case: Case, model: Path, saved: Path, loaded: PeftModel) -> None:
    if case is not CASES[0]:
        return
    merge_adapter(model, saved / "adapter", saved / "merged")
    wanted = loaded.merge_and_unload().state_dict()
    found = tensors_of(saved / "merged")
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in found.items())
    assert (saved / "merged" / "tokenizer.json").is_file()
    with safe_open(saved / "adapter" / "adapter_model.safetensors", framework="pt") as file:
        assert "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight" in file.keys()  # noqa: SIM118
    assert LoraConfig.from_pretrained(str(saved / "adapter")).rank_pattern == {"layers.1.self_attn.q_proj": 3}
    cloud = saved / "cloud" / f"global_step{STEPS}"
    min(cloud.glob("layer_*")).unlink()
    with pytest.raises(CheckpointError, match=r"layer_02-model_states\.pt is missing"):
        export_adapter(saved / "edge", saved / "cloud", saved / "incomplete", hf_config=model)

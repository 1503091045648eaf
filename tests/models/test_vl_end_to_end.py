"""Qwen2.5-VL over two sites is Qwen2.5-VL in one piece: losses, gradient norm, every weight; and what is sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, Qwen2_5_VLForConditionalGeneration

from ds_ldt.config.lora import LoraSettings
from ds_ldt.models import count_targets, family_of
from ds_ldt.models.lora import lora_config
from tests.harness import GroupPool
from tests.models.tiny import tiny_model
from tests.models.tiny_vl import IMAGE, tiny_vl_config
from tests.models.vl_end_to_end import IDS_FROM, STEPS, batches, holds, secrets

KINDS = ["mixed", "text only", "left", "two sizes"]
VISION, TEXT = "vision_encoder", "text_decoder"

THREE_CHUNKS = {
    2: {VISION: [[1, 2], [1, 0], [0, 0]], TEXT: [[0, 0], [1, 2], [1, 0]]},
    3: {VISION: [[1, 1, 1], [1, 0, 0], [0, 0, 0]], TEXT: [[0, 0, 0], [1, 1, 1], [1, 0, 0]]},
}
EVERY_BLOCK_ON_THE_EDGE = {VISION: [[4, 0], [0, 0]], TEXT: [[1, 2], [1, 0]]}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"type": "SGD", "params": {"lr": 0.05}},
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.1}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training: layout, domains, model, data."""

    name: str
    matrices: dict[str, list[list[int]]]
    num_domains: int = 1
    tied: bool = False
    kinds: tuple[str, ...] = tuple(KINDS)
    optimizer: str = "SGD"
    clipping: float = 0.0
    marked: bool = False
    freeze: tuple[str, ...] = ()
    pipeline: tuple[tuple[str, int], ...] = ()
    zero_stage: int = 0
    halves: bool = False
    lora: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(self.kinds) // self.num_domains,
            "gradient_clipping": self.clipping,
            "steps_per_print": 1000,
            "optimizer": OPTIMIZERS[self.optimizer],
            "pipeline": dict(self.pipeline),
            "zero_optimization": {"stage": self.zero_stage},
            "ldt": {
                "pipeline_num_layers": self.matrices,
                "cloud": {"data_parallel_size": self.num_domains},
                "freeze": list(self.freeze),
                "timeout_s": 60,
                **({"schedule": {"split_backward": True, "policy": "greedy"}} if self.halves else {}),
                **({"lora": self.adapters.model_dump()} if self.lora else {}),
            },
        }

    @property
    def adapters(self) -> LoraSettings:
        return LoraSettings(target_modules=list(self.lora), init_lora_weights=False)

    def config(self) -> Any:
        changes: dict[str, Any] = {}
        if self.marked:  # as the ids are moved, so must be the ids of the special tokens
            changes = {
                f"{name}_token_id": getattr(tiny_vl_config(), f"{name}_token_id") + IDS_FROM
                for name in ("image", "video", "vision_start", "vision_end")
            }
        text = {"num_hidden_layers": 4, **({"vocab_size": IDS_FROM + 61} if self.marked else {})}
        return tiny_vl_config(tie_word_embeddings=self.tied, text=text, **changes)


CHECKPOINTED = (("activation_checkpoint_interval", 1),)
REENTRANT: tuple[tuple[str, int], ...] = (*CHECKPOINTED, ("use_reentrant", True))
TARGETS = ("qkv", "q_proj", "down_proj")
"""Of the vision blocks, and of both kinds of blocks."""

CASES: dict[int, list[Case]] = {
    2: [
        Case(name="P=2", matrices=THREE_CHUNKS[2], clipping=0.5),
        Case(name="P=2, two chunks", matrices=EVERY_BLOCK_ON_THE_EDGE, tied=True, optimizer="AdamW"),
        Case(name="sent", matrices=THREE_CHUNKS[2], tied=True, marked=True),
        Case(
            name="adapters, backwards in two halves",
            matrices=THREE_CHUNKS[2],
            halves=True,
            lora=TARGETS,
            pipeline=REENTRANT,
            marked=True,
        ),
        Case(name="ViT frozen", matrices=THREE_CHUNKS[2], freeze=(VISION,), pipeline=CHECKPOINTED, optimizer="AdamW"),
    ],
    3: [
        # domain 1 never sees an image
        Case(
            name="P=2, D=2",
            matrices=THREE_CHUNKS[2],
            num_domains=2,
            tied=True,
            clipping=0.5,
            kinds=("mixed", "text only", "left", "text only"),
            zero_stage=1,
        ),
        Case(
            name="P=2, D=2, backwards in two halves",
            matrices=THREE_CHUNKS[2],
            num_domains=2,
            clipping=0.5,
            halves=True,
            pipeline=CHECKPOINTED,
        ),
        Case(name="P=3", matrices=THREE_CHUNKS[3], optimizer="AdamW", halves=True, pipeline=REENTRANT),
        Case(name="decoder and merger frozen", matrices=THREE_CHUNKS[3], freeze=("embedding", "merger", TEXT, "head")),
    ],
    5: [Case(name="P=3, D=2", matrices=THREE_CHUNKS[3], num_domains=2, optimizer="AdamW", clipping=0.5)],
}


def published(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def freeze(model: PreTrainedModel, parts: tuple[str, ...]) -> None:
    family = family_of(model.config)
    keys, named = family.key_map(model.config), family.parts(model.config)
    prefixes = tuple(keys.prefix(layer) for part in parts for layer in named[part])
    for name, parameter in model.named_parameters():
        if published(name).startswith(prefixes):
            parameter.requires_grad_(False)


def train_unsplit(
    directory: Path, case: Case, adapters: dict[str, Tensor]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """What transformers computes: one loss over the targets of all micro-batches of a step, one optimizer step."""
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    freeze(model, case.freeze)
    if adapters:
        model = get_peft_model(model, lora_config(case.adapters))
        model.load_state_dict(adapters, strict=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    params = {key: value for key, value in OPTIMIZERS[case.optimizer]["params"].items() if key != "torch_adam"}
    optimizer = getattr(torch.optim, case.optimizer)(trained, **params)
    data, losses, norms = batches(list(case.kinds), marked=case.marked), [], []
    for _ in range(STEPS):
        step = [next(data) for _ in case.kinds]
        loss = loss_of(model, step)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, case.clipping or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(float(loss_of(model, list(batches(list(case.kinds), marked=case.marked, steps=1)))))
    if adapters:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    else:
        weights = {published(name): parameter.detach() for name, parameter in model.named_parameters()}
    return losses, norms, weights


def loss_of(model: PreTrainedModel, step: list[dict[str, Tensor]]) -> Tensor:
    counts = [count_targets(batch["labels"]) for batch in step]
    parts = [model(**batch, use_cache=False).loss * n for batch, n in zip(step, counts, strict=True)]
    return sum(parts) / sum(counts)


def compare(case: Case, ranks: list[dict[str, Any]], directory: Path) -> None:
    adapters = {name: tensor for rank in ranks for name, tensor in rank["adapters"].items()}
    losses, norms, wanted = train_unsplit(directory, case, adapters)
    assert bool(adapters) == bool(case.lora)
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["losses"] == pytest.approx(losses, abs=1e-5)
        assert rank["norms"] == pytest.approx(norms, rel=1e-4)
        assert rank["refused"].startswith("ConfigError") and "expected a model of text alone" in rank["refused"]
        assert bool(rank["late"]) == (case.halves and rank is not ranks[0])
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for key, tensor in rank["after" if case.lora else "weights"].items():
            assert torch.equal(found.setdefault(key, tensor), tensor), f"replicas of {key} differ"
    assert found.keys() == wanted.keys()
    errors = {key: float((found[key] - tensor).abs().max()) for key, tensor in wanted.items()}
    assert {key: error for key, error in errors.items() if not error <= 1e-5} == {}


def assert_nothing_secret_was_sent(case: Case, ranks: list[dict[str, Any]]) -> None:
    values = secrets(list(case.kinds))
    assert len(values) > 500
    assert IMAGE + IDS_FROM in values.tolist()
    hidden = torch.randn(3, 4)
    assert not holds(hidden, list(case.kinds))
    hidden[1, 2] = float(values[-1])  # a pixel in the middle of other numbers would be seen
    assert holds(hidden, list(case.kinds))
    for rank in ranks:
        assert rank["num_sent"] > 20
        recorded, counted = rank["num_bytes"]
        assert recorded >= counted > 0, "messages passed the record by"
        assert rank["found"] == []


@pytest.mark.parametrize("world_size", CASES)
def test_S14_training_over_two_sites_equals_training_in_one_piece(
    groups: GroupPool, tmp_path: Path, world_size: int
) -> None:
    jobs = []
    for number, case in enumerate(CASES[world_size]):
        directory = tmp_path / str(number)
        tiny_model(case.config()).save_pretrained(directory)
        jobs.append(
            {"model": str(directory), "settings": case.settings(), "kinds": list(case.kinds), "marked": case.marked}
        )
    ranks = groups.run(world_size, "tests.models.vl_end_to_end:train_many", jobs, deadline_s=150)
    for number, case in enumerate(CASES[world_size]):
        results = [rank[number] for rank in ranks]
        try:
            compare(case, results, tmp_path / str(number))
            if case.marked:
                assert_nothing_secret_was_sent(case, results)
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from error


def test_example_learns_from_photographs(groups: GroupPool) -> None:
    words = ("--steps", "10", "--image_size", "56")
    edge, cloud = groups.run(2, "tests.models.vl_end_to_end:run_example", *words, deadline_s=90)
    assert edge == cloud
    assert edge["held_out_after"] < 0.8 * edge["held_out_before"]
    assert edge["losses"][-1] < 0.8 * edge["losses"][0]

"""`engine.generate` gives, token for token, what `generate` of transformers gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ds_ldt.errors import ConfigError
from ds_ldt.runtime.generation import Decoding, check_model, last_position
from tests.conversion.models import MATRIX, THREE_CHUNKS, save_model
from tests.harness import GroupPool
from tests.models.tiny import VOCABULARY, batch_of

NEW = 7


def prompts(rows: int, *, padded: bool, seed: int = 5, length: int = 6) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    if not padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 4] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def wanted(model: Any, arguments: dict[str, Any]) -> Tensor:
    """What transformers answers; sampling as after `torch.manual_seed`."""
    options = {"pad_token_id": 0, "max_new_tokens": NEW, **arguments}
    if options.get("do_sample"):
        options.setdefault("top_k", 0)
    with torch.random.fork_rng():
        torch.manual_seed(options.pop("seed", 0))
        return model.generate(**options)


def stopping(model: Any, arguments: dict[str, Any], row: int, place: int) -> dict[str, Any]:
    """The same prompts, with a token that is going to come as the end of a sequence."""
    answer = wanted(model, arguments)
    return {**arguments, "eos_token_id": int(answer[row, arguments["input_ids"].shape[1] + place]), "pad_token_id": 0}


def cases_of(model: Any) -> list[dict[str, Any]]:
    one, padded = prompts(1, padded=False), prompts(5, padded=True)
    drawn = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}
    return [
        one,
        padded,
        {"input_ids": padded["input_ids"], "pad_token_id": 0},  # the mask follows from the padding
        stopping(model, padded, row=1, place=2),
        {**stopping(model, one, row=0, place=1), "max_new_tokens": 30},
        {**padded, "repetition_penalty": 1.4},
        {**padded, **drawn},
        {**stopping(model, {**padded, **drawn}, row=2, place=3), "repetition_penalty": 1.2},
    ]


@pytest.mark.parametrize(
    "family, tied, num_domains, num_replicas",
    [("qwen2", True, 1, 1), ("llama", False, 2, 1), ("qwen3", False, 2, 2)],
)
def test_answers_equal_those_of_transformers(
    groups: GroupPool, tmp_path: Path, family: str, tied: bool, num_domains: int, num_replicas: int
) -> None:
    matrix = THREE_CHUNKS if num_domains > num_replicas else MATRIX
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "ldt": {
            "pipeline_num_layers": matrix,
            "edge": {"data_parallel_size": num_replicas},
            "cloud": {"data_parallel_size": num_domains},
        },
    }
    depth = sum(map(sum, matrix))
    source = save_model(tmp_path / "hf", family=family, tie_word_embeddings=tied, num_hidden_layers=depth)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    first = [{"max_new_tokens": NEW, **case} for case in cases_of(model)]
    first = first if num_domains == 1 else [first[0], first[4], first[7]]
    # Replicas ask for different things: a call takes as many rounds as the longest answer, and fails for all.
    arguments = [[case, *first[::-1][place : place + 1]][:num_replicas] for place, case in enumerate(first)]
    wrong = [{"input_ids": torch.zeros(3)}, first[0]][:num_replicas]
    beyond = [{"input_ids": torch.tensor([[3, 4], [5, 10**6]])}, first[0]][:num_replicas]
    ranks = groups.run(
        num_replicas + num_domains,
        "tests.models.generation:generate",
        str(source),
        config,
        [wrong, beyond, *arguments],
        deadline_s=90,
    )
    for replica in range(num_replicas):
        for case, found in zip(arguments, ranks[replica]["answers"][2:], strict=True):
            assert torch.equal(found, wanted(model, case[replica]))
    for rank, answers in enumerate(rank["answers"] for rank in ranks):
        assert answers[0].startswith("ConfigError: Configuration error: input_ids" if rank == 0 else "LinkError")
        assert answers[1].startswith("SampleError" if rank == 0 else "LinkError")
        assert ("found 1000000 at position 1" in answers[1]) == (rank == 0)
        assert rank < num_replicas or answers[2:] == [None] * len(arguments)
    batch = batch_of("left")
    loss = model(**batch).loss.item()
    assert all(rank["kept"] and rank["loss"] == pytest.approx(loss, abs=1e-5) for rank in ranks)
    assert [rank["outputs"] is None for rank in ranks] == [rank >= num_replicas for rank in range(len(ranks))]
    torch.testing.assert_close(ranks[0]["outputs"][0], model(**batch).logits)


@torch.no_grad()
def shortfall(model: Any, answer: Tensor, arguments: dict[str, Any]) -> float:
    """By how much the logit of a token of an answer falls short of the largest, at most, in units of its rounding."""
    length, worst = arguments["input_ids"].shape[1], 0.0
    mask = arguments.get("attention_mask", torch.ones_like(arguments["input_ids"]))
    for place in range(length, answer.shape[1]):
        seen = {
            "input_ids": answer[:, :place],
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        }
        logits = model(**seen, use_cache=False).logits[:, -1]
        chosen = logits.gather(1, answer[:, place : place + 1])[:, 0]
        unit = torch.finfo(logits.dtype).eps * logits.abs().amax(1)
        worst = max(worst, float(((logits.amax(1) - chosen) / unit).max()))
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return worst


def test_half_precision_over_three_chunks_chooses_the_likeliest_token(groups: GroupPool, tmp_path: Path) -> None:
    """Of tokens whose logits round alike either may be taken: batches of other sizes may round otherwise."""
    precisions = {"bf16": torch.bfloat16, "fp16": torch.float16}
    ldt = {"pipeline_num_layers": THREE_CHUNKS, "cloud": {"data_parallel_size": 2}}
    base = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "ldt": ldt}
    configs = [{**base, name: {"enabled": True}} for name in precisions]
    source = save_model(tmp_path, family="qwen3", num_hidden_layers=sum(map(sum, THREE_CHUNKS)))
    cases = [{"max_new_tokens": 12, **one} for one in (prompts(1, padded=False), prompts(5, padded=True))]
    edge, *cloud = groups.run(3, "tests.models.generation:answer_all", str(source), configs, cases, deadline_s=60)
    assert cloud == [[[None, None]] * 2] * 2
    for dtype, answers in zip(precisions.values(), edge, strict=True):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        for case, answer in zip(cases, answers, strict=True):
            assert answer.shape[1] == case["input_ids"].shape[1] + 12
            assert shortfall(model, answer, case) <= 4
            spoiled = answer.clone()
            spoiled[0, -1] = (answer[0, -1] + 1) % VOCABULARY
            assert shortfall(model, spoiled, case) > 4


def test_what_cannot_be_chosen_by_is_refused_with_every_fault() -> None:
    with pytest.raises(ConfigError) as raised:
        Decoding(max_new_tokens=0, top_p=1.5, temperature=0.0, do_sample=False).check()
    for text in (
        "max_new_tokens: found 0",
        "top_p: found 1.5, expected above 0",
        "temperature: found 0.0",
        "do_sample",
    ):
        assert text in str(raised.value)
    Decoding(max_new_tokens=1, top_p=1.0, top_k=1, temperature=0.1, do_sample=True, eos_token_id=[1, 2]).check()


def test_models_with_images_and_without_logits_are_told_apart() -> None:
    check_model(SimpleNamespace(local_layers=frozenset()))
    with pytest.raises(ConfigError, match="expected a model of text alone"):
        check_model(SimpleNamespace(local_layers=frozenset({3})))
    assert last_position(torch.ones(2, 3)) is None
    assert last_position((torch.ones(2, 3, 4),)) is None
    assert last_position(torch.arange(24.0).reshape(2, 3, 4)).tolist() == [[8, 9, 10, 11], [20, 21, 22, 23]]

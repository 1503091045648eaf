"""Decoding through the U: what an edge replica does between two forward-only steps. The cloud only runs the steps.

Each new token is one forward pass over the whole sequence: nothing is kept in the cloud between two tokens. Prompts
and answers stay on the edge. What crosses the link is what evaluation sends; the lengths show in its shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ldt.comm.collectives import bounded
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.errors import Absent, ConfigError, ConfigProblem
from ds_ldt.runtime.module import LDTPipelineModule

_CALL = "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How tokens are chosen and when to stop; as the arguments of the same names of transformers' ``generate``.

    Attributes:
        max_new_tokens: most tokens to append, at least 1.
        eos_token_id: a row is finished after one of these; none: only ``max_new_tokens`` ends it.
        pad_token_id: what a finished row is filled up with; None: the first of ``eos_token_id``.
        do_sample: draw tokens at random instead of taking the likeliest.
        temperature: divides the logits; above 0. None: 1.
        top_k: draw from this many likeliest tokens only. None: from all.
        top_p: draw from the smallest set whose probability reaches this, in (0, 1]. None: from all.
        repetition_penalty: above 1 makes tokens that the row already holds less likely. None: 1.
        seed: of the random numbers; None: another one in every call.
    """

    max_new_tokens: int
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a row."""
        eos = self.eos_token_id
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    def check(self) -> None:
        """Look for what cannot be done.

        Raises:
            ConfigError: every fault, with its argument.
        """
        problems = []
        if self.max_new_tokens < 1:
            problems.append(_problem("max_new_tokens", self.max_new_tokens, "at least 1", "ask for a token"))
        for name, fits, expected in (
            ("temperature", lambda value: value > 0, "above 0"),
            ("top_k", lambda value: value >= 1, "at least 1"),
            ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
            ("repetition_penalty", lambda value: value > 0, "above 0"),
        ):
            value = getattr(self, name)
            if value is not None and not fits(value):
                problems.append(_problem(name, value, expected, "correct it, or leave it out"))
        for name in ("temperature", "top_k", "top_p", "seed"):
            if not self.do_sample and getattr(self, name) is not None:
                problems.append(
                    _problem(name, getattr(self, name), "nothing, without do_sample", "set do_sample=True")
                )
        if problems:
            raise ConfigError.from_problems(problems)

    def processors(self, padding: Tensor) -> Any:
        """Make the processors of logits: those of transformers, in the order of its own ``generate``.

        Args:
            padding: how many tokens each prompt is padded with, (B,) int64; they do not count as repeated.
        """
        from transformers import (
            LogitsProcessorList,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        found = LogitsProcessorList()
        if self.repetition_penalty is not None:
            penalty = float(self.repetition_penalty)
            found.append(RepetitionPenaltyLogitsProcessor(penalty=penalty, prompt_ignore_length=padding))
        if self.temperature is not None:
            found.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            found.append(TopKLogitsWarper(top_k=self.top_k))
        if self.top_p is not None:
            found.append(TopPLogitsWarper(top_p=float(self.top_p)))
        return found


def check_model(module: LDTPipelineModule) -> None:
    """Refuse a model of which every rank knows that it cannot generate.

    Raises:
        ConfigError: it takes pictures besides text.
    """
    if module.local_layers:
        raise ConfigError.of(
            _CALL,
            found=Absent("a model with local layers (images)"),
            expected="a model of text alone",
            fix="export the model and generate with transformers",
        )


class Generator:
    """Decodes the prompts of one edge replica.

    The intake draws the micro-batches of `batches`, one for each domain of the slice and step; the engine puts into
    `logits` what comes back. Everything happens inside the iterator, so that an error reaches every rank as any
    failure to draw does, and its end as the end of the data does.

    Args:
        module: says how to read a batch.
        grid: the domains of this replica, and the group of all replicas.
        device: where tokens are chosen.
        input_ids: prompts (B, S), padded on the left.
        attention_mask: (B, S), 0 where a prompt is padded; None: where ``pad_token_id`` stands, unless that ends rows
            as well (as in transformers).
        decoding: how to choose tokens and when to stop.

    Attributes:
        ids: prompts and answers (B, S + tokens so far), int64.
        logits: for each domain of the slice, what `last_position` made of its outputs.
    """

    def __init__(
        self,
        module: LDTPipelineModule,
        grid: LDTPipelineGrid,
        device: torch.device,
        input_ids: Any,
        attention_mask: Any,
        decoding: Decoding,
    ) -> None:
        self.ids = torch.empty(0, 0, dtype=torch.int64)
        self.logits: Sequence[Any] = ()
        self._module = module
        self._grid = grid
        self._device = device
        self._prompts = input_ids
        self._given_mask = attention_mask
        self._decoding = decoding

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield K micro-batches a step, until the rows of every replica are finished."""
        self._begin()
        while True:
            yield from self._micro_batches()
            failure: Exception | None = None
            try:
                self._append(self._rows_of(self.logits))
            except Exception as error:  # the other replicas are on their way into the reduction
                failure = error
            goes_on = self._any_replica_goes_on(failure is not None or self._is_unfinished)
            if failure is not None:
                raise failure
            if not goes_on:
                return

    def _begin(self) -> None:
        self._decoding.check()
        if self._module.batch_fn is None or self._module.loss_fn is None:
            raise _not_a_language_model("a module without batch_fn and loss_fn")
        ids, mask = self._prompts, self._given_mask
        if not isinstance(ids, Tensor) or ids.ndim != 2 or 0 in ids.shape or ids.is_floating_point():
            found = f"shape {tuple(ids.shape)}, {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ConfigError.of(
                "input_ids", found=Absent(found), expected="token ids of shape (rows, length)", fix="tokenize prompts"
            )
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
            found = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ConfigError.of(
                "attention_mask", found=Absent(found), expected=f"shape {tuple(ids.shape)}", fix="pass the tokenizer's"
            )
        self.ids = ids.long().to(self._device)
        self._mask = self._infer_mask() if mask is None else mask.long().to(self._device)
        if not bool(self._mask[:, -1].all()):
            raise ConfigError.of(
                "attention_mask",
                found=Absent("rows that are padded on the right"),
                expected="rows that end in a token",
                fix='tokenize with padding_side="left"',
            )
        self._unfinished = torch.ones(len(self.ids), dtype=torch.bool, device=self._device)
        self._num_new = 0
        self._eos = torch.tensor(self._decoding.ends, dtype=torch.int64, device=self._device)
        self._processors = self._decoding.processors(self._mask.argmax(dim=1))
        self._random = torch.Generator(device=self._device)
        if self._decoding.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(self._decoding.seed)

    def _infer_mask(self) -> Tensor:
        pad = self._decoding.pad_token_id
        if pad is None or pad in self._decoding.ends:
            return torch.ones_like(self.ids)
        return self.ids.ne(pad).long()

    @property
    def _is_unfinished(self) -> bool:
        return self._num_new < self._decoding.max_new_tokens and bool(self._unfinished.any())

    def _micro_batches(self) -> Iterator[dict[str, Tensor]]:
        """Spread the rows over the domains of the slice; where they do not suffice the last one is repeated."""
        slice_size = len(self._grid.domains)
        if not self._is_unfinished:  # other replicas go on: take part as cheaply as possible
            for _ in range(slice_size):
                yield {"input_ids": self.ids[:1, -1:]}
            return
        rows = -(-len(self.ids) // slice_size)
        positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0)
        for place in range(slice_size):
            chosen = torch.arange(place * rows, (place + 1) * rows, device=self._device).clamp(max=len(self.ids) - 1)
            yield {
                "input_ids": self.ids[chosen],
                "attention_mask": self._mask[chosen],
                "position_ids": positions[chosen],
            }

    def _rows_of(self, logits: Sequence[Any]) -> Tensor:
        """Put the logits (B, vocabulary) of all domains together, without those of repeated rows."""
        for one in logits:
            if not isinstance(one, Tensor):
                raise _not_a_language_model("outputs that are not of shape (rows, length, vocabulary)")
        return torch.cat(list(logits))[: len(self.ids)]

    def _append(self, logits: Tensor) -> None:
        """Choose the next token of every row."""
        if not self._is_unfinished:
            return
        scores = self._processors(self.ids, logits.float())
        if self._decoding.do_sample:
            chosen = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._random)[:, 0]
        else:
            chosen = scores.argmax(dim=-1)
        ends, pad = self._decoding.ends, self._decoding.pad_token_id
        if ends:
            chosen = chosen.where(self._unfinished, torch.full_like(chosen, ends[0] if pad is None else pad))
            self._unfinished &= ~torch.isin(chosen, self._eos)
        self.ids = torch.cat([self.ids, chosen[:, None]], dim=1)
        self._mask = torch.cat([self._mask, torch.ones_like(chosen)[:, None]], dim=1)
        self._num_new += 1

    def _any_replica_goes_on(self, mine: bool) -> bool:
        """Ask the other edge replicas, for a step is a step of all of them."""
        if self._grid.num_physical_replicas == 1:
            return mine
        count = torch.tensor([float(mine)], device=self._device)
        with bounded(_CALL, self._grid):
            dist.all_reduce(count, group=self._grid.dp_proc_group)
        return bool(count.item())


def last_position(outputs: Any) -> Tensor | None:
    """Keep the logits (B, vocabulary) behind the last token of (B, S, vocabulary); None if these are no logits."""
    if isinstance(outputs, Tensor) and outputs.ndim == 3 and outputs.is_floating_point():
        return outputs[:, -1].clone()
    return None


def _not_a_language_model(found: str) -> ConfigError:
    return ConfigError.of(
        _CALL,
        found=Absent(found),
        expected="a language model whose last layer returns logits",
        fix="use a model of ds_ldt.models.from_pretrained",
    )


def _problem(name: str, found: object, expected: str, fix: str) -> ConfigProblem:
    return ConfigProblem(key=f"{_CALL}: {name}", found=found, expected=expected, fix=fix)

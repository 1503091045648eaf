"""The pipeline layers that all decoder families share, and their loss.

A layer takes and returns one tensor or a tuple of tensors. From the embedding's output on, the tuple is

    (hidden states (B, S, H), position_ids (B, S) int32 [, padding mask (B, S) bool])

and the last two pass through every decoder layer untouched. The final norm returns hidden states only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ds_ldt.models.attention import AttentionMemo
from ds_ldt.models.batch import count_target_tensor

Tensors = Tensor | tuple[Tensor, ...]


class TokenEmbedding(nn.Embedding):
    """Pipeline layer 0: token ids (B, S) become hidden states (B, S, H). The ids go no further."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)

    def forward(self, inputs: Tensors) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Embed `(input_ids, position_ids[, padding mask])`; bare ids get the positions 0..S-1."""
        if isinstance(inputs, Tensor):
            inputs = (inputs, default_position_ids(inputs))
        input_ids, *rest = inputs
        return super().forward(input_ids), *rest


class DecoderMixin(nn.Module):
    """Turns a decoder layer of transformers into a pipeline layer. Mix it in before the layer's class.

    The mixed class keeps the state-dict keys of the layer it extends.
    """

    def __init__(self, config: Any, layer_idx: int, *, memo: AttentionMemo, mask_kind: str) -> None:
        super().__init__(config, layer_idx)
        self.memo = memo
        self.mask_kind = mask_kind

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the layer on `(hidden, position_ids[, padding mask])` and pass all but `hidden` on as they came."""
        hidden, position_ids, *optional = inputs
        padding_mask = optional[0] if optional else None
        positions, rotary, mask = self.memo.look_up(hidden, position_ids, padding_mask, self.mask_kind)
        hidden = super().forward(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return hidden, position_ids, *optional


class FinalNormMixin(nn.Module):
    """Turns a norm of transformers into the pipeline layer after the last decoder layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, inputs: Tensors) -> Tensor:
        """Return normed hidden states (B, S, H); what came beside them ends here."""
        return super().forward(hidden_of(inputs))


class OutputLayer(nn.Linear):
    """The last pipeline layer when it has its own weight: hidden states (B, S, H) become logits (B, S, vocabulary)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, inputs: Tensors) -> Tensor:
        """Return the logits."""
        return super().forward(hidden_of(inputs))


def tied_output(embedding: TokenEmbedding, inputs: Tensors) -> Tensor:
    """Compute logits (B, S, vocabulary) with the embedding's own weight."""
    return nn.functional.linear(hidden_of(inputs), embedding.weight)


def hidden_of(inputs: Tensors) -> Tensor:
    """Return the hidden states of a layer's input."""
    return inputs if isinstance(inputs, Tensor) else inputs[0]


def default_position_ids(input_ids: Tensor) -> Tensor:
    """Return positions 0..S-1 for every row, (B, S) int32: what transformers assumes, padding or not."""
    return torch.arange(input_ids.shape[1], dtype=torch.int32, device=input_ids.device).repeat(input_ids.shape[0], 1)


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over the targets of one micro-batch, in fp32, as transformers computes it.

    The labels are shifted here and nowhere else: position i is scored against label i + 1.

    Args:
        logits: (B, S, vocabulary).
        labels: (B, S) int64, not shifted; -100 marks what is no target.

    Returns:
        A scalar. It is 0, with gradients of 0, if the micro-batch has no target.
    """
    labels = labels.to(logits.device)
    count = count_target_tensor(labels).clamp(min=1)
    return ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1], num_items_in_batch=count)

"""Are samples longer than the model was made for? Rope goes on beyond that, so nothing fails by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepspeed.utils import logger
from torch import Tensor
from transformers import PreTrainedConfig


def position_limit(config: PreTrainedConfig) -> int:
    """Return how many positions a model was made for.

    Args:
        config: Its config. Where rope is scaled by a factor, the scaled length counts if it is the larger one.

    Returns:
        `max_position_embeddings`, or more.
    """
    text = config.get_text_config()
    limit: int = text.max_position_embeddings
    scaled = [
        (rope.get("original_max_position_embeddings") or limit) * rope["factor"]
        for rope in _ropes(getattr(text, "rope_parameters", None))
        if isinstance(rope.get("factor"), int | float)
    ]
    return max(limit, *map(int, scaled)) if scaled else limit


def beyond_limit(config: PreTrainedConfig, positions: int) -> str | None:
    """Return what to say of samples of so many positions, None if they are within what the model was made for."""
    limit = position_limit(config)
    if positions <= limit:
        return None
    return (
        f"samples reach {positions} positions, while the model was made for {limit} (max_position_embeddings of its "
        "config.json): what it computes beyond may be worthless. Fix: cut the samples, or scale rope in the config"
    )


class WatchedBatches:
    """Reads batches as a family does, and says once that positions go beyond what the model was made for.

    Args:
        batch_fn: What the family reads batches with.
        config: The config of the model.
    """

    def __init__(self, batch_fn: Callable[[Any], tuple[Any, ...]], config: PreTrainedConfig) -> None:
        self.batch_fn = batch_fn
        self._config = config
        self._has_said = False

    def __call__(self, batch: Any) -> tuple[Any, ...]:
        """Return what the family makes of a collated batch. Packed sequences count on their own."""
        prepared = self.batch_fn(batch)
        if not self._has_said:
            # Token ids and their positions are the inputs, or with images what stays for the text embedding.
            _, position_ids, *_ = prepared[2] if len(prepared) > 2 else prepared[0]
            self._look_at(position_ids)
        return prepared

    def _look_at(self, position_ids: Tensor) -> None:
        warning = beyond_limit(self._config, int(position_ids.max()) + 1) if position_ids.numel() else None
        if warning is not None:
            self._has_said = True
            logger.warning(f"ds_ldt: {warning}")


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Yield rope settings, of which some models have one for each type of layer."""
    if not isinstance(parameters, Mapping):
        return
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, Mapping))

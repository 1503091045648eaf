"""The fingerprint of a Hugging Face model: is it the one that the other half, a checkpoint or an adapter is of?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from ds_ldt.checkpointing.hf_weights import HFWeights
from ds_ldt.comm.identity import ModelFingerprint

SAMPLE_BYTES = 32768
"""How much of either end of a weight is hashed: all of small ones, and of large ones what takes no time to read."""

# What does not make another model of it: where it is from, how it is run, trained or sampled from.
_IGNORED = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "transformers_version"),
        *("_attn_implementation", "_attn_implementation_autoset", "_experts_implementation", "attn_implementation"),
        *("dtype", "torch_dtype", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("bos_token_id", "eos_token_id", "id2label", "label2id", "problem_type", "chunk_size_feed_forward"),
        *("initializer_range", "pretraining_tp", "is_encoder_decoder"),
    }
)


def fingerprint_of(config: PreTrainedConfig, weights: HFWeights | str) -> ModelFingerprint:
    """Return the fingerprint of a model.

    Args:
        config: Its config, checked or not.
        weights: Its files, or a text that says where its weights come from, e.g. the seed of random ones.
    """
    return ModelFingerprint(
        family=config.model_type,
        settings=settings_of(config),
        weights=weights if isinstance(weights, str) else weights_digest(weights),
    )


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a config that say which model it is, where they differ from the defaults of its class.

    Defaults are left out so that a release of transformers that knows more settings finds the same. Left out as well
    is what may change between two uses of one model: file names, dtype, ids that end a text.
    """
    return _without_defaults(config.to_dict(), type(config)().to_dict())


def weights_digest(weights: HFWeights) -> str:
    """Return a digest of the weights of a model, the same however they are spread over files.

    Hashed are, for every weight in the order of the pipeline layers, its key, dtype and shape and its first and last
    rows, `SAMPLE_BYTES` of each end at least where there are so many. Two models that agree in all of that are taken
    to be one; a change in the middle of a large weight alone goes unnoticed.
    """
    hashed = hashlib.sha256()
    for layer, key in weights.places:
        ends, dtype, shape = weights.ends(layer, key, SAMPLE_BYTES)
        hashed.update(f"{layer} {key} {dtype} {'x'.join(map(str, shape))}\n".encode())
        for tensor in ends:
            hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _without_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in settings.items():
        if key in _IGNORED:
            continue
        if isinstance(value, Mapping):
            default = defaults.get(key)
            inner = _without_defaults(value, default if isinstance(default, Mapping) else {})
            if inner:
                kept[key] = inner
        elif key not in defaults or value != defaults[key]:
            kept[key] = json.loads(json.dumps(value, default=str))
    return kept

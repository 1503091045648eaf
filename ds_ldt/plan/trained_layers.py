"""Which layers of a model train anything, as far as a configuration tells without the model.

Gradients cross a boundary only if something before it is trained. The engine asks the layers themselves; here there
are only names. Those of the modules of supported families are known, so the names of `ldt.lora` can be matched with
them by PEFT's rules; a name that is none of theirs is taken for a module of every layer, as in a list of layers of
one's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ds_ldt.config.layer_matrix import LAYERS, TEXT, VISION
from ds_ldt.config.lora import LoraSettings
from ds_ldt.config.schema import LDTConfig
from ds_ldt.topology.layout import BETWEEN, LEADING, TRAILING, Layout

_ALL_LINEAR = "all-linear"
_DEFAULTS = ("q_proj", "v_proj")
"""PEFT's choice for every supported family that it has one for."""

_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_DECODER_LINEAR = (*(f"self_attn.{name}_proj" for name in "qkvo"), *_MLP)
_DECODER_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
_BLOCK_LINEAR = ("attn.qkv", "attn.proj", *_MLP)
_BLOCK_NORMS = ("norm1", "norm2")
_MERGER_LINEAR = ("mlp.0", "mlp.2")
_HEAD = "lm_head"

_Module = tuple[str, int | None, bool]
"""Name in the whole model, its global pipeline layer index (None if this layout has no place for it), is it linear."""


def trained_layers(ldt: LDTConfig, layout: Layout) -> frozenset[int] | None:
    """Return the global pipeline layer indices of the layers that train anything.

    Args:
        ldt: The "ldt" section.
        layout: Its layout; layers that join those of a matrix may be missing from it.

    Returns:
        None for all, or where only the model can tell: biases are trained, or a regular expression fits no known name.
    """
    if ldt.lora is not None:
        return _adapted(ldt.lora, layout)
    if VISION in ldt.freeze and len(layout.matrices) > 1:  # what else is frozen, a model has to say
        start = layout.parts[BETWEEN].start
        return frozenset(range(start, layout.num_layers))
    return None


def gradient_boundaries(layers: frozenset[int] | None, layout: Layout) -> tuple[bool, ...] | None:
    """Return for each boundary whether gradients cross it; None means that they cross all.

    Args:
        layers: Those that train anything; None for all.
        layout: The layout that they are numbered by.
    """
    if layers is None:
        return None
    first = min(layers, default=layout.num_layers)
    return tuple(first < virtual.stop for virtual in layout.virtual_stages[:-1])


def describe_layers(layers: frozenset[int], layout: Layout) -> str:
    """Return layers by the numbers they have in their modality, e.g. `text_decoder 4-6, trailing`."""
    found = []
    for part, held in layout.parts.items():
        mine = [index - held.start for index in held if index in layers]
        if mine:
            numbers = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in _runs(mine))
            found.append(part if part in (LEADING, BETWEEN, TRAILING) else f"{part} {numbers}")
    return "; ".join(found) or "those behind the last hop"


def _adapted(settings: LoraSettings, layout: Layout) -> frozenset[int] | None:
    if settings.bias == "all":
        return None
    known = list(_modules(layout))
    own = [name for name in _listed(settings.target_modules) if not any(_is(module, name) for module, *_ in known)]
    # A list of layers of one's own is named like the decoder layers of a model of text.
    modules = [*known, *((f"{path}.{name}", index, True) for name in own for path, index in _decoder(layout))]
    trained = [module for module in modules if _is_target(settings, module)]
    saved = settings.modules_to_save or []
    trained += [module for module in modules if any(module[0].endswith(name) for name in saved)]
    if not trained:
        return None
    return frozenset(index for _, index, _ in trained if index is not None)


def _is_target(settings: LoraSettings, module: _Module) -> bool:
    name, _, linear = module
    if _matches(settings.exclude_modules, name):
        return False
    if any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in settings.modules_to_save or []):
        return False
    targets = settings.target_modules
    if targets == _ALL_LINEAR:
        return linear and name != _HEAD and _is_transformed(settings, name)
    return _matches(_DEFAULTS if targets is None else targets, name) and _is_transformed(settings, name)


def _is_transformed(settings: LoraSettings, name: str) -> bool:
    """Whether `layers_to_transform` has the first number in a name, which counts vision blocks as decoder layers."""
    indices = settings.layers_to_transform
    if indices is None:
        return True
    patterns = settings.layers_pattern
    listed = [patterns] if isinstance(patterns, str) else patterns or []
    forms = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in listed] or [r".*?\.[^.]*\.(\d+)\."]
    found = next(filter(None, (re.match(form, name) for form in forms)), None)
    return found is not None and int(found[1]) in indices


def _matches(names: Iterable[str] | str | None, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(_is(module, name) for name in names or ())


def _is(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _listed(targets: list[str] | str | None) -> list[str]:
    return targets if isinstance(targets, list) else []


def _decoder(layout: Layout) -> Iterator[tuple[str, int]]:
    """Yield name and global index of the decoder layers."""
    part, path = (LAYERS, "model.layers") if LAYERS in layout.parts else (TEXT, "model.language_model.layers")
    for number, index in enumerate(layout.parts[part]):
        yield f"{path}.{number}", index


def _modules(layout: Layout) -> Iterator[_Module]:
    """Yield the modules of a model of a supported family, without its embedding, which is never trained with adapters.

    Not every family has every norm; to name one that is not there is refused once the model is known.
    """
    parts = layout.parts
    if VISION in parts:
        yield "model.visual.patch_embed.proj", parts[LEADING].start, False
        for number, index in enumerate(parts[VISION]):
            yield from _within(f"model.visual.blocks.{number}", index, _BLOCK_LINEAR, _BLOCK_NORMS)
        yield from _within("model.visual.merger", parts[BETWEEN].start, _MERGER_LINEAR, ("ln_q",))
    for path, index in _decoder(layout):
        yield from _within(path, index, _DECODER_LINEAR, _DECODER_NORMS)
    end = parts[TRAILING].start if parts[TRAILING] else None
    yield ("model.language_model.norm" if VISION in parts else "model.norm"), end, False
    yield _HEAD, end, True


def _within(path: str, index: int, linear: Iterable[str], others: Iterable[str]) -> Iterator[_Module]:
    yield from ((f"{path}.{name}", index, True) for name in linear)
    yield from ((f"{path}.{name}", index, False) for name in others)


def _runs(numbers: list[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    yield run

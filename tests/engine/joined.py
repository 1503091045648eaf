"""A toy of two modalities over three chunks: patches meet token ids in a middle chunk of the edge.

Patches (B, patches, 4) become hidden states of the first modality, which cross the link and return. On the edge they
are pooled and added to the embeddings of token ids, which stay there; the hidden states of the second modality have
another length and carry positions. Numbers of patches and of tokens change with every micro-batch, and some
micro-batches have no picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils.data import Dataset

import ds_ldt
import ds_ldt.errors
from ds_ldt.comm.wire import WireSchema, WireTensor
from ds_ldt.runtime.shape_inference import Shapes
from ds_ldt.topology.layout import Layout
from tests.engine.cases import Untouchable, config, initialize, train_steps, weights_of
from tests.toy import WIDTH, Block, Head, Stem

LAYERS = {"vision_encoder": [[1, 1], [1, 0], [0, 0]], "text_decoder": [[0, 0], [1, 1], [1, 0]]}
WHOLE_VISION_ON_EDGE = {"vision_encoder": [[3, 0], [0, 0]], "text_decoder": [[1, 1], [1, 0]]}
JOIN_FIRST = {"vision_encoder": [[1, 1, 1], [0, 0, 0], [0, 0, 0]], "text_decoder": [[0, 0, 0], [1, 1, 0], [1, 0, 0]]}
DEPTHS = {"vision_encoder": 3, "text_decoder": 3}
JOINING = {"num_leading": 1, "num_between": 1, "num_trailing": 1}
JOIN = 4
PARTS: dict[str, list[Any]] = {
    "vision_encoder": [0, 1, 2, 3],
    "merger": [(JOIN, "merger.")],
    "text_decoder": [(JOIN, "embedding."), 5, 6, 7, 8],
}

HIDDEN = WireTensor(name="hidden", dtype="float", ndim=3, gradient=True)
POSITIONS = WireTensor(name="positions", dtype="int32", ndim=2)
TENSORS = {"vision_encoder": (HIDDEN,), "text_decoder": (HIDDEN, POSITIONS)}


class Join(nn.Module):
    """Hidden states (B, patches, WIDTH) and, from the edge, ids (B, S) and whether there is a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.merger = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(11, WIDTH)

    def forward(self, vision: Tensor, local: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, has_picture = local
        hidden = self.embedding(ids)
        if not vision.is_meta and bool(has_picture):
            hidden = hidden + self.merger(vision.mean(1, keepdim=True))
        return hidden, torch.arange(ids.shape[1], dtype=torch.int32).repeat(ids.shape[0], 1)


class TextBlock(nn.Module):
    """A block that needs the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, positions = inputs
        return self.block(hidden) * (1 + 0.01 * positions[..., None].float()), positions


class TextHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return self.head(inputs[0].mean(1))


CLASSES: list[type[nn.Module]] = [Stem, Block, Block, Block, Join, TextBlock, TextBlock, TextBlock, TextHead]


class Unsplit(nn.Sequential):
    """The oracle: the same layers, called one after the other."""

    def forward(self, inputs: tuple[Tensor, tuple[Tensor, Tensor]]) -> Any:
        payload, local = inputs
        for layer in self:
            payload = layer(payload, local) if isinstance(layer, Join) else layer(payload)
        return payload


class Pictures(Dataset[Any]):
    """Sample i: patches (n, 4), ids (s,), a target (3,). Some micro-batches have no picture: `collate` decides."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        patches = torch.randn(1 + index % 5, 4, generator=generator)
        ids = torch.randint(0, 11, (2 + (index * 3) % 7,), generator=generator)
        return patches, ids, torch.randn(3, generator=generator)


def collate(samples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[tuple[Tensor, tuple[Tensor, Tensor]], Tensor]:
    """((patches, (ids, has_picture)), targets), padded."""
    patches, ids, targets = zip(*samples, strict=True)
    pad = nn.utils.rnn.pad_sequence
    has_picture = torch.tensor(int(ids[0][0]) % 3 != 0)
    return (pad(patches, batch_first=True), (pad(ids, batch_first=True), has_picture)), torch.stack(targets)


def batch_fn(batch: Any) -> tuple[Any, Tensor, tuple[Tensor, Tensor]]:
    """What enters the head, the labels, and what stays on the edge for the join."""
    (patches, local), targets = batch
    return patches, targets, local


def sent_shapes(inputs: Tensor, local: tuple[Tensor, ...], boundary: int) -> Shapes | None:
    """What the edge sends, said instead of traced: patches over boundary 0, tokens over that of the join."""
    if boundary == 0:
        return ((torch.float32, (*inputs.shape[:2], WIDTH)),)
    size = tuple(local[0].shape)
    return (torch.float32, (*size, WIDTH)), (torch.int32, size)


def settings(layers: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A configuration for the toy on three ranks: two domains of one cloud stage, or one of two."""
    num_domains = 2 if len(layers["text_decoder"][0]) == 2 else 1
    return config(layers, num_domains=num_domains, num_micro_batches=3, **options)  # type: ignore[arg-type]


def build(wanted: dict[str, Any], *, said: bool, **changes: Any) -> ds_ldt.LDTPipelineModule:
    """The toy split as configured; `said`: shapes are said instead of traced."""
    layout = Layout.build(wanted["ldt"]["pipeline_num_layers"], num_layers=DEPTHS, **JOINING)
    options: dict[str, Any] = {
        "wire": WireSchema.by_modality(layout, TENSORS, uniform=said),
        "depths": DEPTHS,
        "local_layers": [JOIN],
        "batch_fn": batch_fn,
        "sent_shapes": sent_shapes if said and layout.modality_of_boundary(0) == "vision_encoder" else None,
        "parts": PARTS,
        **JOINING,
    }
    layers = [LayerSpec(one) for one in CLASSES]
    return ds_ldt.LDTPipelineModule(layers, wanted, nn.functional.mse_loss, **{**options, **changes})


def engine_of(module: ds_ldt.LDTPipelineModule) -> ds_ldt.LDTPipelineEngine:
    """An engine with data on the edge only."""
    data = Pictures() if dist.get_rank() == 0 else Untouchable()
    return initialize(model=module, training_data=data, collate_fn=collate)


def refusals() -> list[str]:
    """What this rank is told where nothing is left to train, layers are misplaced, or there is nothing to join."""
    wanted = settings(LAYERS)
    nothing_left = settings(LAYERS, ldt={"freeze": list(PARTS)})

    def trained() -> None:
        engine_of(build(wanted, said=True, batch_fn=lambda batch: batch_fn(batch)[:2])).train_batch()

    said = []
    for attempt in (
        lambda: engine_of(build(nothing_left, said=True)),
        lambda: build(wanted, said=True, local_layers=[2]),
        lambda: build(wanted, said=True, depths={"vision_encoder": 3, "text_decoder": 3}, num_between=0),
        trained,
    ):
        try:
            attempt()
        except ds_ldt.errors.LDTError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def train_variants(variants: list[tuple[dict[str, Any], bool]], steps: int) -> list[dict[str, Any]]:
    """Train with each (configuration, whether shapes are said instead of traced); what this rank saw."""
    found = []
    for wanted, said in variants:
        engine = engine_of(build(wanted, said=said))
        before = weights_of(engine)
        seen = train_steps(engine, steps)
        after = weights_of(engine)
        instructions = [one.name for step in engine._train_schedule().steps() for one in step]
        found.append(
            {
                **seen,
                "weights": after,
                "changed": [
                    (index, name)
                    for index in before
                    for name, value in before[index].items()
                    if not torch.equal(value, after[index][name])
                ],
                "gradients": instructions.count("SendGrad"),
            }
        )
        engine.destroy()
    return found

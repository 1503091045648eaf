"""Two modalities: what meets on the edge in the middle of the pipeline equals the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_ldt.comm.wire import WireSchema
from ds_ldt.errors import ConfigError
from ds_ldt.runtime.module import frozen_parameters
from ds_ldt.runtime.shape_inference import ShapeTracer, without_gradients
from ds_ldt.topology.layout import Layout
from tests.engine.joined import (
    CLASSES,
    DEPTHS,
    JOIN,
    JOIN_FIRST,
    JOINING,
    LAYERS,
    PARTS,
    TENSORS,
    WHOLE_VISION_ON_EDGE,
    Pictures,
    Unsplit,
    collate,
    sent_shapes,
    settings,
)
from tests.engine.parity import assert_parity
from tests.harness import GroupPool
from tests.toy import WIDTH, Trace, build_unsplit, train_unsplit

STEPS = 3
LAYOUT = Layout.build(LAYERS, num_layers=DEPTHS, **JOINING)


def oracle(frozen: tuple[str, ...] = (), num_domains: int = 2) -> Trace:
    model = Unsplit(*build_unsplit(list(CLASSES)))
    for index, prefix in frozen_parameters(frozen, PARTS):
        for name, parameter in model[index].named_parameters():
            parameter.requires_grad_(not name.startswith(prefix))
    return train_unsplit(
        model,
        Pictures(),
        loss_fn=nn.functional.mse_loss,
        make_optimizer=lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1),
        steps=STEPS,
        num_micro_batches=3,
        num_domains=num_domains,
        micro_batch_size=2,
        collate=collate,
    )


def test_two_modalities_equal_the_unsplit_model_whatever_meets_on_the_edge(groups: GroupPool) -> None:
    frozen = {"freeze": ["vision_encoder"]}
    checkpointed = {"pipeline": {"activation_checkpoint_interval": 1}}
    variants: list[tuple[dict[str, Any], bool]] = [
        (settings(LAYERS), False),
        (settings(LAYERS, **checkpointed), True),
        (settings(WHOLE_VISION_ON_EDGE), True),
        (settings(LAYERS, ldt=frozen), False),
        (settings(LAYERS, ldt={"freeze": ["vision_encoder", "merger"]}), True),
        (settings(JOIN_FIRST), True),
    ]
    ranks = groups.run(3, "tests.engine.joined:train_variants", variants, STEPS, deadline_s=120)
    whole = oracle()
    for number, _ in enumerate(variants[:3]):
        assert_parity([rank[number] for rank in ranks], whole, "SGD")
    assert_parity([rank[5] for rank in ranks], oracle(num_domains=1), "SGD")
    for number, names in ((3, ("vision_encoder",)), (4, ("vision_encoder", "merger"))):
        results = [rank[number] for rank in ranks]
        assert_parity(results, oracle(names), "SGD")
        changed = {(index, name.split(".")[0]) for result in results for index, name in result["changed"]}
        assert {index for index, _ in changed} == {*range(JOIN, 9)}
        assert ((JOIN, "merger") in changed) == ("merger" not in names)
        # Nothing is trained before the join: the cloud sends gradients back for the text alone.
        assert [result["gradients"] for result in results] == [6, 3, 3]
    assert [rank[0]["gradients"] for rank in ranks] == [12, 6, 6]


def test_what_cannot_be_joined_or_trained_is_refused(groups: GroupPool) -> None:
    edge, *cloud = groups.run(3, "tests.engine.joined:refusals", deadline_s=60)
    for said in (edge, *cloud):
        assert 'ldt.freeze: found ["vision_encoder", "merger", "text_decoder"], expected some part' in said[0]
        assert "expected layer 2 on stage 0, the edge: it takes what stays there" in said[1]
        assert "layers: found 9 layers, expected 8, those of depths=" in said[2]
    assert "ConfigError" in edge[3]
    assert "batch_fn: found 2 values, expected (inputs, labels, local)" in edge[3]
    assert all("LinkError" in said[3] for said in cloud)


def test_the_edge_announces_what_does_not_follow_from_the_boundary_before() -> None:
    uniform = WireSchema.by_modality(LAYOUT, TENSORS)
    traced = WireSchema.by_modality(LAYOUT, TENSORS, uniform=False)
    assert [len(uniform.tensors_at(boundary)) for boundary in range(4)] == [1, 1, 2, 2]
    inputs, local = torch.ones(2, 5, 4), (torch.ones(2, 7, dtype=torch.int64), torch.tensor(True))
    layers = [one() for one in CLASSES]
    for schema, said in ((traced, False), (uniform, True)):
        tracer = ShapeTracer(layers, LAYOUT, schema, local_layers=[JOIN])
        head = tracer.declare(0, sent_shapes(inputs, local, 0) or ())
        if not said:
            assert tracer.sent_by_edge(0, ((torch.float32, (2, 5, 4)),)) == head
        known = tracer.boundaries((head,))
        assert [without_gradients(one) for one in known] == [((torch.float32, (2, 5, WIDTH)),)] * 2
        shapes = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in local)
        join = tracer.sent_by_edge(2, without_gradients(known[-1]), shapes)
        assert without_gradients(join) == sent_shapes(inputs, local, 2)
        assert tracer.boundaries((head, join)) == (*known, join, join)


def test_a_schema_by_modality_names_the_boundaries_of_each() -> None:
    text = WireSchema.by_modality(LAYOUT, TENSORS).describe()
    assert "  boundaries 0-1:\n    1. hidden" in text
    assert "  boundaries 2-3:\n    1. hidden" in text
    assert "every" not in text.split("\n")[1]


def test_unknown_parts_are_refused_with_those_there_are() -> None:
    assert frozen_parameters(["merger", "vision_encoder"], PARTS)[:2] == [(JOIN, "merger."), (0, "")]
    with pytest.raises(ConfigError, match='ldt.freeze: found "vision", expected parts of this model: vision_'):
        frozen_parameters(["vision"], PARTS)
    with pytest.raises(ConfigError, match="expected nothing: this model names no parts"):
        frozen_parameters(["decoder"], {})

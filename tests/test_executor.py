"""Instructions on real tensors in one process: no DeepSpeed engine, no process group, messages in a dictionary."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ldt.comm.wire import DEFAULT_SCHEMA, signature_of
from ds_ldt.errors import LinkError
from ds_ldt.plan import Channel, Kind, PipelineShape, Plan, build_plan, planned
from ds_ldt.runtime.executor import StageExecutor
from ds_ldt.runtime.micro_batches import MicroBatch
from ds_ldt.runtime.step_inputs import Step
from ds_ldt.topology.layout import Layout
from tests.toy import WIDTH, Points, build_unsplit, layer_classes

ROWS, M = 3, 4
LAYOUTS = {"two chunks": [[2, 1], [2, 0]], "three chunks": [[1, 1], [1, 1], [1, 0]]}


class Mailbox:
    """Messages of all ranks, by channel and micro-batch."""

    def __init__(self) -> None:
        self.messages: dict[tuple[Channel, int], deque[tuple[Tensor, ...]]] = defaultdict(deque)

    def send(self, channel: Channel, micro_batch: int, tensors: tuple[Tensor, ...]) -> None:
        self.messages[channel, micro_batch].append(tuple(t.detach().clone() for t in tensors))

    def receive(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        return self.messages[channel, micro_batch].popleft()


class Part:
    """The layers of one stage, as an executor needs them."""

    wire, base_seed, training = DEFAULT_SCHEMA, 1, True
    loss_fn = staticmethod(nn.functional.mse_loss)

    def __init__(self, layers: nn.Sequential, layout: Layout) -> None:
        self.layers, self.layout = layers, layout

    def __call__(self, inputs: Any, *, virtual_stage: int, inside: Any, **_: Any) -> Any:
        stage = self.layout.virtual_stages[virtual_stage]
        for layer in self.layers[stage.start : stage.stop]:
            if inside is None:
                inputs = layer(inputs)
            else:
                with inside():
                    inputs = layer(inputs)
        return inputs

    def get_additional_losses(self) -> None:
        return None

    def trained_parameters(self, virtual_stage: int) -> list[nn.Parameter]:
        stage = self.layout.virtual_stages[virtual_stage]
        return list(self.layers[stage.start : stage.stop].parameters())


def executors_of(layout: Layout, layers: nn.Sequential, plan: Plan) -> tuple[list[StageExecutor], list[MicroBatch]]:
    """An executor for each rank, its step begun; and the micro-batches."""
    mailbox, points = Mailbox(), Points(ROWS * M)
    boundary = signature_of((torch.zeros(ROWS, WIDTH, requires_grad=True),))
    batches = [
        MicroBatch(inputs=points.inputs[m * ROWS : (m + 1) * ROWS], labels=points.targets[m * ROWS : (m + 1) * ROWS])
        for m in range(M)
    ]
    found = []
    for rank in range(plan.shape.num_ranks):
        executor = StageExecutor(
            rank=rank,
            module=Part(layers, layout),  # type: ignore[arg-type]
            messages=mailbox,
            device=torch.device("cpu"),
            gradient_boundaries=(True,) * layout.num_boundaries,
        )
        signatures = {(m, 0): (boundary,) * layout.num_boundaries for m in range(M)}
        own = {(m, 0): batch for m, batch in enumerate(batches)} if rank == 0 else {}
        executor.begin(Step(plan=plan, signatures=signatures, batches=own), number=0)
        found.append(executor)
    return found, batches


def run_together(executors: list[StageExecutor], plan: Plan) -> None:
    """Let every rank go on as far as it has its messages, until all are done; gradients meet in shared layers."""
    left = {rank: deque(map(planned, plan.for_rank(rank))) for rank in range(len(executors))}
    closing = {Kind.REDUCE_GRADS: lambda key, channel: None, Kind.OPTIMIZER_STEP: lambda key, channel: None}
    while any(left.values()):
        moved = False
        for rank, instructions in left.items():
            while instructions:
                kind, key, channel = instructions[0]
                if kind.is_receive and not executors[rank]._messages.messages[channel, key.micro_batch]:
                    break
                executors[rank].run([instructions.popleft()], {**executors[rank].handlers, **closing})
                moved = True
        assert moved, "every rank waits for a message"


@pytest.mark.parametrize("split", [False, True], ids=["whole backward", "split backward"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_in_one_process_make_the_gradients_of_the_unsplit_model(name: str, split: bool) -> None:
    layout = Layout.build(LAYOUTS[name], num_layers=5)
    shape = PipelineShape.from_layout(layout, num_micro_batches=M, num_domains=1, num_replicas=1, split_backward=split)
    plan = build_plan(shape, policy="greedy", training=True)
    layers, oracle = build_unsplit(layer_classes(5)), build_unsplit(layer_classes(5))
    executors, batches = executors_of(layout, layers, plan)
    points = Points(ROWS * M)
    losses = [
        nn.functional.mse_loss(
            oracle(points.inputs[m * ROWS : (m + 1) * ROWS]), points.targets[m * ROWS : (m + 1) * ROWS]
        )
        for m in range(M)
    ]
    (sum(losses) / M).backward()
    run_together(executors, plan)
    for parameter, wanted in zip(layers.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, atol=1e-6, rtol=1e-5)
    found = executors[0].results.losses
    assert [found[m, 0].item() for m in range(M)] == pytest.approx([loss.item() for loss in losses], abs=1e-6)
    for executor in executors:
        assert not any((executor.inputs, executor.outputs, executor.output_grads, executor.losses))
        assert len(executor.ledger) == 0


def test_what_the_layers_return_is_held_to_what_was_announced() -> None:
    layout = Layout.build(LAYOUTS["two chunks"], num_layers=5)
    shape = PipelineShape.from_layout(layout, num_micro_batches=M, num_domains=1, num_replicas=1)
    plan = build_plan(shape, policy="closed_form", training=True)
    executors, batches = executors_of(layout, build_unsplit(layer_classes(5)), plan)
    batches[0].inputs = batches[0].inputs[:1]
    with pytest.raises(LinkError, match=r"returned \(float32\[1, 8\]\), but \(float32\[3, 8\]\) was announced"):
        run_together(executors, plan)


def test_loss_scale_is_on_the_gradients_and_not_on_the_results() -> None:
    layout = Layout.build(LAYOUTS["two chunks"], num_layers=5)
    shape = PipelineShape.from_layout(layout, num_micro_batches=M, num_domains=1, num_replicas=1)
    plan = build_plan(shape, policy="closed_form", training=True)
    gradients, results = [], []
    for scale in (1.0, 8.0):
        layers = build_unsplit(layer_classes(5))
        executors, _ = executors_of(layout, layers, plan)
        for executor in executors:
            executor.loss_scale = lambda scale=scale: scale
        run_together(executors, plan)
        gradients.append(layers[0].linear.weight.grad)
        results.append(executors[0].results.losses[0, 0])
    torch.testing.assert_close(gradients[1], 8 * gradients[0])
    assert torch.equal(*results)

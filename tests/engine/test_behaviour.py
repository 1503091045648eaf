"""Single promises of the engine; tests named after a row of faults that people hit in comparable projects."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_ldt.plan.chrome_trace import read_trace
from tests.engine.behaviour import Square, TiedLinear
from tests.engine.cases import config, layout
from tests.engine.parity import assert_parity, oracle
from tests.engine.scenarios import SCENARIOS, shapes_after_stem, wrong_shapes_after_stem
from tests.harness import GroupPool
from tests.toy import Points, Trace, build_unsplit, domain_batches, layer_classes, train_unsplit

TARGETS = "tests.engine.behaviour:"


def run(groups: GroupPool, world_size: int, target: str, *args: Any, **options: Any) -> list[Any]:
    return groups.run(world_size, TARGETS + target, *args, **{"deadline_s": 90, **options})


def scenario_oracle(name: str, settings: dict[str, Any], steps: int) -> Trace:
    scenario = SCENARIOS[name]
    model = build_unsplit([lambda c=c, a=a: c(*a) for c, a in scenario.layers])
    return train_unsplit(
        model,
        scenario.dataset(),
        loss_fn=nn.functional.mse_loss,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=steps,
        num_micro_batches=settings["gradient_accumulation_steps"],
        num_domains=settings["ldt"]["cloud"]["data_parallel_size"],
        micro_batch_size=settings["train_micro_batch_size_per_gpu"],
        collate=scenario.collate,
    )


def check_scenario(groups: GroupPool, name: str) -> None:
    settings = config(SCENARIOS[name].matrix, num_micro_batches=3)
    ranks = run(groups, 3, "train_scenario", name, settings, 3, {})
    assert_parity(ranks, scenario_oracle(name, settings, 3), "SGD")


def test_S01_an_int_tensor_before_the_activations_arrives_as_it_is(groups: GroupPool) -> None:
    check_scenario(groups, "S01")


def test_S02_a_float_tensor_without_gradient_is_not_waited_for(groups: GroupPool) -> None:
    check_scenario(groups, "S02")


def test_S04_tuples_of_bool_int_and_float_tensors_arrive_whole(groups: GroupPool) -> None:
    check_scenario(groups, "S04")


def test_S05_micro_batches_of_different_lengths_equal_the_unsplit_run(groups: GroupPool) -> None:
    check_scenario(groups, "S05")


def test_S05_with_fixed_shapes_other_lengths_are_refused_before_any_compute(groups: GroupPool) -> None:
    settings = config(SCENARIOS["S05"].matrix, num_micro_batches=3)
    edge, *cloud = run(groups, 3, "train_scenario", "S05", settings, 1, {"dynamic_shape": False}, check=False)
    assert edge.is_a("ConfigError") and "dynamic_shape" in edge.message
    assert all(failure.is_a("LinkError") and "failed to draw" in failure.message for failure in cloud)


def test_a_model_may_say_the_shapes_of_its_head_instead_of_having_them_traced(groups: GroupPool) -> None:
    settings = config(SCENARIOS["S05"].matrix, num_micro_batches=3)
    ranks = run(groups, 3, "train_scenario", "S05", settings, 2, {"sent_shapes": shapes_after_stem})
    assert_parity(ranks, scenario_oracle("S05", settings, 2), "SGD")


def test_outputs_of_other_shapes_than_announced_are_refused_before_they_are_sent(groups: GroupPool) -> None:
    settings = config(SCENARIOS["S05"].matrix, num_micro_batches=3)
    options = {"sent_shapes": wrong_shapes_after_stem}
    edge, *cloud = run(groups, 3, "train_scenario", "S05", settings, 1, options, check=False)
    assert edge.is_a("LinkError")
    assert "was announced to the receiver" in edge.message
    assert all(failure.is_a("LinkError") for failure in cloud)


def test_every_boundary_may_have_a_width_of_its_own(groups: GroupPool) -> None:
    check_scenario(groups, "widths")


@pytest.mark.parametrize("frozen, reaches_stage_1", [([0], True), ([1, 2], True), ([0, 1], False)])
def test_S03_S46_a_frozen_site_trains_nothing_and_nobody_waits_for_it(
    groups: GroupPool, frozen: list[int], reaches_stage_1: bool
) -> None:
    ranks = run(groups, 3, "train_frozen", config(layout(3, 2)), 3, frozen)
    assert [rank["stage"] for rank in ranks if rank["changed"]] == [s for s in range(3) if s not in frozen]
    assert len({tuple(rank["losses"]) for rank in ranks}) == 1
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0]
    assert ranks[1]["gradients"] == (4 if frozen == [1, 2] else 0), "stage 1 sends gradients to an edge that trains"
    assert (ranks[2]["gradients"] > 0) == reaches_stage_1


@pytest.mark.parametrize("world_size, sizes", [(3, {"num_domains": 2}), (4, {"num_domains": 2, "num_replicas": 2})])
def test_S07_outputs_meet_the_labels_of_their_own_sample(
    groups: GroupPool, world_size: int, sizes: dict[str, int]
) -> None:
    settings = config(layout(2, 3), num_micro_batches=5, **sizes)
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    ranks = run(groups, world_size, "count_label_mismatches", settings, 3)
    edges = ranks[: sizes.get("num_replicas", 1)]
    assert [(wrong, loss) for wrong, _, loss in ranks] == [(0, 0.0)] * world_size
    assert all(compared == 3 * 5 * sizes["num_domains"] // len(edges) for _, compared, _ in edges)


@pytest.mark.parametrize("num_batches", [[0], [6], [9, 6], [6, 100]])
def test_S08_when_the_data_ends_every_rank_stops_and_can_go_on(groups: GroupPool, num_batches: list[int]) -> None:
    """Steps of 4 micro-batches; with two edge replicas one of them may have data left when the other has none."""
    replicas = len(num_batches)
    settings = config(layout(2, 2), num_domains=replicas, num_replicas=replicas)
    ranks = run(groups, 2 * replicas, "run_out_of_data", settings, num_batches)
    assert all(rank["ended"] and rank["steps"] == min(num_batches) // 4 for rank in ranks)
    assert len({rank["more"] for rank in ranks}) == 1


def test_without_data_the_edge_is_told_how_to_give_some(groups: GroupPool) -> None:
    edge, cloud = run(groups, 2, "edge_without_data", config(layout(2, 2)))
    assert edge.startswith("ConfigError") and "pass training_data=" in edge
    assert cloud.startswith("LinkError") and "the edge (rank 0) failed" in cloud


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_S09_fewer_micro_batches_than_stages(groups: GroupPool, num_micro_batches: int) -> None:
    settings = config(layout(3, 2), num_micro_batches=num_micro_batches)
    ranks = groups.run(3, "tests.engine.cases:train", settings, 2, deadline_s=90)
    assert_parity(ranks, oracle(settings, 2), "SGD")


@pytest.mark.parametrize("num_micro_batches", [1, 2, 8])
def test_S16_the_accumulation_factor_is_applied_once(groups: GroupPool, num_micro_batches: int) -> None:
    """One SGD step without clipping: weights show every gradient, and the head must not be scaled a second time."""
    settings = config(layout(2, 3), num_micro_batches=num_micro_batches)
    ranks = groups.run(2, "tests.engine.cases:train", settings, 1, deadline_s=90)
    assert_parity(ranks, oracle(settings, 1), "SGD")


def test_S17_the_same_global_batch_gives_the_same_update_however_it_is_accumulated(groups: GroupPool) -> None:
    """16 samples as 4 micro-batches of 4 and as 8 of 2."""
    runs = [(config(layout(2, 2), num_micro_batches=16 // size, micro_batch_size=size), 1) for size in (4, 2)]
    first, second = groups.run(2, "tests.engine.cases:train_many", runs, deadline_s=90)[0]
    assert math.isclose(first["norms"][0], second["norms"][0], rel_tol=1e-6)
    for index, layer in first["weights"].items():
        for name, value in layer.items():
            torch.testing.assert_close(value, second["weights"][index][name], rtol=0, atol=1e-6)


def test_S18_with_many_losses_in_flight_each_backward_uses_its_own(groups: GroupPool) -> None:
    settings = config(layout(2, 3), num_domains=2)
    ranks = groups.run(3, "tests.engine.losses:train_with_all_losses_in_flight", settings, 2, deadline_s=90)
    assert_parity(ranks, oracle(settings, 2), "SGD")
    assert [rank["most"] for rank in ranks] == [8, 0, 0], "all losses of both domains at once, on the edge alone"


def test_S19_every_rank_returns_the_mean_of_the_micro_batch_losses(groups: GroupPool) -> None:
    settings = config(layout(2, 2), num_domains=2)
    ranks = groups.run(3, "tests.engine.cases:train", settings, 5, deadline_s=90)
    expected = oracle(settings, 5).losses
    assert all(loss > 0 for loss in expected)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bf16", [True, False])
def test_S06_S20_S21_S22_evaluation_between_steps(groups: GroupPool, bf16: bool) -> None:
    """Evaluate 3, train, evaluate 1, 4, then 2 micro-batches of another size, train; against the unsplit model."""
    extra = {"bf16": {"enabled": True}} if bf16 else {}
    settings = config(layout(2, 2), num_micro_batches=2, **extra)
    edge, cloud = run(groups, 2, "evaluate_between_steps", settings, bf16)
    assert edge["losses"] == cloud["losses"], "the ranks were told different losses"
    assert edge["rng_kept"] and edge["mode_kept"] and edge["iterator_kept"]
    tolerance = 2e-2 if bf16 else 1e-6
    assert edge["losses"] == pytest.approx(_evaluations(settings), abs=tolerance, rel=tolerance)


def _evaluations(settings: dict[str, Any]) -> list[float]:
    num_layers = sum(map(sum, settings["ldt"]["pipeline_num_layers"]))
    model = build_unsplit(layer_classes(num_layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = domain_batches(Points(96), 0, 1, 2)

    def evaluate(count: int, size: int = 2) -> float:
        batches = domain_batches(Points(64, 3), 0, 1, size)
        with torch.no_grad():
            return sum(_loss(model, next(batches)).item() for _ in range(count)) / count

    def train() -> float:
        losses = [_loss(model, next(stream)) / 2 for _ in range(2)]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    return [evaluate(3), train(), evaluate(1), evaluate(4), evaluate(2, 8), train()]


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.mse_loss(model(inputs), labels)


def test_evaluation_returns_logits_and_single_losses_in_order_on_the_edge_only(groups: GroupPool) -> None:
    edge, cloud = run(groups, 2, "evaluate_for_outputs", config(layout(2, 2)))
    assert (cloud["logits"], cloud["listed"]) == (None, None) and cloud["mean"] == edge["mean"]
    model = build_unsplit(layer_classes(5))
    stream = domain_batches(Points(64, 7), 0, 1, 2)
    for logits, loss in zip(edge["logits"], edge["listed"], strict=True):
        inputs, labels = next(stream)
        torch.testing.assert_close(logits, model(inputs))
        torch.testing.assert_close(loss, nn.functional.mse_loss(model(inputs), labels))
    assert edge["mean"] == pytest.approx(sum(loss.item() for loss in edge["listed"]) / 3)


def test_S23_S24_the_monitor_gets_each_returned_loss_once_from_the_edge(groups: GroupPool, tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    edge, cloud = run(groups, 2, "train_with_monitor", config(layout(2, 2), csv_monitor=monitor), 3, str(tmp_path))
    assert edge["losses"] == cloud["losses"]
    assert edge["written"]["Train_Samples_train_loss.csv"] == pytest.approx(edge["losses"], rel=1e-6)
    assert edge["written"]["Train_Samples_lr.csv"] == [0.1] * 3


def test_S28_clipping_bounds_the_update_of_the_whole_model(groups: GroupPool) -> None:
    settings = config(layout(2, 2), num_domains=2, gradient_clipping=0.01)
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    length = math.sqrt(sum(run(groups, 3, "update_length", settings)))
    assert length == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("sizes", [{}, {"num_domains": 2}, {"num_domains": 2, "num_replicas": 2}])
def test_S29_bf16_steps_are_close_to_fp32_steps(groups: GroupPool, sizes: dict[str, int]) -> None:
    settings = config(layout(2, 2), gradient_clipping=0.5, **sizes)
    world_size = sizes.get("num_replicas", 1) + sizes.get("num_domains", 1)
    ranks = run(groups, world_size, "train_bf16", {**settings, "bf16": {"enabled": True}}, 3)
    expected = oracle(settings, 3)
    assert ranks[0]["losses"] == pytest.approx(expected.losses, rel=2e-2)
    assert ranks[0]["norms"] == pytest.approx(expected.grad_norms, rel=2e-2)
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
        for index, layer in rank["weights"].items():
            for name, value in layer.items():
                assert value.dtype == torch.bfloat16
                torch.testing.assert_close(value.float(), expected.weights[index][name], rtol=1e-2, atol=1e-2)


def test_S33_what_a_rank_holds_does_not_grow_with_the_number_of_micro_batches(groups: GroupPool) -> None:
    # A far link wants more in flight, and so does the plan that measured steps run.
    near = {"link": {"latency_ms": 1}, "schedule": {"layer_forward_ms": 1, "measure_steps": 0}}
    few = run(groups, 2, "count_live_buffers", config(layout(2, 2), num_micro_batches=12, ldt=near))
    many = run(groups, 2, "count_live_buffers", config(layout(2, 2), num_micro_batches=48, ldt=near))
    assert many == few
    assert max(few) < 24, "each micro-batch in flight takes two buffers on a rank"
    assert run(groups, 2, "garbage_remains", config(layout(2, 2), num_micro_batches=8)) == [0, 0]


@pytest.mark.parametrize("sizes", [{}, {"num_domains": 2, "num_replicas": 2}])
def test_S25_S27_tied_layers_on_the_edge_train_and_count_as_one_tensor(
    groups: GroupPool, sizes: dict[str, int]
) -> None:
    settings = config([[2, 2], [2, 0]], optimizer="AdamW", gradient_clipping=0.1, **sizes)
    world_size = sizes.get("num_replicas", 1) + sizes.get("num_domains", 1)
    ranks = run(groups, world_size, "train_tied", settings, 5)
    expected = tied_oracle(settings, 5)
    assert_parity(ranks, expected, "AdamW")


class TiedModel(nn.Module):
    """The oracle: one parameter used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1234)
        self.add_module("0", TiedLinear())
        for index in range(1, 5):
            torch.manual_seed(1234 + index)
            self.add_module(str(index), Square())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for layer in self.children():
            hidden = layer(hidden)
        return hidden @ self.get_submodule("0").weight.t()


def tied_oracle(settings: dict[str, Any], steps: int) -> Trace:
    return train_unsplit(
        TiedModel(),
        Points(96),
        loss_fn=lambda y, t: ((y[:, :3] - t) ** 2).mean(),
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
        steps=steps,
        num_micro_batches=settings["gradient_accumulation_steps"],
        num_domains=settings["ldt"]["cloud"]["data_parallel_size"],
        micro_batch_size=2,
        gradient_clipping=0.1,
    )


@pytest.mark.parametrize("control", ["train_without_slice_scaling", "train_with_stock_clipping"])
def test_parity_would_notice(groups: GroupPool, control: str) -> None:
    """Negative controls: without the edge's 1/K, and with DeepSpeed's own clipping, the comparison fails."""
    settings = config(layout(2, 2), num_domains=2, gradient_clipping=0.1 if "clipping" in control else 0.0)
    ranks = run(groups, 3, control, settings, 3)
    with pytest.raises(AssertionError, match=r"loss|norm|w_ref"):
        assert_parity(ranks, oracle(settings, 3), "SGD")


def test_timers_and_prints_of_deepspeed_keep_working(groups: GroupPool) -> None:
    settings = config(layout(2, 2), wall_clock_breakdown=True)
    settings["steps_per_print"] = 1
    (edge_out, edge), (cloud_out, cloud) = run(groups, 2, "train_and_capture", settings, 2)
    assert edge == cloud
    for step, loss in enumerate(edge, start=1):
        assert f"steps: {step} loss: {loss:0.4f}" in edge_out
    assert "loss:" not in cloud_out


def test_a_trace_holds_what_each_rank_did_in_the_chosen_steps(groups: GroupPool, tmp_path: Path) -> None:
    halves = {"schedule": {"split_backward": True, "measure_steps": 0}}
    trace = {"trace": {"path": str(tmp_path), "steps": [2, 3]}}
    plain, traced = (config(layout(2, 2), num_domains=2, ldt=halves | more) for more in ({}, trace))
    (expected, _), *_ = run(groups, 3, "train_traced", plain, 4)
    ranks = run(groups, 3, "train_traced", traced, 4)
    orders = ranks[0][1]
    assert all(losses == expected for losses, _ in ranks)
    arrows: dict[str, list[str]] = {"s": [], "f": []}
    for rank in range(3):
        events = json.loads((tmp_path / f"rank_{rank}.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert [span["name"] for span in spans if span["cat"] == "compute"] == orders[rank] * 2
        assert {event["tid"] for event in events} == {rank}
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in zip(spans, spans[1:], strict=False))
        for event in events:
            if event["ph"] in arrows:
                arrows[event["ph"]].append(event["id"])
    assert arrows["s"]
    assert sorted(arrows["s"]) == sorted(arrows["f"])
    timeline = read_trace(tmp_path, step=3)
    assert {rank: [str(compute) for compute in timeline.order_of(rank)] for rank in range(3)} == orders
    assert 0 < timeline.makespan < 60
    assert {"F1.0.0", "B1.0.0", "W1.0.0"} <= set(orders[1])


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_S32_activation_checkpointing_changes_nothing(groups: GroupPool, interval: int, reentrant: bool) -> None:
    pipeline = {"activation_checkpoint_interval": interval, "use_reentrant": reentrant}
    settings = config(layout(2, 3), pipeline=pipeline)
    ranks = groups.run(2, "tests.engine.cases:train", settings, 2, deadline_s=90)
    assert_parity(ranks, oracle(settings, 2), "SGD")


@pytest.mark.parametrize("reentrant", [False, True])
def test_S32_chunks_checkpointed_apart_with_ints_before_the_activations(groups: GroupPool, reentrant: bool) -> None:
    settings = config(SCENARIOS["S01"].matrix, num_micro_batches=3, pipeline={"use_reentrant": reentrant})
    settings["ldt"]["activation_checkpoint_interval"] = [1, 0]
    ranks = run(groups, 3, "train_scenario", "S01", settings, 3, {})
    assert_parity(ranks, scenario_oracle("S01", settings, 3), "SGD")


def test_S32_a_checkpoint_behind_a_frozen_edge_keeps_its_gradients(groups: GroupPool) -> None:
    pipeline = {"activation_checkpoint_interval": 1, "use_reentrant": True}
    plain, kept = (
        run(groups, 3, "train_frozen", config(layout(3, 2), **more), 3, [0]) for more in ({}, {"pipeline": pipeline})
    )
    assert [rank["losses"] for rank in kept] == [rank["losses"] for rank in plain]
    assert [rank["changed"] for rank in kept] == [False, True, True]


def test_a_destroyed_engine_leaves_no_thread_and_no_connection(groups: GroupPool, tmp_path: Path) -> None:
    for seen in run(groups, 2, "left_behind", config(layout(2, 2)), str(tmp_path)):
        assert seen["working"][0] > seen["before"][0] + 10, "there was nothing to leave behind"
        assert seen["working"][1] > seen["before"][1] + 10
        assert seen["after"][0] <= seen["before"][0]
        assert seen["after"][1] <= seen["before"][1]
        step, checkpoint, module, twice = seen["told"]
        assert step.startswith("LinkError") and "it was destroyed" in step
        assert checkpoint.startswith("LinkError") and "its engine was destroyed" in checkpoint
        assert module.startswith("ConfigError") and "build a new LDTPipelineModule" in module
        assert twice.startswith("ConfigError") and "a module that an engine trains already" in twice


def test_after_a_failure_nobody_waits_for_the_others_when_an_engine_is_destroyed(groups: GroupPool) -> None:
    assert max(run(groups, 2, "destroy_after_failure", config(layout(2, 2)))) < 5


def test_an_engine_that_one_rank_alone_destroys_ends_there_and_fails_elsewhere_in_seconds(groups: GroupPool) -> None:
    ranks = run(groups, 3, "destroy_one", config(layout(2, 2), num_domains=2))
    for rank, found in enumerate(ranks):
        for alone, (seconds, told) in enumerate(found):
            assert seconds < 10, (rank, alone)
            assert told == "" if rank == alone else told.startswith("LinkError"), (rank, alone)

"""Losses and what comes beside them, and evaluation; tests named after a row of faults that people hit elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ldt.errors import ConfigError
from ds_ldt.runtime.losses import MAX_NAMED, Results, split_loss, weighted
from tests.engine.cases import config, layout
from tests.engine.evaluation import Punished, layer_classes, named_loss
from tests.harness import GroupPool
from tests.toy import Head, Points, build_unsplit, domain_batches

TARGETS = "tests.engine.evaluation:"
SIZES = [{}, {"num_domains": 2, "num_replicas": 2}]


def world_size_of(sizes: dict[str, int]) -> int:
    return sizes.get("num_replicas", 1) + sizes.get("num_domains", 1)


class Oracle:
    """The unsplit model, trained by SGD on the micro-batches of all domains."""

    def __init__(self, num_domains: int, loss_fn: Callable[[Any, Any], Any], head: type[nn.Module] = Head) -> None:
        self.model = build_unsplit(layer_classes(5, head))
        self.loss_fn = loss_fn
        self.num_domains = num_domains
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._streams = [domain_batches(Points(96), d, num_domains, 2) for d in range(num_domains)]

    def drawn(self, size: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The first micro-batches of every domain, those of the first domain first."""
        for domain in range(self.num_domains):
            yield from islice(domain_batches(Points(96), domain, self.num_domains, size), count)

    def evaluate(self, size: int, count: int) -> list[Any]:
        self.model.eval()
        with torch.no_grad():
            return [self.loss_fn(self.model(inputs), labels) for inputs, labels in self.drawn(size, count)]

    def train(self, count: int) -> list[Any]:
        self.model.train()
        found = []
        for stream in self._streams:
            for _ in range(count):
                inputs, labels = next(stream)
                found.append(self.loss_fn(self.model(inputs), labels))
                loss = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
                (loss / count / self.num_domains).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return found


def mean(values: Any) -> float:
    numbers = [float(torch.as_tensor(value).detach()) for value in values]
    return sum(numbers) / len(numbers)


@pytest.mark.parametrize("sizes", SIZES)
def test_values_beside_the_loss_are_averaged_printed_and_monitored_on_the_edge(
    groups: GroupPool, tmp_path: Path, sizes: dict[str, int]
) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    settings = config(layout(2, 2), csv_monitor=monitor, **sizes) | {"steps_per_print": 1}
    ranks = groups.run(world_size_of(sizes), TARGETS + "name_values", settings, str(tmp_path), deadline_s=90)
    oracle = Oracle(sizes.get("num_domains", 1), named_loss)
    expected = [oracle.train(4), oracle.train(4), oracle.evaluate(8, 3)]
    size = [mean(named["size"] for _, named in step) for step in expected]
    num_replicas = sizes.get("num_replicas", 1)
    for rank in ranks:
        assert rank["losses"] == pytest.approx([mean(loss for loss, _ in step) for step in expected], abs=1e-6)
    for rank in ranks[:num_replicas]:
        assert [found["size"].item() for found in rank["named"]] == pytest.approx(size, abs=1e-6)
        assert [found["rows"].item() for found in rank["named"]] == [2, 2, 8]
        assert num_replicas == 1 or "values of the same names" in rank["refused"]
    assert all(rank["named"] == [None] * 3 for rank in ranks[num_replicas:])
    for step, value in enumerate(size[:2], start=1):
        assert (
            f"steps: {step} loss: {ranks[0]['losses'][step - 1]:0.4f} size: {value:0.4f} rows: 2"
            in (ranks[0]["printed"])
        )
    written = ranks[0]["written"]
    assert written["Train_Samples_train_loss"] == pytest.approx(ranks[0]["losses"][:2], rel=1e-6)
    assert written["Train_Samples_size"] == pytest.approx(size[:2], rel=1e-6)
    assert written["Train_Samples_eval_loss"] == pytest.approx(ranks[0]["losses"][2:], rel=1e-6)
    assert written["Train_Samples_eval_size"] == pytest.approx(size[2:], rel=1e-6)
    assert written["Train_Samples_eval_rows"] == [8.0]


@pytest.mark.parametrize("sizes", SIZES)
def test_S06_S22_evaluation_of_every_kind_leaves_weights_buffers_modes_and_data_alone(
    groups: GroupPool, sizes: dict[str, int]
) -> None:
    settings = config(layout(2, 2), num_micro_batches=2, **sizes)
    ranks = groups.run(world_size_of(sizes), TARGETS + "evaluate", settings, deadline_s=90)
    assert all(rank["left_alone"] for rank in ranks)
    num_replicas, num_domains = sizes.get("num_replicas", 1), sizes.get("num_domains", 1)
    oracle = Oracle(num_domains, nn.functional.mse_loss)
    for step in range(3):
        model, found = oracle.model.eval(), [rank["found"][step] for rank in ranks]
        assert [one["mean"] for one in found] == [pytest.approx(mean(oracle.evaluate(8, 3)), abs=1e-6)] * len(ranks)
        for replica in range(num_replicas):  # K is 1: the replica's domain is its own number
            eights, threes = (list(oracle.drawn(size, count)) for size, count in ((8, 3), (3, 1)))
            wanted = [model(inputs) for inputs, _ in eights[3 * replica : 3 * replica + 3]]
            torch.testing.assert_close(found[replica]["outputs"], wanted)
            inputs, labels = threes[replica]
            torch.testing.assert_close(found[replica]["plain"], [model(inputs)])
            torch.testing.assert_close(found[replica]["listed"], [oracle.loss_fn(model(inputs), labels)])
        for one in found[num_replicas:]:
            assert (one["outputs"], one["listed"], one["plain"]) == (None, None, None)
        if step < 2:
            oracle.train(2)
    passes = [layer.passes for layer in oracle.model if hasattr(layer, "passes")]
    assert int(passes[0]) > 2 * 2 * num_domains, "the oracle's buffers do count evaluations"
    cloud = ranks[-1]["weights"]
    assert {name: int(value) for layer in cloud.values() for name, value in layer.items() if name == "passes"} == {
        "passes": 4
    }


def test_a_last_layer_may_return_the_losses_of_single_samples(groups: GroupPool) -> None:
    edge, cloud = groups.run(2, TARGETS + "lists_of_losses", config(layout(2, 2)), deadline_s=90)
    oracle = Oracle(1, lambda outputs, labels: outputs, Punished)
    trained = oracle.train(4)
    assert edge["trained"] == cloud["trained"] == pytest.approx(mean(trained), abs=1e-6)
    listed = oracle.evaluate(5, 2)
    assert edge["mean"] == cloud["mean"] == pytest.approx(mean([mean(losses) for losses in listed]), abs=1e-6)
    torch.testing.assert_close(edge["listed"], listed)
    assert cloud["listed"] is None


@pytest.mark.parametrize(
    "found, text",
    [
        (None, "found NoneType, expected a tensor of one element"),
        (torch.ones(3), r"found a tensor of shape \(3,\), expected a tensor of one element"),
        ([torch.ones(())], "found list"),
        ((torch.ones(()), {"loss": 1}), 'found "loss", expected names'),
        ((torch.ones(()), {3: 1}), "found 3, expected names"),
        ((torch.ones(()), {"a": torch.ones(2)}), r"loss_fn \(a\): found a tensor of shape \(2,\)"),
        ((torch.ones(()), {"a": "text"}), r"loss_fn \(a\): found str"),
        ((torch.ones(()), {str(i): 1 for i in range(MAX_NAMED + 1)}), f"at most {MAX_NAMED}"),
    ],
)
def test_what_a_loss_function_may_not_return_in_training(found: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        split_loss(found, training=True)


def test_names_may_not_change_between_the_micro_batches_of_a_step() -> None:
    results = Results()
    results.keep_named((0, 0), {"a": torch.ones(()), "b": torch.ones(())})
    results.keep_named((1, 0), {"b": torch.ones(()), "a": torch.ones(())})
    with pytest.raises(ConfigError, match=r"found \[a\] for micro-batch 2 of domain 0, \[a, b\] before it"):
        results.keep_named((2, 0), {"a": torch.ones(())})
    results.clear()
    results.keep_named((0, 0), {})


def test_S30_what_has_no_weight_has_no_value_and_no_gradient_even_if_it_is_no_number() -> None:
    loss = torch.tensor(float("nan"), requires_grad=True)
    nothing = weighted(loss, 0.0)
    assert nothing.item() == 0.0
    assert not nothing.requires_grad
    assert weighted([torch.ones(()), loss], 0.0) == [0.0, 0.0]

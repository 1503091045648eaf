"""After a resume the next sample is the one that an uninterrupted run would take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import logger

from ds_ldt.checkpointing.data_position import file_name, position_of, read
from ds_ldt.checkpointing.manifest import content_id
from ds_ldt.data.sampling import TrainingData
from ds_ldt.errors import CheckpointError
from tests.engine.cases import config, layout
from tests.harness import GroupPool


@pytest.mark.parametrize("own_iterator", [False, True])
def test_S38_S39_a_resumed_run_reads_what_an_uninterrupted_one_reads(
    groups: GroupPool, tmp_path: Path, own_iterator: bool
) -> None:
    """3 steps of 16 samples out of 40, so that the second half begins within an epoch; layers with dropout."""
    settings = config(layout(2, 2), num_domains=2, optimizer="AdamW", ldt={"schedule": {"measure_steps": 0}})
    target = "tests.engine.data:resume"
    ranks = groups.run(3, target, settings, str(tmp_path), 3, 40, own_iterator, deadline_s=90)
    for rank in ranks:
        whole, first, second = rank["losses"]
        assert whole == first + second
        for index, layer in rank["weights"][0].items():
            for name, value in layer.items():
                assert torch.equal(value, rank["weights"][2][index][name]), f"layer {index} {name}"
    whole, first, second = ranks[0]["read"]
    assert whole == first + second
    assert ranks[0]["positions"][0] == ranks[0]["positions"][2]
    if not own_iterator:
        assert len(set(whole[:40])) == 40
        assert whole[:40] != whole[40:80], "each epoch has an order of its own"
    assert (tmp_path / "edge" / "global_step3" / "data_replica_00.pt").is_file()
    assert not list((tmp_path / "cloud").rglob("data_replica*"))


def edge(data: Any, *, replica: int = 0, num_replicas: int = 1, is_loader: bool = True) -> Any:
    """As much of an engine as the position of the data concerns."""
    return SimpleNamespace(
        site="edge",
        training_dataloader=data if is_loader else None,
        data_iterator=data,
        set_dataloader=mock.Mock(),
        job=SimpleNamespace(num_replicas=num_replicas),
        grid=SimpleNamespace(data_parallel_id=replica),
    )


def reader(replica: int = 0, num_replicas: int = 1) -> TrainingData:
    domains = range(4 * replica // num_replicas, 4 * (replica + 1) // num_replicas)
    return TrainingData(list(range(48)), domains=domains, num_domains=4, micro_batch_size=2, collate_fn=list)


def save(engine: Any, directory: Path) -> None:
    torch.save(position_of(engine), directory / file_name(engine.grid.data_parallel_id))


def restore(engine: Any, directory: Path) -> None:
    position = read(engine, directory, {path.name: content_id(path) for path in directory.glob("*.pt")})
    if position is not None:
        position.put()


def warnings_of(engine: Any, directory: Path) -> list[str]:
    with mock.patch.object(logger, "warning") as warning:
        restore(engine, directory)
    return [call.args[0] for call in warning.call_args_list]


class Stateful:
    """An iterator with a position."""

    def __init__(self, position: Any = 0) -> None:
        self.position = position

    def state_dict(self) -> Any:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"] + 0


def test_training_data_goes_on_with_another_number_of_edge_replicas(tmp_path: Path) -> None:
    first = reader()
    taken = {sample for _ in range(4) for sample in next(first)}
    save(edge(first), tmp_path)
    left: set[int] = set()
    for replica in range(2):
        second = reader(replica, 2)
        assert warnings_of(edge(second, replica=replica, num_replicas=2), tmp_path) == []
        left |= {sample for _ in range(10) for sample in next(second)}
    assert taken | left == set(range(48))
    assert not taken & left


def test_what_does_not_fit_is_left_alone_and_said(tmp_path: Path) -> None:
    assert "holds no position of the data" in warnings_of(edge(reader()), tmp_path)[0]
    assert warnings_of(edge(iter([]), is_loader=False), tmp_path) == []
    save(edge(Stateful(7), is_loader=False), tmp_path)
    assert "of data_iter, and this engine reads training_data" in warnings_of(edge(reader()), tmp_path)[0]
    assert "call set_dataiterator() before loading" in warnings_of(edge(None), tmp_path)[0]
    assert "list_iterator has no load_state_dict()" in warnings_of(edge(iter([]), is_loader=False), tmp_path)[0]
    own = Stateful()
    [told] = warnings_of(edge(own, is_loader=False, num_replicas=2), tmp_path)
    assert "read by 1 edge replicas, and now by 2" in told
    assert own.position == 0


def test_a_loader_of_the_user_is_iterated_anew_from_its_position(tmp_path: Path) -> None:
    save(edge(Stateful(7)), tmp_path)
    engine = edge(Stateful())
    assert warnings_of(engine, tmp_path) == []
    assert engine.training_dataloader.position == 7
    engine.set_dataloader.assert_called_once_with(engine.training_dataloader)


def test_a_position_that_was_put_can_be_taken_back(tmp_path: Path) -> None:
    save(edge(Stateful(7)), tmp_path)
    engine = edge(Stateful(3))
    files = {path.name: content_id(path) for path in tmp_path.glob("*.pt")}
    position = read(engine, tmp_path, files)
    assert position is not None
    assert engine.training_dataloader.position == 3
    position.take_back()
    assert engine.training_dataloader.position == 3
    position.put()
    assert engine.training_dataloader.position == 7
    position.take_back()
    assert engine.training_dataloader.position == 3


def test_a_position_that_cannot_be_saved_or_taken_fails_with_the_reason(tmp_path: Path) -> None:
    assert position_of(edge(iter([]), is_loader=False)) is None
    with pytest.raises(CheckpointError, match=r"cannot be saved, state_dict\(\) of Stateful"):
        position_of(edge(Stateful(object())))
    save(edge(Stateful("seven")), tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be restored, load_state_dict\(\) of Stateful"):
        restore(edge(Stateful()), tmp_path)

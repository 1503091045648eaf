"""Optimizer states by layer: whatever stages and replicas they were saved from, each replica gets its own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_ldt.checkpointing.optimizer_states import ShardedStage, names_of, shard_for, whole_for, whole_state
from ds_ldt.errors import CheckpointError

Members = list[tuple[tuple[int, str], int]]


def flat(members: Members, replicas: int, offset: float = 0.0) -> Tensor:
    """The padded buffer of a group: number k of layer l is l + k / 1000 + offset."""
    values = [layer + torch.arange(size) / 1000 + offset for (layer, _), size in members]
    whole = torch.cat(values) if values else torch.zeros(0)
    unit = 2 * replicas
    return torch.cat([whole, torch.zeros(-len(whole) % unit)])


def saved_stage(groups: list[Members], replicas: int, step: float = 3.0) -> ShardedStage:
    shards = []
    for replica in range(replicas):
        partitions, states = [], {}
        for group, members in enumerate(groups):
            weights, moments = flat(members, replicas), flat(members, replicas, 0.5)
            size = len(weights) // replicas
            mine = slice(replica * size, (replica + 1) * size)
            partitions.append(weights[mine])
            states[group] = {"step": torch.tensor(step), "exp_avg": moments[mine]}
        shards.append(
            {
                "names": [[(layer, name, size) for (layer, name), size in members] for members in groups],
                "base": {"state": states, "param_groups": [{"lr": 0.1, "params": [g]} for g in range(len(groups))]},
                "fp32_partitions": partitions,
                "loss_scaler": {"cur_scale": 8.0},
            }
        )
    return ShardedStage(shards)


def cut(sizes: list[int], bounds: list[int]) -> list[list[Members]]:
    """Layers 0, 1, ... of these sizes, cut into stages; layers of odd index are in the second group."""
    edges = [0, *sorted(bounds), len(sizes)]
    return [
        [[((layer, "weight"), sizes[layer]) for layer in range(first, last) if layer % 2 == group] for group in (0, 1)]
        for first, last in zip(edges, edges[1:], strict=False)
    ]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_S78_any_stages_and_replicas_give_any_others_their_own_numbers(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    bounds = st.lists(st.integers(0, len(sizes)), max_size=3)
    replicas = data.draw(st.integers(1, 4))
    saved = [saved_stage(groups, replicas) for groups in cut(sizes, data.draw(bounds)) if any(groups)]
    here = data.draw(st.integers(1, 4))
    for groups in cut(sizes, data.draw(bounds)):
        wholes = [flat(members, here) for members in groups]
        found: list[dict[str, Any]] = []
        for replica in range(here):
            slices = [(replica * len(w) // here, (replica + 1) * len(w) // here) for w in wholes]
            shard = shard_for(groups, slices, iter(saved))
            assert (shard is None) == (not any(groups))
            if shard is not None:
                found.append(shard)
        for group, members in enumerate(groups):
            if not members:
                continue
            assert torch.equal(torch.cat([shard["fp32_partitions"][group] for shard in found]), wholes[group])
            moments = torch.cat([shard["base"]["state"][group]["exp_avg"] for shard in found])
            assert torch.equal(moments, flat(members, here, 0.5))
            assert all(shard["base"]["state"][group]["step"] == 3.0 for shard in found)
            assert found[0]["loss_scaler"] == {"cur_scale": 8.0}


def refused(groups: list[Members], saved: list[ShardedStage]) -> str:
    slices = [(0, len(flat(members, 1))) for members in groups]
    with pytest.raises(CheckpointError) as told:
        shard_for(groups, slices, saved)
    return str(told.value)


def test_what_does_not_fit_is_refused_by_the_names_of_parameters() -> None:
    one, other = ((1, "w"), 6), ((2, "w"), 4)
    assert "no optimizer state of layer 2 w" in refused([[one, other]], [saved_stage([[one]], 2)])
    assert "saved with 1 parameter groups, here are 2" in refused([[one], [other]], [saved_stage([[one, other]], 1)])
    assert "layer 2 w was in another parameter group" in refused(
        [[one], [other]], [saved_stage([[one, other], []], 1)]
    )
    assert "layer 1 w has another size" in refused([[((1, "w"), 7)]], [saved_stage([[one]], 1)])
    assert "differ in 'step'" in refused(
        [[one, other]], [saved_stage([[one]], 1, 3.0), saved_stage([[other]], 1, 4.0)]
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def optimizer_of(layers: dict[int, nn.Module], num_groups: int = 1) -> tuple[torch.optim.Optimizer, Any]:
    parameters = [p for layer in layers.values() for p in layer.parameters()]
    groups = [{"params": parameters[number::num_groups]} for number in range(num_groups)]
    return torch.optim.AdamW(groups, lr=0.1), names_of(layers)


def stepped(layers: dict[int, nn.Module], skip: tuple[int, ...] = ()) -> dict[str, Any]:
    """What a checkpoint keeps after a step in which some layers had no gradient."""
    optimizer, names = optimizer_of(layers)
    for index, layer in layers.items():
        for parameter in layer.parameters():
            parameter.grad = None if index in skip else torch.full_like(parameter, float(index + 1))
    optimizer.step()
    return whole_state(optimizer, names)


def test_S78_whole_states_go_to_the_parameters_that_they_are_of() -> None:
    saved = [stepped({0: Tied(), 4: Tied()}), stepped({2: Tied(), 3: Tied()}, skip=(3,))]
    layers = {3: Tied(), 4: Tied(), 2: Tied()}
    optimizer, names = optimizer_of(layers)
    state = whole_for(optimizer, names, iter(saved))
    assert state is not None
    optimizer.load_state_dict(state)
    moments = {index: optimizer.state[layer.weight]["exp_avg"] for index, layer in layers.items() if index != 3}
    assert torch.equal(moments[4], torch.full((3,), 0.5))
    assert torch.equal(moments[2], torch.full((3,), 0.3))
    assert layers[3].weight not in optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_whole_states_that_are_missing_or_of_other_groups_are_refused() -> None:
    saved = [stepped({0: Tied()})]
    optimizer, names = optimizer_of({0: Tied(), 1: Tied()})
    with pytest.raises(CheckpointError, match="no optimizer state of layer 1 weight"):
        whole_for(optimizer, names, saved)
    optimizer, names = optimizer_of({0: Tied(), 1: Tied()}, num_groups=2)
    with pytest.raises(CheckpointError, match="saved with 1 parameter groups, here are 2"):
        whole_for(optimizer, names, saved)
    frozen = {0: Tied(), 1: Tied()}
    frozen[1].weight.requires_grad_(False)
    optimizer, names = optimizer_of(frozen)
    assert whole_for(optimizer, names, saved) is not None
    assert whole_for(*optimizer_of({7: Tied().requires_grad_(False)}), saved) is None

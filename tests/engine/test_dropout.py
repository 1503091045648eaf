"""Dropout masks depend on the seed, the step and the place in the model, and on no split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_ldt.models import count_targets
from ds_ldt.models.registry import checked_config, family_of
from ds_ldt.runtime.pretrained import initialize_layers
from ds_ldt.runtime.rng import Place
from tests.engine.cases import config, layout
from tests.engine.dropout import ATTENTION_DROPOUT, dropping_layers, dynamic_batches
from tests.engine.parity import assert_parity
from tests.harness import GroupPool
from tests.models.tiny import Sequence, tiny_config
from tests.toy import Points, SeededSequential, Trace, build_unsplit, train_unsplit

STEPS = 2


def seed_of(step: int, domain: int, micro_batch: int, layer: int, base_seed: int = 1234) -> int:
    return Place(base_seed=base_seed, step=step, domain=domain, micro_batch=micro_batch).seed_of(layer)


numbers = st.tuples(*[st.integers(0, 9)] * 4, st.integers(-5, 5))


@given(numbers, numbers)
def test_every_place_has_a_seed_of_its_own(first: Any, second: Any) -> None:
    """In the low 32 bits too, as the generator of a CPU takes no more."""
    assert (seed_of(*first) % 2**32 == seed_of(*second) % 2**32) == (first == second)


def test_the_rule_of_seeds_stays_as_it_is() -> None:
    """A resumed run must find the masks of the version that it began with."""
    assert [seed_of(0, 0, 0, 0), seed_of(3, 1, 2, 7)] == [5415621781476965285, 5706257444288582032]


def unsplit(settings: dict[str, Any], base_seed: int = 1234) -> Trace:
    """The same layers in one process; the order of samples is that of `shuffle_seed=3`."""
    num_layers = sum(map(sum, settings["ldt"]["pipeline_num_layers"]))
    sizes = settings["gradient_accumulation_steps"], settings["ldt"]["cloud"]["data_parallel_size"]
    order = torch.randperm(96, generator=torch.Generator().manual_seed(3)).tolist()
    return train_unsplit(
        SeededSequential(
            build_unsplit(dropping_layers(num_layers)), *sizes, lambda *place: seed_of(*place, base_seed=base_seed)
        ),
        torch.utils.data.Subset(Points(96), order),
        loss_fn=nn.functional.mse_loss,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=STEPS,
        num_micro_batches=sizes[0],
        num_domains=sizes[1],
        micro_batch_size=2,
    )


def checkpointed(interval: int, *, reentrant: bool) -> dict[str, Any]:
    return {"pipeline": {"activation_checkpoint_interval": interval, "use_reentrant": reentrant}}


RUNS = {
    2: [config(layout(2, 3)), config(layout(2, 2), **checkpointed(1, reentrant=False))],
    3: [
        config(layout(3, 3), **checkpointed(2, reentrant=False), ldt={"schedule": {"split_backward": True}}),
        config(layout(3, 2), ldt={"schedule": {"policy": "greedy"}}),
        config(layout(2, 2), num_domains=2, **checkpointed(2, reentrant=True)),
        config(layout(2, 2), num_domains=2),
    ],
}


@pytest.mark.parametrize("world_size", RUNS)
def test_S34_dropout_of_a_split_model_is_that_of_the_unsplit_one(groups: GroupPool, world_size: int) -> None:
    ranks = groups.run(world_size, "tests.engine.dropout:train_dropping", RUNS[world_size], STEPS, deadline_s=90)
    for number, settings in enumerate(RUNS[world_size]):
        assert_parity([rank[number] for rank in ranks], unsplit(settings), "SGD")
    assert unsplit(RUNS[world_size][0], base_seed=1).losses != pytest.approx(ranks[0][0]["losses"], abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"activation_checkpoint_interval": 1}])
def test_S34_S05_dropout_of_attention_in_batches_of_all_sizes_is_that_of_the_unsplit_model(
    groups: GroupPool, options: dict[str, Any]
) -> None:
    settings = config([[1, 1], [1, 0]], num_domains=2, num_micro_batches=2)
    ranks = groups.run(3, "tests.engine.dropout:train_attention_dropout", settings, options, deadline_s=90)
    expected = unsplit_llama(ATTENTION_DROPOUT)
    assert_parity(ranks, expected, "SGD")
    assert unsplit_llama(0.0).losses != pytest.approx(expected.losses, abs=1e-3)


def unsplit_llama(dropout: float) -> Trace:
    """One step of SGD with the mean over all targets; domain d draws every second micro-batch."""
    model_config = checked_config(tiny_config("llama", attention_dropout=dropout))
    model = Sequence(model_config)
    initialize_layers(model.modules, family_of(model_config), model_config, seed=5)
    layers = model.funcs
    batches = dynamic_batches()
    counts = [count_targets(batch["labels"]) for batch in batches]
    total = torch.zeros(())
    for number, batch in enumerate(batches):
        micro_batch, domain = divmod(number, 2)
        model.funcs = [seeded(layer, seed_of(0, domain, micro_batch, i, 5)) for i, layer in enumerate(layers)]
        total = total + model.loss(batch) * counts[number] / sum(counts)
    total.backward()
    parameters = [parameter for module in model.modules.values() for parameter in module.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf")).item()
    torch.optim.SGD(parameters, lr=0.1).step()
    weights = {index: dict(module.state_dict()) for index, module in model.modules.items()}
    return Trace(losses=[total.item()], grad_norms=[norm], weights=weights)


def seeded(layer: Any, seed: int) -> Any:
    def run(inputs: Any) -> Any:
        torch.manual_seed(seed)
        return layer(inputs)

    return run

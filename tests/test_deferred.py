"""Linear layers that put the gradients of their weights off: the gradients are those of plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_ldt.runtime.weight_gradients import WeightLedger

Net = Callable[[Tensor], Tensor]


class Tied(nn.Module):
    """One weight as an embedding (at once), as an output (late) and twice in a row; and one frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 5)
        self.square = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.LayerNorm(5)

    def forward(self, given: Tensor) -> Tensor:
        hidden = given + self.embedding(torch.arange(given.shape[-2]) % 6)
        hidden = self.square(torch.tanh(self.square(hidden)))
        hidden = self.norm(self.frozen(hidden)) + functional.linear(hidden, self.square.weight.t())
        return functional.linear(hidden, weight=self.embedding.weight)


class OddInputs(nn.Module):
    """Views, transposes, an input used twice, a vector, an expanded gradient, a bias that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(5, 4, bias=False)
        self.third = nn.Linear(4, 3)

    def forward(self, given: Tensor) -> Tensor:
        turned = given.transpose(0, 1)
        both = self.first(turned) * self.second(turned) + self.second(given[..., :5].flip(-1)).transpose(0, 1)
        vector = functional.linear(both[0, 0], self.third.weight, self.third.bias * 2)
        return self.third(both).sum().expand(4).sum() + vector.sum()


class Parts(nn.Module):
    """Layers that are not linear, attention with a packed weight, and a linear layer that makes its own checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.convolution = nn.Conv1d(5, 5, 1)
        self.inside = nn.Linear(5, 5)
        self.reentrant = False

    def forward(self, given: Tensor) -> Tensor:
        hidden, _ = self.attention(given, given, given)
        hidden = self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
        return checkpoint(lambda x: torch.tanh(self.inside(x)), hidden, use_reentrant=self.reentrant)


def gradients(module: nn.Module, run: Callable[[], None]) -> dict[str, Tensor | None]:
    module.zero_grad(set_to_none=True)
    run()
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def both_ways(module: nn.Module, given: Tensor, *, wrap: Callable[[Net], Net] = lambda net: net) -> WeightLedger:
    """Check that the gradients of weights and input are the same; return the ledger."""
    ledger = WeightLedger()
    inputs = [given.clone().requires_grad_(given.is_floating_point()) for _ in range(2)]

    def plain() -> None:
        for _ in range(2):
            module(inputs[0]).square().sum().backward()

    def late_forward(x: Tensor) -> Tensor:
        with ledger.deferring():
            return module(x)

    def late() -> None:
        losses = [wrap(late_forward)(inputs[1]).square().sum() for _ in range(2)]
        for key, loss in enumerate(losses):
            with ledger.owed_by(key):
                loss.backward()
        for key in (1, 0):
            ledger.settle(key)

    expected, found = gradients(module, plain), gradients(module, late)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    assert len(ledger) == 0
    return ledger


def deferred_names(module: nn.Module, given: Tensor) -> set[str]:
    ledger = WeightLedger()
    with ledger.deferring():
        output = module(given)
    with ledger.owed_by("a"):
        output.square().sum().backward()
    weights = ledger.settle("a")
    return {name for name, p in module.named_parameters() if any(p is weight for weight in weights)}


@pytest.mark.parametrize(
    "make, wrapped",
    [
        *[(make, wrapped) for make in (Tied, OddInputs) for wrapped in ("plain", "checkpoint", "reentrant")],
        *[(Parts, "plain"), (Parts, "checkpoint")],  # torch itself refuses checkpoints of both kinds in each other
    ],
)
def test_gradients_are_those_of_plain_autograd(make: type[nn.Module], wrapped: str) -> None:
    torch.manual_seed(0)

    def wrap(net: Net) -> Net:
        if wrapped == "plain":
            return net
        return lambda x: checkpoint(net, x, use_reentrant=wrapped == "reentrant")

    both_ways(make(), torch.randn(2, 3, 5), wrap=wrap)


def test_what_can_wait_waits_and_nothing_else() -> None:
    given = torch.randn(2, 3, 5)
    assert deferred_names(Tied(), given) == {"embedding.weight", "square.weight"}
    assert deferred_names(OddInputs(), given) == {"first.weight", "second.weight", "third.weight"}
    assert "inside.weight" not in deferred_names(Parts(), given)


def test_nothing_is_made_before_it_is_settled() -> None:
    layer, ledger = nn.Linear(3, 2), WeightLedger()
    given = torch.randn(4, 3, requires_grad=True)
    with ledger.deferring():
        output = layer(given)
    with ledger.owed_by("key"):
        output.sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None and given.grad is not None
    assert len(ledger) == 1
    ledger.settle("key")
    assert layer.weight.grad is not None and len(ledger) == 0


def test_a_first_layer_whose_input_needs_no_gradient() -> None:
    layer = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    given, ledger = torch.randn(3, 5), WeightLedger()
    expected = gradients(layer, lambda: layer(given).sum().backward())

    def late() -> None:
        with ledger.deferring():
            loss = layer(given).sum()
        with ledger.owed_by(0):
            loss.backward()
        ledger.settle(0)

    torch.testing.assert_close(gradients(layer, late), expected)


def test_a_backward_that_owes_nobody_makes_everything_at_once() -> None:
    layer, ledger = nn.Linear(3, 2), WeightLedger()
    with ledger.deferring():
        loss = layer(torch.ones(1, 3)).sum()
    loss.backward()
    assert torch.equal(layer.weight.grad, torch.ones(2, 3)) and len(ledger) == 0


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_with_a_hook_does_not_wait(hook: str) -> None:
    module, seen = Tied(), []
    getattr(module.square.weight, hook)(lambda grad: seen.append(1))
    assert deferred_names(module, torch.randn(2, 3, 5)) == {"embedding.weight"}
    assert seen


def test_under_autocast_nothing_waits() -> None:
    module, given = nn.Linear(5, 4), torch.randn(2, 5)

    def cast() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(given)

    ledger = WeightLedger()
    expected = gradients(module, lambda: cast().float().sum().backward())
    with ledger.deferring():
        output = cast()
    with ledger.owed_by(0):
        torch.testing.assert_close(gradients(module, lambda: output.float().sum().backward()), expected)
    assert ledger.settle(0) == []


def test_bf16_is_rounded_as_autograd_rounds_it() -> None:
    torch.manual_seed(0)
    both_ways(nn.Linear(5, 4).to(torch.bfloat16), torch.randn(2, 3, 5, dtype=torch.bfloat16))


def test_without_gradients_it_is_a_plain_linear() -> None:
    module, ledger = nn.Linear(5, 4), WeightLedger()
    given = torch.randn(2, 5)
    with torch.no_grad(), ledger.deferring():
        output = module(given)
    assert output.grad_fn is None and torch.equal(output, module(given).detach())


def test_a_failed_step_leaves_nothing_behind() -> None:
    module, ledger = nn.Linear(5, 4), WeightLedger()
    with ledger.deferring():
        loss = module(torch.randn(2, 5)).sum()
    with ledger.owed_by(0):
        loss.backward()
    ledger.clear()
    assert len(ledger) == 0 and ledger.settle(0) == []

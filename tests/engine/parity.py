"""Compares what the ranks of a split run saw with the unsplit oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.toy import Points, Trace, build_unsplit, layer_classes, train_unsplit

WEIGHT_TOLERANCE = {"SGD": 1e-6, "AdamW": 1e-5}


def oracle(settings: dict[str, Any], steps: int, *, dataset_size: int = 96) -> Trace:
    """The toy model of these settings, trained unsplit."""
    params = {k: v for k, v in settings["optimizer"]["params"].items() if k != "torch_adam"}
    optimizer_class = getattr(torch.optim, settings["optimizer"]["type"])
    num_layers = sum(map(sum, settings["ldt"]["pipeline_num_layers"]))
    return train_unsplit(
        build_unsplit(layer_classes(num_layers)),
        Points(dataset_size),
        loss_fn=nn.functional.mse_loss,
        make_optimizer=lambda parameters: optimizer_class(parameters, **params),
        steps=steps,
        num_micro_batches=settings["gradient_accumulation_steps"],
        num_domains=settings["ldt"]["cloud"]["data_parallel_size"],
        micro_batch_size=settings["train_micro_batch_size_per_gpu"],
        gradient_clipping=settings["gradient_clipping"],
    )


def assert_parity(ranks: list[dict[str, Any]], expected: Trace, optimizer: str) -> None:
    """Losses to 1e-6, norms to 1e-5 relative, every weight to the optimizer's tolerance, replicas bit-equal."""
    tolerance = WEIGHT_TOLERANCE[optimizer]
    seen: dict[int, dict[str, torch.Tensor]] = {}
    for rank, result in enumerate(ranks):
        assert result["losses"] == ranks[0]["losses"], f"rank {rank} reports other losses than rank 0"
        assert result["norms"] == ranks[0]["norms"], f"rank {rank} reports other norms than rank 0"
        for index, layer in result["weights"].items():
            replica = seen.setdefault(index, layer)
            for name, value in layer.items():
                assert torch.equal(value, replica[name]), f"layer {index} {name}: replicas differ (rank {rank})"
    for step, (loss, wanted) in enumerate(zip(ranks[0]["losses"], expected.losses, strict=True)):
        assert abs(loss - wanted) <= 1e-6, f"step {step}: loss {loss}, unsplit {wanted}"
    for step, (norm, wanted) in enumerate(zip(ranks[0]["norms"], expected.grad_norms, strict=True)):
        assert abs(norm - wanted) <= 1e-5 * wanted, f"step {step}: norm {norm}, unsplit {wanted}"
    assert sorted(seen) == sorted(expected.weights), "a layer is missing, or held where it should not be"
    for index, layer in expected.weights.items():
        for name, value in layer.items():
            difference = (seen[index][name] - value).abs().max().item()
            assert difference <= tolerance, f"layer {index} {name}: max |w - w_ref| = {difference}"

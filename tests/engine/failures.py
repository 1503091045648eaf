"""Targets in which something goes wrong on purpose."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ldt
from ds_ldt.comm.step_header import short_fingerprint
from tests.engine.cases import config, initialize, layout, toy_engine, toy_module
from tests.toy import Block, Head, Points, Stem


def outcome(action: Any) -> tuple[str, str, float]:
    """(error class, message, seconds) of a call that is meant to fail."""
    begin = time.monotonic()
    try:
        action()
    except ds_ldt.LDTError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "no error", "", time.monotonic() - begin


def only_the_edge_calls(method: str, directory: str) -> tuple[str, str, float]:
    """Rank 0 enters a call that nobody else enters; the others go on training."""
    engine = toy_engine(config(layout(2, 2), timeout_s=3))
    engine.train_batch()
    if dist.get_rank() != 0:
        return outcome(engine.train_batch)
    data = iter([Points(8)[0]] * 100)
    return outcome(
        lambda: engine.save_checkpoint(directory) if method == "save_checkpoint" else engine.eval_batch(data)
    )


def other_program_order() -> tuple[str, str, float]:
    """Rank 0 evaluates while rank 1 trains."""
    engine = toy_engine(config(layout(2, 2), timeout_s=5))
    batch = (torch.zeros(2, 4), torch.zeros(2, 3))
    return outcome(lambda: engine.eval_batch(iter([batch] * 8)) if dist.get_rank() == 0 else engine.train_batch())


def other_costs() -> tuple[tuple[str, str, float], str]:
    """Rank 1 plans for another link than rank 0; what it is told, and the fingerprint of its plan."""
    engine = toy_engine(config(layout(2, 2), timeout_s=12))
    engine.train_batch()
    if dist.get_rank() == 1:
        near = replace(engine._planner.known.costs, latency=0.0, message_bytes=0)
        engine._planner.known = replace(engine._planner.known, costs=near)
    fingerprint = engine._train_schedule().plan.fingerprint
    result = outcome(engine.train_batch)
    engine.transport.abort()
    return result, f"{short_fingerprint(fingerprint):x}"


class LeakingStem(nn.Module):
    """Sends the sample's ids along, undeclared."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.stem(inputs), inputs.long()


class LeakyBlock(Block):
    def forward(self, inputs: Any) -> Any:
        return (super().forward(inputs[0]), *inputs[1:])


class LeakyHead(Head):
    def forward(self, inputs: Any) -> Tensor:
        return super().forward(inputs[0])


def leak_an_int_tensor() -> tuple[str, str, float]:
    """The head returns an int tensor that the wire schema does not declare."""
    layers = [LayerSpec(LeakingStem), *[LayerSpec(LeakyBlock)] * 3, LayerSpec(LeakyHead)]
    module = ds_ldt.LDTPipelineModule(layers, config(layout(2, 2), timeout_s=10), nn.functional.mse_loss)
    engine = initialize(model=module, training_data=Points(32) if dist.get_rank() == 0 else None)
    sent: list[Any] = []
    engine.transport.on_send = lambda *message: sent.append(message)
    result = outcome(engine.train_batch)
    assert not sent, "something was posted before the guard refused"
    return result


class FailingBlock(Block):
    def forward(self, inputs: Tensor) -> Tensor:
        if not inputs.is_meta:
            raise LookupError("a layer of the cloud failed")
        return super().forward(inputs)


def fail_in_the_cloud() -> tuple[str, str, float]:
    """A layer of stage 1 raises in the middle of a step; the edge must hear of it long before its timeout."""
    layers = [LayerSpec(Stem), LayerSpec(Block), LayerSpec(FailingBlock), LayerSpec(Block), LayerSpec(Head)]
    module = ds_ldt.LDTPipelineModule(layers, config(layout(2, 2), timeout_s=40), nn.functional.mse_loss)
    engine = initialize(model=module, training_data=Points(32) if dist.get_rank() == 0 else None)
    try:
        return outcome(engine.train_batch)
    except LookupError as error:
        return "LookupError", str(error), 0.0


def different_files(changes: dict[str, Any]) -> tuple[str, str, float]:
    """The cloud's JSON differs from the edge's."""
    settings = config(layout(2, 2), timeout_s=10)
    if dist.get_rank() == 1:
        settings.update(changes)
    return outcome(lambda: toy_module(settings))


def different_settings(cases: dict[str, dict[str, Any]]) -> dict[str, tuple[str, str, float]]:
    """For each case the settings at dotted paths that the cloud's JSON has; what each rank is told."""
    told = {}
    for name, changes in cases.items():
        settings = copy.deepcopy(config(layout(2, 2), timeout_s=10))
        for path, value in changes.items() if dist.get_rank() == 1 else ():
            *sections, last = path.split(".")
            place = settings
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        told[name] = outcome(lambda settings=settings: toy_module(settings))  # type: ignore[misc]
    return told


def bad_configurations(rows: list[dict[str, Any]]) -> list[str]:
    """What this rank is told of each bad configuration; no process group may come into being."""
    messages = []
    for settings in rows:
        try:
            toy_or_any_module(settings)
        except ds_ldt.ConfigError as error:
            messages.append(str(error))
        else:
            messages.append("accepted")
        assert not dist.is_initialized(), "a process group was created for a configuration that is refused"
    assert os.environ["WORLD_SIZE"] == "2"
    return messages


def toy_or_any_module(settings: dict[str, Any]) -> None:
    """Build a module of five layers."""
    ds_ldt.LDTPipelineModule([LayerSpec(Stem), *[LayerSpec(Block)] * 3, LayerSpec(Head)], settings)


def one_rank_stops(stopped: int, place: str, num_stages: int) -> tuple[str, str, float]:
    """A rank is stopped for a while in the middle of a step, with D = 2; everybody else runs into the timeout."""
    engine = toy_engine(config(layout(num_stages, 2), num_domains=2, timeout_s=_STOP_TIMEOUT_S))
    engine.train_batch()
    if dist.get_rank() == stopped:
        if place == "layer":
            engine.module.register_forward_pre_hook(lambda *_: stop_for_a_while())
        else:
            collect = engine._accumulated_gradients
            engine._accumulated_gradients = lambda: (stop_for_a_while(), collect())[1]
    return outcome(engine.train_batch)


_STOP_TIMEOUT_S = 2.0


def stop_for_a_while() -> None:
    """Stop this process; another one lets it go on long after everybody else has given up."""
    wake = f"sleep {2 * _STOP_TIMEOUT_S + 2}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def one_rank_dies(dead: int) -> tuple[str, str, float]:
    """A rank ends in the middle of a step, with D = 2 over three stages."""
    engine = toy_engine(config(layout(3, 2), num_domains=2, timeout_s=40))
    engine.train_batch()
    if dist.get_rank() == dead:
        engine.module.register_forward_pre_hook(lambda *_: os._exit(3))
    return outcome(engine.train_batch)

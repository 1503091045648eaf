"""Targets in which the edge prepares its data for longer than `ldt.timeout_s`."""

from __future__ import annotations

import os
import time
from typing import Any

import ds_ldt
from tests.engine.cases import Untouchable, config, initialize, layout, toy_module
from tests.engine.failures import outcome, stop_for_a_while
from tests.toy import Points

TIMEOUT_S = 4.0
PREPARATION_S = 2 * TIMEOUT_S
SETTINGS = config(layout(2, 2), num_domains=2, num_replicas=2, timeout_s=TIMEOUT_S)


def on_edge() -> bool:
    """Whether this process is an edge rank."""
    return int(os.environ["RANK"]) < 2


def prepare(seconds: float) -> Any:
    """What a script does on every rank; only the edge has something to prepare, each replica for another time."""
    if not on_edge():
        return Untouchable()
    time.sleep(seconds - 0.5 * int(os.environ["RANK"]))
    return Points(96)


def train(module: ds_ldt.LDTPipelineModule, data: Any) -> list[float]:
    """The losses of two steps."""
    engine = initialize(model=module, config=SETTINGS, training_data=data)
    losses = [float(engine.train_batch()) for _ in range(2)]
    engine.destroy()
    return losses


def train_after_long_preparations() -> tuple[list[float], list[float], list[float]]:
    """Losses with data prepared before the module is built, after it, and without any waiting."""
    with ds_ldt.preparing_data(SETTINGS):
        data = prepare(PREPARATION_S)
    before = train(toy_module(SETTINGS), data)
    module = toy_module(SETTINGS)
    with ds_ldt.preparing_data(SETTINGS):
        data = prepare(PREPARATION_S)
    after = train(module, data)
    return before, after, train(toy_module(SETTINGS), prepare(0.5))


def prepare_without_a_word(when: str) -> tuple[str, str, float]:
    """What each rank is told if the edge takes longer than the timeout and does not say so."""
    if when == "before":
        data = prepare(PREPARATION_S)
        return outcome(lambda: train(toy_module(SETTINGS), data))
    module = toy_module(SETTINGS)
    data = prepare(PREPARATION_S)
    return outcome(lambda: train(module, data))


def end_while_preparing(how: str) -> tuple[str, str, float]:
    """The first edge rank ends, or is stopped, while it prepares its data."""
    if os.environ["RANK"] == "0":
        with ds_ldt.preparing_data(SETTINGS):
            time.sleep(0.5)
            if how == "ends":
                os._exit(3)
            stop_for_a_while()
        return "not asked", "", 0.0
    if os.environ["RANK"] == "1":
        return "not asked", "", 0.0
    return outcome(lambda: toy_module(SETTINGS))

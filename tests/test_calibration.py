"""What a measured compute is said to take; no process is started."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from deepspeed.runtime.pipe import schedule as ds

from ds_ldt.plan import Op
from ds_ldt.plan.measured_costs import Duration
from ds_ldt.profiling.step_timer import Calibration
from ds_ldt.runtime.schedule import Key

COMPUTE_S, POST_S, WAIT_S = 0.010, 0.004, 0.050


def _compute(engine: Any, *, key: Key) -> None:
    time.sleep(COMPUTE_S)


def _send(engine: Any, *, key: Key) -> None:
    time.sleep(POST_S)


def _receive(engine: Any, *, key: Key) -> None:
    time.sleep(POST_S + WAIT_S)
    engine.transport.waited_ns += round(WAIT_S * 1e9)


def test_a_compute_takes_what_keeps_its_rank_busy_and_not_what_the_rank_waits() -> None:
    """The median over micro-batches of a compute with its messages: whoever plans has to count them in."""
    calibration, engine = Calibration(0, 1), SimpleNamespace(transport=SimpleNamespace(waited_ns=0))
    handlers = calibration.wrap(
        {
            ds.RecvActivation: _receive,
            ds.ForwardPass: _compute,
            ds.SendActivation: _send,
            ds.RecvGrad: _receive,
            ds.BackwardPass: _compute,
            ds.OptimizerStep: _compute,
        },
        SimpleNamespace(signatures={}),
    )
    for micro_batch in range(3):
        key = Key(virtual_stage=1, micro_batch=micro_batch, domain=0)
        for kind in (ds.RecvActivation, ds.ForwardPass, ds.SendActivation, ds.RecvGrad, ds.BackwardPass):
            handlers[kind](engine, key=key)
    taken = calibration._readings({})
    assert set(taken) == {Duration(0, 1, Op.FORWARD), Duration(0, 1, Op.BACKWARD)}
    forward, backward = (taken[Duration(0, 1, op)] * 1e-9 for op in (Op.FORWARD, Op.BACKWARD))
    assert COMPUTE_S + 2 * POST_S <= forward < WAIT_S
    assert COMPUTE_S + POST_S <= backward < WAIT_S
    assert handlers[ds.OptimizerStep] is _compute

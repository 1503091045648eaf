"""What a measured compute is said to take; no process is started."""

from __future__ import annotations

import time
from typing import Any

from ds_ldt.plan import Key, Kind, Op
from ds_ldt.plan.measured_costs import Duration
from ds_ldt.profiling.step_timer import Calibration

COMPUTE_S, POST_S, WAIT_S = 0.010, 0.004, 0.050


def _compute(key: Key, channel: Any) -> None:
    time.sleep(COMPUTE_S)


def _send(key: Key, channel: Any) -> None:
    time.sleep(POST_S)


def test_a_compute_takes_what_keeps_its_rank_busy_and_not_what_the_rank_waits() -> None:
    """The median over micro-batches of a compute with its messages: whoever plans has to count them in."""
    waited_ns = 0

    def receive(key: Key, channel: Any) -> None:
        nonlocal waited_ns
        time.sleep(POST_S + WAIT_S)
        waited_ns += round(WAIT_S * 1e9)

    calibration = Calibration(0, 1, lambda: waited_ns)
    handlers = calibration.wrap(
        {
            Kind.RECV_ACTIVATION: receive,
            Kind.FORWARD_PASS: _compute,
            Kind.SEND_ACTIVATION: _send,
            Kind.RECV_GRAD: receive,
            Kind.BACKWARD_PASS: _compute,
            Kind.OPTIMIZER_STEP: _compute,
        },
        [],
    )
    for micro_batch in range(3):
        key = Key(virtual_stage=1, micro_batch=micro_batch, domain=0)
        for kind in list(handlers)[:-1]:
            handlers[kind](key, None)
    taken = calibration._readings({})
    assert set(taken) == {Duration(0, 1, Op.FORWARD), Duration(0, 1, Op.BACKWARD)}
    forward, backward = (taken[Duration(0, 1, op)] * 1e-9 for op in (Op.FORWARD, Op.BACKWARD))
    assert COMPUTE_S + 2 * POST_S <= forward < WAIT_S
    assert COMPUTE_S + POST_S <= backward < WAIT_S
    assert handlers[Kind.OPTIMIZER_STEP] is _compute

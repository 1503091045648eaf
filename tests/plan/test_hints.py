"""What hints and files of costs say at the limits of their ranges, and when a limit of memory limits nothing."""

from __future__ import annotations

import pytest

from ds_ldt.config.schema import load_config
from ds_ldt.errors import ConfigError
from ds_ldt.plan import Costs
from ds_ldt.plan.cost_file import Known, is_measured, known_from_config, known_from_file, memory_limits, memory_warning
from ds_ldt.topology.layout import Layout
from tests.plan.shapes import full_matrix, full_shape

SHAPE = full_shape(3, 2, m=8, d=2)
LAYOUT = Layout.build(full_matrix(3, 2))
HINTS = Known(costs=Costs.uniform(SHAPE, edge=1.0), activation_bytes=None, measured=False)
FORWARD_S = {"0.0": 1, "0.1": 2, "0.2": 2, "1.0": 1}
MB_OF_CELLS = {(0, 0): 1e6, (0, 1): 1e6, (0, 2): 3e6, (1, 0): 1e6}


def test_a_whole_backward_may_be_that_of_the_weights() -> None:
    for share in (0, 1):
        assert known_from_file({"forward_s": FORWARD_S, "weight_share": share}, LAYOUT, hints=HINTS).costs == Costs(
            forward=dict(zip(HINTS.costs.forward, (1, 2, 2, 1), strict=True)), weight_share=share
        )


@pytest.mark.parametrize("number", [float("inf"), float("nan"), -1e-9])
def test_a_number_without_end_is_refused(number: float) -> None:
    with pytest.raises(ConfigError, match=r"costs: latency_s: found .*, expected a number >= 0"):
        known_from_file({"forward_s": FORWARD_S, "latency_s": number}, LAYOUT, hints=HINTS)


def test_memory_for_one_micro_batch_of_each_domain_is_enough_and_a_byte_less_is_not() -> None:
    assert memory_limits(SHAPE, memory_gb=0.004, activation_bytes=MB_OF_CELLS) == (1, 4, 1)
    with pytest.raises(ConfigError, match=r"memory_gb: found 0\.00399.*, expected at least 0\.004, .* on stage 0"):
        memory_limits(SHAPE, memory_gb=0.003999, activation_bytes=MB_OF_CELLS)
    assert memory_limits(SHAPE, memory_gb=0.0, activation_bytes=dict.fromkeys(MB_OF_CELLS, 0.0)) == (8, 8, 8)


@pytest.mark.parametrize(
    "schedule, measured, warned",
    [
        ({"policy": "auto", "measure_steps": 1}, True, (True, False)),
        ({"policy": "auto", "measure_steps": 0}, False, (True, True)),
        ({"policy": "greedy", "measure_steps": 1}, False, (True, True)),
        ({"policy": "greedy", "measure_steps": 0, "layer_activation_mb": 1}, False, (False, False)),
        ({"policy": "greedy", "measure_steps": 0, "memory_gb": None}, False, (False, False)),
    ],
)
def test_memory_limits_nothing_where_no_bytes_are_known_unless_a_run_will_measure_them(
    schedule: dict[str, object], measured: bool, warned: tuple[bool, bool]
) -> None:
    job = load_config(
        {
            "train_batch_size": 4,
            "ldt": {"pipeline_num_layers": [[1, 1], [1, 0]], "schedule": {"memory_gb": 1} | schedule},
        }
    )
    known = known_from_config(job, Layout.build([[1, 1], [1, 0]]))
    assert is_measured(job) is measured
    assert tuple(memory_warning(job, known, running=running) is not None for running in (False, True)) == warned

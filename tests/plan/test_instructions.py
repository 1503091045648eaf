from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ldt.plan import Channel, Compute, Flow, Instruction, Kind, Op

computes = st.builds(
    Compute,
    op=st.sampled_from(Op),
    virtual_stage=st.integers(0, 30),
    micro_batch=st.integers(0, 2000),
    domain=st.integers(0, 99),
)


def test_a_compute_is_written_as_op_virtual_stage_micro_batch_domain() -> None:
    assert str(Compute(op=Op.FORWARD, virtual_stage=0, micro_batch=3, domain=1)) == "F0.3.1"
    assert f"{Compute(op=Op.BACKWARD, virtual_stage=12, micro_batch=0, domain=7)}" == "B12.0.7"
    assert str(Compute(op=Op.WEIGHT, virtual_stage=0, micro_batch=3, domain=1)) == "W0.3.1"


@given(compute=computes)
def test_a_written_compute_is_read_back(compute: Compute) -> None:
    assert Compute.parse(str(compute)) == compute


@pytest.mark.parametrize("text", ["", "F0.1", "X0.1.2", "F0.1.2.3", "f0.1.2", "F-1.0.0", "F0.1.2 ", "F0. 1.2"])
def test_what_is_no_compute_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no compute; expected .* like 'F0.3.1'"):
        Compute.parse(text)


def test_kinds_carry_the_instruction_names_of_deepspeed() -> None:
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    assert [kind.value for kind in Kind if not hasattr(schedule, kind.value)] == ["WeightPass"]


def test_an_instruction_knows_the_compute_it_serves() -> None:
    channel = Channel(domain=1, boundary=2, flow=Flow.GRADIENT, source=4, destination=0)
    receive = Instruction(kind=Kind.RECV_GRAD, chunk=1, virtual_stage=2, micro_batch=3, domain=1, channel=channel)
    assert receive.serves == Compute.parse("B2.3.1")
    assert receive.compute is None
    assert str(receive) == "RecvGrad(2.3.1 boundary 2 from rank 4)"
    assert str(channel) == "gradient over boundary 2 of domain 1, rank 4 -> rank 0"


def test_a_closing_reduction_serves_no_compute() -> None:
    assert Instruction(kind=Kind.REDUCE_GRADS).serves is None
    assert str(Instruction(kind=Kind.OPTIMIZER_STEP)) == "OptimizerStep"


def test_an_instruction_with_half_its_indices_is_refused() -> None:
    with pytest.raises(ValueError, match="must name a virtual stage, a micro-batch and a domain"):
        Instruction(kind=Kind.FORWARD_PASS, virtual_stage=1)

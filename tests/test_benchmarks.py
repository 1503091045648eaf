"""The benchmarks run: tiny settings, no numbers asserted beyond what no machine can miss."""

from __future__ import annotations

import math
import subprocess

import pytest
import torch

from tests.benchmarks import link, overhead, wan
from tests.benchmarks.delay import InProcessLink
from tests.benchmarks.link import Direction, Link, namespace
from tests.benchmarks.peers import ROWS, Row
from tests.benchmarks.setting import Setup
from tests.benchmarks.work import Stopwatch, TimedCell, TimedLedger

TINY = Setup(layer_s=0.002, cloud_layers=2, num_micro_batches=6, message_bytes=4096)


def test_the_bound_is_that_of_the_issue() -> None:
    assert [round(wan.bound(Setup(), ratio * 0.02, 1), 2) for ratio in (0, 1, 4)] == [2.0, 2.04, 2.16]


def test_the_bound_of_split_backwards_leaves_the_weight_gradients_out_of_the_way() -> None:
    # 3tM + t(P - 2) + e + L, and the time of a message on the link
    found = [wan.bound(Setup(), ratio * 0.02, 1, split=True) for ratio in (0, 1, 4)]
    assert found == pytest.approx([1.945, 1.965, 2.025], abs=1e-3)


def test_the_room_that_a_peer_leaves_is_its_time_over_the_bounds() -> None:
    rows = [Row(name="ours", builder="", policy="auto"), Row(name="slow", builder=""), Row(name="fast", builder="")]
    cells = {("ours", 1): [1.0], ("slow", 1): [9.0], ("fast", 1): [2 * wan.bound(Setup(), 0.02, 1)]}
    text = wan.room(rows, Setup(), [1], {place: wan.Cell(steps_s=steps) for place, steps in cells.items()})
    assert "takes 2.00 of the lower bound, 2.07 of that with split backwards" in text


@pytest.mark.parametrize("cells", [Setup().cells, [1, 4, 4, 1]])
def test_every_row_holds_the_same_layers(cells: list[int]) -> None:
    assert sum(cells) == sum(map(sum, Setup().matrix))


@pytest.mark.parametrize("first", [True, False])
def test_a_backward_takes_twice_the_time_of_the_forward(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "worked_s", 0.0)
    layer, inputs = TimedCell(Setup(layer_s=0.0005), 2, first), torch.ones(2, 3, requires_grad=not first)
    output = layer(inputs)
    assert Stopwatch.worked_s == pytest.approx(0.001)
    output.sum().backward()
    assert Stopwatch.worked_s == pytest.approx(0.003)
    assert layer.weight.grad.item() == 6


def test_the_backward_can_be_split_in_equal_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "worked_s", 0.0)
    cell, inputs = TimedCell(Setup(layer_s=0.001), 2), torch.ones(2, 3, requires_grad=True)
    output = cell(inputs).sum()
    torch.autograd.grad(output, inputs, retain_graph=True)
    assert Stopwatch.worked_s == pytest.approx(0.004)
    torch.autograd.grad(output, list(cell.parameters()))
    assert Stopwatch.worked_s > 0.005


def test_ds_ldt_can_put_the_weight_half_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "worked_s", 0.0)
    ledger, cell = TimedLedger(), TimedCell(Setup(layer_s=0.0005), 2, later=True)
    with ledger.deferring():
        output = cell(torch.ones(2, 3, requires_grad=True))
    with ledger.owed_by(0):
        output.sum().backward()
    assert Stopwatch.worked_s == pytest.approx(0.002)
    ledger.settle(0)
    assert Stopwatch.worked_s == pytest.approx(0.003)
    assert cell.weight.grad.item() == 6


def test_a_direction_delays_by_rate_and_latency(tmp_path) -> None:
    with (tmp_path / "out").open("wb") as out:
        direction = Direction(out=out.fileno(), latency_s=0.02, bytes_per_s=1e6)
        direction.enter(b"x" * 1000, 5.0)
        direction.enter(b"x" * 1000, 5.0)
        assert direction.next_due() == pytest.approx(5.021)
        direction.leave(5.0215)
        assert (direction.carried, direction.next_due()) == (1000, pytest.approx(5.022))
        direction.latency_s = 0.0
        direction.enter(b"x", 5.003)
        direction.leave(6.0)
    assert direction.carried == 2001
    assert math.isinf(direction.next_due())


@pytest.mark.parametrize("sent, wanted, leaves", [(7.0, 5.0, 7.0), (7.0, 6.9, 6.95), (5.0, 7.0, 7.05)])
def test_a_receive_posted_late_costs_a_round_trip(sent, wanted, leaves, tmp_path, monkeypatch) -> None:
    channel = InProcessLink(edge_ranks=(0,), directory=tmp_path, latency_s=0.05)
    times = iter([sent, wanted])
    monkeypatch.setattr("tests.benchmarks.delay.time.monotonic", lambda: next(times))
    place = channel.post("0_0_1", 0)
    assert channel.post("0_0_1", 1) == place
    assert channel.leaves(*place) == pytest.approx(max(leaves, sent))


@pytest.mark.skipif(link.available() is not None, reason=f"the emulated link needs {link.available()}")
def test_the_emulated_link_delays_and_leaves_nothing_behind() -> None:
    def namespaces() -> str:
        return subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True, timeout=30).stdout

    with Link("ldt_test") as emulated:
        assert namespace("ldt_test", "edge") in namespaces()
        emulated.set(latency_s=0.05, mbps=100.0)
        ping = ["ip", "netns", "exec", namespace("ldt_test", "edge"), *_connect(link.ADDRESSES["cloud"])]
        seconds = float(subprocess.run(ping, check=True, capture_output=True, text=True, timeout=30).stdout)
        assert 0.1 <= seconds < 5  # refused by the other end: one round trip
        assert min(emulated.carried()) >= 40
    assert namespace("ldt_test", "edge") not in namespaces()


def _connect(address: str) -> list[str]:
    code = f"""
import socket, time
begin = time.monotonic()
socket.socket().connect_ex(("{address}", 9))
print(time.monotonic() - begin)
"""
    return ["python3", "-c", code]


@pytest.mark.distributed
@pytest.mark.skipif(link.available() is not None, reason=f"the emulated link needs {link.available()}")
def test_ds_ldt_and_a_peer_are_measured_over_the_emulated_link() -> None:
    measure([next(row for row in ROWS if wanted in row.name) for wanted in ("split", "ZBV")], over_link=True)


@pytest.mark.distributed
def test_ds_ldt_is_measured_with_the_link_inside_the_processes() -> None:
    measure([ROWS[0]], over_link=False)


def measure(rows: list[Row], *, over_link: bool) -> None:
    with wan.open_lanes(rows, TINY, over_link=over_link) as lanes:
        cells = wan.measure(lanes, TINY, [2.0], turns=1, steps=1)
    for row in rows:
        assert cells[row.name, 2.0].step_s > 0.9 * wan.bound(TINY, 0.0, 1)
    assert f"| {rows[0].name} |" in wan.table(rows, TINY, [2.0], cells)


def test_the_table_takes_its_place_in_a_document(tmp_path) -> None:
    document = tmp_path / "README.md"
    document.write_text(f"before\n{wan.BEGIN}\nold\n{wan.END}\nafter\n")
    wan.put_into(document, "| new |")
    assert document.read_text() == f"before\n{wan.BEGIN}\n\n| new |\n\n{wan.END}\nafter\n"
    document.write_text("no place")
    with pytest.raises(ValueError, match="wan.py begins"):
        wan.put_into(document, "| new |")


@pytest.mark.distributed
def test_the_overhead_is_measured() -> None:
    setup = Setup(layer_s=0.0, cloud_layers=1, num_micro_batches=4, message_bytes=4096)
    engines = overhead.measure(setup, turns=1, steps=2)
    assert [engine.num_instructions for engine in engines] == [90, 100]
    assert all(engine.cpu_per_instruction_s > 0 for engine in engines)
    assert "ds_ldt over DeepSpeed" in overhead.table(engines)

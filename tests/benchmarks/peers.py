"""The rows of the table, each as what its processes do: ds_ldt and what a user would pick instead.

`prepare` puts a process on its site, `build` makes its engine, `run_steps` trains. All are targets of the harness.
"""

from __future__ import annotations

import cProfile
import ctypes
import io
import os
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.link import ADDRESSES, DEVICE, namespace

_CLONE_NEWNET = 0x40000000
_TIMEOUT_S = 120.0
_LEARNING_RATE = 1e-3
_MEASURED_STEPS = 3
"""Steps after which "auto" plans for what it has measured, as it does by default. They are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table.

    Attributes:
        name: as printed.
        builder: name of the function below that makes its engine.
        policy: schedule policy of ds_ldt.
        split: ds_ldt runs the backward of a cloud stage in two halves.
        domains: D.
        edge_last: the last rank is on the edge too, as a process of its own.
        multiple_of_stages: M must be a multiple of P: the least such above is run, and its time taken in proportion.
        note: what the reader has to know.
    """

    name: str
    builder: str
    policy: str = ""
    split: bool = False
    domains: int = 1
    edge_last: bool = False
    multiple_of_stages: bool = False
    note: str = ""

    @property
    def is_peer(self) -> bool:
        """Whether it is something else than ds_ldt."""
        return not self.policy

    def world_size(self, num_stages: int) -> int:
        """Number of processes."""
        return 1 + (num_stages - 1) * self.domains + int(self.edge_last)

    def edge_ranks(self, num_stages: int) -> tuple[int, ...]:
        """Ranks on the edge."""
        return (0, num_stages) if self.edge_last else (0,)

    def num_micro_batches(self, wanted: int, num_stages: int) -> int:
        """M of this row."""
        return -(-wanted // num_stages) * num_stages if self.multiple_of_stages else wanted


ROWS = (
    Row(name="ds_ldt auto", builder="ds_ldt", policy="auto"),
    Row(name="ds_ldt auto, split", builder="ds_ldt", policy="auto", split=True, note="backward in two halves"),
    Row(name="ds_ldt ldt_1f1b", builder="ds_ldt", policy="ldt_1f1b"),
    Row(name="DeepSpeed PipelineModule 1F1B", builder="deepspeed_1f1b", edge_last=True, note="two edge processes"),
    Row(name="DeepSpeed DualPipeVModule", builder="deepspeed_dualpipev"),
    Row(name="torch ScheduleZBVZeroBubble", builder="torch_zbv", note="backward in two halves"),
    Row(
        name="torch ScheduleInterleaved1F1B",
        builder="torch_interleaved",
        multiple_of_stages=True,
        note="the last layer and the labels are in the cloud; M a multiple of P, time in proportion",
    ),
    Row(name="ds_ldt auto, D = 2", builder="ds_ldt", policy="auto", domains=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the processes of a row run.

    Attributes:
        edge_ranks: ranks on the edge.
        link: name of the emulated link, if there is one.
        directory: where processes leave the times of their messages for each other, if the link is within them; None
            and no `link`: there is none between the sites.
    """

    edge_ranks: tuple[int, ...]
    link: str | None = None
    directory: str | None = None


_process: dict[str, Any] = {}
"""What this process holds: `step`, a function that trains one step, and `close`, one that ends the engine."""


def prepare(place: Place) -> None:
    """Move this process to its site, before torch is imported."""
    site = "edge" if int(os.environ["RANK"]) in place.edge_ranks else "cloud"
    if place.link is not None:
        _enter(namespace(place.link, site))
        os.environ["MASTER_ADDR"] = ADDRESSES["edge"]
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    import torch
    from deepspeed import ops

    from tests.benchmarks.setting import end_with_parent, precise_sleeps

    torch.set_num_threads(1)
    precise_sleeps()
    end_with_parent()
    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled at first use
    if place.directory is not None:
        from tests.benchmarks.delay import install

        _process["delay"] = install(place.edge_ranks, place.directory)


def build(row: Row, setup: Any, latency_s: float) -> None:
    """Make the engine. Only ds_ldt plans for a latency; the others keep the one that they have."""
    if "delay" in _process:
        _process["delay"].latency_s, _process["delay"].mbps = latency_s, setup.mbps
    if "step" in _process and row.builder != "ds_ldt":
        return
    if "close" in _process:
        _process.pop("close")()
    builder: Callable[[Row, Any, float], Callable[[], Any]] = globals()[f"_{row.builder}"]
    _process["step"] = builder(row, setup, latency_s)


def run_steps(count: int) -> dict[str, Any]:
    """Train `count` steps one after the other.

    Returns:
        `ends`: when each ended, in seconds of a clock that all processes of a machine share; `worked_s`: how long the
        layers slept, all steps together; `cpu_s`: processor time, all threads.
    """
    from tests.benchmarks.work import Stopwatch

    Stopwatch.worked_s, before, ends = 0.0, time.process_time(), []
    for _ in range(count):
        _process["step"]()
        ends.append(time.monotonic())
    return {"ends": ends, "worked_s": Stopwatch.worked_s, "cpu_s": time.process_time() - before}


def count_instructions() -> int:
    """Instructions of this rank in a step of a DeepSpeed engine."""
    return sum(len(commands) for commands in _process["engine"]._train_schedule())


def profile_steps(count: int, lines: int) -> str:
    """Train `count` steps under a profiler; what took most of the main thread's own time."""
    with cProfile.Profile() as profile:
        for _ in range(count):
            _process["step"]()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(lines)
    return text.getvalue()


def _enter(name: str) -> None:
    """Move this process into a network namespace (Python 3.11 has no os.setns)."""
    with open(f"/run/netns/{name}") as there:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _settings(setup: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": setup.batch_shape[0],
        "gradient_accumulation_steps": setup.num_micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**6,
        "optimizer": {"type": "SGD", "params": {"lr": _LEARNING_RATE}},
    }


def _ds_ldt(row: Row, setup: Any, latency_s: float) -> Callable[[], Any]:
    from deepspeed.pipe import LayerSpec
    from torch.nn import Identity
    from torch.nn.functional import mse_loss

    import ds_ldt
    from tests.benchmarks.work import TimedCell, TimedLedger, micro_batches

    settings = _settings(setup) | {
        "ldt": {
            "pipeline_num_layers": setup.matrix,
            "cloud": {"data_parallel_size": row.domains},
            "schedule": {
                "policy": row.policy,
                "split_backward": row.split,
                "layer_forward_ms": setup.layer_s * 1e3 or 1.0,
                "measure_steps": _MEASURED_STEPS,
            },
            "link": {
                "latency_ms": latency_s * 1e3,
                "bandwidth_mbps": setup.mbps,
                "message_mb": setup.message_bytes / 1e6,
            },
            "timeout_s": _TIMEOUT_S,
        }
    }
    layers = []
    cells = [(number, stage > 0) for line in setup.matrix for stage, number in enumerate(line) if number]
    for count, is_cloud in cells:
        # Plans count layers, so a cell has as many as it should; the first of them sleeps for all.
        timed = LayerSpec(TimedCell, setup, count, not layers, row.split and is_cloud)
        layers += [timed, *[LayerSpec(Identity)] * (count - 1)]
    module = ds_ldt.LDTPipelineModule(layers=layers, config=settings, loss_fn=mse_loss)
    engine, _, _, _ = ds_ldt.initialize(model=module)
    engine.executor.ledger = TimedLedger()
    batches = micro_batches(setup) if module.mpu().site == "edge" else None
    _process["close"], _process["engine"] = engine.destroy, engine
    for _ in range(_MEASURED_STEPS if row.policy == "auto" else 0):
        engine.train_batch(batches)
    return lambda: engine.train_batch(batches)


def _deepspeed_1f1b(row: Row, setup: Any, latency_s: float) -> Callable[[], Any]:
    from deepspeed.pipe import PipelineModule

    counts = [1] + [setup.cloud_layers] * (setup.num_stages - 1) + [1]
    return _deepspeed(PipelineModule, counts, len(counts), setup)


def _deepspeed_dualpipev(row: Row, setup: Any, latency_s: float) -> Callable[[], Any]:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    return _deepspeed(DualPipeVModule, setup.cells, setup.num_stages, setup)


def _deepspeed(module_class: type[Any], counts: list[int], num_stages: int, setup: Any) -> Callable[[], Any]:
    from datetime import timedelta

    import deepspeed
    from deepspeed.pipe import LayerSpec
    from torch.nn.functional import mse_loss

    from tests.benchmarks.work import TimedCell, micro_batches

    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    layers = [LayerSpec(TimedCell, setup, count, index == 0) for index, count in enumerate(counts)]
    module = module_class(layers=layers, num_stages=num_stages, loss_fn=mse_loss, partition_method="uniform")
    engine, _, _, _ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=_settings(setup)
    )
    batches = micro_batches(setup)
    _process["engine"] = engine
    return lambda: engine.train_batch(data_iter=batches)


def _torch_zbv(row: Row, setup: Any, latency_s: float) -> Callable[[], Any]:
    from torch.distributed.pipelining import ScheduleZBVZeroBubble

    rank = int(os.environ["RANK"])
    return _torch(ScheduleZBVZeroBubble, setup, setup.cells, (rank, 2 * setup.num_stages - 1 - rank))


def _torch_interleaved(row: Row, setup: Any, latency_s: float) -> Callable[[], Any]:
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    rank, half = int(os.environ["RANK"]), setup.cells[: setup.num_stages]
    return _torch(ScheduleInterleaved1F1B, setup, half + half, (rank, setup.num_stages + rank))


def _torch(schedule_class: type[Any], setup: Any, cells: list[int], stages: tuple[int, int]) -> Callable[[], Any]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.nn.functional import mse_loss

    from tests.benchmarks.work import TimedCell

    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    device = torch.device("cpu")
    parts = {index: TimedCell(setup, cells[index], index == 0) for index in stages}
    pipeline = [PipelineStage(part, index, len(cells), device) for index, part in parts.items()]
    schedule = schedule_class(pipeline, setup.num_micro_batches, loss_fn=mse_loss)
    optimizer = torch.optim.SGD([p for part in parts.values() for p in part.parameters()], lr=_LEARNING_RATE)
    samples, width = setup.batch_shape
    batch = torch.ones(samples * setup.num_micro_batches, width)
    inputs = (batch,) if 0 in parts else ()
    target = {"target": torch.zeros_like(batch)} if len(cells) - 1 in parts else {}

    def step() -> None:
        schedule.step(*inputs, **target, losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return step

"""What all rows of the benchmark have in common. Standard library only: the link and the table need no torch."""

from __future__ import annotations

import ctypes
import signal
from dataclasses import dataclass

WIDTH = 4096
_FLOAT_BYTES = 4
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all rows have in common.

    Every layer takes the same time. Head and tail are one layer each, so the edge's forward is t / cloud_layers twice.

    Attributes:
        layer_s: Seconds of the forward of one layer; its backward takes twice as long.
        cloud_layers: Layers of a cloud stage, an even number: t = cloud_layers * layer_s.
        num_micro_batches: M.
        num_stages: P, the edge included.
        message_bytes: Bytes of the activations of a micro-batch.
        mbps: Megabits per second of the link, each way; 0: unlimited.
    """

    layer_s: float = 0.005
    cloud_layers: int = 4
    num_micro_batches: int = 32
    num_stages: int = 3
    message_bytes: int = 65536
    mbps: float = 1000.0

    @property
    def stage_s(self) -> float:
        """Seconds of the forward of one cloud stage: t."""
        return self.layer_s * self.cloud_layers

    @property
    def matrix(self) -> list[list[int]]:
        """The setting `ldt.pipeline_num_layers`."""
        cloud = self.num_stages - 1
        return [[1] + [self.cloud_layers] * cloud, [1] + [0] * cloud]

    @property
    def cells(self) -> list[int]:
        """Layers of the 2P stages of a V, out through the cloud and back: half a stage each time."""
        half = [1] + [self.cloud_layers // 2] * (self.num_stages - 1)
        return half + half[::-1]

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Samples of a micro-batch and floats of a sample."""
        samples = max(1, self.message_bytes // (WIDTH * _FLOAT_BYTES))
        return samples, self.message_bytes // (samples * _FLOAT_BYTES)


def precise_sleeps() -> None:
    """Let sleeps of this process end on time (Linux rounds them up by 50 microseconds otherwise)."""
    _prctl(_PR_SET_TIMERSLACK, _SLACK_NS)


def end_with_parent() -> None:
    """Let this process be killed when its parent is gone: one that is stopped would never notice."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (AttributeError, OSError):
        return  # not Linux

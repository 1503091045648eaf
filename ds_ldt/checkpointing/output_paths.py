"""Are the places writable that a job will write to? Tried on every rank before the first step, not after the last.

Permission bits do not tell: root passes them, and a mount may be read-only or full. So each rank writes a file where
it will write later, and removes it again. Directories that do not exist yet are tried under another name, inside the
nearest one that does, so that ranks which share a place are not in each other's way and nothing is left behind.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_ldt.comm.collectives import MAX_TEXT_BYTES, bounded, exchange_text, gather_text_of_site, sum_over_sites
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.waits import ranks
from ds_ldt.config.schema import JobConfig
from ds_ldt.errors import Absent, ConfigError, ConfigProblem

_PROBE_BYTES = bytes(4096)
_LONGEST_PATH = 300
"""Characters of a path in a message."""
_RANKS_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPath:
    """A place that this rank will write to.

    Attributes:
        setting: what names it: a key of the JSON, or an option of a script.
        path: the file or the directory.
        is_directory: whether files are made in it; else it is a file itself.
    """

    setting: str
    path: str
    is_directory: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A place that a rank cannot write to; ``path`` is None in the cloud where it is of the edge."""

    setting: str
    path: str | None
    reason: str
    rank: int


def output_paths_of(job: JobConfig, rank: int) -> list[OutputPath]:
    """The places that a rank will write to because the JSON says so.

    Args:
        job: the configuration.
        rank: the rank; all but the first only record traces.
    """
    found = []
    if job.ldt.trace is not None:
        found.append(OutputPath(setting="ldt.trace.path", path=job.ldt.trace.path))
    if rank != 0:
        return found
    if job.ldt.measured_costs is not None:
        found.append(OutputPath(setting="ldt.measured_costs", path=job.ldt.measured_costs, is_directory=False))
    for monitor in ("tensorboard", "csv_monitor"):
        section = job.deepspeed.get(monitor, {})
        if section.get("enabled"):
            # DeepSpeed's own defaults
            directory = os.path.join(section.get("output_path") or "", section.get("job_name", "DeepSpeedJobName"))
            found.append(OutputPath(setting=f"{monitor}.output_path", path=directory))
    return found


def why_not_writable(output: OutputPath) -> str | None:
    """Try to write to a place as later on; nothing is left behind and nothing that is there changes.

    Returns:
        None if it can be written to, else the reason, mostly in the words of the operating system; it names no path,
        for other sites read it.
    """
    try:
        path = Path(output.path).absolute()
        if output.is_directory:
            _try_directory(path)
        else:
            _try_file(Path(os.path.realpath(path)))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        return getattr(error, "strerror", None) or str(error)
    return None


def _try_file(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.is_file():
        with path.open("ab"):
            return
    if not path.exists():  # else it is a device or a pipe, which must not be opened twice
        _try_directory(path.parent, path.name)


def _try_directory(directory: Path, file_name: str = "probe") -> None:
    """Write a file in a directory, or in one of the same name where it does not exist yet."""
    existing = directory
    missing: list[str] = []
    while not os.path.lexists(existing):
        missing.insert(0, existing.name)
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a part of the path is a file, or a link to nowhere")
    with tempfile.TemporaryDirectory(prefix=".ldt_probe_", dir=existing) as probe:
        place = Path(probe, *missing)
        place.mkdir(parents=True, exist_ok=True)
        (place / file_name).write_bytes(_PROBE_BYTES)


def check_together(paths: Sequence[OutputPath], grid: LDTPipelineGrid, *, what: str) -> None:
    """Try the places of every rank; if any cannot be written to, fail on every rank of both sites. All ranks call it.

    Args:
        paths: those of this rank, none or several.
        grid: the groups.
        what: the call, as the user knows it.

    Raises:
        ConfigError: it names the setting, the ranks and the reason, and the path; a path of the edge is not named in
            the cloud.
        LinkError: a rank did not take part within ``ldt.timeout_s``.
    """
    tried = [(output, why_not_writable(output)) for output in paths]
    mine = [
        _Failure(setting=output.setting, path=_short(output.path), reason=reason, rank=grid.global_rank)
        for output, reason in tried
        if reason is not None
    ]
    with bounded(what, grid):
        if not _sum([len(mine)], grid)[0]:
            return
        texts = gather_text_of_site(_as_text(mine), grid)
        here = [_Failure(**one) for text in texts for one in json.loads(text)]
        # What the edge calls its directories stays there.
        told = [_Failure(setting=f.setting, path=None, reason=f.reason, rank=f.rank) for f in here]
        both = exchange_text(_as_text(told if grid.site == "edge" else here), grid)
    there = [_Failure(**one) for one in json.loads(both[int(grid.site == "edge")])]
    raise ConfigError.from_problems(_problems([*here, *there], grid))


def check_directory(directory: str | os.PathLike[str] | None, grid: LDTPipelineGrid, *, setting: str) -> None:
    """Try a directory for checkpoints on every rank; see :meth:`ds_ldt.LDTPipelineEngine.check_save_dir`.

    Args:
        directory: of this site, or None.
        grid: the groups.
        setting: what names it.

    Raises:
        ConfigError: on every rank, if any cannot write, or if only some ranks have one.
        LinkError: a rank did not take part within ``ldt.timeout_s``.
    """
    with bounded("check_save_dir", grid):
        given = _sum([int(directory is not None)], grid)[0]
    if 0 < given < grid.world_size:  # a rank that saves would wait for those that do not
        mine = "one" if directory is not None else "none"
        raise ConfigError.of(
            setting,
            found=Absent(
                f"a directory on {given} of {grid.world_size} ranks; rank {grid.global_rank} ({grid.site}) has {mine}"
            ),
            expected="one on every rank of both sites, or on none",
            fix=f"give both sites a {setting}, or neither",
        )
    paths = [] if directory is None else [OutputPath(setting=setting, path=os.fspath(directory))]
    check_together(paths, grid, what="check_save_dir")


def end_monitoring_at_errors(monitor: Any) -> None:
    """Have a monitor of DeepSpeed that can no longer write say so and stop, instead of ending the training.

    Args:
        monitor: DeepSpeed's ``MonitorMaster``.
    """
    write_events: Callable[..., None] = monitor.write_events

    def write_or_stop(*args: Any, **kwargs: Any) -> None:
        try:
            write_events(*args, **kwargs)
        except OSError as error:
            monitor.enabled = False
            logger.warning(f"monitoring ends here, training goes on: {error}")

    monitor.write_events = write_or_stop


def _problems(failures: Iterable[_Failure], grid: LDTPipelineGrid) -> list[ConfigProblem]:
    """One problem for each place and reason, with the ranks that met it."""
    met_by: dict[tuple[str, str | None, str, str], list[int]] = {}
    for failure in failures:
        site = grid.rank_map.site(failure.rank)
        met_by.setdefault((failure.setting, failure.path, failure.reason, site), []).append(failure.rank)
    return [
        ConfigProblem(
            key=setting,
            found=Absent(
                f"{_quoted(path)}, to which {ranks(numbers, most=_RANKS_NAMED)} ({site}) cannot write: {reason}"
            ),
            expected="a place where files can be made",
            fix=f"name another one on the {site}, or make this one writable there",
        )
        for (setting, path, reason, site), numbers in met_by.items()
    ]


def _named(numbers: list[int]) -> str:
    return ranks(numbers, most=_RANKS_NAMED)


def _quoted(path: str | None) -> str:
    return "a path of the edge" if path is None else f'"{path}"'


def _short(path: str) -> str:
    return path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}..."


def _as_text(failures: Sequence[_Failure]) -> str:
    """As many failures as fit into a text that ranks exchange."""
    kept = list(failures)
    while True:
        text = json.dumps([{name: getattr(one, name) for name in _Failure.__slots__} for one in kept])
        if len(text) <= MAX_TEXT_BYTES:
            return text
        kept.pop()


def _sum(counts: list[int], grid: LDTPipelineGrid) -> list[int]:
    values = torch.tensor(counts, dtype=torch.int32, device=get_accelerator().current_device_name())
    summed: list[int] = sum_over_sites(values, grid).tolist()
    return summed

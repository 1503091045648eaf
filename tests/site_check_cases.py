"""Targets that test_site_check.py runs in two processes: rank 0 is the edge, rank 1 the cloud."""

from __future__ import annotations

import contextlib
import io
import os
import time
from typing import Any
from unittest import mock

from ds_ldt.cli import main as cli

SITES = ("edge", "cloud")


def command(config: str, arguments: list[str], changes: dict[int, list[str]]) -> tuple[int, str, str, float]:
    """Run `ds-ldt check` as a user would: (status, stdout, stderr, seconds).

    Args:
        config: path of the configuration.
        arguments: of both sites.
        changes: rank -> further arguments of that rank; a rank with `["absent"]` does nothing.
    """
    rank = int(os.environ["RANK"])
    further = changes.get(rank, [])
    if further == ["absent"]:
        return 0, "", "", 0.0
    site = [] if "--site" in further else ["--site", SITES[rank]]
    out, err = io.StringIO(), io.StringIO()
    started = time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["check", config, *site, *arguments, *further])
    return status, out.getvalue(), err.getvalue(), time.perf_counter() - started


def cloud_goes_away_while_the_link_is_measured(config: str, port: int) -> tuple[int, str, str, float]:
    """The cloud's part of the measuring fails once gloo has connected the sites."""
    from ds_ldt.cli import site_check

    failing = mock.patch.object(site_check, "answer_probe", side_effect=RuntimeError("told to"))
    with failing if os.environ["RANK"] == "1" else contextlib.nullcontext():
        return command(config, ["--master_port", str(port), "--timeout_s", "20"], {})


def other_version_in_the_cloud(config: str, port: int) -> Any:
    """The cloud tells another version of deepspeed: what `check_sites` finds."""
    from ds_ldt.cli.site_check import Meeting, check_sites, facts_of
    from ds_ldt.config.schema import load_config
    from ds_ldt.plan import PipelineShape, build_plan
    from ds_ldt.topology.layout import Layout

    job = load_config(config)
    shape = PipelineShape.from_layout(
        Layout.build(job.ldt.pipeline_num_layers),
        num_micro_batches=job.num_micro_batches,
        num_domains=job.num_domains,
        num_replicas=job.num_replicas,
    )
    rank = int(os.environ["RANK"])
    facts = facts_of(job, build_plan(shape), SITES[rank])
    if rank == 1:
        facts = facts.model_copy(update={"versions": facts.versions | {"deepspeed": "0.19.9"}})
    report = check_sites(facts, Meeting(site=SITES[rank], master_addr="127.0.0.1", master_port=port, timeout_s=30.0))
    return str(report.difference), report.document()

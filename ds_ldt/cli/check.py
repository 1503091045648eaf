"""Check two sites before a job: whether they agree, and what the link between them is like.

    ds-ldt check config.json --site edge --master_addr 203.0.113.10
    ds-ldt check config.json --site cloud --master_addr 203.0.113.10

Run it on both sites at once. Both print the same report. No model and no data is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from argparse import ArgumentParser, Namespace

from ds_ldt.cli.arguments import port, seconds
from ds_ldt.cli.job import add_set, load_job
from ds_ldt.cli.progress import Progress
from ds_ldt.errors import ConfigError
from ds_ldt.plan import build_plan


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command.

    Args:
        parser: Its parser.
    """
    parser.add_argument("config", help="DeepSpeed JSON with an ldt section, this site's copy")
    parser.add_argument("--site", required=True, choices=("edge", "cloud"), help="which site this is")
    parser.add_argument(
        "--master_addr",
        default=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        help="address of the edge, as seen from here (default: MASTER_ADDR, else 127.0.0.1)",
    )
    parser.add_argument(
        "--master_port",
        type=port,
        default=os.environ.get("MASTER_PORT", "29500"),
        help="a TCP port of the edge that can be reached (default: MASTER_PORT, else 29500)",
    )
    parser.add_argument("--interface", help="network interface that leads to the other site (as GLOO_SOCKET_IFNAME)")
    parser.add_argument("--timeout_s", type=seconds, help="longest wait for the other site (ldt.timeout_s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_set(parser)


def run(options: Namespace) -> str:
    """Meet the other site and run the check; return what it prints.

    Args:
        options: The command line.

    Raises:
        LDTError: The input is wrong, the other site is not there, or the sites differ.
        OSError: A file cannot be read.
    """
    job = load_job(options)
    policy = job.config.ldt.schedule.policy
    with Progress(1) as progress:
        progress("making the plan")
        plan = build_plan(job.shape, policy=policy, costs=job.known.costs, max_in_flight=job.limits)
    if options.interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    # What torch says of a site that is not there yet is many lines of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # DeepSpeed greets on stdout, which is for the report.
    with contextlib.redirect_stdout(sys.stderr):
        from ds_ldt.cli.site_check import Meeting, check_sites, facts_of

        report = check_sites(
            facts_of(job.config, plan, options.site),
            Meeting(
                site=options.site,
                master_addr=options.master_addr,
                master_port=options.master_port,
                timeout_s=options.timeout_s or job.config.ldt.timeout_s,
            ),
        )
    text = json.dumps(report.document()) + "\n" if options.json else report.text()
    if report.difference is None:
        return text
    if options.json:
        sys.stdout.write(text)
        sys.stdout.flush()
    raise ConfigError.from_problems([report.difference], where="what the two sites have")

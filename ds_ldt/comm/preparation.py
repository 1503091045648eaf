"""``ds_ldt.preparing_data``: lets the other ranks wait for as long as the edge reads and tokenises its data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ds_ldt.comm.launch import prepare_environment
from ds_ldt.comm.rendezvous import join, of_world, preparing
from ds_ldt.config.schema import JobConfig, load_config
from ds_ldt.topology.ranks import RankMap


@contextmanager
def preparing_data(config: str | os.PathLike[str] | Mapping[str, Any] | JobConfig) -> Iterator[None]:
    """Tell the other ranks that this one is alive and prepares its data; they wait for as long as it does.

    Without it a rank gives up once another has not come for ``ldt.timeout_s``; with it, that long after the last sign
    of life. Put it around reading and tokenising, before the model is built or between that and
    ``ds_ldt.initialize``:

        with ds_ldt.preparing_data("config.json"):
            samples = read_and_tokenise()

    Every rank may run it. In the cloud it does nothing. Only the signs of life cross, nothing about the data.

    Args:
        config: the configuration of the job, as for ``ds_ldt.LDTPipelineModule``.

    Raises:
        ConfigError: the configuration or the launch environment is wrong, or the port is in use.
        LinkError: on an edge rank other than 0: rank 0 does not answer within ``ldt.timeout_s``.
    """
    launched = prepare_environment()
    job = load_config(config, world_size=launched.world_size)
    sites = RankMap.from_config(job).sites
    if sites[launched.rank] != "edge":
        yield
        return
    from torch import distributed

    timeout_s = job.ldt.timeout_s
    if distributed.is_initialized():
        store = of_world(distributed, timeout_s=timeout_s)
    else:
        store = join(launched, timeout_s=timeout_s, sites=sites)
    with preparing(store, timeout_s=timeout_s):
        yield

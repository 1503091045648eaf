"""Split fine-tuning over an edge and a cloud, as an extension of DeepSpeed's pipeline engine.

Names are imported when they are first used: `import ds_ldt` alone imports neither torch nor deepspeed, so that
planning tools answer at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    from ds_ldt import models
    from ds_ldt.api import initialize, site_of_this_rank
    from ds_ldt.comm.preparation import preparing_data
    from ds_ldt.comm.wire import WireSchema, WireTensor
    from ds_ldt.config.schema import JobConfig, LDTConfig, load_config
    from ds_ldt.errors import CheckpointError, ConfigError, LDTError, LinkError, PrivacyError, ScheduleError
    from ds_ldt.runtime.engine import LDTPipelineEngine
    from ds_ldt.runtime.module import LDTPipelineModule
    from ds_ldt.runtime.saver import Saver

__version__ = "0.1.0"

# Public name -> module that defines it.
_HOMES = {
    "initialize": "ds_ldt.api",
    "preparing_data": "ds_ldt.comm.preparation",
    "site_of_this_rank": "ds_ldt.api",
    "Saver": "ds_ldt.runtime.saver",
    "LDTPipelineModule": "ds_ldt.runtime.module",
    "LDTPipelineEngine": "ds_ldt.runtime.engine",
    "LDTConfig": "ds_ldt.config.schema",
    "JobConfig": "ds_ldt.config.schema",
    "load_config": "ds_ldt.config.schema",
    "LayerSpec": "deepspeed.pipe",
    "TiedLayerSpec": "deepspeed.pipe",
    "WireSchema": "ds_ldt.comm.wire",
    "WireTensor": "ds_ldt.comm.wire",
    "LDTError": "ds_ldt.errors",
    "ConfigError": "ds_ldt.errors",
    "ScheduleError": "ds_ldt.errors",
    "PrivacyError": "ds_ldt.errors",
    "LinkError": "ds_ldt.errors",
    "CheckpointError": "ds_ldt.errors",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "JobConfig",
    "LDTConfig",
    "LDTError",
    "LDTPipelineEngine",
    "LDTPipelineModule",
    "LayerSpec",
    "LinkError",
    "PrivacyError",
    "Saver",
    "ScheduleError",
    "TiedLayerSpec",
    "WireSchema",
    "WireTensor",
    "__version__",
    "initialize",
    "load_config",
    "models",
    "preparing_data",
    "site_of_this_rank",
]


if not TYPE_CHECKING:  # else a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        """Import a public name on first use."""
        if name == "models":
            return import_module("ds_ldt.models")
        if name not in _HOMES:
            raise AttributeError(f"module 'ds_ldt' has no attribute '{name}'")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names, those not imported yet included."""
    return sorted({*globals(), *__all__})

"""The CPU as a Backend: which plan computes a model, and why."""

import logging

from triptych.kernels.cpu import active_isa, select_isa, supported_isas
from triptych.services.executor.backend import BackendOptions, LoadedModel, Progress
from triptych.services.executor.native_plan import load_native, why_not_native
from triptych.services.executor.packed_weights import parts_of, why_not_packed
from triptych.services.executor.raw_weights import open_raw_weights
from triptych.services.executor.rounding import RoundedWeights
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles

_log = logging.getLogger(__name__)


def load_cpu_model(files: ModelFiles, options: BackendOptions, progress: Progress) -> LoadedModel:
    """Load a model into memory. Raises StartupError when it cannot be run.

    "auto" takes the native plan where it can express the model, else the eager one. Sets the
    process's CPU kernels when the options name some.
    """
    if options.isa is not None:
        _select_isa(options.isa)
    if "fp8" in (options.quantization, options.kv_cache_dtype):
        raise StartupError("fp8 is for GPUs only (quantization, kv_cache_dtype)")
    if options.quantization != "none" and files.kind != "folder":
        raise StartupError(
            f"quantization {options.quantization}: {files.path} is no folder of float weights"
        )
    if options.plan != "eager":
        source = open_raw_weights(files)
        if options.quantization in ("int8", "int4"):
            source = RoundedWeights(source, options.quantization)
        reason = why_not_native(source.config, options) or why_not_packed(
            parts_of(source.config), source
        )
        if reason is None:
            _log.info("the native plan computes, with kernels for %s", active_isa())
            return load_native(files, source, options, progress)
        if options.plan == "native":
            raise source.config.refused(f"the native plan cannot compute this: {reason}")
        _log.info("the eager plan computes, because the native one cannot: %s", reason)
    # Loads torch, which takes more than a second: only where it is used.
    from triptych.services.executor.eager_backend import load_eager

    return load_eager(files, options, progress)


def _select_isa(name: str) -> None:
    if name not in supported_isas():
        raise StartupError(
            f"cpu_isa {name!r}: this machine runs {', '.join(supported_isas())} only"
        )
    select_isa(name)

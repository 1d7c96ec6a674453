"""What the processes of an engine have in common, imported once where they are forked from."""

import importlib
from collections.abc import Sequence

from triptych.services.runtime.settings import one_blas_thread

# None of it is one service's own.
_ALL_NEED = (
    "triptych.services.runtime.control_server",
    "triptych.services.runtime.process_stats",
    "triptych.services.runtime.silence",
    "triptych.services.transport.channel",
    "triptych.services.transport.wire",
    "triptych.v1.stage_pb2",
)
_STEPS_NEED = (
    "triptych.services.transport.fd_passing",
    "triptych.services.transport.ring_layouts",
    "triptych.services.transport.rings",
)


def import_what_all_need() -> None:
    """Also the tokenizer."""
    _import_all(_ALL_NEED)


def import_what_steps_need() -> None:
    """The scheduler and the executor."""
    with one_blas_thread():
        _import_all(_STEPS_NEED)


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)

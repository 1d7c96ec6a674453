"""Plug-ins that change logits, found by entry point and loaded by name (`--logits-processors`).

One is given a row of logits to change, and runs in this process: in a copy of the row, because the
logits ring is the executor's and mapped read-only here. It is foreign code: whatever it raises ends
the request that asked for it, and no other.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

import numpy as np
import numpy.typing as npt

from triptych.engine_core.errors import InvalidRequest, NotFinite, RequestError
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.runtime.lifecycle import StartupError

ENTRY_POINTS = "triptych.logits_processors"

Row = npt.NDArray[np.float32]
LogitsProcessor = Callable[[Sequence[int], Sequence[int], Row], None]
"""Given prompt ids, output ids and a row of logits, float32 [vocabulary], to change in place."""
ProcessorFactory = Callable[[str], LogitsProcessor]
"""Called with a request's argument (JSON, or empty); raises ValueError for one it cannot take."""

_log = logging.getLogger(__name__)


def load_processors(names: Sequence[str]) -> dict[str, ProcessorFactory]:
    """The named plug-ins. Raises StartupError for one that is not installed or does not load."""
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)} if names else {}
    factories: dict[str, ProcessorFactory] = {}
    for name in names:
        if name not in found:
            known = ", ".join(sorted(found)) or "none"
            raise StartupError(f"logits_processors: {name!r} is not installed; installed: {known}")
        try:
            factories[name] = found[name].load()
        except Exception as error:  # foreign code, at start-up: one clear line
            raise StartupError(f"logits_processors: {name!r} does not load: {error}") from error
    return factories


@dataclass(slots=True)
class _Processed:
    """A running sequence that has plug-ins. `error`: they could not be made a second time."""

    processors: list[tuple[str, LogitsProcessor]]
    error: RequestError | None
    prompt_ids: tuple[int, ...]
    output_ids: list[int]


class RunningProcessors:
    """The plug-ins of the running sequences."""

    def __init__(self, factories: Mapping[str, ProcessorFactory]) -> None:
        self._factories = factories
        self._processed: dict[int, _Processed] = {}

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._processed

    def __len__(self) -> int:
        return len(self._processed)

    def make(self, params: SamplingParams) -> list[tuple[str, LogitsProcessor]]:
        """A request's plug-ins. Raises InvalidRequest for those that are not loaded, or arguments
        that they refuse."""
        made = []
        for index, (name, argument) in enumerate(params.processors):
            field = f"logits_processors[{index}]"
            factory = self._factories.get(name)
            if factory is None:
                loaded = ", ".join(sorted(self._factories)) or "none"
                raise InvalidRequest(f"{field}.name", f"{name!r} is not loaded; loaded: {loaded}")
            try:
                made.append((name, factory(argument)))
            except ValueError as error:
                raise InvalidRequest(f"{field}.argument", str(error)) from error
            except Exception as error:  # foreign code, given a client's text: only the asker fails
                _log.exception("logits processor %r failed to begin", name)
                raise InvalidRequest(
                    f"{field}.argument", f"{name!r} failed to take it ({type(error).__name__})"
                ) from error
        return made

    def open(
        self,
        sequence_id: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """A sequence with plug-ins runs, with these tokens."""
        processors, failed = [], None
        try:
            processors = self.make(params)
        except RequestError as error:  # they were made at `check`: foreign code may do anything
            failed = error
        self._processed[sequence_id] = _Processed(
            processors, failed, tuple(prompt_ids), list(output_ids)
        )

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """One more output token for each; those without plug-ins are passed over."""
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            processed = self._processed.get(sequence_id)
            if processed is not None:
                processed.output_ids.append(token_id)

    def close(self, sequence_id: int) -> None:
        """A sequence runs no more. Nothing if it has no plug-ins."""
        self._processed.pop(sequence_id, None)

    def change(self, sequence_id: int, row: Row) -> RequestError | None:
        """Run a sequence's plug-ins over a row; the error that ends it, if one failed."""
        processed = self._processed[sequence_id]
        if processed.error is not None:
            return processed.error
        for name, processor in processed.processors:
            try:
                processor(processed.prompt_ids, processed.output_ids, row)
            except Exception:  # foreign code: it ends the request that asked for it, no other
                _log.exception("logits processor %r failed", name)
                return NotFinite(f"logits processor {name!r} failed")
        return None

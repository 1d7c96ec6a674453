"""The sampler of a scheduler process: the kernels' one, fitted to the core, plug-ins before it.

A logits processor is a plug-in, found by entry point and loaded by name (`--logits-processors`). It
is given a row of logits to change, and runs in this process: in a copy of the row, because the
logits ring is the executor's and mapped read-only here.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal

import numpy as np
import numpy.typing as npt

from triptych.engine_core.errors import InvalidRequest, NotFinite, RequestError
from triptych.engine_core.sampling_params import SamplingParams
from triptych.kernels.sampler_params import (
    NO_TOKEN,
    Drawn,
    SamplerParams,
    SamplerProtocol,
    TokenLogprobs,
)
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


def new_sampler(
    impl: Literal["native", "python"], vocabulary_size: int, *, processed_logprobs: bool
) -> SamplerProtocol:
    """The C++ sampler, or its plain meaning: they draw the same tokens."""
    if impl == "native":
        from triptych.kernels.cpu.sampler import Sampler as Native

        return Native(vocabulary_size, processed_logprobs=processed_logprobs)
    from triptych.kernels.reference.sampler import Sampler as Plain

    return Plain(vocabulary_size, processed_logprobs=processed_logprobs)


@dataclass(slots=True)
class _Processed:
    """A running sequence that has plug-ins. `error`: they could not be made a second time."""

    processors: list[tuple[str, LogitsProcessor]]
    error: RequestError | None
    prompt_ids: tuple[int, ...]
    output_ids: list[int]


class StepSampler:
    """A SamplingState (engine_core.sampling) that also draws. Used by the loop's thread only."""

    def __init__(self, sampler: SamplerProtocol, factories: Mapping[str, ProcessorFactory]) -> None:
        self._sampler = sampler
        self._factories = factories
        self._processed: dict[int, _Processed] = {}

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest for plug-ins that are not loaded, or arguments they refuse."""
        self._processors(params)

    def open(
        self,
        sequence_id: int,
        params: SamplingParams,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """A sequence runs, with these tokens."""
        self._sampler.open(sequence_id, _sampler_params(params, choice), prompt_ids, output_ids)
        if params.processors:
            processors, failed = [], None
            try:
                processors = self._processors(params)
            except RequestError as error:  # they were made at `check`: foreign code may do anything
                failed = error
            self._processed[sequence_id] = _Processed(
                processors, failed, tuple(prompt_ids), list(output_ids)
            )

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """One more output token for each."""
        self._sampler.append(sequence_ids, token_ids)
        if self._processed:
            for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
                processed = self._processed.get(sequence_id)
                if processed is not None:
                    processed.output_ids.append(token_id)

    def close(self, sequence_id: int) -> None:
        """A sequence runs no more."""
        self._sampler.close(sequence_id)
        self._processed.pop(sequence_id, None)

    def draw(
        self, logits: Row, sequence_ids: Sequence[int], logits_rows: Sequence[int]
    ) -> tuple[Drawn, dict[int, RequestError]]:
        """A token for each sample; the error of each that a plug-in failed, by sample.

        `logits`: float32 [rows, vocabulary], a view into the logits ring.
        """
        if not self._processed or not any(each in self._processed for each in sequence_ids):
            return self._sampler.draw(logits, sequence_ids, logits_rows), {}
        errors: dict[int, RequestError] = {}
        tokens = np.full(len(sequence_ids), NO_TOKEN, np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        changed = [i for i, each in enumerate(sequence_ids) if each in self._processed]
        plain = [i for i, each in enumerate(sequence_ids) if each not in self._processed]
        rows = np.stack([logits[logits_rows[i]] for i in changed])
        for row, sample in zip(rows, changed, strict=True):
            error = self._process(sequence_ids[sample], row)
            if error is not None:
                errors[sample] = error
                row[:] = np.nan
        for samples, matrix, at in (
            (plain, logits, [logits_rows[i] for i in plain]),
            (changed, rows, list(range(len(changed)))),
        ):
            if samples:
                drawn = self._sampler.draw(matrix, [sequence_ids[i] for i in samples], at)
                tokens[samples] = drawn.token_ids
                logprobs.update((samples[i], each) for i, each in drawn.logprobs.items())
        return Drawn(tokens, logprobs), errors

    def score(
        self, logits: Row, logits_rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[TokenLogprobs | None]:
        """Logprobs of given tokens, for prompt logprobs; None where logits are not finite."""
        return self._sampler.score(logits, logits_rows, token_ids, top)

    def _process(self, sequence_id: int, row: Row) -> RequestError | None:
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

    def _processors(self, params: SamplingParams) -> list[tuple[str, LogitsProcessor]]:
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


def _sampler_params(params: SamplingParams, choice: int) -> SamplerParams:
    return SamplerParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        top_n_sigma=params.top_n_sigma,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        seed=params.seed,
        choice=choice,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        masked_token_ids=params.stop_token_ids if params.min_tokens > 0 else (),
        mask_until=params.min_tokens,
        logprobs=params.logprobs,
    )

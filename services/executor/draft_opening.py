"""The served model and a draft model side by side, within one budget."""

from dataclasses import replace

from triptych.services.executor.backend import (
    Backend,
    BackendOptions,
    LoadedModel,
    Progress,
    blocks_within,
    load_model,
)
from triptych.services.executor.draft_model import DraftModel
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles


def open_with_draft(
    files: ModelFiles, draft_files: ModelFiles, options: BackendOptions, progress: Progress
) -> tuple[Backend, DraftModel]:
    """Load a model and its draft model. Both get the same number of blocks; what the options allow
    for keys and values pays for those of both.

    Raises StartupError when either cannot be run, or they do not fit together.
    """
    served = load_model(files, options, progress)
    draft = _load_draft(draft_files, served, options, progress)
    block_bytes = served.block_bytes + draft.block_bytes
    num_blocks = blocks_within(options, served.max_model_len, block_bytes)
    return served.open(num_blocks), DraftModel(draft.open(num_blocks))


def _load_draft(
    files: ModelFiles, served: LoadedModel, options: BackendOptions, progress: Progress
) -> LoadedModel:
    """Computed as the served model is; rounded as it is where there is something to round."""
    theirs = replace(
        options,
        max_model_len=served.max_model_len,
        quantization=options.quantization if files.kind == "folder" else "none",
    )
    try:
        draft = load_model(files, theirs, progress)
    except StartupError as error:
        raise StartupError(f"speculative_model: {error}") from error
    if draft.vocabulary_size != served.vocabulary_size:
        raise StartupError(
            f"speculative_model: {files.path} has a vocabulary of {draft.vocabulary_size} tokens, "
            f"the served model one of {served.vocabulary_size}; they must be the same"
        )
    return draft

"""Model folders for end-to-end tests that need any small model, made where the test says."""

from pathlib import Path

from scripted_models import write_m2_random_llama

SMALL = ("--kv-cache-memory", "4MiB", "--cpu-threads", "1")
"""Flags for an engine that shares the machine with other tests."""

EXACT = (*SMALL, "--kv-cache-dtype", "float32")
"""Also for one whose numbers are compared with transformers' to 1e-4."""


def tiny_model(folder: Path, **config: object) -> Path:
    """A random Llama (M2) in `folder`/model."""
    model = folder / "model"
    if not model.exists():
        write_m2_random_llama(model, **config)
    return model

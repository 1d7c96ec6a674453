"""Triptych: an LLM inference engine in three processes (tokenizer, scheduler, executor)."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("triptych")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["__version__"]

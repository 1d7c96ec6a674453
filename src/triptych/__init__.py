"""Triptych: an LLM inference engine in three processes (tokenizer, scheduler, executor)."""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    # Looked up when somebody asks: importlib.metadata takes as long to import as all of asyncio,
    # and every process imports this module at its start.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("triptych")
    except PackageNotFoundError:  # a source tree that was never installed
        found = "0.0.0"
    globals()[name] = found
    return found

"""Everything here needs a CUDA device, and is skipped, saying so, where there is none."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, and skip them."""
    reason = _missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing() -> str | None:
    if torch.version.cuda is None:
        return "this torch is a build without CUDA"
    return None if torch.cuda.is_available() else "there is no CUDA device"

"""Where weights come from, whatever the file format, and the rule that all are accounted for.

Parameters carry the names and orientation of transformers' state dicts; each format maps its own
names to them. A parameter is a view of the tensor that the network computes with (fused matrices
are filled part by part), so a weight is copied once: from the mapped file to its place.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from triptych.services.executor.model_config import ModelConfig
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles

if TYPE_CHECKING:  # the native plan loads weights without it, and starts a second sooner
    import torch

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) while weights load, from the loading thread."""


class WeightSource(Protocol):
    """An open checkpoint."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model, checked."""

    def rope_factors(self) -> "torch.Tensor | None":
        """Divisors of the rotary frequencies, float32 [head_dim / 2], when the file has them."""

    def load(self, parameters: "Mapping[str, torch.Tensor]", progress: Progress) -> None:
        """Fill every parameter (any float dtype).

        Raises StartupError, naming tensors, when one is missing, unexpected, or of another shape.
        """


def open_weights(files: ModelFiles) -> WeightSource:
    """Open a checkpoint and check its configuration; weights are read by `load`."""
    match files.kind:
        case "gguf":
            from triptych.services.executor.gguf_weights import GgufWeights

            return GgufWeights(files.path)
        case "folder":
            from triptych.services.executor.safetensors_weights import SafetensorsWeights

            return SafetensorsWeights(files.path)


def account(source: str, wanted: Collection[str], found: Collection[str]) -> None:
    """Raise StartupError unless both name the same tensors (ignorable ones already left out)."""
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise StartupError(f"{source}: {_names(missing)} missing from the weights")
    unexpected = sorted(set(found) - set(wanted))
    if unexpected:
        raise StartupError(f"{source}: {_names(unexpected)} in the weights, but not in the model")


def check_shape(source: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise StartupError unless the shapes are equal."""
    if found != wanted:
        raise StartupError(
            f"{source}: tensor {name} has shape {list(found)}, the model needs {list(wanted)}"
        )


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{more}"

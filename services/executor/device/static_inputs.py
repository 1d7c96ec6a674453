"""A step's inputs on the device: one packed host buffer and one copy a step.

Everything is int32. A step that replays a graph has its first arrays at fixed places, as long as
the largest step is, filled up with padding: a graph of any size finds them there. Its block tables
are spread over a table of full width, which graphs know; a step that runs eagerly reads all where
it was packed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from triptych.engine_core.layout import SAMPLE_COLUMNS
from triptych.services.executor.device.capacity import StepCapacity
from triptych.services.executor.device.device import Device, Event, Work
from triptych.services.executor.device.ops import (
    AttentionRows,
    SampleColumns,
    SampleFeatures,
)
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.step_inputs import Ints, StepInputs

_ALIGNMENT = 4  # of arrays, in elements: kernels read 16 bytes at once
_HOST_BUFFERS = 3  # two steps are in flight, and one is being written
# Name -> what a row of padding has: no sequence (length 0), nothing stored, any logits.
_FIXED = {"token_ids": 0, "positions": 0, "slots": -1, "kv_lengths": 0, "logits_tokens": 0}


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's arrays on the device, as `StepInputs` has them."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: AttentionRows
    logits_tokens: torch.Tensor
    columns: SampleColumns | None = None


@dataclass(slots=True)
class _HostBuffer:
    memory: torch.Tensor
    array: npt.NDArray[np.int32]
    copied: Event | None = None


class StaticInputs:
    """The buffers of one device. The launching thread only."""

    def __init__(self, device: Device, capacity: StepCapacity) -> None:
        """Raises DeviceMemoryError."""
        self._device = device
        self._stride = _aligned(capacity.rows)
        size = _size(capacity, self._stride)
        self._packed = device.empty((size,), torch.int32)
        self._tables = device.zeros((capacity.rows, _table_width(capacity.blocks)), torch.int32)
        self._hosts = [
            _HostBuffer(memory, memory.numpy())
            for memory in (device.pinned((size,), torch.int32) for _ in range(_HOST_BUFFERS))
        ]
        self._turn = 0
        self.clear()

    def clear(self) -> None:
        """Queue padding alone to the places that graphs read: a step that ran eagerly left anything
        there, which may be out of every range."""
        packer = _Packer(self._free_host())
        for name, padding in _FIXED.items():
            packer.add(name, np.empty(0, np.int32), self._stride, padding)
        self._queue(packer.end)

    def fixed(self, num_rows: int) -> StepTensors:
        """What a graph of so many rows reads."""
        views = {
            name: self._packed[place * self._stride : place * self._stride + num_rows]
            for place, name in enumerate(_FIXED)
        }
        return StepTensors(
            token_ids=views["token_ids"],
            positions=views["positions"],
            slots=views["slots"],
            rows=AttentionRows(self._tables[:num_rows], views["kv_lengths"]),
            logits_tokens=views["logits_tokens"],
        )

    def upload(
        self, inputs: StepInputs, device: DeviceInputs | None, block_size: int, *, padded: bool
    ) -> StepTensors:
        """Queue the copy of a step's arrays, and give the places where they will be.

        `padded`: of a step whose rows have one token each, for a graph; it finds all but the
        samples' columns in `fixed`.
        """
        blocks = -(-int(inputs.kv_lengths.max()) // block_size)
        width = _table_width(blocks)
        packer = _Packer(self._free_host())
        if padded:
            for name, padding in _FIXED.items():
                packer.add(name, getattr(inputs, name), self._stride, padding)
        else:
            for name in (*_FIXED, "row_starts"):
                packer.add(name, getattr(inputs, name))
        packer.add_table("block_tables", inputs.block_tables[:, :blocks], width)
        if device is not None and device.num_samples:
            for name in (
                "sample_rows", "sample_params", "history_starts", "history_prompts", "history",
            ):  # fmt: skip
                packer.add(name, getattr(device, name))
        self._queue(packer.end)
        views = {
            name: self._packed[start : start + count]
            for name, (start, count) in packer.places.items()
        }
        tables = views["block_tables"].view(inputs.num_rows, width)
        if padded:
            self._device.run(_spreading(self._tables[: inputs.num_rows, :width], tables))
        columns = None
        if device is not None and device.num_samples:
            columns = _columns(views, sample_features(device))
        return _tensors(inputs, views, tables, columns, padded=padded)

    def _free_host(self) -> _HostBuffer:
        host = self._hosts[self._turn]
        if host.copied is not None:
            host.copied.wait()
        return host

    def _queue(self, count: int) -> None:
        host = self._hosts[self._turn]
        self._device.upload(host.memory[:count], self._packed[:count])
        host.copied = self._device.record()
        self._turn = (self._turn + 1) % len(self._hosts)


class _Packer:
    """Writes arrays into a host buffer, one after another."""

    def __init__(self, host: _HostBuffer) -> None:
        self._array = host.array
        self.places: dict[str, tuple[int, int]] = {}
        self.end = 0

    def add(self, name: str, values: Ints, room: int = 0, padding: int = 0) -> None:
        """Append values, and padding up to `room` elements."""
        start, count = self.end, values.size
        self._array[start : start + count].reshape(values.shape)[...] = values
        self._array[start + count : start + room] = padding
        self.places[name] = start, count
        self.end = _aligned(start + max(count, room))

    def add_table(self, name: str, values: Ints, width: int) -> None:
        """Append rows of `width` columns; behind the values' own lies anything."""
        start, rows = self.end, len(values)
        table = self._array[start : start + rows * width].reshape(rows, width)
        table[:, : values.shape[1]] = values
        self.places[name] = start, rows * width
        self.end = _aligned(start + rows * width)


def sample_features(device: DeviceInputs) -> SampleFeatures:
    """What some sample that the device draws asks for."""
    params = device.sample_params[device.sample_rows >= 0]
    floats = params.view(np.float32)

    def any_of(name: str, off: float) -> bool:
        return bool((floats[:, SAMPLE_COLUMNS.index(name)] != off).any())

    return SampleFeatures(
        noise=any_of("temperature", 0.0),
        top_k=bool((params[:, SAMPLE_COLUMNS.index("top_k")] > 0).any()),
        top_p=any_of("top_p", 1.0),
        penalties=any_of("repetition_penalty", 1.0)
        or any_of("presence_penalty", 0.0)
        or any_of("frequency_penalty", 0.0),
    )


def _columns(views: dict[str, torch.Tensor], features: SampleFeatures) -> SampleColumns:
    return SampleColumns(
        rows=views["sample_rows"],
        params=views["sample_params"].view(-1, len(SAMPLE_COLUMNS)),
        history_starts=views["history_starts"],
        history_prompts=views["history_prompts"],
        history=views["history"],
        features=features,
    )


def _table_width(blocks: int) -> int:
    """Columns of a table: kernels are compiled anew for a stride that is no multiple of 16."""
    return -(-blocks // 16) * 16


def _tensors(
    inputs: StepInputs,
    views: dict[str, torch.Tensor],
    tables: torch.Tensor,
    columns: SampleColumns | None,
    *,
    padded: bool,
) -> StepTensors:
    decode = padded or inputs.num_tokens == inputs.num_rows
    rows = AttentionRows(tables, views["kv_lengths"], None if decode else views["row_starts"])
    return StepTensors(
        token_ids=views["token_ids"],
        positions=views["positions"],
        slots=views["slots"],
        rows=rows,
        logits_tokens=views["logits_tokens"],
        columns=columns,
    )


def _spreading(to: torch.Tensor, tables: torch.Tensor) -> Work:
    def spread() -> None:
        to.copy_(tables)

    return spread


def _size(capacity: StepCapacity, stride: int) -> int:
    fixed = len(_FIXED) * stride
    counts: Iterable[int] = (
        max(fixed, 3 * capacity.tokens + 2 * capacity.rows + 1 + capacity.logits),
        capacity.rows * _table_width(capacity.blocks),
        capacity.samples * (3 + len(SAMPLE_COLUMNS)) + 1,
        capacity.history,
    )
    return sum(counts) + 16 * _ALIGNMENT


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT

"""What an emulated device sees of the work it does: every torch call and kernel launch, in order.

A graph of a GPU is a list of launches with addresses and numbers in them. Captured work here is
called again at each replay, so each of its launches is compared with the captured one: another
address, shape or number is what a GPU would not notice, and compute wrong.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import ParamSpec, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from triptych.services.executor.device.device import DeviceError

P = ParamSpec("P")
Signature: TypeAlias = tuple[object, ...]

HOST_READS = frozenset(
    {
        "item", "tolist", "numpy", "cpu", "nonzero", "__array__", "__bool__", "__int__",
        "__float__", "__index__", "__contains__", "equal", "allclose",
    }
)  # fmt: skip
"""Torch calls whose answer the host needs before it can go on."""


class EmulationError(DeviceError):
    """Work that a GPU would refuse, wait for, or get wrong."""


class Purpose(Enum):
    """What a trace is for."""

    RUN = "work"
    CAPTURE = "a capture"
    REPLAY = "a replay"


class _Current(threading.local):
    trace: "Trace | None" = None


_current = _Current()


def kernel(function: Callable[P, None]) -> Callable[P, None]:
    """Mark a function as one launch: whatever it does inside, reading values too, is the device's.

    It writes to tensors it is given, and returns nothing. During a capture it is not executed.
    """

    @functools.wraps(function)
    def launch(*args: P.args, **kwargs: P.kwargs) -> None:
        trace = _current.trace
        if trace is None:
            function(*args, **kwargs)
            return
        trace.launched(function.__qualname__, (*args, *kwargs.values()))
        if trace.purpose is not Purpose.CAPTURE:
            with trace.suspended():
                function(*args, **kwargs)

    return launch


def active_trace() -> "Trace | None":
    """The trace of the work that the calling thread is in, if any."""
    return _current.trace


class Launches:
    """What was captured: launch after launch, and the memory that they name."""

    def __init__(self) -> None:
        self.signatures: list[Signature] = []
        self.storages: dict[int, StorageWeakRef] = {}

    def memory_is_gone(self) -> bool:
        """Whether a tensor that the launches name was given back."""
        return any(storage.expired() for storage in self.storages.values())


class Trace:
    """Watches the work of one call on the calling thread."""

    def __init__(self, purpose: Purpose, captured: Launches | None = None) -> None:
        """`captured` are the launches to fill (capture) or to compare with (replay)."""
        self.purpose = purpose
        self._captured = captured
        self._next = 0
        self._made: dict[int, StorageWeakRef] = {}  # by the work itself; keys are addresses
        self._written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._modes = ExitStack()

    def call(self, work: Callable[[], object]) -> None:
        """Call the work. Raises what it raises, and EmulationError."""
        try:
            self._watch()
            try:
                work()
            finally:
                self._stop_watching()
            self._check_end()
        finally:
            for storage, before in self._written.values():
                storage.copy_(before)  # capturing computes nothing

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not watch what the calling thread does within."""
        self._stop_watching()
        try:
            yield
        finally:
            self._watch()

    def _watch(self) -> None:
        _current.trace = self
        self._modes.enter_context(_Calls())
        self._modes.enter_context(_Launches(self))

    def _stop_watching(self) -> None:
        self._modes.close()
        _current.trace = None

    def launched(self, name: str, arguments: Sequence[object]) -> None:
        """Note, or compare, a launch."""
        captured = self._captured
        if captured is None:
            return
        signature = (name, *(self._signature(argument) for argument in arguments))
        if self.purpose is Purpose.CAPTURE:
            captured.signatures.append(signature)
            return
        place, self._next = self._next, self._next + 1
        expected = captured.signatures[place] if place < len(captured.signatures) else ("nothing",)
        if signature != expected:
            raise EmulationError(
                f"launch {place} of a replay is not the captured one: {_difference(signature)} "
                f"where a graph has {_difference(expected)}"
            )

    def made(self, tensor: torch.Tensor) -> None:
        """Note a tensor that a launch returned."""
        if self._captured is None:
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._captured.storages:
            self._made[address] = StorageWeakRef(storage)

    def written(self, tensor: torch.Tensor) -> None:
        """Keep what a launch is about to overwrite, if it was there before a capture."""
        if self.purpose is not Purpose.CAPTURE:
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._made and address not in self._written:
            self._written[address] = (storage, storage.clone())

    def _signature(self, argument: object) -> object:
        """What a graph would keep of an argument."""
        if isinstance(argument, torch.Tensor):
            return self._tensor(argument)
        if isinstance(argument, Mapping):
            return tuple((key, self._signature(value)) for key, value in argument.items())
        if isinstance(argument, Sequence) and not isinstance(argument, str | bytes):
            return tuple(self._signature(value) for value in argument)
        if is_dataclass(argument) and not isinstance(argument, type):
            return tuple(self._signature(getattr(argument, part.name)) for part in fields(argument))
        if argument is None or isinstance(argument, int | float | str | torch.dtype):
            return argument
        return type(argument).__qualname__

    def _tensor(self, tensor: torch.Tensor) -> Signature:
        kind = (tensor.dtype, tuple(tensor.shape), tensor.stride())
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not tensor.numel() or address in self._made:
            return ("a tensor of its own", *kind)
        assert self._captured is not None
        if self.purpose is Purpose.CAPTURE and address not in self._captured.storages:
            self._captured.storages[address] = StorageWeakRef(storage)
        return (f"memory {tensor.data_ptr():#x}", *kind)

    def _check_end(self) -> None:
        captured = self._captured
        if captured is None:
            return
        if self.purpose is Purpose.REPLAY and self._next != len(captured.signatures):
            raise EmulationError(
                f"a replay has {self._next} launches, {len(captured.signatures)} were captured"
            )
        if self.purpose is Purpose.CAPTURE and any(
            not storage.expired() for storage in self._made.values()
        ):
            raise EmulationError(
                "a tensor made in a capture outlives it: results go to tensors made before"
            )


def _difference(signature: Signature) -> str:
    return f"{signature[0]}({', '.join(map(str, signature[1:]))})"


class _Calls(TorchFunctionMode):
    """Refuses torch calls that need the host to wait."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in HOST_READS or (name == "to" and _to_host(args, kwargs)):
            raise EmulationError(f"{name}: the host would have to wait for the device, within work")
        return func(*args, **(kwargs or {}))


def _to_host(args: tuple[object, ...], kwargs: dict[str, object] | None) -> bool:
    targets = (*args[1:], *(kwargs or {}).values())
    return any(
        target == "cpu" or (isinstance(target, torch.device) and target.type == "cpu")
        for target in targets
        if isinstance(target, str | torch.device)
    )


class _Launches(TorchDispatchMode):
    """Tells a trace of each operator that torch computes."""

    def __init__(self, trace: Trace) -> None:
        TorchDispatchMode.__init__(self)
        self._trace = trace

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags
        ):
            raise EmulationError(f"{func}: the host would have to wait for the device, within work")
        self._trace.launched(str(func), (*args, *kwargs.values()))
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                if isinstance(value, torch.Tensor):
                    self._trace.written(value)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._trace.made(tensor)
        return result

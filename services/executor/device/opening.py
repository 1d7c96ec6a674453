"""Opens the device that the settings name, or says why it cannot."""

import importlib.util
import logging

import torch

from triptych.services.executor.device.device import Device, DeviceError
from triptych.services.executor.device.emulated_device import EmulatedDevice
from triptych.services.runtime.lifecycle import StartupError

_LEAST_CAPABILITY = (8, 0)  # bfloat16 matrix units; what the kernels are compiled for

_log = logging.getLogger(__name__)


def open_device(kind: str, rank: int = 0, size: int = 1) -> Device:
    """The device of a rank among `size` ranks of this machine. Raises StartupError.

    To be called by the thread that launches.
    """
    device = EmulatedDevice() if kind == "emulated" else _open_cuda(kind, rank, size)
    facts = device.memory()
    _log.info(
        "device opened",
        extra={
            "device": device.name,
            "capability": "{}.{}".format(*device.capability),
            "memory": facts.total,
            "free": facts.free,
        },
    )
    return device


def _open_cuda(kind: str, rank: int, size: int) -> Device:
    reason = why_no_cuda(rank, size)
    if reason is not None:
        raise StartupError(f"device {kind}: {reason}")
    # Only here: a process that emulates needs nothing of it.
    from triptych.services.executor.device.cuda_device import CudaDevice

    try:
        return CudaDevice(rank)
    except DeviceError as error:
        raise StartupError(f"device {kind}, rank {rank}: {error}") from error


def why_no_cuda(rank: int, size: int) -> str | None:
    """What keeps this process from a CUDA device of its own; None when nothing does."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA; install one that has it "
            f"(docs/gpu.md)"
        )
    if not torch.cuda.is_available():
        return f"there is no CUDA device here: {_driver_says()}"
    count = torch.cuda.device_count()
    if rank >= count:
        return (
            f"tensor_parallel_size {size}, rank {rank}: this machine shows {count} CUDA "
            f"{'device' if count == 1 else 'devices'} (CUDA_VISIBLE_DEVICES limits them)"
        )
    capability = torch.cuda.get_device_capability(rank)
    if capability < _LEAST_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(rank), capability
        return f"{name} has compute capability {major}.{minor}; 8.0 or later is needed"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, which compiles the kernels: pip install triton"
    return None


def _driver_says() -> str:
    """Why torch finds no device, in the driver's or torch's words."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "torch finds none"

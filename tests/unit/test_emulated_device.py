"""The emulated device: in order, later, and strict where a GPU would silently be wrong."""

import gc
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device_checks import CHECKS, values
from emulated_work import double_into, host
from triptych.services.executor.device.device import (
    Device,
    DeviceError,
    DeviceMemoryError,
    MemoryFacts,
)
from triptych.services.executor.device.emulated_device import EmulatedDevice
from triptych.services.executor.device.emulated_trace import EmulationError, active_trace

FLOAT = torch.float32


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    emulated = EmulatedDevice(memory=1 << 20)
    yield emulated
    emulated.close()


@contextmanager
def held(emulated: EmulatedDevice) -> Iterator[None]:
    """Within, what is queued is not done."""
    go_on = threading.Event()
    emulated.run(lambda: assert_waited(go_on))
    try:
        yield
    finally:
        go_on.set()


def assert_waited(event: threading.Event) -> None:
    assert event.wait(30)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_every_device_does(check: Callable[[Device], None]) -> None:
    emulated = EmulatedDevice()
    check(emulated)
    emulated.close()


def test_it_fills_the_protocol(device: EmulatedDevice) -> None:
    as_device: Device = device
    assert (as_device.kind, as_device.torch_device) == ("emulated", torch.device("cpu"))


def test_work_is_done_later_and_in_order(device: EmulatedDevice) -> None:
    x = device.zeros((2,), FLOAT)
    done: list[str] = []

    def add() -> None:
        x.add_(1)
        done.append("add")

    def multiply() -> None:
        x.mul_(10)
        done.append("multiply")

    with held(device):
        device.run(add)
        device.run(multiply)
        event = device.record()
        go_on = threading.Event()
        device.run(lambda: assert_waited(go_on))
        device.run(add)
        assert not event.done()
        assert done == []
    event.wait()
    assert event.done()
    assert done == ["add", "multiply"]
    go_on.set()
    assert values(device, x) == [11.0, 11.0]


def test_each_work_takes_longer_where_it_is_told_to() -> None:
    slow = EmulatedDevice(memory=1 << 20, work_seconds=0.05)
    began = time.monotonic()
    for _ in range(2):
        slow.run(lambda: None)
    slow.synchronize()
    assert time.monotonic() - began >= 0.1
    slow.close()


def test_copies_take_what_is_there_when_they_come_to_it(device: EmulatedDevice) -> None:
    x, source = device.empty((2,), FLOAT), host(1, 2)
    with held(device):
        device.upload(source, x)
        source.fill_(7)  # too early: a GPU would read this too
    assert values(device, x) == [7.0, 7.0]


def test_any_thread_waits(device: EmulatedDevice) -> None:
    x = device.zeros((1,), FLOAT)
    with held(device):
        device.run(lambda: x.add_(1))
        event = device.record()
        waited = threading.Thread(target=event.wait)
        waited.start()
        assert waited.is_alive()
    waited.join(30)
    assert event.done()
    assert not waited.is_alive()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("item", lambda x: x[0].item()),
        ("tolist", lambda x: x.tolist()),
        ("bool", lambda x: bool(x[0])),
        ("cpu", lambda x: x.cpu()),
        ("add", lambda x: x + 1),
        ("in place", lambda x: x.add_(1)),
        ("copy", lambda x: torch.zeros(2).copy_(x)),
        ("index", lambda x: x[torch.tensor([0])]),
        ("print", repr),
    ],
)
def test_the_host_may_not_touch_values_while_work_is_queued(
    device: EmulatedDevice, name: str, use: Callable[[torch.Tensor], object]
) -> None:
    x = device.zeros((2,), FLOAT)
    device.synchronize()
    use(x)  # nothing is queued
    with held(device):
        device.run(lambda: x.add_(1))
        with pytest.raises(EmulationError, match="work queued"):
            use(x)
    device.synchronize()
    use(x)


def test_a_tensor_of_the_device_has_no_numpy(device: EmulatedDevice) -> None:
    x = device.zeros((2,), FLOAT)
    for use in (x.numpy, x.__array__):
        with pytest.raises(EmulationError, match="download it"):
            use()


def test_forms_and_views_are_free_at_any_time(device: EmulatedDevice) -> None:
    x = device.zeros((4, 2), FLOAT)
    with held(device):
        device.run(lambda: x.add_(1))
        part = x[1:3, 0].unsqueeze(0)
        assert (tuple(part.shape), x.stride(), x.is_contiguous(), x.numel()) == (
            (1, 2),
            (2, 1),
            True,
            8,
        )
        assert (x.dtype, x.view(8).size(0), x.data_ptr() % 4) == (FLOAT, 8, 0)
    device.run(lambda: part.mul_(5))
    assert values(device, x) == [1, 1, 5, 1, 5, 1, 1, 1]


def test_a_failure_is_told_by_the_next_event_once(device: EmulatedDevice) -> None:
    def wrong() -> None:
        raise ValueError("a bug")

    before = device.record()
    device.run(wrong)
    device.run(wrong)
    behind, after = device.record(), device.record()
    before.wait()
    with pytest.raises(DeviceError, match="ValueError: a bug"):
        behind.wait()
    after.wait()
    device.synchronize()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.to(torch.device("cpu"), FLOAT),
        lambda x: 1 if x[0] else 0,
        lambda x: int(x[0]),
        torch.nonzero,
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
    ],
)
@pytest.mark.parametrize("how", ["run", "capture"])
def test_work_may_not_wait_for_itself(
    device: EmulatedDevice, read: Callable[[torch.Tensor], object], how: str
) -> None:
    x = device.zeros((2,), FLOAT)

    def work() -> None:
        read(x)

    def try_it() -> None:
        if how == "run":
            device.run(work)
            device.synchronize()
        else:
            device.capture(work)

    with pytest.raises(EmulationError, match="the host would have to wait"):
        try_it()


def test_a_kernel_reads_values(device: EmulatedDevice) -> None:
    x, out = device.zeros((2,), FLOAT), device.empty((2,), FLOAT)
    device.upload(host(1, 2), x)
    device.run(lambda: double_into(x, out))
    assert values(device, out) == [2, 4]
    plain = torch.empty(2)
    double_into(host(3, 4), plain)  # and is a plain function elsewhere
    assert plain.tolist() == [6, 8]
    assert active_trace() is None


def test_work_may_not_queue_or_copy(device: EmulatedDevice) -> None:
    x = device.zeros((2,), FLOAT)
    for wrong in (
        lambda: device.run(lambda: None),
        lambda: device.upload(host(1, 2), x),
        lambda: device.download(x, host(1, 2)),
    ):
        device.run(wrong)
        with pytest.raises(EmulationError):
            device.synchronize()


def test_copies_are_of_one_form(device: EmulatedDevice) -> None:
    x = device.zeros((2, 2), FLOAT)
    for wrong in (host(1, 2), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(4, 2)[::2]):
        with pytest.raises(EmulationError, match="a copy"):
            device.upload(wrong, x)


def test_memory_is_counted_and_bounded(device: EmulatedDevice) -> None:
    assert device.memory() == MemoryFacts(1 << 20, 1 << 20, 0, 0, 0)
    x = device.zeros((1 << 17,), FLOAT)
    part = x[:10]
    facts = device.memory()
    assert (facts.allocated, facts.free, facts.peak) == (1 << 19, 1 << 19, 1 << 19)
    with pytest.raises(
        DeviceMemoryError, match=r"out of memory: 524292 bytes .* 524288 of 1048576"
    ):
        device.empty(((1 << 17) + 1,), FLOAT)
    del x
    gc.collect()
    assert device.memory().allocated == 1 << 19  # the part holds it
    del part
    gc.collect()
    assert device.memory() == MemoryFacts(1 << 20, 1 << 20, 0, 0, 1 << 19)
    device.reset_peak()
    assert device.memory().peak == 0


def test_what_was_not_written_is_nan(device: EmulatedDevice) -> None:
    assert bool(device.empty((3,), torch.bfloat16).isnan().all())
    assert device.empty((3,), torch.int32).shape == (3,)
    assert values(device, device.zeros((1,), FLOAT)) == [0.0]


def test_shared_memory_is_copied_to_and_from(device: EmulatedDevice) -> None:
    with mmap.mmap(-1, 8192) as mapping:
        memory = memoryview(mapping)
        assert device.register_host(memory)
        with pytest.raises(EmulationError, match="twice"):
            device.register_host(memory)
        view = device.host_view(memory[16:], (2, 2), FLOAT)
        x = device.zeros((2, 2), FLOAT)
        device.upload(host(1, 2, 3, 4).reshape(2, 2), x)
        device.download(x, view)
        device.synchronize()
        assert memory[16:32].cast("f").tolist() == [1, 2, 3, 4]
        device.unregister_host(memory)
        with pytest.raises(EmulationError, match="not registered"):
            device.unregister_host(memory)
        with pytest.raises(ValueError, match="do not hold"):
            device.host_view(memory[8184:], (3,), FLOAT)
        del view
        memory.release()


def test_read_only_memory_is_a_tensor_that_holds_it() -> None:
    device = EmulatedDevice(memory=1 << 10)
    memory = memoryview(host(1, 2).numpy().tobytes())
    assert memory.readonly
    view = device.host_view(memory, (2,), FLOAT)
    del memory
    gc.collect()
    x = device.empty((2,), FLOAT)
    device.upload(view, x)
    assert values(device, x) == [1, 2]
    assert device.host_view(memoryview(b""), (0, 3), FLOAT).shape == (0, 3)
    device.close()


def test_memory_is_not_unregistered_under_a_copy(device: EmulatedDevice) -> None:
    memory = memoryview(bytearray(64))
    device.register_host(memory)
    with held(device), pytest.raises(EmulationError, match="while work is queued"):
        device.unregister_host(memory)
    device.synchronize()
    device.unregister_host(memory)


def test_a_closed_device_takes_no_work() -> None:
    device = EmulatedDevice(memory=1 << 10)
    with held(device), pytest.raises(EmulationError, match="while work is queued"):
        device.close()
    device.synchronize()
    device.close()
    with pytest.raises(EmulationError, match="closed"):
        device.run(lambda: None)


@given(st.lists(st.tuples(st.sampled_from("+*ud"), st.integers(1, 3)), max_size=12))
def test_any_program_computes_what_it_does_without_a_device(program: list[tuple[str, int]]) -> None:
    device = EmulatedDevice(memory=1 << 10)
    x, expected, source = device.zeros((3,), FLOAT), torch.zeros(3), host(1, 2, 3)
    seen, wanted = [], []
    for operation, number in program:
        match operation:
            case "+":
                device.run(partial(x.add_, number))
                expected += number
            case "*":
                device.capture(partial(x.mul_, number)).replay()
                expected *= number
            case "u":
                device.upload(source, x)
                expected.copy_(source)
            case _:
                seen.append(device.pinned((3,), FLOAT))
                device.download(x, seen[-1])
                wanted.append(expected.clone())
    device.synchronize()
    assert [tensor.tolist() for tensor in seen] == [tensor.tolist() for tensor in wanted]
    assert values(device, x) == expected.tolist()
    device.close()

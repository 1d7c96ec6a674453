"""Graphs of the emulated device: computed at each replay, and strict where a GPU would silently be
wrong."""

from collections.abc import Callable, Iterator

import pytest
import torch

from device_checks import values
from emulated_work import double_into, host
from triptych.services.executor.device.emulated_device import EmulatedDevice
from triptych.services.executor.device.emulated_trace import EmulationError, kernel

FLOAT = torch.float32


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    emulated = EmulatedDevice(memory=1 << 20)
    yield emulated
    emulated.close()


def a_graph(device: EmulatedDevice) -> tuple[torch.Tensor, torch.Tensor, Callable[[], object]]:
    x, out = device.zeros((2,), FLOAT), device.zeros((2,), FLOAT)

    def work() -> None:
        double_into(x + 1, out)
        out.mul_(3)

    return x, out, work


def test_a_graph_computes_at_each_replay_and_not_at_its_capture(device: EmulatedDevice) -> None:
    x, out, work = a_graph(device)
    device.upload(host(5, 6), out)
    graph = device.capture(work)
    assert values(device, out) == [5, 6]
    for start in (0.0, 10.0):
        device.upload(host(start, start + 1), x)
        graph.replay()
        assert values(device, out) == [(start + 1) * 6, (start + 2) * 6]


def test_two_graphs_of_one_program(device: EmulatedDevice) -> None:
    x, out = device.zeros((4,), FLOAT), device.zeros((4,), FLOAT)

    def work(rows: int) -> Callable[[], object]:
        return lambda: double_into(x[:rows], out[:rows])

    graphs = {rows: device.capture(work(rows)) for rows in (1, 2, 4)}
    device.upload(host(1, 2, 3, 4), x)
    graphs[2].replay()
    assert values(device, out) == [2, 4, 0, 0]
    graphs[4].replay()
    assert values(device, out) == [2, 4, 6, 8]


def replayed(
    device: EmulatedDevice, work: Callable[[], object], change: Callable[[], object]
) -> str:
    """What the error says that a replay gets after the change."""
    graph = device.capture(work)
    graph.replay()
    device.synchronize()
    change()
    graph.replay()
    with pytest.raises(EmulationError) as caught:
        device.synchronize()
    return str(caught.value)


def test_a_static_buffer_that_was_replaced(device: EmulatedDevice) -> None:
    buffers = {"x": device.zeros((2,), FLOAT)}
    kept = [buffers["x"]]
    said = replayed(
        device,
        lambda: buffers["x"].add_(1),
        lambda: buffers.update(x=device.zeros((2,), FLOAT)),
    )
    assert "launch 0 of a replay is not the captured one: aten.add_.Tensor(('memory 0x" in said
    assert kept


def test_a_static_buffer_that_was_given_back(device: EmulatedDevice) -> None:
    buffers = {"x": device.zeros((2,), FLOAT)}

    def replace() -> None:
        del buffers["x"]
        buffers["x"] = device.zeros((2,), FLOAT)  # perhaps where the old one was

    said = replayed(device, lambda: double_into(buffers["x"], buffers["x"]), replace)
    assert "given back since its capture" in said


def test_a_number_of_the_host_that_changed(device: EmulatedDevice) -> None:
    x, scale = device.zeros((2,), FLOAT), {"factor": 2.0}
    said = replayed(
        device, lambda: double_into(x, x, scale["factor"]), lambda: scale.update(factor=3.0)
    )
    assert "3.0) where a graph has double_into" in said


def test_a_shape_that_changed(device: EmulatedDevice) -> None:
    x, rows = device.zeros((4,), FLOAT), {"n": 2}
    said = replayed(device, lambda: x[: rows["n"]].add_(1), lambda: rows.update(n=3))
    assert "aten.slice" in said


def test_launches_that_are_more_or_fewer(device: EmulatedDevice) -> None:
    x, times = device.zeros((2,), FLOAT), {"n": 2}

    def work() -> None:
        for _ in range(times["n"]):
            double_into(x, x)

    assert "where a graph has nothing" in replayed(device, work, lambda: times.update(n=3))
    assert "has 2 launches, 3 were captured" in replayed(device, work, lambda: times.update(n=2))


@pytest.mark.parametrize("how", ["capture", "replay"])
def test_memory_of_the_device_is_not_taken_in_a_graph(device: EmulatedDevice, how: str) -> None:
    takes = {"now": how == "capture"}

    def work() -> None:
        if takes["now"]:
            device.zeros((2,), FLOAT)

    if how == "capture":
        with pytest.raises(EmulationError, match="is taken in a capture"):
            device.capture(work)
    else:
        assert "is taken in a replay" in replayed(device, work, lambda: takes.update(now=True))


def test_a_result_that_outlives_its_capture(device: EmulatedDevice) -> None:
    x = device.zeros((2,), FLOAT)
    kept: list[torch.Tensor] = []
    with pytest.raises(EmulationError, match="outlives it"):
        device.capture(lambda: kept.append(x + 1))


def test_what_is_captured_is_not_computed(device: EmulatedDevice) -> None:
    calls: list[int] = []

    @kernel
    def counted(out: torch.Tensor) -> None:
        calls.append(1)
        out.add_(1)

    x = device.zeros((2,), FLOAT)

    def work() -> None:
        counted(x)
        x.sub_(5)

    graph = device.capture(work)
    assert calls == []
    assert values(device, x) == [0, 0]
    graph.replay()
    assert values(device, x) == [-4, -4]

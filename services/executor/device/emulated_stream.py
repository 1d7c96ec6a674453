"""The stream of an emulated device: a thread that does what is queued, one after another."""

import threading
import time
from queue import SimpleQueue

import torch

from triptych.services.executor.device.device import DeviceError, Work
from triptych.services.executor.device.emulated_trace import EmulationError


class EmulatedStream:
    """The thread and its queue."""

    def __init__(self, work_seconds: float) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._seconds = work_seconds
        self._lock = threading.Lock()
        self._queued = 0
        self._failure: BaseException | None = None  # that no event has reported
        self._thread = threading.Thread(target=self._run, name="emulated-device", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued."""
        with self._lock:
            return self._queued == 0

    @property
    def here(self) -> bool:
        """Whether the caller is the stream's thread."""
        return threading.current_thread() is self._thread

    def put(self, work: Work) -> None:
        """Queue what is to be done."""
        if self.here:
            raise EmulationError("work that queues work")
        if not self._thread.is_alive():
            raise EmulationError("the device is closed")
        with self._lock:
            self._queued += 1
        self._queue.put(work)

    def take_failure(self) -> BaseException | None:
        """What went wrong since this was asked last; the stream's thread."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        # Tensors of the device are plain ones in here.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            while (work := self._queue.get()) is not None:
                try:
                    if self._seconds:
                        time.sleep(self._seconds)
                    work()
                except BaseException as failure:  # the top of the thread: the next event raises it
                    self._failure = self._failure or failure
                del work  # tensors that it holds go now, not with the next
                with self._lock:
                    self._queued -= 1


class EmulatedEvent:
    """As `Event`."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._failure: BaseException | None = None

    def pass_with(self, failure: BaseException | None) -> None:
        """The stream is here."""
        self._failure = failure
        self._passed.set()

    def wait(self) -> None:
        """As `Event.wait`."""
        self._passed.wait()
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if isinstance(failure, DeviceError):
            raise failure
        raise DeviceError(f"{type(failure).__name__}: {failure}") from failure

    def done(self) -> bool:
        """As `Event.done`."""
        return self._passed.is_set()

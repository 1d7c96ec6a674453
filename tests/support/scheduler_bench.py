"""The scheduler's step loop over real sockets and rings, executors and tokenizers beside it."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fake_executor import ExecutorProcess
from fake_tokenizer import FakeTokenizer
from triptych.services.runtime.run_dir import RunDir
from triptych.services.scheduler.logits_processors import ProcessorFactory
from triptych.services.scheduler.loop import StepLoop
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.v1 import control_pb2


class Engine:
    """A loop on a thread, and what a test starts beside it."""

    def __init__(
        self,
        folder: Path,
        processors: Mapping[str, ProcessorFactory] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        self.run_dir = RunDir.open(folder)
        # A test that waits for one peer does not pump another: neither is dead for that.
        values: dict[str, object] = {"heartbeat_interval": 0.1, "heartbeat_timeout": 30}
        values |= {"max_num_seqs": 8, "max_num_batched_tokens": 16, "run_dir": str(folder)}
        values |= settings
        self.settings = SchedulerSettings.model_validate(values)
        self.loop = StepLoop(self.settings, self.run_dir, epoch=77, processors=processors)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.executors: list[ExecutorProcess] = []
        self._tokenizers: list[FakeTokenizer] = []

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error

    def executor(self, **options: object) -> ExecutorProcess:
        executor = ExecutorProcess(self.run_dir.path, **options)
        self.executors.append(executor)
        return executor

    def tokenizer(self, **options: object) -> FakeTokenizer:
        """One that has been welcomed."""
        tokenizer = self.stranger(**options)
        tokenizer.until(lambda: tokenizer.welcomes)
        return tokenizer

    def stranger(self, **options: object) -> FakeTokenizer:
        tokenizer = FakeTokenizer(self.run_dir, **options)  # type: ignore[arg-type]  # test values
        self._tokenizers.append(tokenizer)
        return tokenizer

    @property
    def stats(self) -> control_pb2.SchedulerStats:
        return self.loop.snapshot.stats

    def until(self, condition: Callable[[], object], timeout: float = 30.0) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert self.error is None
            assert time.monotonic() < end, f"the condition does not come true:\n{self.stats}"
            time.sleep(0.01)

    def until_idle(self) -> None:
        """Everything is back where it started."""
        self.until(self._idle)

    def _idle(self) -> bool:
        stats = self.stats
        return (
            stats.blocks_free == stats.blocks_total
            and stats.slots_free == stats.slots_total
            and stats.requests_tracked == stats.requests_running == stats.requests_waiting == 0
        )

    @property
    def stopped(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End the loop and the tokenizers; executors stay."""
        for tokenizer in self._tokenizers:
            tokenizer.close()
        self._tokenizers.clear()
        if self._thread.is_alive():
            self.loop.stop()
            self._thread.join(30)

    def close(self) -> None:
        self.stop()
        for executor in self.executors:
            executor.kill()
        assert self.stopped
        if self.error is not None:
            raise self.error


MakeEngine = Callable[..., Engine]
"""Takes settings of the scheduler."""

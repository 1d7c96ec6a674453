"""Blocks on their way between the device and host memory: what falls due, in which order.

A step makes its stores first, then its loads, then its copies. So a block may be taken for
anything in the very step that stores what it held, and a loaded one is as good as a computed one
for all that the step computes: it can be found from when its load falls due.

A store is made by one step, or not at all: later its block holds something else. A load is due
until a step has made it, for as long as somebody has its target.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from triptych.engine_core.host_blocks import HostBlocks
from triptych.engine_core.ids import BlockId
from triptych.engine_core.prefix_cache import CachedBlock

Pairs = list[tuple[int, int]]


class HostHit(NamedTuple):
    """A text's whole block number `place` is in host memory, in `block`."""

    place: int
    block: BlockId
    text: CachedBlock


class Transfers:
    """`most`: stores in a step, and loads. `_stores`: host block -> device block and text, None
    where nobody wants it any more; `_loads`: device block -> host block. The first `_sent_stores`
    and `_sent_loads` are made by steps in flight."""

    def __init__(self, host: HostBlocks, most: int) -> None:
        self.host = host
        self._most = most
        self._stores: dict[BlockId, tuple[BlockId, CachedBlock | None]] = {}
        self._loads: dict[BlockId, BlockId] = {}
        self._sent_stores = 0
        self._sent_loads = 0

    # ------------------------------------------------------------------ falling due

    @property
    def num_loads_left(self) -> int:
        """Loads that the next step has room for."""
        return self._most - len(self._loads) + self._sent_loads

    def stores(self) -> Pairs:
        """(device, host): those of the next step, in order."""
        due: Pairs = [(source, target) for target, (source, _) in self._stores.items()]
        return due[self._sent_stores :]

    def loads(self) -> Pairs:
        """(host, device): those of the next step, in order."""
        due: Pairs = [(source, target) for target, source in self._loads.items()]
        return due[self._sent_loads :]

    def store(self, taken: Iterable[tuple[BlockId, CachedBlock | None]]) -> None:
        """Device blocks are taken for something else: what they held goes to host memory, if it is
        a whole block's. Where there is room for fewer, the last ones go: as the end of a text is
        taken before its beginning, and worth nothing without it."""
        room = self._most - len(self._stores) + self._sent_stores
        whole = [(block, text) for block, text in taken if text is not None and text.digest]
        lacking = [(block, text) for block, text in whole if not self.host.keeps(text)]
        for block, text in lacking[max(0, len(lacking) - room) :]:
            target = self.host.begin_store()
            if target is not None:
                self._stores[target] = (block, text)

    def load(self, source: BlockId, target: BlockId) -> None:
        """A host block, held for that (HostBlocks.begin_load), goes to a device's fresh one."""
        self._loads[target] = source

    def awaits(self, table: Sequence[BlockId]) -> bool:
        """Whether a load into one of the blocks is due."""
        return not self._loads.keys().isdisjoint(table)

    def cancel(self, target: BlockId) -> bool:
        """Nobody has the block any more; whether it had a load due."""
        source = self._loads.pop(target, None)
        if source is None:
            return False
        self.host.end_load(source)
        return True

    # ------------------------------------------------------------------ in a step

    def send(self, num_stores: int, num_loads: int) -> None:
        """A step that is written makes so many."""
        self._sent_stores += num_stores
        self._sent_loads += num_loads

    def finish(self, num_stores: int, num_loads: int) -> None:
        """The older step in flight, with so many, was computed."""
        self._end_stores(num_stores, made=True)
        for target in list(islice(self._loads, num_loads)):
            self.host.end_load(self._loads.pop(target))
        self._sent_loads -= num_loads

    def abandon(self, num_stores: int, num_loads: int) -> None:
        """It was not computed: perhaps its stores were made, perhaps not."""
        self._end_stores(num_stores, made=False)
        self._sent_loads -= num_loads

    def _end_stores(self, count: int, *, made: bool) -> None:
        for target in list(islice(self._stores, count)):
            _, text = self._stores.pop(target)
            self.host.end_store(target, text if made else None)
        self._sent_stores -= count

    # ------------------------------------------------------------------ forgetting

    def forget(self, text: CachedBlock) -> None:
        """The text cannot be found in host memory any more."""
        self.host.forget(text)
        for target, (source, stored) in self._stores.items():
            if stored == text:
                self._stores[target] = (source, None)

    def clear(self) -> None:
        """No text can."""
        self.host.clear()
        self._stores = {target: (source, None) for target, (source, _) in self._stores.items()}

    def check(self, references: Callable[[BlockId], int]) -> None:
        """Assert every invariant; `references`: holders of a device block."""
        self.host.check(Counter([*self._stores, *self._loads.values()]))
        assert 0 <= self._sent_stores <= len(self._stores), "transfers: more stores sent than due"
        assert 0 <= self._sent_loads <= len(self._loads), "transfers: more loads sent than due"
        assert len(self.stores()) <= self._most, "transfers: more stores than a step has room for"
        assert len(self.loads()) <= self._most, "transfers: more loads than a step has room for"
        for target in self._loads:
            assert references(target) > 0, f"transfers: nobody has {target}"

"""A process that is one rank of a group, and does one thing with the others.

python tests/support/rank_process.py --run-dir DIR --rank R --size N --then WHAT

meet    meets the others, says so, and does what its input says until that says "leave":
        "begin RING", "take STEP", "over" (of a session with a scheduler)
sums    prints what collectives of seeded random tensors give, as hex of their bytes
hang    rank 0 waits for a sum that no other comes to
"""

import argparse
import logging
import sys
import threading
from collections.abc import Callable

from triptych.services.executor.rank_group import RankGroup
from triptych.services.executor.rank_meeting import Member, meet
from triptych.services.runtime.lifecycle import EXIT_OK, run_main
from triptych.services.runtime.run_dir import RunDir


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _sums(group: RankGroup) -> None:
    import torch

    from triptych.services.executor.device.group_collectives import open_gloo

    collectives = open_gloo(group)
    for dtype in (torch.float32, torch.bfloat16):
        everything = [
            torch.randn(40, 7, generator=torch.Generator().manual_seed(rank)).to(dtype)
            for rank in range(group.size)
        ]
        ours = everything[group.rank]
        for rows in (ours[3:4], ours[:17], ours):
            summed = rows.clone()
            collectives.all_reduce(summed)
            _say(f"sum {dtype} {len(rows)} {_hex(summed)}")
        out = torch.zeros(40, 7 * group.size - 2, dtype=dtype) if group.rank == 0 else None
        collectives.gather_columns(ours.contiguous(), out)
        if out is not None:
            assert torch.equal(out, torch.cat(everything, 1)[:, : out.shape[1]])
        told = torch.tensor([group.rank, 5])
        collectives.broadcast(told)
        assert told.tolist() == [0, 5]
        collectives.all_reduce(torch.empty(0))
    assert collectives.minimum((10 - group.rank, group.rank)) == (11 - group.size, 0)
    _say("done")
    sys.stdin.readline()


def _obey(group: RankGroup) -> None:
    take: Callable[[int], None] = print
    for line in sys.stdin:
        match line.split():
            case ["begin", ring]:
                take = group.begin_session(int(ring))
            case ["take", step]:
                take(int(step))
            case ["over"]:
                group.end_session()
            case _:
                return
        _say("ok")


def _hex(tensor: "object") -> str:
    import torch

    assert isinstance(tensor, torch.Tensor)
    return tensor.contiguous().view(torch.uint8).numpy().tobytes().hex()


def _hang(group: RankGroup) -> None:
    import torch

    from triptych.services.executor.device.group_collectives import open_gloo

    collectives = open_gloo(group)
    _say("there")
    if group.rank == 0:
        collectives.all_reduce(torch.ones(5))
    sys.stdin.readline()


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--fingerprint", default="print")
    parser.add_argument("--setting", default="1")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--then", choices=("meet", "sums", "hang"), default="meet")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_dir, name = RunDir.open(options.run_dir), f"executor-{options.rank}"
    run_dir.lock(name)
    member = Member(
        options.rank, options.size, options.fingerprint, {"block_size": options.setting}
    )
    group = meet(run_dir, name, member, threading.Event(), options.timeout)
    assert group is not None
    if options.then == "meet":
        _say("there")
        _obey(group)
    elif options.then == "sums":
        _sums(group)
    else:
        _hang(group)
    group.close()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_main("executor", _main))

"""Random runs of the scheduler over the C++ batch and the plain one: same plans, same outputs.

    python scripts/lockstep.py --runs 2000

The test of tests/property/test_twins.py, as often as asked: requests of every kind come, are
aborted, fail and are preempted, with guesses or without; after each call both answer alike, and the
step slots are equal byte for byte. A difference is printed with the calls that lead to it; exit
code 1.
"""

import argparse
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "property")]
from test_twins import test_schedulers_over_either_batch_agree as both


def main() -> int:
    """0 when nothing differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    args = parser.parse_args()
    began = time.monotonic()
    unbounded = settings(
        max_examples=args.runs,
        phases=(Phase.generate,),
        deadline=None,
        database=None,
        suppress_health_check=tuple(HealthCheck),
    )
    unbounded(both)()
    print(f"{args.runs} runs of both, no difference, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

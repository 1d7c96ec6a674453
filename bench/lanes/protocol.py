"""A lane's side of its pipe: one JSON request a line in, one JSON answer a line out.

Standard library only: it also runs in a peer's own environment.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

Operation = Callable[..., object]


def answer_requests(operations: Mapping[str, Operation]) -> None:
    """Run {"op": name, ...arguments} lines from stdin until it ends.

    An operation's exception ends the process with its traceback on stderr, which the parent shows.
    """
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        answer = operations[request.pop("op")](**request)
        print(json.dumps(answer), flush=True)

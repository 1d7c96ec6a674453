"""Log lines: one a record, on stderr, `time level process message key=value ...`.

Facts travel as `extra={"key": value}` and come out as `key=value`, so that a line can be searched
by machine and read by people.
"""

import logging
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NOISY = ("asyncio", "grpc", "httpcore", "httpx", "huggingface_hub", "urllib3", "uvicorn")


class LineFormatter(logging.Formatter):
    """Formats a record as one line; only a traceback may follow it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line: UTC time with milliseconds, level, process, message, facts."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage().replace("\n", "\\n")
        facts = "".join(
            f" {key}={_quoted(value)}"
            for key, value in vars(record).items()
            if key not in _STANDARD
        )
        line = (
            f"{stamp}.{int(record.msecs):03d}Z {record.levelname:<7} {self._process} "
            f"{message}{facts}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging(level: str, process_name: str) -> None:
    """Send all log records of `level` ("debug", "info", ...) and above to stderr as lines.

    Call it once, first thing in `main`. Libraries speak from warning upwards only.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if text and not any(mark in text for mark in ' "=\n\t'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

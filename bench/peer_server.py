"""How long llama-cpp-python's own HTTP server takes from its start to the first token."""

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

PROMPT = " the" * 32
TIMEOUT = 120.0


def seconds_to_first_token(
    python: Path, model: Path, threads: int, environment: Mapping[str, str]
) -> float:
    """Start the server, ask for one token until it answers, end it."""
    port = _free_port()
    settings = [f"{name}={value}" for name, value in environment.items()]
    start = time.perf_counter()
    process = subprocess.Popen(
        ["env", *settings, str(python), "-m", "llama_cpp.server", "--model", str(model),
         "--n_threads", str(threads), "--n_threads_batch", str(threads), "--n_ctx", "2048",
         "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not _answers(port):
            if process.poll() is not None:
                raise RuntimeError(f"llama_cpp.server ended with code {process.returncode}")
            if time.perf_counter() - start > TIMEOUT:
                raise RuntimeError(f"llama_cpp.server did not answer within {TIMEOUT} s")
            time.sleep(0.02)
        return time.perf_counter() - start
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _answers(port: int) -> bool:
    """Whether one token came; False while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "temperature": 0})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"llama_cpp.server: {response.status} {answer[:300]!r}")
    return True

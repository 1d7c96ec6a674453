"""A client in a process of its own, to be killed or frozen: streams that it reads to their ends.

Run as a script: door (grpc or http), its address, streams, tokens of each, ids of the prompt. A
line says when all streams have given something; a last one how each of them ended.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx

from engine import Engine, generate_request
from grpc_errors import as_error
from triptych.v1 import inference_pb2_grpc


class ClientProcess:
    """The process, from outside."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def line(self) -> str:
        """What it says next, once it does."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def client_process(
    engine: Engine, door: str, streams: int, tokens: int, prompt: Sequence[int]
) -> Iterator[ClientProcess]:
    """Start one and wait for its first tokens; it is killed at the end."""
    address = engine.address if door == "grpc" else engine.http_address
    numbers = map(str, (streams, tokens, *prompt))
    process = subprocess.Popen(
        [sys.executable, __file__, door, address, *numbers],
        stdout=subprocess.PIPE, text=True,
        env={"PYTHONPATH": ":".join([*sys.path, str(Path(__file__).parent)])},
    )  # fmt: skip
    try:
        client = ClientProcess(process)
        assert client.line() == "begun"
        yield client
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def _over_grpc(address: str, tokens: int, prompt: list[int], begun: threading.Semaphore) -> str:
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = generate_request(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        try:
            for response in stub.Generate(request):
                if response.token_ids:
                    begun.release()
        except grpc.RpcError as error:
            return as_error(error).code().name
        return "OK"


def _over_http(address: str, tokens: int, prompt: list[int], begun: threading.Semaphore) -> str:
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    end = "nothing"
    try:
        with httpx.stream(
            "POST", f"http://{address}/v1/completions", json=body, timeout=None
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    begun.release()
                    end = "OK" if line == "data: [DONE]" else end
                    end = "slow_reader" if '"slow_reader"' in line else end
    except httpx.TransportError as error:
        return type(error).__name__
    return end


def _main(door: str, address: str, streams: int, tokens: int, *prompt: int) -> None:
    run = _over_grpc if door == "grpc" else _over_http
    begun = [threading.Semaphore(0) for _ in range(streams)]
    ends = [""] * streams

    def read(index: int) -> None:
        ends[index] = run(address, tokens, list(prompt), begun[index])

    threads = [threading.Thread(target=read, args=(index,)) for index in range(streams)]
    for thread in threads:
        thread.start()
    for each in begun:
        each.acquire()
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    for thread in threads:
        thread.join()
    sys.stdout.write(" ".join(ends) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))

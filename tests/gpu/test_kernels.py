"""The tests of tests/kernels/triton, compiled, on the device instead of in the interpreter; and
what only shows at real sizes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from device_samples import Ask, columns, host_tokens, random_ask
from source_tree import REPO
from triptych.kernels import cpu
from triptych.kernels.cpu.sampler import Sampler
from triptych.kernels.sampler_params import SamplerParams

Child = subprocess.Popen[bytes]
FOLDER = REPO / "tests" / "kernels" / "triton"
# It is about the emulated device.
FILES = sorted({path.name for path in FOLDER.glob("test_*.py")} - {"test_device_plan.py"})


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Child, Path]]:
    """Each file's run, and where it writes; all at once: most of their time is compiling."""
    folder = tmp_path_factory.mktemp("children")
    found = {}
    for name in FILES:
        output = folder / name
        command = [
            "env", "TRITON_TESTS_ON=cuda", sys.executable, "-P", "-m", "pytest", "-q",
            "-p", "no:cacheprovider", str(FOLDER / name),
        ]  # fmt: skip
        with output.open("wb") as file:
            child = subprocess.Popen(command, cwd=REPO, stdout=file, stderr=subprocess.STDOUT)
        found[name] = child, output
    return found


@pytest.mark.parametrize("name", FILES)
def test_as_the_reference(name: str, children: dict[str, tuple[Child, Path]]) -> None:
    child, output = children[name]
    assert child.wait() == 0, output.read_text()


def drawn(logits: torch.Tensor, asks: list[Ask], vocabulary: int) -> list[int]:
    from triptych.kernels.triton.sampler import sample, sampler_workspace

    with torch.device("cuda"):
        of_asks = columns(asks)
        out = torch.empty(len(asks), dtype=torch.int32)
    room = sampler_workspace(len(asks), vocabulary, "cuda")
    sample(logits, of_asks, vocabulary, out, room)
    assert not room.counts.any()
    tokens: list[int] = out.tolist()
    return tokens


@pytest.mark.parametrize("vocabulary", [50, 32000, 151936])
def test_thousands_of_draws_are_the_hosts(vocabulary: int) -> None:
    """Token for token, over every kind of parameters, ties among them."""
    rng = np.random.default_rng(vocabulary)
    rows = (rng.standard_normal((16, vocabulary)) * 4).astype(np.float32)
    rows[8:] = np.round(rows[8:] * 2) / 2
    asks = [random_ask(rng, 16, vocabulary) for _ in range(1000)]
    logits = torch.tensor(rows, device="cuda")
    got = drawn(logits, asks, vocabulary)
    assert cpu.supported_isas()
    expected = host_tokens(rows, asks, vocabulary, Sampler)
    different = [(i, asks[i]) for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    assert not different, f"{len(different)} of {len(asks)}, first {different[0]}"


def test_a_captured_draw_follows_its_columns() -> None:
    """A graph reads parameters and logits where they are, so that it serves other samples too."""
    from triptych.kernels.triton.sampler import sample, sampler_workspace

    vocabulary, rng = 4096, np.random.default_rng(4)
    first, second = ([random_ask(rng, 4, vocabulary) for _ in range(8)] for _ in range(2))
    with torch.device("cuda"):
        held, other = columns(first), columns(second)
        length = max(len(held.history), len(other.history))
        held.history.resize_(length)
        logits, out = torch.zeros(4, vocabulary), torch.empty(8, dtype=torch.int32)
    room = sampler_workspace(8, vocabulary, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sample(logits, held, vocabulary, out, room)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        sample(logits, held, vocabulary, out, room)
    rows = rng.standard_normal((4, vocabulary)).astype(np.float32)
    logits.copy_(torch.tensor(rows))
    for name in ("rows", "params", "history_starts", "history_prompts", "history"):
        target, source = getattr(held, name), getattr(other, name)
        target[: len(source)].copy_(source)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == host_tokens(rows, second, vocabulary)


def test_greedy_over_many_rows() -> None:
    from triptych.kernels.triton.sampler import Features, sample, sampler_workspace

    vocabulary = 128256
    logits = torch.randn(256, vocabulary, device="cuda")
    asks = [Ask(row, SamplerParams(temperature=0.0)) for row in range(256)]
    with torch.device("cuda"):
        of_asks, out = columns(asks), torch.empty(256, dtype=torch.int32)
    room = sampler_workspace(256, vocabulary, "cuda")
    sample(logits, of_asks, vocabulary, out, room, Features(False, False, False, False))
    assert torch.equal(out, logits.argmax(1).int())


def test_more_tokens_than_a_grid_is_high() -> None:
    """CUDA takes 65535 programs in the second and third direction of a grid."""
    from triptych.kernels.triton.embedding import embed
    from triptych.kernels.triton.silu_gate import silu_gate

    tokens = 70_000
    with torch.device("cuda"):
        table, out = torch.randn(50, 24), torch.empty(tokens, 24)
        ids = torch.randint(0, 50, (tokens,), dtype=torch.int32)
        gate_up, gated = torch.randn(tokens, 16), torch.empty(tokens, 8)
    embed(ids, table, 0, out)
    assert torch.equal(out, table[ids])
    silu_gate(gate_up, gated)
    expected = torch.nn.functional.silu(gate_up[:, :8]) * gate_up[:, 8:]
    torch.testing.assert_close(gated, expected)

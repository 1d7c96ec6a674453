"""The `triptych` command and its clients, against a public service of canned answers."""

import argparse
import io
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.services.cli import __main__ as cli
from triptych.services.cli import chat, generate, health
from triptych.services.cli.chat import Conversation
from triptych.services.cli.client import Answer, Client, print_stream, printable
from triptych.services.cli.client_flags import client_parser, sampling_params
from triptych.services.cli.engine import PROCESSES
from triptych.services.cli.panel import as_typed, count, how_to_call, owns, panel_facts, size
from triptych.services.runtime.lifecycle import StartupError
from triptych.v1 import common_pb2, control_pb2, inference_pb2, inference_pb2_grpc

_WAIT = 60.0


def last(**extra: object) -> dict[str, object]:
    usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=2)
    return {"finish_reason": common_pb2.FINISH_REASON_STOP, "usage": usage, **extra}


class CannedService(inference_pb2_grpc.InferenceServiceServicer):
    """Echoes in two pieces. "fail" is refused; "endless" streams until it is cancelled."""

    def __init__(self) -> None:
        self.chats: list[inference_pb2.ChatRequest] = []
        self.generates: list[inference_pb2.GenerateRequest] = []

    def Generate(  # noqa: N802  # the rpc's name
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.generates.append(request)
        if request.text == "fail":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "text: no")
        yield inference_pb2.GenerateResponse(text=f"<{request.text}")
        yield inference_pb2.GenerateResponse(text=">", **last())  # type: ignore[arg-type]  # kwargs

    def Chat(  # noqa: N802  # the rpc's name
        self, request: inference_pb2.ChatRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.ChatResponse]:
        self.chats.append(request)
        content = request.messages[-1].content
        if content == "fail":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
        while content == "endless" and context.is_active():
            yield inference_pb2.ChatResponse(text="more ")
            time.sleep(0.05)
        yield inference_pb2.ChatResponse(text="you said ")
        yield inference_pb2.ChatResponse(text=content, **last())  # type: ignore[arg-type]  # kwargs

    Tokenize = Detokenize = ListModels = Session = None  # type: ignore[assignment]  # not called


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[CannedService, str]]:
    service = CannedService()
    running = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield service, f"127.0.0.1:{port}"
    running.stop(0).wait()


def run_cli(*argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "triptych.services.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WAIT)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    for command in ("serve", "tokenizer", "scheduler", "executor", "generate", "chat", "doctor"):
        assert f"\n  {command}" in said


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from triptych.services.cli.__main__ import main; main(['--help'])\n"
        "print({'torch', 'grpc', 'numpy', 'pydantic', 'rich'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.endswith("set()\n")


@pytest.mark.parametrize("module", ["serve", "chat", "generate", "health", "demo", "doctor"])
def test_no_command_imports_torch(module: str) -> None:
    code = f"import sys, triptych.services.cli.{module}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("triptych ")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serv"]) == 2
    said = capsys.readouterr().err
    assert said == "triptych: error: unknown command 'serv'; did you mean serve?\n"
    assert cli.main([]) == 2


def parse(*argv: str) -> argparse.Namespace:
    return client_parser("test", "").parse(argv)


def test_only_given_sampling_flags_are_set() -> None:
    assert sampling_params(parse()) == common_pb2.SamplingParams()
    given = parse("--temperature", "0", "--top-k", "-1", "--stop", "a", "--stop", "b", "--seed=0")
    expected = common_pb2.SamplingParams(temperature=0, top_k=-1, stop=["a", "b"], seed=0)
    assert sampling_params(given) == expected
    assert sampling_params(given).HasField("temperature")


@pytest.mark.parametrize(
    "argv", [["--max-tokens", "-1"], ["--stop-token-id", "-1"], ["--seed", str(1 << 64)]]
)
def test_values_that_fit_no_field_are_refused(argv: list[str]) -> None:
    with pytest.raises(StartupError, match=f"^{argv[0]}: {argv[1]} does not fit"):
        sampling_params(parse(*argv))


def test_generate_streams_and_counts(
    server: tuple[CannedService, str], capsys: pytest.CaptureFixture[str]
) -> None:
    service, address = server
    assert generate.run(["--address", address, "--max-tokens", "5", "hello"]) == 0
    out, err = capsys.readouterr()
    assert out == "<hello>\n"
    assert "3 prompt + 2 output tokens" in err
    assert "ended by stop" in err
    assert service.generates[-1].sampling_params == common_pb2.SamplingParams(max_tokens=5)


def test_a_failed_call_is_one_line_with_its_code(
    server: tuple[CannedService, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.run(["--address", server[1], "fail"]) == 1
    assert capsys.readouterr().err == "triptych generate: error: INVALID_ARGUMENT: text: no\n"
    assert chat.run(["--address", server[1], "fail"]) == 1
    said = capsys.readouterr().err
    assert said == "triptych chat: error: RESOURCE_EXHAUSTED: queue full\n"


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.run(["--address", "127.0.0.1:1", "hi"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("triptych chat: error: UNAVAILABLE: nothing answers there")


def test_a_bad_flag_is_one_line_and_exit_code_2() -> None:
    ended = run_cli("chat", "--temperatur", "1")
    assert ended.returncode == 2
    assert ended.stderr == (
        "triptych chat: error: unknown flag --temperatur; did you mean --temperature?\n"
    )
    ended = run_cli("chat", "--temperature", "warm", "hi")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1


def test_a_conversation_keeps_what_went_well(server: tuple[CannedService, str]) -> None:
    service, address = server
    with Client(address) as client:
        talk = Conversation(
            client, common_pb2.SamplingParams(), system="be brief", template_kwargs='{"a": 1}'
        )
        talk.ask("one")
        with pytest.raises(grpc.RpcError):
            talk.ask("fail")
        talk.ask("two")
    said = [(each.role, each.content) for each in service.chats[-1].messages]
    expected = [("system", "be brief"), ("user", "one"), ("assistant", "you said one")]
    assert said == [*expected, ("user", "two")]
    assert service.chats[-1].chat_template_kwargs == '{"a": 1}'


def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    server: tuple[CannedService, str],
) -> None:
    command = [sys.executable, "-u", "-m", "triptych.services.cli", "chat", "--address", server[1]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"endless\n")
        process.stdin.flush()
        assert process.stdout.read(5) == b"more "
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"again\n", timeout=_WAIT)
    assert out.endswith(b"\nyou said again\n")
    assert b"(cancelled)" in err
    assert process.returncode == 0


def test_a_command_is_named_as_a_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "triptych").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert as_typed("triptych") == ".venv/bin/triptych"
    assert as_typed("not-installed") == "not-installed"
    monkeypatch.chdir(folder)  # where its bare name would be looked for on the path
    assert as_typed("triptych") == str(folder / "triptych")
    monkeypatch.setenv("PATH", str(folder))
    assert as_typed("triptych") == "triptych"


def test_a_reader_that_goes_ends_the_command_in_silence(server: tuple[CannedService, str]) -> None:
    command = [sys.executable, "-m", "triptych.services.cli", "chat", "--address", server[1]]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "endless"], stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == b"more "
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(_WAIT) == 128 + signal.SIGPIPE


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\tb\n\x1b[2Jc\x9bd\x7f") == "a\tb\n�[2Jc�d�"


class Terminal(io.StringIO):
    """Or a file, where `tty` is false."""

    def __init__(self, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


class CannedCall:
    """A stream of responses that are there already."""

    def __init__(self, *responses: inference_pb2.ChatResponse) -> None:
        self._responses = responses

    def __iter__(self) -> Iterator[inference_pb2.ChatResponse]:
        return iter(self._responses)

    def cancel(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("tty", "shown"),
    [(True, "\x1b[2mhm, \ufffd[2J\nwell\x1b[22m\nWarm.\n"), (False, "Warm.\n")],
)
def test_reasoning_is_dimmed_on_a_terminal(tty: bool, shown: str) -> None:
    out = Terminal(tty)
    answer = print_stream(
        CannedCall(
            inference_pb2.ChatResponse(reasoning="hm, \x1b[2J\n"),
            inference_pb2.ChatResponse(reasoning="well"),
            inference_pb2.ChatResponse(text="Warm", reasoning=""),
            inference_pb2.ChatResponse(text=".", finish_reason=common_pb2.FINISH_REASON_STOP),
        ),
        out,
    )
    assert out.getvalue() == shown
    assert (answer.text, answer.reasoning) == ("Warm.", "hm, \x1b[2J\nwell")


def test_summary_of_nothing() -> None:
    said = Answer().summary()
    assert said.startswith("0 prompt + 0 output tokens")
    assert "tokens/s" not in said


def test_the_speed_is_over_the_whole_time() -> None:
    """One message may bring everything, so the time from the first to the last says nothing."""
    usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=100)
    said = Answer(first=1.9999, total=2.0, usage=usage).summary()
    assert "100 output tokens, first after 2.00 s, 2.00 s in all (50.0 tokens/s)" in said


class Serving(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """grpc.health.v1 that always says the same."""

    def __init__(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        self._status = status

    def Check(  # noqa: N802  # the rpc's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=self._status)


@pytest.mark.parametrize(("executor", "code"), [("SERVING", 0), ("NOT_SERVING", 1)])
def test_health_asks_every_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], executor: str, code: int
) -> None:
    tmp_path.chmod(0o700)
    servers = []
    states = dict.fromkeys((*PROCESSES, "public"), "SERVING") | {"executor-0": executor}
    port = 0
    for name, state in states.items():
        server = grpc.server(futures.ThreadPoolExecutor(1))
        status = health_pb2.HealthCheckResponse.ServingStatus.Value(state)
        health_pb2_grpc.add_HealthServicer_to_server(Serving(status), server)
        unix = f"unix:{tmp_path / name}.control.sock"
        port = server.add_insecure_port("127.0.0.1:0" if name == "public" else unix)
        server.start()
        servers.append(server)
    run_dir, address = str(tmp_path), f"127.0.0.1:{port}"
    assert health.run(["--run-dir", run_dir, "--address", address]) == code
    for server in servers:
        server.stop(0).wait()
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [*PROCESSES, address, address]
    assert health.run(["--run-dir", run_dir, "--address", address]) == 1


def test_health_of_an_address_alone(
    server: tuple[CannedService, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert health.run(["--address", server[1]]) == 1  # the canned server has no health service
    out = capsys.readouterr().out
    assert "UNIMPLEMENTED" in out
    assert "executor-0" not in out


def test_panel_facts() -> None:
    stats = {
        "scheduler": control_pb2.StatsResponse(
            scheduler=control_pb2.SchedulerStats(
                max_num_seqs=8, max_num_batched_tokens=256, impl="native"
            )
        ),
        "executor-0": control_pb2.StatsResponse(
            executor=control_pb2.ExecutorStats(
                device="cpu", plan="eager", dtype="float32", architecture="llama", model="m.gguf",
                parameters=134_515_008, weight_bytes=538_060_032, kv_cache_bytes=94_371_840,
                num_blocks=128, block_size=16, max_model_len=8192, vocabulary_size=49152,
                load_seconds=1.25,
            )
        ),
        "tokenizer-0": control_pb2.StatsResponse(
            tokenizer=control_pb2.TokenizerStats(address="127.0.0.1:7", model_names=["smol", "s"])
        ),
    }  # fmt: skip
    for pid, each in enumerate(stats.values(), start=1):
        each.process.pid = pid
    facts = dict(panel_facts(stats, Path("/run/x")))
    assert facts["model"] == "smol, s (m.gguf)"
    assert facts["network"] == (
        "llama, 134.5 M parameters, vocabulary 49,152, context 8,192 tokens"
    )
    assert facts["KV cache"] == "128 blocks x 16 tokens = 2,048 tokens, 90.0 MiB"
    assert facts["processes"] == "scheduler 1, executor-0 2, tokenizer-0 3"
    assert any("--address 127.0.0.1:7" in line for line in how_to_call("127.0.0.1:7"))


def test_sizes_and_counts() -> None:
    assert [size(n) for n in (0, 2048, 3 << 19, 5 << 30)] == ["0 B", "2 KiB", "1.5 MiB", "5.0 GiB"]
    assert [count(n) for n in (7, 1500, 1_240_000_000)] == ["7", "1.5 K", "1.2 B"]


def test_who_binds_which_socket() -> None:
    assert owns("scheduler", "scheduler.zmq")
    assert owns("scheduler", "executor.fds")
    assert owns("scheduler", "samplers.sock")
    assert not owns("executor-0", "executor.zmq")
    assert owns("executor-0", "executor-0.control.sock")
    assert not owns("scheduler", "executor-0.control.sock")


def test_a_port_in_use_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        where = ("--model", str(tmp_path / "not-there.gguf"), "--run-dir", str(tmp_path / "run"))
        ended = run_cli("serve", *where, "--port", port)
    assert ended.returncode == 2
    said = f"triptych serve: error: port {port} on 127.0.0.1: Address already in use; "
    assert ended.stderr == f"{said}use another --port\n"


def test_health_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typo = tmp_path / "typo" / "run"
    assert cli.main(["health", "--run-dir", str(typo)]) == 2
    assert not typo.parent.exists()
    said = capsys.readouterr().err
    assert said.startswith(f"triptych health: error: run directory {typo} does not exist")


@pytest.mark.parametrize(
    ("redirection", "reason"),
    [("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")],
)
@pytest.mark.parametrize("command", ["generate hello", "chat hello", "health", "help", "version"])
def test_an_output_that_cannot_be_written_is_one_line(
    server: tuple[CannedService, str], command: str, redirection: str, reason: str
) -> None:
    if " " in command or command == "health":
        command += f" --address {server[1]}"
    line = f"{sys.executable} -m triptych.services.cli {command} {redirection}"
    ended = subprocess.run(
        line, shell=True, capture_output=True, text=True, check=False, timeout=_WAIT
    )
    assert ended.returncode == 1
    speaker = "triptych" if command in ("help", "version") else f"triptych {command.split()[0]}"
    assert ended.stderr == f"{speaker}: error: standard output: {reason}\n"


def test_closed_streams_stay_out_of_the_way() -> None:
    """What is opened next must not become standard output, and children get whole streams."""
    code = (
        "import os, subprocess, sys; from triptych.services.runtime.lifecycle import run_main\n"
        "def body():\n"
        "    sys.stderr.write('lost')\n"
        "    child = 'import os; os.fstat(0), os.fstat(1), os.write(2, b\"x\")'\n"
        "    subprocess.run([sys.executable, '-c', child], check=True)\n"
        "    return 7 if os.open('/dev/zero', os.O_RDONLY) > 2 else 1\n"
        "sys.exit(run_main('test', body))"
    )
    command = f"{shlex.join([sys.executable, '-c', code])} <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, check=False, timeout=_WAIT).returncode == 7

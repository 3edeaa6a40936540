"""The command line, in process: its answers, its errors in one line, its exit codes."""

from __future__ import annotations

import importlib
import json
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from baton.cli.app import app
from baton.cli.status import make_picture
from baton.client import TokenStream
from common.security import create_secret, load_secret
from protos.errors import AccessDeniedError, DuplicateRequestError, ServerUnavailableError
from protos.messages import (
    Finish,
    FinishReason,
    GenerateChunk,
    KvStats,
    LedgerAudit,
    ServerInfo,
    ServerLedger,
    Usage,
)
from tests.support.cli_server import SayingServer, serving

ANSWER = (
    GenerateChunk(external_id="r", token_ids=(5,), text="a", seed=3),
    GenerateChunk(
        external_id="r",
        text="b",
        text_offset=1,
        finish=Finish(
            reason=FinishReason.STOP,
            usage=Usage(prompt_tokens=2, completion_tokens=1),
            kv=KvStats(transferred_bytes=64, transport="tcp"),
        ),
    ),
)

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def test_text_is_printed_and_nothing_else() -> None:
    with serving(SayingServer(ANSWER)) as server:
        done = run("generate", "hi", "--server", server.address)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "ab\n", "")


def test_json_is_one_object_with_the_promised_keys() -> None:
    with serving(SayingServer(ANSWER)) as server:
        done = run("chat", "hi", "--system", "be kind", "--json", "--server", server.address)
    answer = json.loads(done.stdout)
    assert set(answer) == {
        *("text", "token_ids", "finish_reason", "usage", "kv", "timing", "external_id", "seed")
    }
    assert (answer["text"], answer["token_ids"], answer["seed"]) == ("ab", [5], 3)
    assert set(answer["usage"]) == {"prompt_tokens", "cached_tokens", "completion_tokens"}
    assert (answer["kv"]["transferred_bytes"], answer["kv"]["transport"]) == (64, "tcp")
    assert [m.role for m in server.requests[0].chat.messages] == ["system", "user"]


def test_every_flag_reaches_the_server() -> None:
    flags = shlex.split(
        "--max-tokens 0 --temperature 0 --top-k 0 --top-p 0 --seed 0 --ignore-eos "
        "--stop x --stop y --stop-token-id 0 --model m --external-id e --timeout 9"
    )
    with serving(SayingServer(ANSWER)) as server:
        done = run("generate", "--prompt-ids", "1,2", *flags, "--server", server.address)
    assert done.exit_code == 0
    (request,) = server.requests
    sampling = request.sampling
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed"):
        assert sampling.HasField(name), f"a 0 given for {name} was taken for silence"
    assert sampling.ignore_eos
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["x", "y"], [0])
    assert (request.model, request.external_id, request.deadline_ms) == ("m", "e", 9000)
    assert len(request.token_ids) == 8


@pytest.mark.parametrize("arguments", [("generate",), ("generate", "-"), ("chat",)])
def test_a_prompt_may_come_by_stdin(arguments: tuple[str, ...]) -> None:
    with serving(SayingServer(ANSWER)) as server:
        done = run(*arguments, "--server", server.address, stdin="two\nlines\n")
    assert done.exit_code == 0
    (request,) = server.requests
    assert (request.text or request.chat.messages[0].content) == "two\nlines"


def test_a_failed_request_is_one_line_and_exit_code_1() -> None:
    error = DuplicateRequestError("external_id 'e' is live already", field="external_id")
    with serving(SayingServer(error=error)) as server:
        done = run("generate", "hi", "--server", server.address)
    assert (done.exit_code, done.stderr) == (1, "baton: external_id 'e' is live already\n")


def test_nobody_there_comes_with_a_remedy() -> None:
    done = run("generate", "hi", "--server", "127.0.0.1:1")
    assert done.exit_code == 1
    assert "nobody answers at 127.0.0.1:1" in done.stderr
    assert done.stderr.count("baton up") == 1
    assert done.stderr.count("127.0.0.1:1") == 1
    assert done.stderr.count("\n") == 1


def test_a_router_without_servers_is_not_told_to_be_started() -> None:
    """The remedy for a refused connection stood under the router's own UNAVAILABLE."""
    error = ServerUnavailableError("no generation server is ready (failed to connect to h:1)")
    with serving(SayingServer(error=error)) as server:
        done = run("generate", "hi", "--server", server.address)
    assert (done.exit_code, done.stderr) == (1, f"baton: {error.message}\n")


def test_an_error_after_text_stands_on_a_line_of_its_own() -> None:
    error = ServerUnavailableError("the engine is gone")
    with serving(SayingServer(ANSWER[:1], error)) as server:
        done = run("generate", "hi", "--server", server.address)
    assert (done.exit_code, done.output) == (1, "a\nbaton: the engine is gone\n")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_prompt_that_is_no_utf8_is_refused_in_one_line(command: str) -> None:
    """Both were tracebacks: UnicodeDecodeError from stdin, UnicodeEncodeError from argv."""
    piped = run(command, "--server", "h:1", stdin=b"ok \xff\xfe")
    assert (piped.exit_code, "prompt on stdin is not UTF-8: byte 3" in piped.stderr) == (2, True)
    given = run(command, "\udcff\udcfe bad", "--server", "h:1")
    assert given.exit_code == 2
    assert "UTF-8" in given.stderr
    assert given.stderr.count("\n") == piped.stderr.count("\n") == 1


def test_ctrl_c_ends_an_answer_and_not_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the whole chat, history and all; the turn it cut short must not come back."""
    lines = iter(["first", "second"])

    def read_line(_prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise KeyboardInterrupt from None  # Ctrl-C at the prompt

    answers = iter([KeyboardInterrupt, None])

    def answer_or_interrupt(stream: TokenStream) -> GenerateChunk:
        why = next(answers, None)
        if why is not None:
            raise why
        return receive(stream)

    receive = TokenStream.__next__
    monkeypatch.setattr("builtins.input", read_line)
    monkeypatch.setattr("baton.cli.ask._is_terminal", lambda: True)
    monkeypatch.setattr(TokenStream, "__next__", answer_or_interrupt)
    with serving(SayingServer(ANSWER)) as server:
        done = run("chat", "--server", server.address)
        said = [[m.content for m in request.chat.messages] for request in server.requests]
    assert done.exit_code == 130
    assert "ab\n" in done.stdout
    assert ["second"] in said
    assert ["first", "second"] not in said


def test_ctrl_c_ends_the_request_without_a_traceback() -> None:
    with serving(SayingServer(ANSWER[:1], hangs=True)) as server:
        command = [sys.executable, "-m", "baton", "generate", "hi", "--server", server.address]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.read(1) == "a"
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=10)
        assert server.was_cancelled.wait(5)
    assert (process.returncode, stderr.strip()) == (130, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "hi", "--max-tokens", "many"), "--max-tokens"),
        (("generate", "hi", "--prompt-ids", "1"), "both"),
        (("generate", "--prompt-ids", "1,x"), "'1,x'"),
        (("generate", "--maxtokens", "3"), "--max-tokens"),
        (("genrate", "hi"), "genrate"),
        (("router",), "--config"),
        (("up", "--config", "/no/such.yaml"), "/no/such.yaml"),
        (("up", "--dtype", "float8"), "float8"),
        (("status", "--secret-file", "/no/secret"), "/no/secret"),
        (("status", "--server", "h:1", "--runtime-dir", "/no/dir"), "--secret-file"),
        (("generate", "hi", "--server", "nonsense"), "HOST:PORT, port 1 to 65535"),
        (("generate", "hi", "--server", "localhost:99999"), "HOST:PORT, port 1 to 65535"),
        (("status", "--server", "localhost:0"), "HOST:PORT, port 1 to 65535"),
        (("generate", "hi", "--seed", "-1"), "sampling.seed is -1; it must be an unsigned 64-bit"),
        (("generate", "hi", "--stop", "\udcff"), "sampling.stop[0]"),
        (("generate", "hi", "--model", "\udcff"), "model is"),
        (("generate", "hi", "--external-id", "\udcff"), "external_id is"),
        (("chat", ""), "the message is empty"),
        (("up", "--dtype", "float16"), "'dtype' is 'float16'; it must be one of float32, bfloat16"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("baton: ")


def test_a_secret_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    made, again = run("secret", str(path)), run("secret", str(path))
    assert made.exit_code == 0
    text = path.read_text()
    load_secret(path)
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
    assert "exists already" in again.stderr
    assert path.read_text() == text


def test_status_without_a_cluster_says_so(tmp_path: Path) -> None:
    """It complained of a missing secret file, which a newcomer never heard of."""
    done = run("status", "--runtime-dir", str(tmp_path))
    assert done.exit_code == 1
    assert f"no cluster runs here (runtime dir {tmp_path})" in done.stderr
    for flag in ("--runtime-dir", "--server", "--secret-file"):
        assert flag in done.stderr


def test_a_wrong_secret_is_told_as_one(tmp_path: Path) -> None:
    create_secret(tmp_path / "secret")
    error = AccessDeniedError("this call needs the control key", value="wrong")
    with serving(SayingServer(error=error)) as server:
        where = ("--server", server.address, "--secret-file", str(tmp_path / "secret"))
        for command in (("status",), ("engine", "sleep"), ("engine", "loras")):
            done = run(*command, *where)
            assert done.exit_code == 1, command
            assert "does not match" in done.stderr, command
            assert "--secret-file" in done.stderr


def test_a_server_that_still_starts_is_shown_with_what_it_waits_for(tmp_path: Path) -> None:
    create_secret(tmp_path / "secret")
    info = ServerInfo(
        name="g0", role="generation", incarnation=0, version="1", state="starting", detail="waits"
    )
    refusal = ServerUnavailableError("generation server 'g0' is starting: waits")
    with serving(SayingServer(server_info=info, ledger_error=refusal)) as server:
        where = ("--server", server.address, "--secret-file", str(tmp_path / "secret"))
        done, as_json = run("status", *where), run("status", "--json", *where)
    assert done.exit_code == as_json.exit_code == 0
    assert "starting" in done.stdout
    assert "g0: waits" in done.stdout
    assert json.loads(as_json.stdout)["servers"][0]["holders"] is None


def test_blocks_of_a_sleeping_server_are_released_not_free() -> None:
    """Bug: `baton status` showed `free:512` of a server that had given its memory back."""
    info = ServerInfo(name="g0", role="generation", incarnation=0, version="1", state="asleep")
    audit = LedgerAudit(entries_by_state={}, blocks_by_state={"free": 512, "live": 0})
    (entry,) = make_picture(info, audit, "h:1")["servers"]
    assert entry["blocks_by_state"] == {"live": 0, "released": 512}


def test_the_demo_takes_no_arguments_and_says_so() -> None:
    """Bug: `scripts/demo --port 9000` ran for a minute as if nothing had been asked."""
    script = Path(__file__).parents[2] / "scripts" / "demo"
    done = subprocess.run([script, "--port", "9000"], capture_output=True, text=True, timeout=10)
    assert done.returncode == 2
    assert "unknown argument --port" in done.stderr
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0
    assert "usage: scripts/demo" in done.stdout


def test_an_engines_server_must_be_named_and_is_no_router() -> None:
    assert "The router" not in run("engine", "sleep", "--help").stdout
    done = run("engine", "sleep")
    assert done.exit_code == 2
    assert "--server" in done.stderr


@pytest.mark.parametrize(
    ("command", "module", "flags"),
    [
        ("context", "context_server.__main__", ("--frontends", "3")),
        ("generation", "generation_server.__main__", ("--frontends", "2")),
        ("worker", "executor.attach.worker_server", ("--listen", "10.0.0.1:8301")),
        ("router", "router.__main__", ()),
    ],
)
def test_a_servers_flags_reach_it(
    command: str, module: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    main = importlib.import_module(module)

    def noted(argv: list[str]) -> int:
        asked.append(argv)
        return 70

    monkeypatch.setattr(main, "main", noted)
    assert run(command, "--config", "x.yaml", *flags, "--log-level", "debug").exit_code == 70
    assert asked == [["--config", "x.yaml", "--log-level", "debug", *flags]]


def test_a_misspelt_key_names_the_nearest(tmp_path: Path) -> None:
    config = tmp_path / "up.yaml"
    config.write_text("contxt: {count: 2}\n")
    done = run("up", "--config", str(config))
    assert done.exit_code == 2
    assert "did you mean 'context'" in done.stderr


def test_every_command_explains_itself_with_an_example() -> None:
    assert run().exit_code == 0
    for name, command in app.commands.items():
        if isinstance(command, click.Group):
            continue
        done = run(name, "--help")
        assert done.exit_code == 0
        assert f"baton {name}" in done.stdout.partition("Example")[2], name


def test_the_version_is_that_of_the_package() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert run("--version").stdout == f"baton, version {pyproject['project']['version']}\n"


HELD = LedgerAudit(
    blocks_by_state={"live": 2, "free": 3},
    holders={10: ("lease:1-2-0",), 9: ("sequence:1", "transfer:1-2-0")},
)


def make_router() -> tuple[ServerInfo, LedgerAudit]:
    def info(name: str, role: str, **more: Any) -> ServerInfo:
        return ServerInfo(name=name, role=role, incarnation=255, version="1", state="ready", **more)

    servers = (info("c", "context", address="h:1"), info("g", "generation", address="h:2"))
    audit = LedgerAudit(
        entries_by_state={"open": 1},
        servers=(
            ServerLedger(name="c", ledger=HELD),
            ServerLedger(name="g", error="no answer"),
        ),
    )
    return info("router", "router", servers=servers), audit


def test_the_picture_holds_each_server_even_a_silent_one() -> None:
    picture = make_picture(*make_router(), "h:0")
    context, generation = picture["servers"]
    assert picture["router"]["ledger_entries"] == {"open": 1}
    assert context["blocks_by_state"] == {"free": 3, "live": 2}
    assert list(context["holders"].items()) == [
        ("9", ["sequence:1", "transfer:1-2-0"]),
        ("10", ["lease:1-2-0"]),
    ], "every held block's holders are named"
    assert (context["incarnation"], context["address"]) == ("00000000000000ff", "h:1")
    assert (generation["blocks_by_state"], generation["detail"]) == (None, "no answer")


def test_the_picture_of_a_single_server() -> None:
    info = ServerInfo(name="g", role="generation", incarnation=1, version="1")
    picture = make_picture(info, LedgerAudit(), "h:9")
    assert picture["router"] is None
    assert picture["servers"][0]["address"] == "h:9"


def test_status_shows_the_secret_and_prints_both_ways(tmp_path: Path) -> None:
    token = create_secret(tmp_path / "secret").control_token()
    info, audit = make_router()
    with serving(SayingServer(server_info=info, audit=audit)) as server:
        where = ("--runtime-dir", str(tmp_path), "--server", server.address)
        table, as_json = run("status", *where), run("status", "--json", *where)
    assert (table.exit_code, as_json.exit_code) == (0, 0)
    assert "free:3 live:2" in table.stdout
    assert "g: no answer" in table.stdout
    assert len(json.loads(as_json.stdout)["servers"]) == 2
    assert server.metadata[0]["x-baton-control"] == token

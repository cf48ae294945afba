"""The server of the live page: who may ask, how much, and that others lose nothing by it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import lipscope as ls
from command import BERT, Command
from lipscope.explore import Server, served
from lipscope.explore.answers import Question
from lipscope.explore.solver import Place

TEXT = "It was late."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = served([BERT], TEXT)
    made.start()
    yield made
    made.end()


def asked(
    server: Server, *, path: str = "", method: str = "GET", body: bytes = b"", **headers: str
) -> tuple[int, str]:
    """Status and body of an answer to a request as it is, of an own socket."""
    at = urlsplit(server.address)
    given = {"Host": at.netloc, "Connection": "close"}
    if method == "POST":
        given |= {"Origin": f"http://{at.netloc}", "Content-Length": str(len(body))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path or at.path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in given.items() if value]
    with socket.create_connection((at.hostname, at.port), timeout=30) as link:
        link.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        found = b""
        while part := link.recv(65536):
            found += part
    head, _, rest = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest.decode()


def question(server: Server, text: str = TEXT, **more: object) -> tuple[int, str]:
    body = json.dumps({"window": "w", "part": "all", "text": text, **more}).encode()
    return asked(server, path=urlsplit(server.address).path + "ask", method="POST", body=body)


def works(server: Server) -> bool:
    status, events = question(server)
    return status == 200 and '"event": "done"' in events


def test_who_knows_the_address_is_answered(server: Server) -> None:
    status, page = asked(server)
    assert status == 200 and page.startswith("<!DOCTYPE html>") and works(server)


def test_headers_are_strict(server: Server) -> None:
    at = urlsplit(server.address)
    with socket.create_connection((at.hostname, at.port)) as link:
        link.sendall(f"GET {at.path} HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode())
        head = link.recv(4096).decode().lower()
    policy = head.partition("content-security-policy: ")[2].partition("\r\n")[0]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "referrer-policy: no-referrer" in head and "cache-control: no-store" in head
    assert "access-control" not in head


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ({"path": "/"}, 404),
        ({"path": "/ask"}, 404),
        ({"path": "/wrong-token/"}, 404),
        ({"path": "/../../etc/passwd"}, 404),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": ""}, 400),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"method": "POST", "Origin": ""}, 403),
        ({"method": "POST", "Content_Length": "10485760"}, 413),
        ({"method": "DELETE"}, 405),
    ],
)
def test_others_are_refused(server: Server, how: dict[str, str], status: int) -> None:
    found, text = asked(server, **how)  # pyright: ignore[reportArgumentType]
    assert found == status and server.address not in text


def test_ten_megabytes_in_pieces_are_refused(server: Server) -> None:
    at = urlsplit(server.address)
    head = f"POST {at.path}ask HTTP/1.1\r\nHost: {at.netloc}\r\nOrigin: http://{at.netloc}\r\n"
    with socket.create_connection((at.hostname, at.port)) as link:
        link.sendall((head + "Transfer-Encoding: chunked\r\n\r\n").encode())
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        answer = b""
        with contextlib.suppress(OSError):  # it may have hung up by then
            for _ in range(160):
                link.sendall(piece)
        with contextlib.suppress(OSError):
            answer = link.recv(100)
        assert answer[9:12] in (b"413", b"")
    assert works(server)


@pytest.mark.parametrize(
    "more",
    [
        {"text": 3},
        {"text": "a" * 30_000},
        {"text": " "},
        {"map": "nonsense"},
        {"move": "3:1"},
        {"move": "0:99999"},
        {"layer": 99},
        {"layer": -1},
        {"model": 5},
        {"heads": 1},
        {"kind": "shell"},
        {"nonsense": 1},
        {"text": "\0"},
        {"text": "\ud800"},
    ],
)
def test_a_wrong_question_is_refused_in_one_line(server: Server, more: dict) -> None:
    status, text = question(server, **{"text": TEXT, **more})
    if status == 200:
        events = [json.loads(one) for one in re.findall(r"^data: (.*)$", text, re.MULTILINE)]
        (text,) = [one["text"] for one in events if one["event"] == "error"]
    else:
        assert status == 400
    assert text.strip() and "\n" not in text.strip() and "Traceback" not in text


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 5000, b"\xff\xfe", b"3"])
def test_what_is_no_question_is_refused(server: Server, body: bytes) -> None:
    path = urlsplit(server.address).path + "ask"
    assert asked(server, path=path, method="POST", body=body)[0] == 413


def test_a_thousand_connections_and_half_sockets_cost_nobody_an_answer(server: Server) -> None:
    at = urlsplit(server.address)
    opened = []
    for k in range(1000):
        link = socket.create_connection((at.hostname, at.port), timeout=10)
        if k % 2:
            link.sendall(f"GET {at.path} HTTP/1.1\r\nHost: {at.netloc}".encode()[:30])
        opened.append(link)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # half sockets are let go after seconds
        try:
            if works(server):
                break
        except (OSError, IndexError):
            time.sleep(0.5)
    assert works(server)
    for link in opened:
        link.close()


def test_a_newer_question_ends_the_older_one_between_two_products(server: Server) -> None:
    solver, place = server.quick[0], Place("window", "all")
    older, newer = Question("It was early, and it never ended."), Question("It was new.")
    events: dict[Question, list[dict | None]] = {older: [], newer: []}
    began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def of_older(event: dict | None) -> None:
        events[older].append(event)
        if event is not None and not began.is_set():
            began.set()
            goes_on.wait(30)

    def of_newer(event: dict | None) -> None:
        events[newer].append(event)
        if event is None:
            ended.set()

    solver.ask(place, older, of_older)
    assert began.wait(30)
    solver.ask(place, newer, of_newer)
    goes_on.set()
    assert ended.wait(30)
    assert [e and e["event"] for e in events[older]] == ["asked", None]
    assert [e and e["event"] for e in events[newer]][-2:] == ["done", None]
    assert older not in solver._kept and newer in solver._kept


def test_it_listens_on_this_machine_alone(server: Server) -> None:
    assert urlsplit(server.address).hostname == "127.0.0.1"
    assert server._socket.getsockname()[0] == "127.0.0.1"


def test_a_wrong_model_is_refused_before_a_browser_opens(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    result = command("explore", "no-such-model-anywhere")
    assert result.status == 2 and result.out == "" and not opened
    assert result.err.count("\n") == 1 and "no-such-model-anywhere" in result.err


def test_the_command_opens_its_address_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n')
    browser.chmod(0o755)
    words = [sys.executable, "-m", "lipscope.cli", "explore", BERT]
    how = os.environ | {"BROWSER": f"{browser} %s"}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=how)
    assert process.stderr is not None
    address = process.stderr.readline()
    assert address.startswith("http://127.0.0.1:")
    deadline = time.monotonic() + 60
    while not opened.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert opened.read_text() == address
    at = urlsplit(address.strip())
    with socket.create_connection((at.hostname, at.port)) as link:  # whoever still listens
        link.sendall(f"GET {at.path} HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode())
        assert link.recv(100).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    process.stderr.close()


def events(server: Server, text: str = TEXT, **more: object) -> list[dict[str, Any]]:
    _, found = question(server, text, **more)
    return [json.loads(one) for one in re.findall(r"^data: (.*)$", found, re.MULTILINE)]


def test_a_kept_answer_goes_with_the_weights_that_it_was_of() -> None:
    model = ls.load_model(BERT)
    page = model.explore(TEXT)
    try:
        assert events(page)[-1]["event"] == "done"
        with torch.no_grad():
            next(model.model.parameters()).mul_(2)
        assert "Found other weights" in events(page)[-1]["text"]
    finally:
        page.end()


def test_a_model_that_is_read_block_by_block_answers_every_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: Any = ls.load_model(BERT)
    whole.model.save_pretrained(tmp_path)
    monkeypatch.setattr("lipscope.models.loading.LARGE", 0)
    page = ls.load_model(str(tmp_path), tokenizer=whole.tokenizer).explore(TEXT)
    try:
        rows = [row for one in events(page) if one["event"] == "rows" for row in one["rows"]]
        expected = ls.measure(whole, TEXT, lengths=len(TEXT), samples=1)
        sigmas = [pytest.approx(one.sigma, rel=1e-5) for one in expected]
        assert [one["sigma"] for one in rows] == sigmas
        assert events(page, kind="words", part="words", layer=1)[-1]["event"] == "done"
    finally:
        page.end()

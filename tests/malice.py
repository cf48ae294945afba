"""Model folders and run folders of a stranger: what they hold tries to run, write or ask."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import BertConfig, BertModel

TINY = {
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": 300,
}


class Trap(NamedTuple):
    """A folder that must not be obeyed.

    Attributes:
        name: What is wrong with it.
        make: Puts it into a copy of a good folder, with the file that its code would make.
        loads: Whether the model is to be had all the same; None where both will do.
    """

    name: str
    make: Callable[[Path, Path], Any]
    loads: bool | None = False


class _Call:
    """An object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


CALLS: dict[str, Callable[[Path], Any]] = {
    "system": lambda ran: _Call(os.system, f"touch {ran}"),
    "popen": lambda ran: _Call(os.popen, f"touch {ran}"),
    "eval": lambda ran: _Call(eval, f"open({str(ran)!r}, 'w')"),
    "exec": lambda ran: _Call(exec, f"open({str(ran)!r}, 'w')"),
    "open": lambda ran: _Call(open, str(ran), "w"),
    "touch": lambda ran: _Call(Path.touch, ran),
    "mkdir": lambda ran: _Call(os.mkdir, str(ran)),
}
SAVED: dict[str, Callable[[Any, Path], Any]] = {
    "zip": torch.save,
    "legacy": lambda what, file: torch.save(what, file, _use_new_zipfile_serialization=False),
    "bare": lambda what, file: file.write_bytes(pickle.dumps(what)),
}
CODE = "from pathlib import Path\nPath({ran!r}).touch()\n"
CODE += "from transformers import BertConfig, BertModel, BertTokenizer\n"
CODE += "class Config(BertConfig): model_type = 'unknown'\nclass Model(BertModel): pass\n"
MAPS = ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor", "AutoImageProcessor")


def good(folder: Path) -> Path:
    """A small model with its weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(BertConfig(**TINY)).save_pretrained(folder)
    return folder


def checkpoints() -> Iterator[Trap]:
    """Pickles that call, pickles beside good weights, headers and indices that lead elsewhere."""
    for call, made in CALLS.items():
        for form, save in SAVED.items():
            yield Trap(f"{call}, {form}", _pickled(save, made))
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth", "pytorch_model.bin"):
        yield Trap(f"{name} beside", _beside(name), loads=True)
    for said in (
        "../../outside.safetensors",
        "/etc/hostname",
        "/dev/zero",
        "evil.bin",
        "good.bin",
        3,
    ):
        yield Trap(f"index: {said}", _index(said))
    yield Trap("pipe", lambda folder, ran: os.mkfifo(folder / "more.safetensors"))
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for said, header in {
        "huge": struct.pack("<Q", 2**63),
        "beyond": struct.pack("<Q", 10**6) + b"{}",
        "no JSON": _header(b"{]"),
        "deep": _header(b"[" * 100_000),
        "offsets": _header(json.dumps({"a": {**entry, "data_offsets": [0, 2**62]}}).encode()),
        "backwards": _header(json.dumps({"a": {**entry, "data_offsets": [8, 0]}}).encode()),
        "type": _header(json.dumps({"a": {**entry, "dtype": "OBJECT"}}).encode()),
        "shape": _header(json.dumps({"a": {**entry, "shape": [2**62, 2**62]}}).encode()),
        "digits": _header(b'{"a": ' + 5000 * b"9" + b"}"),
        "empty": b"",
    }.items():
        yield Trap(f"header: {said}", _weights(header))


def code_folders() -> Iterator[Trap]:
    """Code in the folder of a model, asked for in every way that a configuration has."""
    for kind in ("unknown", "bert"):
        yield Trap(f"auto_map, {kind}", _configured(model_type=kind, auto_map=dict.fromkeys(
            MAPS, "own.Model")), loads=kind == "bert")  # fmt: skip
    yield Trap("auto_map elsewhere", _configured(auto_map={"AutoModel": "someone/else--own.Model"}),
               loads=None)  # fmt: skip
    yield Trap("kernels", _configured(_attn_implementation="someone/kernels"), loads=None)
    yield Trap("quantised", _configured(quantization_config={"quant_method": "own"}), loads=None)
    yield Trap("class", _configured(architectures=["own.Model"]), loads=None)
    yield Trap("type", _configured(model_type="../own"))
    for name in ("tokenizer_config.json", "processor_config.json"):
        yield Trap(name, _told(name), loads=True)
    for name in ("__init__.py", "conftest.py", "torch.py"):
        yield Trap(name, _script(name), loads=True)


def _pickled(save: Callable[[Any, Path], Any], made: Callable[[Path], Any]) -> Any:
    def make(folder: Path, ran: Path) -> None:
        (folder / "model.safetensors").unlink()
        save({"a": torch.zeros(2), "b": [made(ran)]}, folder / "pytorch_model.bin")

    return make


def _beside(name: str) -> Any:
    return lambda folder, ran: torch.save([CALLS["touch"](ran)], folder / name)


def _index(said: Any) -> Any:
    def make(folder: Path, ran: Path) -> None:
        torch.save([CALLS["touch"](ran)], folder / "evil.bin")
        torch.save({"embeddings.word_embeddings.weight": torch.zeros(300, 12)}, folder / "good.bin")
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        index = {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": said}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return make


def _header(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def _weights(content: bytes) -> Any:
    return lambda folder, ran: (folder / "model.safetensors").write_bytes(content)


def _configured(**entries: Any) -> Any:
    def make(folder: Path, ran: Path) -> None:
        _script("own.py")(folder, ran)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | entries))

    return make


def _told(name: str) -> Any:
    def make(folder: Path, ran: Path) -> None:
        _script("own.py")(folder, ran)
        told = {"auto_map": dict.fromkeys(MAPS, "own.Model"), "tokenizer_class": "own.Model"}
        (folder / name).write_text(json.dumps(told | {"processor_class": "own.Model"}))

    return make


def _script(name: str) -> Any:
    return lambda folder, ran: (folder / name).write_text(CODE.format(ran=str(ran)))


# --- pages

SCRIPT = "alert(document.domain)"
PAYLOADS = (
    f"<script>{SCRIPT}</script>",
    f"</script><script>{SCRIPT}</script>",
    f"</style><script>{SCRIPT}</script>",
    f"</title><img src=x onerror={SCRIPT}>",
    f"--><script>{SCRIPT}</script>",
    f"<!--<script>{SCRIPT}",
    f"]]><script>{SCRIPT}</script>",
    f"<svg onload={SCRIPT}>",
    f"<svg><script>{SCRIPT}</script></svg>",
    f"<math><mtext><img src=x onerror={SCRIPT}>",
    f"' onmouseover='{SCRIPT}",
    f'" onmouseover="{SCRIPT}',
    f"` onmouseover=`{SCRIPT}",
    f'"><iframe src="javascript:{SCRIPT}">',
    f'<a href="javascript:{SCRIPT}">x</a>',
    '<base href="https://example.invalid/">',
    '<meta http-equiv="refresh" content="0;url=https://example.invalid">',
    '<link rel="stylesheet" href="https://example.invalid">',
    "<object data=x></object><embed src=x>",
    "<template><slot></template>",
    "<textarea><plaintext>",
    "&lt;script&gt;&#x3c;b&#62;",
    "\\u003cscript\\u003e\\\"};alert(1)//",
    "${alert(1)}{{7*7}}<%= 7 %>",
    "\u2028alert(1)\u2029\u202etxt.exe",
    "\x00<b>\x1b[31m\x07\x7f",
    "%3Cscript%3E\r\n\r\n<b>",
    "constructor.__proto__.polluted",
)  # fmt: skip
FIELDS = ("model", "revision", "weights", "input", "device", "dtype", "version", "note", "error")
FIELDS += ("text", "module", "argument", "map", "metric", "move", "read", "status")
BESIDE = ("token", "spec")


class Shape(HTMLParser):
    """Tags of a page with the names of their attributes, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, ...]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, *sorted(name for name, _ in attrs)))

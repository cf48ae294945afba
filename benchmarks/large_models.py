"""Models larger than memory: peak and time of one layer, beside reading and casting its blocks.

Every figure comes from a fresh process, whose memory is watched from outside. This file is also
that process: ``python benchmarks/large_models.py ask FOLDER LAYER`` or ``read FOLDER LAYER``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tables import Raw, Section, Target, say, table

TOKENS = 64
# Width, layers, width of the MLP, heads, heads of keys and values, vocabulary: 0.72 G parameters
# (1.45 GB) and 8 G (16 GB), shaped as Llama's, with an untied head, which is not read.
SMALL = (2048, 16, 3584, 32, 32, 32_000)
LARGE = (4096, 32, 14_336, 32, 8, 128_256)
TINY = (64, 4, 128, 4, 2, 1000)  # of a quick run
SEVENTY = (8192, 80, 28_672, 64, 8, 128_256)
QUESTIONS = ((SMALL, 8), (LARGE, 3), (LARGE, 16))


def blocks_of(sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The weights of one block by name."""
    d, _, wide, heads, keys, _ = sizes
    own = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    own |= {f"self_attn.{p}_proj": (d, d) for p in "qo"}
    own |= {f"self_attn.{p}_proj": (keys * d // heads, d) for p in "kv"}
    own |= {f"mlp.{p}_proj": (wide, d) for p in ("gate", "up")} | {"mlp.down_proj": (d, wide)}
    return {f"{name}.weight": shape for name, shape in own.items()}


def count(sizes: tuple[int, ...]) -> int:
    """Number of parameters."""
    d, layers, *_, words = sizes
    return layers * block_count(sizes) + 2 * words * d + d


def block_count(sizes: tuple[int, ...]) -> int:
    """Number of parameters of one block."""
    return sum(map(math.prod, blocks_of(sizes).values()))


def write_folder(folder: Path, sizes: tuple[int, ...]) -> None:
    """A random Llama in bfloat16, a shard for each block."""
    import torch
    from safetensors.torch import save_file

    d, layers, wide, heads, keys, words = sizes
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config |= {"hidden_size": d, "num_hidden_layers": layers, "intermediate_size": wide}
    config |= {"num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": words}
    config |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    (folder / "config.json").write_text(json.dumps(config))
    shards = [{"model.embed_tokens.weight": (words, d)}]
    shards += [
        {f"model.layers.{k}.{name}": shape for name, shape in blocks_of(sizes).items()}
        for k in range(layers)
    ]
    shards.append({"model.norm.weight": (d,), "lm_head.weight": (words, d)})
    draw, where = torch.Generator().manual_seed(0), {}
    for k, shard in enumerate(shards):
        name = f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            key: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.randn(shape, generator=draw).mul_(0.02).bfloat16()
            for key, shape in shard.items()
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 2 * count(sizes)}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# --- the fresh process ----------------------------------------------------------------------


def ask(folder: str, layer: int) -> dict[str, Any]:
    """Sigma of a layer at random tokens."""
    import torch

    import lipscope as ls

    began = time.perf_counter()
    model = ls.load_model(folder)
    opened = time.perf_counter()
    ids = torch.randint(3, 1000, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    at = model.at({"input_ids": ids}, layer=layer)
    _, at_input = at.x, time.perf_counter()
    answer = {"sigma": at.sigma, "upper": at.upper}
    ended = time.perf_counter()
    times = {"open": opened - began, "at": at_input - opened, "solve": ended - at_input}
    return answer | times | {"all": ended - opened}


def read(folder: str, layer: int) -> dict[str, Any]:
    """Read the blocks up to a layer as tensors and cast them, one after the other."""
    import torch
    from safetensors import safe_open

    began = time.perf_counter()
    for file in sorted(Path(folder).glob("*.safetensors"))[1 : layer + 2]:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - no mapping
                opened.get_tensor(key).to(torch.float32)
    return {"read": time.perf_counter() - began}


def child() -> None:
    """One question; its answer is the last line."""
    way, folder, layer = sys.argv[1:]
    print("\n" + json.dumps({"ask": ask, "read": read}[way](folder, int(layer))))


# --- the section ----------------------------------------------------------------------------


def _anonymous(process: int) -> int:
    """Anonymous memory of a process at the moment, in bytes."""
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _watched(way: str, folder: Path, layer: int) -> dict[str, Any]:
    say(f"fresh process: {way} {folder.name}, layer {layer}")
    for file in folder.glob("*.safetensors"):  # read from the disk, not from memory
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    asked = [sys.executable, __file__, way, str(folder), str(layer)]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    most = 0
    while process.poll() is None:
        most = max(most, _anonymous(process.pid))
        time.sleep(0.005)
    lines = (process.stdout.read() if process.stdout else "").strip().splitlines()
    if process.returncode:
        return {"problem": f"exit status {process.returncode}"}
    return {**json.loads(lines[-1]), "peak": most}


def measure(*, quick: bool) -> Raw:
    """Peak and time of a layer of random models in bfloat16; the largest that the disk holds."""
    return list(_measured(((TINY, 2),) if quick else QUESTIONS))


def _measured(questions: tuple[tuple[tuple[int, ...], int], ...]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as root:
        for sizes, layer in questions:
            folder = Path(root) / str(count(sizes))
            said = {"sizes": list(sizes), "layer": layer}
            if not folder.exists() and shutil.disk_usage(root).free < 2.5 * count(sizes):
                yield {**said, "problem": "no room on the disk"}
                continue
            if not folder.exists():
                say(f"writing {2 * count(sizes) / 1e9:.2f} GB")
                write_folder(folder, sizes)
            asked = _watched("ask", folder, layer)
            yield {**said, **asked, **_watched("read", folder, layer), "peak": asked.get("peak")}


def render(raw: Raw) -> Section:
    """Peak, time, and both on paper for 70 G."""
    out = Section("Models larger than memory")
    out.add(
        f"""Random models of Llama's shape in bfloat16, map `attention` at {TOKENS} tokens in
float32, all threads. *Peak*: largest anonymous memory of a fresh process, watched from outside;
the files are mapped and count as the system's cache. *Read*: the blocks up to the layer read as
tensors and cast, in another process. Files are dropped from the system's cache before both.
*Open*: headers and, for checkpoints up to 2 GiB, a digest of their contents, and the import of
transformers; *to the layer*: the pass through the blocks below; *solve*: sigma, its interval and
the checks."""
    )
    rows = []
    for one in raw:
        size, layer = count(tuple(one["sizes"])), one["layer"]
        name = [f"{size / 1e9:.2g} G", f"{2 * size / 1e9:.3g}", layer]
        if "problem" in one:
            rows.append([*name, one["problem"], *[""] * 6])
            continue
        ratio, all_of_it = (one[key] / one["read"] for key in ("at", "all"))
        times = [f"{one[key]:.1f}" for key in ("read", "at", "solve", "open")]
        ratios = [f"{ratio:.2f}", f"{all_of_it:.2f}"]
        rows.append([*name, f"{one['peak'] / 1e9:.2f}", *times, *ratios])
        most = 1.0 if size < 2e9 else 4.0
        about = f"{size / 1e9:.2g} G parameters, layer {layer}"
        good = one["peak"] <= most * 1e9
        goal = f"{about}: peak at most {most:.0f} GB"
        out.targets.append(Target(goal, f"{one['peak'] / 1e9:.2f} GB", good))
        if layer == 3:
            goal = f"{about}: sigma in at most twice reading and casting its blocks"
            out.targets.append(Target(goal, f"{all_of_it:.2f}", all_of_it <= 2))
    headers = ["parameters", "on disk, GB", "layer", "peak, GB", "read, s", "to the layer, s"]
    headers += ["solve, s", "open, s", "to the layer / read", "with solve / read"]
    out.add(table(headers, rows))
    largest = max((o for o in raw if "problem" not in o), key=lambda o: count(tuple(o["sizes"])))
    out.add(_on_paper(largest))
    return out


def _on_paper(one: dict[str, Any]) -> str:
    """What the same numbers say of 70 G parameters."""
    sizes = tuple(one["sizes"])
    blocks = block_count(sizes), block_count(SEVENTY)
    peak = one["peak"] * blocks[1] / blocks[0]
    seconds = one["at"] / (one["layer"] + 1) * blocks[1] / blocks[0]
    return f"""On paper, from the last row: {count(SEVENTY) / 1e9:.2g} G parameters (width
{SEVENTY[0]:,}, {SEVENTY[1]} blocks, {2 * count(SEVENTY) / 1e9:.0f} GB on disk) would take
{peak / 1e9:.1f} GB at most and {seconds:.1f} s a block: {4 * seconds:.0f} s to layer 3,
{SEVENTY[1] * seconds / 60:.0f} minutes to the last one. Not run."""


if __name__ == "__main__":
    child()

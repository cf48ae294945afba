"""Every model type of the installed transformers in a tiny random configuration, against a truth.

The truth is the dense Jacobian, by `torch.autograd`, of the unmodified model between the tensor
that a row says moves and the output of the module that it names: both are injected and read by
hooks, and nothing of it comes from lipscope but the row, and that casts to float32 give float64:
a scan in float32 (Jamba's) is off by 2 % at a sigma of 35,000.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import lipscope as ls
from lipscope.errors import InputError
from lipscope.models.quiet import quiet
from lipscope.models.tracing.prepare import exact_maths

TYPES = tuple(sorted(MODEL_MAPPING_NAMES))
MAPS = ("attention", "normed", "block", "model")
WIDTH, HEADS, TOKENS = 16, 4, 6
_LARGEST = 600  # entries of an input whose dense Jacobian is still had
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "width"), WIDTH),
    **dict.fromkeys(("embedding_size", "decoder_hidden_size", "hidden_dim", "emb_dim"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    "decoder_num_attention_heads": HEADS,
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "kv_channels"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "depth"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "d_inner"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 24),
    **dict.fromkeys(("decoder_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("vocab_size", "text_vocab_size"), 60),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions"), 32),
    **dict.fromkeys(("max_target_positions", "n_ctx", "seq_length"), 32),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"), 1),
    **dict.fromkeys(("cls_token_id", "decoder_start_token_id", "unk_token_id"), 1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 4),
    "image_size": 8,
    "patch_size": 4,
    "window_size": 2,
    "num_mel_bins": 16,
    "num_frames": 2,
    "num_labels": 2,
}


# Attention modules that go on after their projection (residual, norm), and its name.
_ENDS = {"AlbertAttention": "dense"}


class Outcome(NamedTuple):
    """What became of a map of a model type: ``exact``, ``refused``, ``wrong`` or ``skipped``."""

    kind: str
    map: str
    verdict: str
    why: str = ""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """A limit on what one model type may take."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Sizes that some families do not take together: the first configuration that runs is used.
_WITHOUT: tuple[tuple[str, ...], ...] = (
    (),
    ("layer_types",),
    ("num_key_value_heads", "num_kv_heads", "layer_types"),
    ("head_dim", "num_key_value_heads", "num_kv_heads", "layer_types"),
    ("num_layers", "num_hidden_layers", "n_layer", "layer_types"),
    ("image_size", "patch_size", "layer_types"),
    ("pad_token_id", "bos_token_id", "eos_token_id", "layer_types"),
    ("hidden_size", "embed_dim", "num_attention_heads", "num_heads", "layer_types"),
)


def shrunk(kind: type, without: tuple[str, ...]) -> Any:
    """A configuration with every size that is known by its name made small."""
    default = kind()
    names = set(inspect.signature(kind.__init__).parameters) | set(default.to_dict())
    sizes: dict[str, Any] = {}
    for name, size in _SIZES.items():
        if name in names and name not in without and isinstance(vars(default).get(name, 1), int):
            sizes[name] = size
    for name, part in getattr(kind, "sub_configs", {}).items():
        held = vars(default).get(name)
        if held is not None and inspect.isclass(part) and hasattr(held, "to_dict"):
            sizes[name] = shrunk(type(held), without).to_dict()
    given = vars(default).get("layer_types")
    if "num_hidden_layers" in sizes and isinstance(given, list) and "layer_types" not in without:
        sizes["layer_types"] = [given[0], given[-1]]
    return kind(**sizes)


def model_of(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with its inputs, from the first configuration that runs."""
    first: Exception | None = None
    for without in _WITHOUT:
        try:
            model = _built(shrunk(CONFIG_MAPPING[kind], without))
            inputs = inputs_of(model)
            with torch.no_grad():
                model(**inputs)
        except Exception as problem:
            first = first or problem
            if isinstance(problem, ImportError | TimeoutError):
                break
        else:
            return model, inputs
    assert first is not None
    raise first


def _built(config: Any) -> nn.Module:
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModel.from_config(config).parameters())
        if count > 1e7:
            raise ValueError(f"{count:.1e} parameters: the configuration is not tiny")
        model = AutoModel.from_config(config, attn_implementation="eager")
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        for p in model.parameters():
            # Larger weights, so that attention is not flat, and no norm or bias at its start.
            p.data += torch.randn(p.shape) * (0.2 if p.ndim < 2 else p.shape[-1] ** -0.5)
    return model.double().eval().requires_grad_(False)


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """A sample of what the model says it reads first."""
    config: Any = model.config
    takes = inspect.signature(model.forward).parameters
    gen = torch.Generator().manual_seed(0)

    def real(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    ids = torch.arange(5, 5 + TOKENS)[None]
    name = getattr(model, "main_input_name", "input_ids")
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", 8)
    side = side if isinstance(side, int) else 8
    channels = getattr(vision, "num_channels", 3)
    known = {
        "input_ids": ids,
        "pixel_values": real(1, channels if isinstance(channels, int) else 3, side, side),
        "pixel_values_videos": real(1, getattr(config, "num_frames", 2), 3, side, side),
        "input_values": real(1, 400),
        "input_features": real(1, getattr(config, "num_mel_bins", 16), 64),
    }
    given = {name: known.get(name, ids)}
    if "input_ids" in takes and name == "pixel_values":
        given["input_ids"] = ids
    if "noise" in takes:  # what ViTMAE hides is drawn anew in every call
        given["noise"] = torch.arange(4.0)[None].double()
    if "decoder_input_ids" in takes:
        given["decoder_input_ids"] = ids[:, :4]
    return given


def truth(model: nn.Module, inputs: dict[str, Tensor], row: Any, turn: int) -> float | None:
    """Sigma of the unmodified model between what moves and what is read, for one call."""
    before = row.argument.startswith("input of ")
    enters = model.get_submodule(row.argument.removeprefix("input of ") if before else row.module)
    ends: nn.Module | None = None if row.map == "model" else model.get_submodule(row.module)
    names = row.argument.split(", ")
    signature = inspect.signature(enters.forward)
    found: dict[str, Any] = {}

    def once(u: Tensor | None) -> Tensor:
        count, out = [0, 0], []

        def start(_: nn.Module, args: Any, kwargs: Any) -> Any:
            count[0] += 1
            if count[0] != turn + 1:
                return None
            bound = signature.bind(*args, **kwargs)
            flat = dict(bound.arguments)
            held = flat if not before else {next(iter(flat)): next(iter(flat.values()))}
            which = list(held)[:1] if before else names
            more = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
            holder = {n: bound.arguments if n in flat else bound.arguments[more] for n in which}
            if u is None:
                found["x"] = holder[which[0]][which[0]].detach().clone()
                found["several"] = len({holder[n][n].data_ptr() for n in which}) > 1
                return None
            for n in which:
                holder[n][n] = u.clone()
            return bound.args, bound.kwargs

        def finish(_: nn.Module, __: Any, result: Any) -> None:
            count[1] += 1
            if count[1] == turn + 1:
                out.append(tensor_of(result) if inner is None else inner[-1])

        def behind(leaf: nn.Module, args: Any, result: Any) -> None:
            if out and args and args[0] is out[-1] and len(out) == 1:
                out.append(result)

        inner: list[Tensor] | None = None
        with contextlib.ExitStack() as stack:
            if ends is not None and type(ends).__name__ in _ENDS and row.map == "attention":
                inner = []
                leaf = ends.get_submodule(_ENDS[type(ends).__name__])
                keep = inner.append
                stack.callback(leaf.register_forward_hook(lambda *a: keep(a[2])).remove)
            stack.callback(enters.register_forward_pre_hook(start, with_kwargs=True).remove)
            if ends is not None:
                stack.callback(ends.register_forward_hook(finish).remove)
                inside = set(ends.modules())
                for leaf in model.modules() if row.map in ("attention", "normed") else ():
                    if isinstance(leaf, nn.Linear) and leaf not in inside:
                        stack.callback(leaf.register_forward_hook(behind).remove)
            stack.enter_context(exact_maths(torch.float64))
            takes = inspect.signature(model.forward).parameters
            last = tensor_of(model(**inputs, **{k: False for k in ("use_cache",) if k in takes}))
        return last if ends is None else out[-1]

    with torch.no_grad():
        once(None)
    if found["several"] or found["x"].numel() > _LARGEST:
        return None
    x = found["x"]
    jacobian = torch.autograd.functional.jacobian(once, x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


def tensor_of(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    last = getattr(result, "last_hidden_state", None)
    if last is not None:
        return last
    values = list(result.values()) if hasattr(result, "values") else list(result)
    return next(v for v in values if isinstance(v, Tensor))


def outcomes(kind: str, maps: tuple[str, ...] = MAPS) -> list[Outcome]:
    """What becomes of every map of a model type."""
    try:
        with limited(60):
            model, inputs = model_of(kind)
    except Exception as problem:
        return [Outcome(kind, name, "skipped", f"not built: {_said(problem)}") for name in maps]
    return [_outcome(kind, model, inputs, name) for name in maps]


def _outcome(kind: str, model: nn.Module, inputs: dict[str, Tensor], name: str) -> Outcome:
    try:
        with limited(60):
            rows = list(ls.measure(model, inputs, map=name, dtype="float64", tol=1e-6))
    except InputError as refusal:
        return Outcome(kind, name, "refused", " ".join(str(refusal).split()))
    except TimeoutError as late:
        return Outcome(kind, name, "skipped", str(late))
    except Exception as problem:
        return Outcome(kind, name, "wrong", _said(problem))
    try:
        with limited(60):
            return _compared(kind, model, inputs, name, rows)
    except Exception as problem:  # of the truth
        return Outcome(kind, name, "skipped", f"no truth: {_said(problem)}")


def _said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:150]}"


def _compared(
    kind: str, model: nn.Module, inputs: dict[str, Tensor], name: str, rows: list[Any]
) -> Outcome:
    turns: dict[str, int] = {}
    compared = 0
    for row in rows:
        turn = turns.get(row.module, 0)
        turns[row.module] = turn + 1
        expected = truth(model, inputs, row, turn)
        if expected is None:
            continue
        compared += 1
        if row.sigma is None or abs(row.sigma - expected) > 1e-4 * max(expected, 1e-3):
            found = f"{row.module} ({row.argument}): {row.sigma} instead of {expected:.8g}"
            return Outcome(kind, name, "wrong", found)
    verdict = "exact" if compared else "skipped"
    return Outcome(kind, name, verdict, f"{compared} of {len(rows)} compared")


def as_page(found: Sequence[Outcome]) -> str:
    """The page of the documentation on a run: how many are exact, and each refusal."""
    kinds = sorted({one.kind for one in found})
    built = sorted({one.kind for one in found if not one.why.startswith("not built")})
    text = [
        "# Model types",
        "",
        f"Of the {len(TYPES)} model types of transformers {transformers.__version__}, {len(kinds)} "
        f"were tried in a tiny random configuration, and {len(built)} could be built and run that "
        "small with the packages at hand. Every layer of these was compared, in float64, with the "
        "dense Jacobian of the unmodified model between the tensor that its row says moves and the "
        "output of the module that it names (`tests/zoo.py`; this page is what "
        "`python tests/zoo.py` writes). *Skipped*: too many entries for a dense Jacobian, or too "
        "slow.",
        "",
        "| map | exact | refused in one line | wrong | skipped |",
        "|---|---|---|---|---|",
    ]
    for name in MAPS:
        count = Counter(o.verdict for o in found if o.map == name and o.kind in built)
        numbers = (str(count[v]) for v in ("exact", "refused", "wrong", "skipped"))
        text.append(f"| `{name}` | {' | '.join(numbers)} |")
    text += ["", "## Exact in every map that was tried", ""]
    whole = [k for k in built if {o.verdict for o in found if o.kind == k} == {"exact"}]
    text += [", ".join(f"`{k}`" for k in whole) + ".", "", "## Refused, and why", ""]
    text += ["| model type | map | why |", "|---|---|---|"]
    text += [f"| `{o.kind}` | `{o.map}` | {o.why} |" for o in found if o.verdict == "refused"]
    wrong = [f"| `{o.kind}` | `{o.map}` | {o.why} |" for o in found if o.verdict == "wrong"]
    if wrong:
        text += ["", "## Wrong", "", "| model type | map | what |", "|---|---|---|", *wrong]
    return "\n".join(text) + "\n"


if __name__ == "__main__":  # python tests/zoo.py [results of a run before] > docs/model-types.md
    if sys.argv[1:]:
        with open(sys.argv[1], encoding="utf-8") as file:
            print(as_page(sorted(Outcome(*json.loads(line)) for line in file)), end="")
    else:
        print(as_page([one for kind in TYPES for one in outcomes(kind)]), end="")

"""Open models, and their layers at an input, with all verbs as methods."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.certificates import BallCertificate
from lipscope.charts import visible
from lipscope.display import Shown
from lipscope.engine.checks import argument, is_whole, whole_number
from lipscope.engine.classifier import Classifier, Pool, decides_by, read_out_of
from lipscope.engine.direction_words import counted
from lipscope.engine.model_decision import ModelDecision, decision_at, decision_at_layer, one_sample
from lipscope.engine.ready_model import AnyModel, ReadyModel, loaded_model
from lipscope.engine.runs import OF_INPUT, AnyData, maps_at, of_one_window
from lipscope.engine.session import MapAtInput
from lipscope.engine.spec import MeasureOptions, Options
from lipscope.engine.verbs.attack import Attacked, attack
from lipscope.engine.verbs.certify import certify
from lipscope.engine.verbs.measure import bounds, directions
from lipscope.engine.verbs.push import Pushed, push
from lipscope.engine.verbs.split import Splitting, split
from lipscope.errors import InputError, shown
from lipscope.linalg import Operator, Watch
from lipscope.models import Branch, Chain, ExactNorm, Network, Pooled, read_parts, with_own_head
from lipscope.pages import Rows, interval
from lipscope.plugins import load_plugins
from lipscope.records import Measurement
from lipscope.theorems import Normed


class OpenModel(Shown, ReadyModel):
    """A model that is loaded once and queried often.

    It need not be closed: the module is prepared (eval mode, a known attention implementation)
    for each question and restored afterwards. A copy in another dtype lives as long as this
    object.

    Attributes:
        loaded: The model with its metadata for rows.
        name: Name as given by the user.
        model: The module as given.
        tokenizer: Its tokenizer, or None.
    """

    def at(
        self,
        data: AnyData = None,
        *,
        layer: int | None = 0,
        length: int | None = None,
        sample: int = 0,
        samples: int | None = None,
        head: int | None = None,
        **options: Unpack[MeasureOptions],
    ) -> LayerAtInput:
        """A layer at an input, with all verbs as methods; the model runs once for it.

        Args:
            data: Text, the ``Path`` of a text file, or a batch (one entry of it).
            layer: Index from 0; ignored for the map ``model``.
            length: Number of tokens of the text window; 64 if None.
            sample: Index of the window, or of the entry of a batch.
            samples: Number of windows that the text is cut into; None: 1, or 10 if ``sample`` is
                not the first.
            head: A single query head; all together if None.
            **options: As for `measure`, except built inputs and theorems.

        Returns:
            The layer at its input.

        Raises:
            InputError: If the request is invalid, or if capture and model disagree.

        >>> import lipscope as ls
        >>> at = ls.load_model("minilm").at("It was the best of times.", layer=3, length=7)
        >>> at.sigma <= at.upper <= 1.001 * at.sigma, at.tokens[:3]
        (True, ('[CLS]', 'it', 'was'))
        """
        sample = argument(whole_number(0, 100_000), "sample", sample)
        asked: dict[str, Any] = {**options}
        cut = of_one_window(data, asked, length, sample)
        if samples is not None:
            cut["samples"] = samples
        if head is not None:
            asked["per_head"] = True
        layers = None if layer is None else [argument(whole_number(0, 100_000), "layer", layer)]
        one, *more = maps_at(self, data, chosen=[sample], layers=layers, **cut, **asked)
        if more:
            raise InputError("`layer` should name one of several layers. Found `layer = None`.")
        return LayerAtInput(one, head, asked)

    def layers(
        self,
        data: AnyData = None,
        *,
        layers: Sequence[int] | int | str = "all",
        lengths: Sequence[int] | int | str | None = None,
        samples: int | None = None,
        watch: Callable[[int | None], Watch] | None = None,
        **options: Unpack[MeasureOptions],
    ) -> Iterator[LayerAtInput]:
        """Layers at inputs: for every length and sample, layer by layer, one pass per window.

        Args:
            data: As for `at`.
            layers: Indices from 0, or "all".
            lengths: Numbers of tokens of the text windows; 64 if None.
            samples: Windows per length; 1 if None.
            watch: If given, sigma of every layer is expected to be used, and several are solved at
                once. It returns a callback for a layer, which is called after every solver step
                (two products with the Jacobian) with a function that returns the current intervals
                ``(sigma, upper)``, one per row. An exception from the callback ends the solve.
            **options: As for `at`.

        Yields:
            Each layer at each input; the model stays prepared during the iteration.

        Raises:
            InputError: If a layer or a map does not exist.
        """
        cut = {"layers": layers, "lengths": lengths, "samples": samples}
        for one in maps_at(self, data, watch=watch, **cut, **options):
            yield LayerAtInput(one, None, options)

    def decision(
        self,
        data: AnyData = None,
        *,
        between: Sequence[str] | None = None,
        read_out: str | Path | Classifier | None = None,
        pool: Pooled | None = None,
        at_layer: int = 0,
        length: int | None = None,
        sample: int = 0,
        **options: Unpack[Options],
    ) -> ModelDecision:
        """The model's decision at an input, with its margin; its `certify` gives a radius.

        By default the model's own answer: the class of a model with a head or of a module that
        ends in logits ``(b, classes)``, or the next token of a decoder. Alternatively the nearest
        of some texts, or a read-out of the pooled hidden state.

        Holds for models that `read_network` supports; unknown parts are refused.

        Args:
            data: Text, the ``Path`` of a text file, or a batch (one entry of it).
            between: Texts; the decision is the one whose mean output has the smallest angle.
            read_out: A file with a matrix of classes, or a `Classifier`, instead of texts.
            pool: Pooling, if the model does not pool itself: ``mean``, ``first``, ``last`` or a
                token index.
            at_layer: The attention layer before which tokens move; 0: the embeddings.
            length: Number of tokens of the text; all of it, at most 64, if None.
            sample: Index of the window, or of the entry of a batch.
            **options: Options of `measure` about the input.

        Returns:
            The decision.

        Raises:
            InputError: If there is no such decision, or the model is not read in closed form.
        """
        model, item = one_sample(self, data, length, sample, options, "decision")
        return decision_at(
            model,
            item,
            decides_by(between, read_out),
            pool=pool,
            at_layer=at_layer,
            special_tokens=options.get("special_tokens") is not False,
        )

    def as_network(
        self,
        data: AnyData = None,
        *,
        length: int | None = None,
        sample: int = 0,
        **options: Unpack[Options],
    ) -> Network | Chain:
        """The parts of the model with its own head, from the token stream on.

        `lipscope.lipschitz_bound` reads an open model in this form: masks and rotations are those
        of this input. Arguments are those of `decision`.

        Returns:
            A network for scores of a pooled row, or a chain that returns all tokens.

        Raises:
            InputError: If the model has an unknown part, with its name.
        """
        if isinstance(self.model, Attention):
            return Chain((Branch(self.model, skip=False),))
        model, item = one_sample(self, data, length, sample, options, "as_network")
        whole = model.in_memory("A bound of a model").loaded
        return read_parts(with_own_head(whole), item.arguments)[0]

    def explore(self, text: str | None = None) -> Any:
        """Open the live page of `lipscope explore` on this model; in a notebook, as a frame.

        Needs the extra ``explore``.

        Args:
            text: Initial text of the page; an example if None.

        Returns:
            The page, with its ``address`` and ``end()``.
        """
        (room,) = load_plugins("lipscope.live")
        return room.explore(self, text)

    def display_lines(self) -> Iterator[tuple[str, str]]:
        """Lines of the display."""
        count = sum(p.numel() for p in self.model.parameters())
        yield from (
            ("name", self.name),
            ("parameters", f"{count:,}"),
            ("weights", self.loaded.weights),
        )
        if self.loaded.trained_length is not None:
            yield "trained length", f"{self.loaded.trained_length} tokens"


_ITS_OWN = {"model", "data", "layer", "layers", "length", "lengths", "sample", "samples"}


class LayerAtInput(Shown):
    """A layer of a model at an input: its sigma, and every verb.

    Values are computed on first access and cached. Verbs that default to float64 do so here
    too.
    """

    def __init__(self, map: MapAtInput, head: int | None, options: Mapping[str, Any]) -> None:
        heads = map.map.num_heads
        if head is not None and not (is_whole(head) and 0 <= head < (heads or 1)):
            raise InputError(
                f"`head` should be between 0 and {(heads or 1) - 1}. Found `head = {shown(head)}`."
            )
        self._map, self.head = map, head
        given = {name: v for name, v in options.items() if v is not None}
        self._options = {name: v for name, v in given.items() if name not in OF_INPUT}

    @property
    def model(self) -> ReadyModel:
        """The model."""
        return self._map.model

    @property
    def layer(self) -> int | None:
        """Index from 0; None for the map ``model``."""
        return self._map.job.layer

    @cached_property
    def x(self) -> Float[Tensor, "n d"]:
        """A copy of the map's input."""
        return self._map.x.detach().clone()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens in the model's vocabulary; their indices if it has none."""
        return self._map.tokens

    @property
    def output(self) -> Tensor:
        """The model's own output of the map, ``(n, d_out)``."""
        return self._map.map.output

    @property
    def module(self) -> str | None:
        """Path of the map's module; None for a standalone layer."""
        return self._map.map.module

    def __call__(self, x: Float[Tensor, "n d"]) -> Tensor:
        """The map at another input, for all heads together."""
        self._of_all_heads("at(x)")
        return self._map(self._fitting(x))

    def linearise(self, x: Float[Tensor, "n d"] | None = None) -> Operator:
        """The Jacobian of the map at this or another input, for all heads, tokens and outputs."""
        self._of_all_heads("linearise")
        return self._map.linearise(None if x is None else self._fitting(x))

    def _fitting(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        own = self._map.x
        if (
            not isinstance(x, Tensor)
            or x.ndim != 2
            or (x[0].shape, x.dtype) != (own[0].shape, own.dtype)
        ):
            found = (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"`x` should have shape (n, {own.shape[1]}) in {own.dtype}. Found {found}."
            )
        return x

    @property
    def sample(self) -> int:
        """Index of the window, or of the entry of a batch."""
        return self._map.job.sample

    @cached_property
    def attention(self) -> Attention:
        """A copy of the attention layer in closed form.

        Raises:
            InputError: If its weights are not read in closed form.
        """
        with self._map.window.ready():  # within it no weight requires gradients
            return copy.deepcopy(self._map.attention).requires_grad_(False)

    @cached_property
    def norm(self) -> nn.Module | None:
        """A copy of the normalisation that feeds the layer, or None."""
        found = self._map.norm
        return None if found is None else copy.deepcopy(found).requires_grad_(False)

    @property
    def normed(self) -> Normed:
        """The layer with its preceding norm, in the form that theorems take.

        Raises:
            InputError: If there is no such norm.
        """
        if self.norm is None:
            raise InputError(f"A norm should feed the layer. Found none before layer {self.layer}.")
        return Normed(self.attention, ExactNorm(self.norm))

    @property
    def radius(self) -> float:
        """Largest token norm of the input."""
        return self._map.radius

    def radius_of_norm(self) -> float:
        """Largest norm that a token can have after the norm that feeds the layer.

        Raises:
            InputError: If there is no such norm, or it is neither RMSNorm nor LayerNorm.
        """
        return self._map.radius_of_norm()

    # --- measurement

    @property
    def row(self) -> Measurement:
        """The row of `measure`."""
        return self._map.finished[self.head or 0].row

    def rows(self) -> Rows:
        """The row, or one per head with ``per_head``, with the tokens."""
        found = self._map.finished
        tokens = [token for one in found for token in one.tokens]
        return Rows([one.row for one in found], tokens)

    @property
    def id(self) -> str:
        """Digest of the question, the same for every verb."""
        return self.row.id

    @property
    def sigma(self) -> float:
        """The local Lipschitz constant: the top singular value of the Jacobian, from below.

        Raises:
            InputError: If there is none, with the reason.
        """
        return self._measured(self.row.sigma)

    @property
    def upper(self) -> float:
        """Upper end of its interval, which holds with probability ``1 - delta``."""
        return self._measured(self.row.upper)

    def _measured(self, value: float | None) -> float:
        if value is None:
            raise InputError(f"No sigma: {self.row.error or self.row.note or self.row.status}.")
        return value

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks of the row on the model and the input."""
        return tuple(self._map.remarks)

    # --- the verbs

    def bounds(self, **options: Any) -> Rows:
        """Compare every theorem with sigma at this input; see `bounds`."""
        found = bounds(*self._here(), layers=self._layers(), **self._asked("bounds", options))
        mine = [row for row in found if self.head in (None, row.head)]
        return Rows(mine, found.tokens, found.windows, found.bounds)

    def directions(self, **options: Any) -> Rows:
        """Describe the worst directions at this input; see `directions`."""
        asked = self._asked("directions", options, whole=True)
        return directions(*self._here(), layer=self._layers(), **asked)

    def push(self, **options: Any) -> Pushed:
        """Push the input along its worst direction; see `push`."""
        asked = self._asked("push", options, whole=True)
        return push(*self._here(), layer=self.layer or 0, **asked)

    def attack(self, **options: Any) -> Attacked:
        """Find inputs of this length with large sigma; see `attack`."""
        asked = self._asked("attack", options, whole=True)
        return attack(*self._here(), layer=self.layer or 0, **asked)

    def certify(self, eps: float | Tensor = 0.01, **options: Any) -> BallCertificate:
        """Certify a bound in a ball around this input; see `certify`."""
        if self.head is not None:
            options.setdefault("head", self.head)
        asked = self._asked("certify", options)
        asked.pop("per_head", None)
        return certify(*self._here(), eps=eps, layer=self.layer or 0, **asked)

    def decision(
        self,
        *,
        between: Sequence[str] | None = None,
        read_out: str | Path | Classifier | None = None,
        pool: Pool = "mean",
        special_tokens: bool = True,
    ) -> ModelDecision:
        """The decision of a read-out on this layer's pooled output, with its margin.

        Args:
            between: Texts; the decision is the one with the nearest pooled output at this layer.
            read_out: A file with a matrix of classes, or a `Classifier`, instead of texts.
            pool: ``mean`` over tokens, or the ``first`` token.
            special_tokens: Whether the texts get the model's own special tokens.

        Returns:
            The decision of the layer alone; `ModelDecision.certify` gives its radius.

        Raises:
            InputError: If neither or both are given, the layer is at a single head or another map,
                or is not read in closed form.
        """
        by = read_out_of(between, read_out)
        self._asked("decision", {}, whole=True)
        if self._map.job.map != "attention":
            raise InputError(
                "A decision reads the layer's attention. Found a layer at `map = "
                f"{self._map.job.map}`; call `model.at` without `map`."
            )
        return decision_at_layer(self._map, by, pool=pool, special_tokens=special_tokens)

    def split(self, **options: Any) -> Splitting:
        """Find tokens that are better split than moved; see `split`."""
        asked = self._asked("split", options, whole=True)
        return split(*self._here(), layers=self._layers(), **asked)

    def _here(self) -> tuple[ReadyModel, list[Any]]:
        return self.model, [self._map.item]

    def _layers(self) -> Any:
        return "all" if self.layer is None else [self.layer]

    def _asked(
        self, verb: str, options: Mapping[str, Any], *, whole: bool = False
    ) -> dict[str, Any]:
        """The options of a verb; ``whole``: it needs all heads together."""
        for name in options.keys() & _ITS_OWN:
            raise InputError(
                f"`{verb}` applies to this layer at this input. Found `{name} = "
                f"{shown(options[name])}`; call `model.at` for another."
            )
        if whole:
            self._of_all_heads(verb)
        return self._options | dict(options)

    def _of_all_heads(self, verb: str) -> None:
        if self.head is not None:
            raise InputError(
                f"`{verb}` applies to all heads together. Found a layer at `head = {self.head}`; "
                f"call `model.at` without `head`, or use `at.attention.head({self.head})`."
            )

    # --- display

    def display_lines(self) -> Iterator[tuple[str, str]]:
        """Lines of the display: location, sigma and top token."""
        row, tokens = self.row, self.tokens
        yield "model", self.model.name
        if self.layer is not None:
            yield "layer", str(self.layer)
        if self.head is not None:
            yield "head", str(self.head)
        yield "map", self._map.job.map
        if self._map.item.place:
            yield "sample", self._map.item.place
        yield "tokens", counted(tokens)
        if row.sigma is None:
            yield "sigma", f"none: {row.error or row.note or row.status}"
            return
        ends = interval(row.sigma, row.upper)
        likely = f"in {ends} with probability {1 - row.delta:g}"
        yield "sigma", ends if row.upper is None else likely
        if row.relative is not None:
            yield "relative", f"{row.relative:.3g}"
        if row.top_token is not None and row.top_share is not None:
            top = visible(tokens[row.top_token])
            yield "top token", f"{top!r} ({row.top_token}), {100 * row.top_share:.0f} %"


def load_model(
    model: AnyModel = "minilm",
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    seed: int = 0,
    allow_pickle: bool = False,
) -> OpenModel:
    """Open a model: load it once, query it often.

    Args:
        model: ``minilm``, ``smollm2``, ``dinov2``, ``random:FAMILY[:key=value,…]``, a folder in
            Hugging Face format, or a hub id; ``NAME@REVISION`` for a revision of a hub id;
            ``timm:NAME`` for a model of timm, ``random:timm:NAME[,key=value,…]`` without its
            weights. Or a torch module, or an `Attention` layer, which are left unchanged.
        tokenizer: Tokenizer of your own module, if it reads text.
        revision: Revision of a hub id, if not in the name.
        seed: Seed of the weights of a random model.
        allow_pickle: Accept a checkpoint that exists only as a pickle, loaded with
            weights-only unpickling.

    Returns:
        The open model, in the dtype of its checkpoint.

    Raises:
        InputError: If there is no such model, or its weights cannot be used.
    """
    if isinstance(model, OpenModel) and tokenizer is None:
        return model
    how = {"tokenizer": tokenizer, "revision": revision, "seed": seed, "allow_pickle": allow_pickle}
    return OpenModel(loaded_model(model, **how))

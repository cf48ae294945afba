"""A model opened once, and its layers at their inputs, which can be asked anything."""

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
from lipscope.display import Shown
from lipscope.engine.checks import argument, is_whole, whole_number
from lipscope.engine.classifier import Classifier, Pool, decides_by, read_out_of
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

_WORDS = 8  # of the input that a display shows


class OpenModel(Shown, ReadyModel):
    """A model that is loaded once and asked often.

    Nothing has to be closed: the module is made ready (eval mode, a known attention
    implementation) while a question is answered, and is as it was found afterwards. A copy in
    another dtype is kept as long as this object lives.

    Attributes:
        loaded: The model with what rows say about it.
        name: As the user gave it.
        model: The module, as it was given.
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
        """A layer at an input, which can be asked anything; the model runs once for it.

        Args:
            data: Text, the ``Path`` of a text file, or a batch (one entry of it).
            layer: Index from 0; of no account for the map ``model``.
            length: Number of tokens of the text window; 64 if None.
            sample: Index of the window, or of the entry of a batch: the first one unless given.
            samples: Number of windows that the text is cut into; if None 1, or 10 where another
                than the first is meant.
            head: A query head alone; all together if None.
            **options: As for `measure`, without inputs that are built and theorems.

        Returns:
            The layer at its input.

        Raises:
            InputError: If it cannot be had as asked, or if capture and model disagree.

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
        """Layers at inputs: for every length and sample, layer by layer, one pass a window.

        Args:
            data: As for `at`.
            layers: Indices from 0, or "all".
            lengths: Numbers of tokens of the text windows; 64 if None.
            samples: Windows per length; 1 if None.
            watch: Where sigma of every layer will be asked for, which then is found of several at
                once: what it gives for a layer is called after every step of the solver, which is
                two products with the Jacobian, with a function that gives the intervals
                ``(sigma, upper)`` so far, one a row. What that raises ends the solve.
            **options: As for `at`.

        Yields:
            Each layer at each input; the model is ready while the iteration lasts.

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
        """What the model decides at an input, and by how much; `certify` says how far it holds.

        The model's own answer: the class of a model with a head or of a module that ends in
        logits ``(b, classes)``, the next token of a decoder; or which of some texts is nearest, or
        a read-out of the pooled hidden state.

        Holds for models that `read_network` takes apart; what it does not know is refused.

        Args:
            data: Text, the ``Path`` of a text file, or a batch (one entry of it).
            between: Texts: the one whose mean output is at the smallest angle decides.
            read_out: A matrix of classes in a file, or a `Classifier`, in their place.
            pool: Which tokens are read where the model does not pool them itself: ``mean``,
                ``first``, ``last`` or the index of one.
            at_layer: The attention layer before which tokens move; 0: the embeddings.
            length: Number of tokens of the text; all of it, at most 64, if None.
            sample: Index of the window, or of the entry of a batch: the first one unless given.
            **options: Those of `measure` about the input.

        Returns:
            The decision.

        Raises:
            InputError: If there is no such decision, or the model is not read in closed form.
        """
        item = one_sample(self, data, length, sample, options, "decision")
        return decision_at(
            self,
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
        """The parts of the model with its own head, from the stream of tokens on.

        What `lipscope.lipschitz_bound` reads of an open model: masks and rotations are those of
        this input. Arguments are those of `decision`.

        Returns:
            Scores of a pooled row, or a chain that gives all tokens.

        Raises:
            InputError: If the model holds what is not known, by name.
        """
        if isinstance(self.model, Attention):
            return Chain((Branch(self.model, skip=False),))
        item = one_sample(self, data, length, sample, options, "as_network")
        whole = self.in_memory("A bound of a model").loaded
        return read_parts(with_own_head(whole), item.arguments)[0]

    def explore(self, text: str | None = None) -> Any:
        """The live page on this model, as `lipscope explore` opens it: in a notebook a frame.

        Needs the extra ``explore``.

        Args:
            text: What the page begins with; an example if None.

        Returns:
            The page: its ``address``, and ``end()``.
        """
        (room,) = load_plugins("lipscope.live")
        return room.explore(self, text)

    def display_lines(self) -> Iterator[tuple[str, str]]:
        """The lines of its display."""
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

    What is asked for is computed when it is first asked for, and kept. Verbs that compute in
    float64 unless told otherwise do so here too.
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
        """Input of the map; a copy."""
        return self._map.x.detach().clone()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens in the model's own words; their indices where it has none."""
        return self._map.tokens

    @property
    def output(self) -> Tensor:
        """The model's own output of the map, ``(n, d_out)``."""
        return self._map.map.output

    @property
    def module(self) -> str | None:
        """Path of the module that the map is of; None for a layer by itself."""
        return self._map.map.module

    def __call__(self, x: Float[Tensor, "n d"]) -> Tensor:
        """The map at another input, of all heads together."""
        self._of_all_heads("at(x)")
        return self._map(self._fitting(x))

    def linearise(self, x: Float[Tensor, "n d"] | None = None) -> Operator:
        """The Jacobian of the map here, or at another input: of all heads, tokens and outputs."""
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
        """The attention layer in closed form, with weights of its own.

        Raises:
            InputError: If its weights are not read in closed form.
        """
        with self._map.window.ready():  # in which no weight has gradients
            return copy.deepcopy(self._map.attention).requires_grad_(False)

    @cached_property
    def norm(self) -> nn.Module | None:
        """The normalisation that feeds the layer, with weights of its own, or None."""
        found = self._map.norm
        return None if found is None else copy.deepcopy(found).requires_grad_(False)

    @property
    def normed(self) -> Normed:
        """The layer with the norm that feeds it in front, as theorems take it.

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

    # --- measured

    @property
    def row(self) -> Measurement:
        """The row of `measure`."""
        return self._map.finished[self.head or 0].row

    def rows(self) -> Rows:
        """The row, or that of every head with ``per_head``, with the tokens."""
        found = self._map.finished
        tokens = [token for one in found for token in one.tokens]
        return Rows([one.row for one in found], tokens)

    @property
    def id(self) -> str:
        """Digest of the question, the same whichever verb asks it."""
        return self.row.id

    @property
    def sigma(self) -> float:
        """The local Lipschitz constant: top singular value of the Jacobian, from below.

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
        """Every theorem next to sigma here, as `bounds` gives them."""
        found = bounds(*self._here(), layers=self._layers(), **self._asked("bounds", options))
        mine = [row for row in found if self.head in (None, row.head)]
        return Rows(mine, found.tokens, found.windows, found.bounds)

    def directions(self, **options: Any) -> Rows:
        """The worst directions here in words, as `directions` gives them."""
        asked = self._asked("directions", options, whole=True)
        return directions(*self._here(), layer=self._layers(), **asked)

    def push(self, **options: Any) -> Pushed:
        """The input pushed along its worst direction, as `push` does."""
        asked = self._asked("push", options, whole=True)
        return push(*self._here(), layer=self.layer or 0, **asked)

    def attack(self, **options: Any) -> Attacked:
        """Inputs of this length that make sigma large, as `attack` finds them."""
        asked = self._asked("attack", options, whole=True)
        return attack(*self._here(), layer=self.layer or 0, **asked)

    def certify(self, eps: float | Tensor = 0.01, **options: Any) -> BallCertificate:
        """A bound in a ball around this input, as `certify` gives it."""
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
        """What a read-out of this layer's pooled output decides here, and by how much.

        Args:
            between: Texts: the one whose pooled output at this layer is nearest decides.
            read_out: A matrix of classes in a file, or a `Classifier`, in their place.
            pool: ``mean`` over tokens, or the ``first`` token.
            special_tokens: Whether those texts have the model's own special tokens.

        Returns:
            The decision, of the layer by itself: `ModelDecision.certify` says how far it holds.

        Raises:
            InputError: If neither or both were given, the layer is at one head or another map, or
                is not read in closed form.
        """
        by = read_out_of(between, read_out)
        self._asked("decision", {}, whole=True)
        if self._map.job.map != "attention":
            raise InputError(
                "A decision reads the layer's attention. Found a layer at `map = "
                f"{self._map.job.map}`; ask `model.at` without `map`."
            )
        return decision_at_layer(self._map, by, pool=pool, special_tokens=special_tokens)

    def split(self, **options: Any) -> Splitting:
        """Tokens that are better split than moved, as `split` finds them."""
        asked = self._asked("split", options, whole=True)
        return split(*self._here(), layers=self._layers(), **asked)

    def _here(self) -> tuple[ReadyModel, list[Any]]:
        return self.model, [self._map.item]

    def _layers(self) -> Any:
        return "all" if self.layer is None else [self.layer]

    def _asked(
        self, verb: str, options: Mapping[str, Any], *, whole: bool = False
    ) -> dict[str, Any]:
        """The options of a verb; ``whole``: of all heads together."""
        for name in options.keys() & _ITS_OWN:
            raise InputError(
                f"`{verb}` is asked of this layer at this input. Found `{name} = "
                f"{shown(options[name])}`; ask `model.at` for another."
            )
        if whole:
            self._of_all_heads(verb)
        return self._options | dict(options)

    def _of_all_heads(self, verb: str) -> None:
        if self.head is not None:
            raise InputError(
                f"`{verb}` speaks of all heads together. Found a layer at `head = {self.head}`; "
                f"ask `model.at` without `head`, or `at.attention.head({self.head})`."
            )

    # --- shown

    def display_lines(self) -> Iterator[tuple[str, str]]:
        """The lines of its display: where it is, its sigma, and what carries it."""
        row, tokens = self.row, self.tokens
        yield "model", self.model.name
        if self.layer is not None:
            yield "layer", str(self.layer)
        if self.head is not None:
            yield "head", str(self.head)
        yield "map", self._map.job.map
        if self._map.item.place:
            yield "sample", self._map.item.place
        words = " ".join(tokens[:_WORDS]) + " …" * (len(tokens) > _WORDS)
        yield "tokens", f"{len(tokens)}: {words}"
        if row.sigma is None:
            yield "sigma", f"none: {row.error or row.note or row.status}"
            return
        ends = interval(row.sigma, row.upper)
        likely = f"in {ends} with probability {1 - row.delta:g}"
        yield "sigma", ends if row.upper is None else likely
        if row.relative is not None:
            yield "relative", f"{row.relative:.3g}"
        if row.top_token is not None and row.top_share is not None:
            top = tokens[row.top_token]
            yield "top token", f"{top!r} ({row.top_token}), {100 * row.top_share:.0f} %"


def load_model(
    model: AnyModel = "minilm",
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    seed: int = 0,
    allow_pickle: bool = False,
) -> OpenModel:
    """Open a model: load it once, and ask it often.

    Args:
        model: ``minilm``, ``smollm2``, ``dinov2``, ``random:FAMILY[:key=value,…]``, a folder in
            Hugging Face format, or a hub id; ``NAME@REVISION`` for a revision of a hub id;
            ``timm:NAME`` for a model of timm, ``random:timm:NAME[,key=value,…]`` without its
            weights. Or a torch module, or one `Attention` layer, which stay as they are.
        tokenizer: Of a module of your own that reads text.
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

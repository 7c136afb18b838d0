"""What a language model is made of: one frozen record that cannot be half wrong."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch

from innerloop import nn
from innerloop.lm.kinds import KINDS, SHORT
from innerloop.lm.pattern import Entry, parse

VERSION = 1
"""Of what ``to_dict`` returns; ``from_dict`` reads no other."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A causal language model: an embedding, pre-normed blocks of a memory and a feed-forward, a head.

    Raises:
        TypeError: If a field has another type.
        ValueError: If a field is out of range, the pattern does not parse, or a layer does not take its options.

    Example:
        >>> from innerloop.lm import Config
        >>> config = Config(vocab_size=256, width=128, pattern="3*gated_delta_rule+attention", depth=8)
        >>> [entry.rule for entry in config.layers].count("softmax_attention")
        2
        >>> Config.from_dict(config.to_dict()) == config
        True
        >>> Config(vocab_size=256, pattern="gated_delta_net")
        Traceback (most recent call last):
            ...
        ValueError: pattern 'gated_delta_net', character 1: wanted the name of a layer; got 'gated_delta_net'. Did you
        mean 'gated_delta_rule'?
    """

    vocab_size: int
    """How many tokens there are."""
    width: int = 256
    """Of the residual stream, D."""
    pattern: str = "gated_delta_rule"
    """The layers, by names of rules: ``3*gated_delta_rule+attention``, ``2*(mamba2+attention(window=256))``."""
    depth: int | None = None
    """Layers in all, a multiple of the pattern's, which is repeated; the pattern's own number if None."""
    heads: int = 4
    """Of every layer whose options do not say otherwise."""
    feed_forward_width: int | None = None
    """Of the feed-forwards inside; 8/3 of the width, rounded up to a multiple of 32, if None; 0 leaves them out."""
    tied: bool = True
    """Whether the head's weight is the embedding's."""
    dropout: float = 0.0
    """Of the embedding and of what each layer adds, in training; in [0, 1)."""
    layer_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name of a rule, options of its layers, such as ``{"gated_delta_rule": {"variant": "qwen"}}``; what the
    pattern says of a layer goes before them."""
    checkpointing: bool = False
    """Whether training keeps only each block's input, and computes the rest anew in the backward pass."""
    norm_eps: float = 1e-6
    """Of the norms in front of layers, feed-forwards and head."""
    initial_std: float = 0.02
    """Of the embedding at the start."""

    def __post_init__(self) -> None:
        """Check every field, and that every layer can be made."""
        self._check_numbers()
        if not isinstance(self.layer_options, Mapping):
            raise TypeError(f"layer_options must be a dict by rule; got {type(self.layer_options).__name__}")
        for rule, chosen in self.layer_options.items():
            if not isinstance(chosen, Mapping):
                raise TypeError(f"layer_options must hold a dict of options by rule; got {chosen!r} for {rule}")
        options = {SHORT.get(rule, rule): dict(chosen) for rule, chosen in self.layer_options.items()}
        object.__setattr__(self, "layer_options", copy.deepcopy(options))
        length = len(parse(self.pattern))
        if self.depth is not None and self.depth % length:
            raise ValueError(f"depth must be a multiple of the {length} layers of pattern {self.pattern!r}; "
                             f"got {self.depth}")  # fmt: skip
        for rule, chosen in options.items():
            if rule not in KINDS:
                raise ValueError(f"layer_options must be by rule, one of {', '.join((*SHORT, *KINDS))}; got {rule!r}")
            _check_options(rule, chosen)
        with torch.device("meta"):
            made = [self.make_layer(entry) for entry in sorted(set(self.layers), key=repr)]
        values = {layer.value.out_features for layer in made if isinstance(layer, nn.RWKV7)}
        if len(values) > 1:
            raise ValueError("all rwkv7 layers must have values of one width, which later ones mix with the first's; "
                             f"got {', '.join(map(str, sorted(values)))}")  # fmt: skip

    @property
    def layers(self) -> tuple[Entry, ...]:
        """The layers from the first to the last."""
        once = parse(self.pattern)
        return once * (1 if self.depth is None else self.depth // len(once))

    @property
    def inner_width(self) -> int:
        """The inner width of the feed-forwards, 0 if there are none."""
        if self.feed_forward_width is not None:
            return self.feed_forward_width
        return 32 * math.ceil(8 * self.width / (3 * 32))

    def make_layer(self, entry: Entry, index: int = 0, layers: int = 1) -> nn.Layer:
        """Make the layer of an entry, the ``index``-th of so many ``layers`` of its kind.

        Args:
            entry: One of ``layers``.
            index: How many of the same rule come before it.
            layers: How many of that rule the model has.

        Returns:
            The layer, with its initial values.

        Raises:
            ValueError: If the layer does not take its options.
        """
        kind, given = KINDS[entry.rule], dict(entry.options)
        _check_options(entry.rule, given)
        options = self.layer_options.get(entry.rule, {}) | given | dict(kind.fixed)
        if kind.heads:
            options.setdefault("heads", self.heads)
        if kind.indexed:
            options |= {"index": index, "layers": layers}
        try:
            return kind.make(self.width, **options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a {entry.rule} layer cannot be made of this configuration: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and a version, as JSON can hold them.

        Returns:
            What ``from_dict`` takes.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return copy.deepcopy({"version": VERSION, **fields})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Return the configuration of which ``to_dict`` returned this.

        Args:
            values: Its fields and version.

        Returns:
            The configuration.

        Raises:
            TypeError: If ``values`` is no mapping, or a field has another type.
            ValueError: If the version is another, or a field is unknown, missing or wrong.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"a configuration must be a mapping of its fields; got {type(values).__name__}")
        if values.get("version") != VERSION:
            raise ValueError(f"the configuration must have version {VERSION}; got {values.get('version')}. "
                             "Load it with the release of innerloop that wrote it.")  # fmt: skip
        fields = {f.name for f in dataclasses.fields(cls)}
        given = {name: value for name, value in values.items() if name != "version"}
        if unknown := set(given) - fields:
            raise ValueError(f"a configuration has the fields {', '.join(sorted(fields))}; "
                             f"got an unknown {sorted(unknown)[0]!r}")  # fmt: skip
        if "vocab_size" not in given:
            raise ValueError("a configuration must have a vocab_size; got none")
        return cls(**given)

    def _check_numbers(self) -> None:
        for name, least in (("vocab_size", 1), ("width", 1), ("depth", 1), ("heads", 1), ("feed_forward_width", 0)):
            value = getattr(self, name)
            if value is None and name in ("depth", "feed_forward_width"):
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name} must be a whole number; got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}")
            object.__setattr__(self, name, int(value))
        for name in ("tied", "checkpointing"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False; got {getattr(self, name)!r}")
        for name, words, fits in (
            ("dropout", "lie in [0, 1)", lambda x: 0 <= x < 1),
            ("norm_eps", "be finite and above 0", lambda x: 0 < x < math.inf),
            ("initial_std", "be finite and at least 0", lambda x: 0 <= x < math.inf),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number; got {value!r}")
            if not fits(value):
                raise ValueError(f"{name} must {words}; got {value}")


def _check_options(rule: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in KINDS[rule].options:
            raise ValueError(f"a {rule} layer takes the options {', '.join(KINDS[rule].options)}; got {name!r}")

"""The language model as ``transformers`` knows models; importing this module registers it.

    import innerloop.integrations.huggingface
    model = AutoModelForCausalLM.from_pretrained(folder)

reads what ``LanguageModel.save`` or ``save_pretrained`` wrote, and ``LanguageModel.load`` reads either, too. It needs
the extra ``hf``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from innerloop.lm import Config, LanguageModel, State
from innerloop.lm.files import MODEL_TYPE
from innerloop.lm.loss import IGNORED
from innerloop.nn.gates import Wide
from innerloop.shapes import readable

__all__ = ["CausalOutput", "InnerloopConfig", "InnerloopForCausalLM", "StateCache"]


_THEIRS = {"hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "heads"}
"""What ``transformers`` calls fields of ours."""
_OURS = (*_THEIRS, *(field.name for field in dataclasses.fields(Config)))


class InnerloopConfig(PretrainedConfig):
    """An ``innerloop.lm.Config`` as ``config.json`` holds it.

    Args:
        innerloop: The fields, as ``Config.to_dict`` returns them; the smallest model if None.
        kwargs: What all configurations of ``transformers`` take; and fields by name, ours (``width``) or theirs
            (``hidden_size``), which go before those of ``innerloop``, as they do when they are set later.

    Raises:
        ValueError: If a field is wrong.

    Example:
        >>> from innerloop.integrations.huggingface import InnerloopConfig
        >>> from innerloop.lm import Config
        >>> InnerloopConfig(Config(vocab_size=256, width=64, pattern="2*kda").to_dict()).num_hidden_layers
        2
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # ruff: ignore[mutable-class-default] - a list is asked for

    def __init__(self, innerloop: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Keep the fields, once they make a configuration."""
        config = Config(vocab_size=1, width=4) if innerloop is None else Config.from_dict(innerloop)
        changed = {name: kwargs.pop(name) for name in _OURS if name in kwargs}
        self.innerloop = _changed(config, changed).to_dict()
        self.use_cache = kwargs.pop("use_cache", True)
        kwargs["tie_word_embeddings"] = False  # a tied head has no parameter of its own
        super().__init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:  # ruff: ignore[any-type] - as theirs
        """Return the configuration; fields of ours among ``kwargs`` are changed together, for one may need another."""
        changed = {name: kwargs.pop(name) for name in _OURS if name in kwargs}
        return super().from_dict({**config_dict, **changed}, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:  # ruff: ignore[any-type] - whatever is set
        """Set an attribute; fields of the model by any of their names, so that they say what is built."""
        if name != "innerloop" and name not in _OURS:
            super().__setattr__(name, value)
            return
        config = Config.from_dict(value) if name == "innerloop" else _changed(self.model(), {name: value})
        for key, said in {"innerloop": config.to_dict(), **_said(config)}.items():
            super().__setattr__(key, said)

    def __getattr__(self, name: str) -> Any:  # ruff: ignore[any-type] - a field
        """Return a field by our name."""
        if name in _OURS and "innerloop" in self.__dict__:
            return self.innerloop[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def model(self) -> Config:
        """Return the configuration of the model itself."""
        return Config.from_dict(self.innerloop)


def _said(config: Config) -> dict[str, int]:
    """Return what ``transformers`` reads of a configuration, by its names."""
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.width, "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.heads,
    }  # fmt: skip


def _changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a configuration with other values of fields, by their names or ours."""
    said = _said(config)
    given = {_THEIRS.get(name, name): x for name, x in values.items() if name not in said or x != said[name]}
    return dataclasses.replace(config, **given)


class StateCache:
    """A model's state, as ``generate`` carries it.

    ``forward`` puts the newer state into it; the tensors of the older one are left as they are.
    """

    is_compileable = False
    is_linear = (True,)

    def __init__(self, state: State | None = None, length: int = 0) -> None:
        """Keep a state that has seen ``length`` columns of the batch, pads among them."""
        self.state, self.length = state, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many columns have been seen."""
        del layer_idx
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row n go on from row ``beam_idx[n]``."""
        self.state = None if self.state is None else self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self.state = None if self.state is None else self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.state is not None:
            rows = torch.arange(len(self.state.position), device=self.state.position.device)
            self.state = self.state.select(rows.repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        """Refuse: a memory that merges its tokens cannot go back."""
        raise ValueError(f"a StateCache cannot be cropped (to {max_length}); keep a copy to go back to")

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.length = None, 0


@dataclasses.dataclass
class CausalOutput(ModelOutput):
    """What the model returns; ``cache`` and ``past_key_values`` are one thing under its newer and older name."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: StateCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class InnerloopForCausalLM(PreTrainedModel, GenerationMixin):
    """``innerloop.lm.LanguageModel`` with ``save_pretrained``, ``generate`` and whatever else a ``Trainer`` wants.

    Args:
        config: What it is made of.

    Example:
        >>> import torch
        >>> from innerloop.integrations.huggingface import InnerloopForCausalLM
        >>> from innerloop.lm import Config, LanguageModel
        >>> model = InnerloopForCausalLM.of(LanguageModel(Config(vocab_size=50, width=16, heads=2)))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 7])
    """

    config_class = InnerloopConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # ruff: ignore[mutable-class-default] - a list is asked for
    _is_stateful = True  # speculation would need to take tokens back

    def __init__(self, config: InnerloopConfig) -> None:
        """Draw the weights as ``LanguageModel`` does."""
        super().__init__(config)
        self._take(LanguageModel(config.model()))

    @classmethod
    def of(cls, model: LanguageModel) -> InnerloopForCausalLM:
        """Return the face of a model, which it shares its parameters with.

        Args:
            model: Any language model.

        Returns:
            The face, in the model's mode.
        """
        with torch.device("meta"):
            face = cls(InnerloopConfig(model.config.to_dict()))
        face._take(model)
        return face.train(model.training)

    def _take(self, model: LanguageModel) -> None:
        self.model = model
        self.gradient_checkpointing = model.checkpointing
        # `dtype=torch.bfloat16` leaves alone what is named here.
        self._keep_in_fp32_modules_strict = {
            f"{path}.{name}"
            for path, module in self.named_modules()
            if isinstance(module, Wide)
            for name in module.wide
            if getattr(module, name) is not None
        }
        for parameter in self.parameters():
            if not parameter.is_meta:
                parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        return_dict: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalOutput | tuple[Any, ...]:
        """Run the model as ``transformers`` does.

        Args:
            input_ids: Tokens that ``cache`` has not seen yet, ``[B, T]``.
            attention_mask: Which of them are real, ``[B, T]``; longer ones name the tokens in the cache first.
            cache: What the last call returned; ``past_key_values`` in older releases.
            labels: The same tokens, ``[B, T]``; they are moved by one here. -100 does not count.
            use_cache: Whether to return the cache; as the configuration says if None, but never in training.
            logits_to_keep: Of how many tokens, from the end, to return the logits, or of which; 0 for all.
            cu_seqlens: Bounds of packed sequences in one row, ``[N+1]``.
            num_items_in_batch: What to divide the sum of the losses by, instead of taking the mean.
            return_dict: False for a tuple.
            output_hidden_states: Whether to return what each block reads, and last what the head reads; as the
                configuration says if None.
            kwargs: What ``transformers`` says beside; of it ``position_ids`` that start anew within a row pack
                sequences.

        Returns:
            The loss, if there are labels; the logits, but not of a training step with labels, which never holds them;
            the cache; the hidden states, if they were asked for, one more than there are layers.

        Raises:
            TypeError: If the cache is no StateCache.
            ValueError: If a shape disagrees, embeddings are given, or attention's weights are asked for.
        """
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions must be False; these layers return no weights of attention")
        if kwargs.get("inputs_embeds") is not None:
            raise ValueError("input_ids must be given; inputs_embeds are not taken")
        cache = _checked_cache(cache, kwargs.get("past_key_values"))
        if cu_seqlens is None:
            cu_seqlens = _bounds(kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids"), input_ids, attention_mask)
        if attention_mask is not None:
            attention_mask = attention_mask[:, -input_ids.shape[1] :]
        state = None if cache is None else cache.state
        where = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens}
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        streams: list[Tensor] | None = [] if output_hidden_states else None
        x, state = self.model.hidden(input_ids, state, streams=streams, **where)
        loss = None if labels is None else self._loss(x, labels, num_items_in_batch, **where)
        if use_cache is None:
            use_cache = cache is not None or (self.config.use_cache and not self.training)
        if use_cache:
            cache = StateCache() if cache is None else cache
            cache.state, cache.length = state, cache.length + input_ids.shape[1]
        logits = None
        if labels is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.logits(x[:, kept])
        hidden = None if streams is None else tuple(streams)
        out = CausalOutput(loss=loss, logits=logits, cache=cache if use_cache else None, hidden_states=hidden)
        returns = self.config.return_dict if return_dict is None else return_dict
        return out if returns else out.to_tuple()

    def _loss(self, x: Tensor, labels: Tensor, count: int | Tensor | None, **where: Tensor | None) -> Tensor:
        if labels.shape != x.shape[:2]:
            raise ValueError(f"labels must have shape [B, T] = {list(x.shape[:2])}; got {list(labels.shape)}")
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if (bounds := where["cu_seqlens"]) is not None:
            # The last token of a sequence does not foretell the first of the next.
            last = torch.zeros(labels.shape[1] + 1, dtype=torch.bool, device=labels.device)
            labels = labels.masked_fill(last.index_fill(0, bounds.long(), True)[1:], IGNORED)
        loss = self.model.loss_of(x, labels, reduction="mean" if count is None else "sum", **where)
        return loss if count is None else loss / torch.as_tensor(count, device=loss.device)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return what ``forward`` takes: the tokens that the cache has not seen."""
        cache = _checked_cache(cache, past_key_values)
        if cache is not None:
            total = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
            new = total - cache.length
            if not 0 < new <= input_ids.shape[1]:
                raise ValueError(f"input_ids must go beyond the {cache.length} tokens that the cache has seen; "
                                 f"got {total} in all, {input_ids.shape[1]} of them given")  # fmt: skip
            input_ids = input_ids[:, -new:]
        passed = ("use_cache", "logits_to_keep", "return_dict", "output_hidden_states", "output_attentions")
        kept = {name: kwargs[name] for name in passed if name in kwargs}
        return {"input_ids": input_ids.contiguous(), "attention_mask": attention_mask, "cache": cache, **kept}

    def _update_model_kwargs_for_generation(
        self, outputs: CausalOutput, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if outputs.cache is not None:
            model_kwargs[_CACHE] = outputs.cache
        return model_kwargs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first call makes a StateCache

    def _init_weights(self, module: nn.Module) -> None:
        """Let a module draw its initial values, but for what has been loaded."""
        if isinstance(module, nn.ParameterDict | nn.ParameterList):
            module = next(owner for owner in self.modules() if any(child is module for child in owner.children()))
        reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
        below = list(module.modules())[1:]
        if reset is None or any(hasattr(child, "reset_parameters") for child in below):
            return  # those below draw their own
        loaded = [(p, p.detach().clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
        reset()
        with torch.no_grad():
            for parameter, value in loaded:
                parameter.copy_(value)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        self.gradient_checkpointing = self.model.checkpointing = enable

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head; None where it is the embedding."""
        return self.model.head

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Take the weights of another embedding, and as many tokens as it has."""
        count = value.num_embeddings
        self.model.embedding.num_embeddings, self.model.embedding.weight = count, value.weight
        self.model.config = dataclasses.replace(self.model.config, vocab_size=count)
        self.config.innerloop = self.model.config.to_dict()

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Take the weights of another head."""
        if self.model.head is None:
            raise ValueError("the head of this model is its embedding; set that")
        self.model.head.out_features, self.model.head.weight = value.out_features, value.weight


def _checked_cache(cache: object, older: object) -> StateCache | None:
    cache = older if cache is None else cache
    if cache is not None and not isinstance(cache, StateCache):
        raise TypeError(f"cache must be a StateCache that this model has returned, or None; got {type(cache).__name__}")
    return cache


def _bounds(given: Tensor | None, positions: Tensor | None, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return the bounds of packed sequences: as given, or where positions start anew."""
    if given is not None or positions is None or mask is not None or not readable(positions):
        return given
    starts = positions.diff(dim=-1) != 1
    if positions.ndim != 2 or not bool(starts.any()):
        return None
    if tokens.shape[0] != 1:
        raise ValueError("position_ids that start anew pack sequences, which must lie in one row; "
                         f"got {tokens.shape[0]} rows")  # fmt: skip
    inner = starts[0].nonzero()[:, 0] + 1
    return F.pad(F.pad(inner, (1, 0)), (0, 1), value=tokens.shape[1])


_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What this release of ``transformers`` calls it."""

AutoConfig.register(MODEL_TYPE, InnerloopConfig)
AutoModelForCausalLM.register(InnerloopConfig, InnerloopForCausalLM)

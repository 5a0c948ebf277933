"""Load tokenizers of the Hugging Face hub or of a directory, through `transformers`, without importing torch.

Code of a repository is never executed. The small tokenizer, which needs no `transformers`, is in
`hermes_rl.tokens.tokenizer`.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import os
import socket
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from hermes_rl.spec.template_limits import LimitedEnvironment, limited_rendering
from hermes_rl.tokens.tokenizer import Messages, TokenizerUnavailable, Tools, refusals
from hermes_rl.values import replace_surrogates

_IMPORTING = Lock()
"""Lock for imports: a library that another thread is importing cannot be used yet."""
_USES_TORCH = "transformers.modeling_rope_utils"
"""The only module that AutoTokenizer imports and that imports torch when it is imported."""
_DATA_TYPES = ("dtype", "torch_dtype")
MOST_GROWTH = 64
"""Maximum characters that the replacements of a tokenizer may write for one."""
PATIENCE = 5.0
"""Maximum seconds for a connection to the hub."""


class HubTokenizer:
    """Tokenizer of the hub or a directory; see `tokenizer.Tokenizer`."""

    def __init__(self, name_or_path: str, tokenizer: Any = None, *, local: bool = False) -> None:
        self.name = name_or_path
        self._tokenizer = _load_pretrained(name_or_path, local) if tokenizer is None else tokenizer
        if tokenizer is None:
            _require_bounded_growth(name_or_path, getattr(self._tokenizer, "backend_tokenizer", None))
        self._engine = _engine_of(self._tokenizer)
        _limit_templates()
        self._lock = Lock()
        added = self._tokenizer.added_tokens_decoder.values()
        self.control = frozenset(token.content for token in added if token.special)
        self.markup = frozenset(token.content for token in added if not token.special)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def encode(self, text: str) -> list[int]:
        if self._engine is not None:
            with refusals(self.name):
                (encoded,) = self._engine.encode_batch_fast([replace_surrogates(text)], add_special_tokens=False)
            return list(encoded.ids)
        # The wrapper sets padding and truncation in each call, so two threads must not call it concurrently.
        with self._lock, refusals(self.name):
            return list(self._tokenizer.encode(replace_surrogates(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        with self._lock:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def render(self, messages: Messages, tools: Tools | None, *, add_generation_prompt: bool) -> str:
        with refusals(self.name), limited_rendering():
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        return text


def wrapped(tokenizer: Any) -> HubTokenizer:
    """Return a wrapper around a copy of a `transformers` tokenizer, whose padding and truncation are disabled.

    Raises:
        TokenizerUnavailable: it has no chat template.
    """
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    return HubTokenizer(name, _with_template(copy.deepcopy(tokenizer), name))


@functools.cache
def hub_reachable() -> bool:
    """Return True if a connection to the hub can be made; tested once.

    The library itself would retry for most of a minute, even for a tokenizer in its cache.
    """
    parts = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if parts.scheme in urllib.request.getproxies():
        return True  # only the proxy knows
    try:
        socket.create_connection((str(parts.hostname), parts.port or 443), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


def auto_tokenizer() -> Any:
    """Return the class AutoTokenizer of `transformers`, imported without torch.

    AutoTokenizer imports configurations of models, and with them a module that imports torch if it is installed. Torch
    takes seconds and several hundred MB, and only models use it: the module gets a `_LazyTorch`. Every other module, in
    `transformers` too, finds the installed torch.
    """
    without_advice()
    with _IMPORTING:
        import transformers

        if _torch_is_unused() and _USES_TORCH not in sys.modules:
            _import_with_lazy_torch()
        return transformers.AutoTokenizer


def _torch_is_unused() -> bool:
    """Return True if torch is installed and nothing in this process has imported it."""
    return "torch" not in sys.modules and find_spec("torch") is not None


def _import_with_lazy_torch() -> None:
    lazy = _LazyTorch("torch")
    lazy.__spec__ = find_spec("torch")
    sys.modules["torch"] = lazy
    try:
        import_module(_USES_TORCH)
    finally:
        lazy.retire()


class _LazyTorch(ModuleType):
    """The value of the name `torch` in the module that imports torch too early: its first use imports torch.

    It is in `sys.modules` only during the import of that module.
    """

    def __getattr__(self, name: str) -> Any:
        self.retire()
        torch = import_module("torch")
        if (user := sys.modules.get(_USES_TORCH)) is not None:
            vars(user)["torch"] = torch
        return getattr(torch, name)

    def retire(self) -> None:
        if sys.modules.get("torch") is self:
            del sys.modules["torch"]


def without_advice() -> None:
    """Suppress the library's message on import that models need PyTorch: hermes-rl uses only its tokenizers."""
    logging.getLogger("transformers").addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in str(record.msg)


def _limit_templates() -> None:
    """Make the library compile chat templates, which are untrusted, in an environment with limits."""
    from transformers.utils import chat_template_utils

    if chat_template_utils.ImmutableSandboxedEnvironment is not LimitedEnvironment:
        chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment
        chat_template_utils._compile_jinja_template.cache_clear()  # earlier compiled templates have no limits


def _require_bounded_growth(name: str, engine: Any) -> None:
    """Raise `TokenizerUnavailable` if a normalizer or decoder may turn a text into a much longer one."""
    for part in ("normalizer", "decoder"):
        step = getattr(engine, part, None)
        if step is not None and (growth := _growth(json.loads(step.__getstate__()))) > MOST_GROWTH:
            raise TokenizerUnavailable(
                f"the tokenizer {name!r} multiplies texts: its {part} may write {growth:.3g} characters for one, "
                f"expected at most {MOST_GROWTH}"
            )


def _growth(step: Mapping[str, Any]) -> float:
    """Return the number of characters that a step of a tokenizer may write for one."""
    growth = 1.0
    if step["type"] == "Replace":
        replaced, written = step["pattern"].get("String"), len(step["content"])
        growth = written / len(replaced) if replaced else written + bool(written)  # a pattern may match between two
    elif step["type"] == "Prepend":
        growth = 1 + len(step["prepend"])
    return math.prod(map(_growth, (*step.get("normalizers", ()), *step.get("decoders", ()))), start=max(1.0, growth))


def _engine_of(tokenizer: Any) -> Any:
    """Return the engine of a wrapper that adds nothing to it, else None: used directly, it takes two thirds of the
    time.
    """
    from transformers import PreTrainedTokenizerFast as Wrapper

    is_unmodified = isinstance(tokenizer, Wrapper) and all(
        getattr(type(tokenizer), method, None) is getattr(Wrapper, method, tokenizer)
        for method in ("encode", "_encode_plus")
    )
    if not is_unmodified or tokenizer.split_special_tokens:
        return None
    engine = tokenizer.backend_tokenizer
    engine.no_truncation()
    engine.no_padding()
    return engine


def _load_pretrained(name_or_path: str, local: bool) -> Any:
    try:
        loader = auto_tokenizer()
        offline = local or (not Path(name_or_path).exists() and not hub_reachable())
        config = _light_config(name_or_path, offline) if _torch_is_unused() else None
        tokenizer = loader.from_pretrained(
            name_or_path, config=config, trust_remote_code=False, local_files_only=offline
        )
    except (ImportError, OSError, ValueError, KeyError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TokenizerUnavailable(
            f"the tokenizer {name_or_path!r} cannot be loaded: {first_line}\n"
            "Name an available one under `tokenizer` of the server (a hub name or a folder)."
        ) from error
    return _with_template(tokenizer, name_or_path)


def _light_config(name_or_path: str, offline: bool) -> Any:
    """Return a configuration with all fields by which AutoTokenizer selects a class, or None if the library must read
    it.

    The library creates one of the model's class. That may need torch for its module (Llama) or for its data type.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    try:
        fields, _ = PreTrainedConfig.get_config_dict(name_or_path, local_files_only=offline)
    except (OSError, ValueError):
        return None
    model_type = fields.get("model_type")
    if not fields or model_type == "encoder-decoder" or (model_type == "mistral" and "layer_types" in fields):
        return None  # for these the library reads further fields
    if (name := CONFIG_MAPPING_NAMES.get(model_type)) is not None:
        shared = list(CONFIG_MAPPING_NAMES.values()).count(name) > 1
        if shared and name.lower() != f"{model_type}config":
            return None  # a class that several types share has the type of its name
        selectors = {field: fields[field] for field in ("tokenizer_class", "model_name") if field in fields}
        # The library uses only the name of the class.
        return type(name, (SimpleNamespace,), {})(model_type=model_type, _name_or_path=name_or_path, **selectors)
    if model_type in CONFIG_MAPPING:
        return None  # this process has registered a class for it
    return PreTrainedConfig.from_dict({name: value for name, value in fields.items() if name not in _DATA_TYPES})


def _with_template(tokenizer: Any, name: str) -> Any:
    if not getattr(tokenizer, "chat_template", None):
        raise TokenizerUnavailable(f"the tokenizer {name!r} has no chat template")
    return tokenizer

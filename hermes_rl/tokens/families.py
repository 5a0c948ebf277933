"""Provide hand-written renderers of model families: the only module that imports `renderers` (0.1.12).

Messages are guarded before they reach it, so that control tokens in texts remain text. Its results follow hermes-rl's
rules too: arguments may be text, and a quoted passage is not a call.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeVar

from hermes_rl.errors import UserError
from hermes_rl.plugins import Code, did_you_mean
from hermes_rl.tokens.hub import without_advice
from hermes_rl.tokens.parsers.base import Parsed, ParsedCall, Quotes, Status, make_call, parse_ids
from hermes_rl.tokens.parsers.table import load_parser
from hermes_rl.tokens.rendering import RendererRefused, RendererSettings, for_template, parse_in_thread
from hermes_rl.tokens.texts import Guard, guarded
from hermes_rl.tokens.tokenizer import Messages, TemplateRefused, Tokenizer, Tools, refusals
from hermes_rl.tokens.transcript import Branch, ids
from hermes_rl.user_code.failures import EndedError, ForeignError
from hermes_rl.user_code.pool import POOL
from hermes_rl.user_code.process import current_runner
from hermes_rl.user_code.proxies import lives_in_runner

log = logging.getLogger(__name__)
T = TypeVar("T")

_TAIL_TOKENS = 256
"""Number of prompt tokens that a family receives: it looks back only to the end of the last turn."""
FEW_TOKENS = 512
FEW_CHARACTERS = 1 << 13
"""Size up to which a turn is parsed in the runner, in quadratic time."""
MARK = "<"
"""Common prefix of all call marks; a text without it is parsed in linear time."""
PARSE_SECONDS = 2.0
"""Timeout in seconds for a turn that is parsed in a separate process."""
_PART = 1 << 40
"""Start of the ids for tokens that are parts of a character; no vocabulary is that large."""
_STATUS = {
    "ok": Status.OK,
    "invalid_json": Status.INVALID_JSON,
    "unclosed_block": Status.UNCLOSED,
    "missing_name": Status.MISSING_NAME,
    "malformed_structure": Status.MALFORMED,
    "unknown_tool": Status.OK,  # the result of the call tells the model which tools exist
}


def family_names() -> list[str]:
    """Return the names of the families, as accepted by `renderer.name`."""
    without_advice()
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return sorted(name for name in RENDERER_REGISTRY if name != "default")


def family_of(model: str) -> str | None:
    """Return the family of a model of the hub, or None."""
    without_advice()
    from renderers.base import MODEL_RENDERER_MAP

    family: str | None = MODEL_RENDERER_MAP.get(model)
    return family


def family_renderer(name: str, tokenizer: Tokenizer, settings: RendererSettings) -> FamilyRenderer:
    """Return the renderer of a family.

    Raises:
        UserError: there is no such family.
        RendererRefused: the tokenizer lacks tokens of the family.
    """
    return FamilyRenderer(require_family(name), tokenizer, settings)


def require_family(name: str) -> str:
    """Return the canonical name of a family, which may lack dots and dashes. Raises UserError if unknown."""
    names = family_names()
    names_by_key = {name.replace(".", "").replace("-", ""): name for name in names}
    family = names_by_key.get(name.replace(".", "").replace("-", "").replace("_", ""))
    if family is None:
        raise UserError(f"there is no renderer {name!r}{did_you_mean(name, names)} (template, {', '.join(names)})")
    return family


def _family_renderer(family: str, tokenizer: Any, retention: str | None) -> Any:
    from renderers import config_from_name, create_renderer

    config = config_from_name(family)
    return create_renderer(tokenizer, config.model_copy(update={"thinking_retention": retention} if retention else {}))


class FamilyRenderer:
    """Renderer of a model family; see `rendering.Renderer`."""

    def __init__(self, family: str, tokenizer: Tokenizer, settings: RendererSettings) -> None:
        self.name = family
        self.tokenizer = tokenizer
        self._adapter = _FamilyTokenizer(tokenizer)
        self._retention = settings.thinking_retention
        try:
            self._renderer = _family_renderer(family, self._adapter, self._retention)
            stops = self._renderer.get_stop_token_ids()
        except (AssertionError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RendererRefused(
                f"the renderer {family!r} does not fit the tokenizer {tokenizer.name}: {error}. "
                "`renderer: {name: template}` works with any template that allows exact tokens"
            ) from error
        stop_encodings = [tokenizer.encode(stop) for stop in settings.stop]
        self.stop_ids = tuple(dict.fromkeys([*stops, *(ids[0] for ids in stop_encodings if len(ids) == 1)]))
        self._parser = load_parser(settings.tool_parser) if settings.tool_parser else None

    def first(self, messages: Messages, tools: Tools | None) -> array[int]:

        def rendered(encoder: Guard | _Written, messages: Messages, tools: Tools | None) -> array[int]:
            with self._adapter.guarded(encoder):
                return ids(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True))

        with refusals(self.name):  # the package may raise any error on unexpected messages
            return self._verify(messages, tools, rendered)

    def _verify(self, messages: Messages, tools: Tools | None, make: Callable[..., T]) -> T:
        """Return the verified result of `make(encoder, messages, tools)`."""

        def write(messages: Messages, tools: Tools | None) -> str:
            make(written := _Written(), messages, tools)
            return "".join(written.texts)

        prepared_messages = [_prepare_message(message) for message in messages]
        return guarded(
            self.tokenizer, prepared_messages, tools, lambda guard: make(guard, guard.messages, guard.tools), write
        )

    def following(self, branch: Branch, new: Messages, tools: Tools | None) -> array[int] | None:
        last = branch.spans[-1]
        before = branch.tokens[max(0, last.start - _TAIL_TOKENS) : last.start].tolist()
        sampled = branch.tokens[last.start :].tolist()
        size = len(before) + len(sampled)

        def bridged(encoder: Guard | _Written, messages: Messages, tools: Tools | None) -> array[int] | None:
            with self._adapter.guarded(encoder):
                bridge = self._renderer.bridge_to_next_turn(before, sampled, messages, tools=tools)
            if bridge is None or bridge.token_ids[:size] != before + sampled:
                return None
            return ids(bridge.token_ids[size:])

        try:
            with refusals(self.name):
                return self._verify(new, tools, bridged)
        except TemplateRefused:
            return None

    async def parse(self, completion: Sequence[int], prompt: Sequence[int], tools: Tools | None) -> Parsed:
        if self._parser is not None:
            work = partial(parse_ids, self._parser, self.tokenizer, completion, prompt, self.stop_ids, tools)
            return await parse_in_thread(work, len(completion))
        sampled, before = list(completion), list(prompt[-_TAIL_TOKENS:])
        text = await parse_in_thread(partial(self.tokenizer.decode, sampled), len(sampled))
        tool_list = list(tools) if tools else None
        few = len(sampled) <= FEW_TOKENS and len(text) <= FEW_CHARACTERS
        try:
            if few or MARK not in text:
                response = await parse_in_thread(
                    partial(_parse_turn, self._renderer, sampled, before, tool_list), len(sampled)
                )
            else:
                response = await self._parse_isolated(sampled, before, tool_list)
        except (
            *(ValueError, TypeError, KeyError, LookupError, AttributeError, RecursionError),
            *(EndedError, ForeignError),
        ) as error:
            log.info("reading a turn as text alone, because the renderer %s cannot parse it: %s", self.name, error)
            return Parsed(text)
        return await parse_in_thread(partial(self._read, response, sampled), len(sampled))

    async def _parse_isolated(self, sampled: list[int], before: list[int], tools: list[Any] | None) -> dict[str, Any]:
        """Parse a turn in a worker process, because the package may take quadratic time."""
        tokens, texts = await parse_in_thread(partial(self._adapter.by_token, [*before, *sampled]), len(sampled))
        arguments = {
            "family": self.name,
            "retention": self._retention,
            "tokenizer": self._adapter,
            "texts": texts,
            "sampled": tokens[len(before) :],
            "before": tokens[: len(before)],
            "tools": tools,
        }
        return dict(await POOL.call(_PARSE_RESPONSE, arguments, "hermes_rl.plugins:identity", PARSE_SECONDS))

    def _read(self, response: dict[str, Any], sampled: list[int]) -> Parsed:
        calls: list[ParsedCall] = []
        aside: list[str] = []
        spans = [call["span"] for call in response["calls"] if call["span"]]
        cuts = sorted({0, len(sampled), *(cut for span in spans for cut in span)})
        text_by_start = {cut: self.tokenizer.decode(sampled[cut:end]) for cut, end in pairwise(cuts)}
        char_offsets = dict(zip(cuts, accumulate(map(len, text_by_start.values()), initial=0), strict=True))
        text, segment_start = "".join(text_by_start.values()), 0
        quotes = Quotes(text)
        for call in response["calls"]:
            if call["span"]:
                start, end = (char_offsets[cut] for cut in call["span"])
                thought = text.rfind("</think>", segment_start, start)
                if thought >= 0:
                    segment_start = thought + len("</think>")
                    quotes.forget_before(segment_start)
                if quotes.quoted(start, end):
                    aside.append(text[start:end])
                    segment_start = start
                    continue
                segment_start = end
                quotes.forget_before(end)
            status = _STATUS.get(call["status"], Status.MALFORMED)
            if status is Status.OK:
                calls.append(make_call(call["raw"], call["name"], call["arguments"], call["id"]))
            else:
                calls.append(ParsedCall(call["raw"], status, call["name"] or "", id=call["id"]))
        content = "\n".join([response["content"], *aside]) if aside else response["content"]
        return Parsed(content, response["reasoning"], calls)


def _parse_turn(renderer: Any, sampled: list[int], before: list[int], tools: list[Any] | None) -> dict[str, Any]:
    """Return the package's parse result for a turn, as plain values."""
    response = renderer.parse_response(sampled, tools=tools, prompt_ids=before)
    calls = [
        {
            "raw": call.raw,
            "name": call.name,
            "arguments": call.arguments,
            "span": call.token_span,
            "status": str(call.status.value),
            "id": call.id,
        }
        for call in response.tool_calls
    ]
    return {"content": response.content or "", "reasoning": response.reasoning_content or None, "calls": calls}


def _prepare_message(message: Any) -> dict[str, Any]:
    """Return the message in the form that families accept: its content is a text, and arguments are an object."""
    prepared = for_template(message)
    if prepared.get("content") is None:
        prepared["content"] = ""
    return prepared


class _Written:
    """Encoder that replaces a guard to collect the texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [0]


@lives_in_runner(f"{__name__}:TokenizerApart")
class _FamilyTokenizer:
    """hermes-rl's tokenizer in the form that the package needs. It encodes texts between the breaks of the active
    guard.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._guard: ContextVar[Guard | _Written | None] = ContextVar("guard", default=None)
        self.name_or_path = tokenizer.name
        self.unk_token_id = None
        self.eos_token_id = None
        self.bos_token = None
        self._texts: dict[int, str] = {}

    def stand_in_fields(self) -> dict[str, Any]:
        return {"name_or_path": self.name_or_path}

    def by_token(self, tokens: list[int]) -> tuple[list[int], dict[int, str]]:
        """Return the tokens and the text of each, so that concatenated texts equal the decoded tokens.

        If a character has several tokens, the first of them has its text; these tokens get new ids.
        """
        for token in set(tokens) - self._texts.keys():
            self._texts[token] = self.decode(token)
        renamed = list(tokens)
        texts = {token: self._texts[token] for token in set(tokens)}
        for parts, positions in groupby(range(len(tokens)), lambda place: "\ufffd" in self._texts[tokens[place]]):
            if parts:
                row = list(positions)
                full_text = self.decode([tokens[position] for position in row])
                for position in row:
                    renamed[position] = _PART + position
                    texts[_PART + position] = full_text if position == row[0] else ""
        if "".join(texts[token] for token in renamed) != self.decode(tokens):
            raise ValueError(f"{self.name_or_path} decodes tokens differently next to other tokens")
        return renamed, texts

    @contextmanager
    def guarded(self, guard: Guard | _Written) -> Iterator[None]:
        token = self._guard.set(guard)
        try:
            yield
        finally:
            self._guard.reset(token)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        guard = self._guard.get()
        return self._tokenizer.encode(text) if guard is None else guard.encode(text)

    def decode(self, token_ids: Any, **_: Any) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        ids = self._tokenizer.encode(tokens)
        return ids[0] if len(ids) == 1 else None


# ----------------------------------------------------------------------------------- In a worker process


class TokenizerApart:
    """Proxy of a `_FamilyTokenizer`: it requests ids from the runner, and has the texts of a turn's tokens."""

    unk_token_id = eos_token_id = bos_token = None

    def __init__(self, tokenizer_id: int, name_or_path: str) -> None:
        self._tokenizer_id = tokenizer_id
        self.name_or_path = name_or_path
        self.texts: dict[int, str] = {}

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return list(current_runner().ask(self._tokenizer_id, "encode", text).result())

    def decode(self, token_ids: Any, **_: Any) -> str:
        return "".join(map(self.texts.__getitem__, [token_ids] if isinstance(token_ids, int) else token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return current_runner().ask(self._tokenizer_id, "convert_tokens_to_ids", tokens).result()


def parse_response(
    family: str,
    retention: str | None,
    tokenizer: TokenizerApart,
    texts: dict[int, str],
    sampled: list[int],
    before: list[int],
    tools: list[Any] | None,
) -> dict[str, Any]:
    """Parse a turn in a worker process."""
    tokenizer.texts = texts
    return _parse_turn(_family_renderer(family, tokenizer, retention), sampled, before, tools)


parse_response.imports = ("renderers",)  # type: ignore[attr-defined]
_PARSE_RESPONSE = Code.from_ref(f"{__name__}:parse_response")

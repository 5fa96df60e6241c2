"""Chat messages to prompt text through the model's own Jinja template, in a sandbox: templates are foreign code.

The environment offers what transformers' does, since templates are written against it.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.runtime.errors import InvalidArgument

STANDARD_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """One model's template, compiled when first used."""

    def __init__(self, source: str | None, special: dict[str, str]) -> None:
        """`special`: texts of special tokens by the names that templates use (`bos_token`, …)."""
        self._source = source
        self._special = special
        self._compiled: jinja2.Template | None = None

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt, up to where the assistant's answer begins.

        Raises `InvalidArgument` for a model without a template, for no messages, for an unknown role, and for
        whatever the template refuses.
        """
        if self._source is None:
            raise InvalidArgument(
                "messages", f"<{len(messages)} messages>", "the model has no chat template", "use prompt instead"
            )
        if not messages:
            raise InvalidArgument("messages", messages, "must have at least one message")
        self._check_roles(messages, self._source)
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source)
            # Templates index and concatenate freely, so any of these can be the messages' fault.
            return self._compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            roles = [message["role"] for message in messages]
            raise InvalidArgument("messages", roles, f"the model's chat template refuses them: {error}") from error

    def _check_roles(self, messages: list[dict[str, str]], source: str) -> None:
        """Refuses roles that neither the convention nor the template's text knows; most templates would print them."""
        for i, message in enumerate(messages):
            role = message["role"]
            if role not in STANDARD_ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
                known = ", ".join(STANDARD_ROLES)
                raise InvalidArgument(f"messages[{i}].role", role, f"must be one of {known}, or a role of the template")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)

"""Chat templates: rendered as their authors mean, refused with a clear error, unable to reach the process."""

from __future__ import annotations

import pytest

from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.text.chat import ChatTemplate

pytestmark = pytest.mark.core
USER = [{"role": "user", "content": "Hi"}]
ALTERNATING = """
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {{- bos_token ~ '[' ~ m.role ~ ']' ~ m.content | tojson }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{% endif %}"""


def render(template: str | None, messages: list[dict[str, str]]) -> str:
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages)


def test_template_sees_what_transformers_offers() -> None:
    """A template that misses a filter, a token or a tag fails at the first request."""
    assert render(ALTERNATING, [{"role": "user", "content": '<é> "q"'}]) == '<s>[user]"<é> \\"q\\""[assistant]'
    assert (
        render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", USER) == "Hi\n"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}{{ eos_token }}", USER) == "Hi</s>"
    assert render("{{ strftime_now('%Y') | length }}{{ tools is none }}", USER) == "4True"


def test_refusals_name_the_messages() -> None:
    """A template's own refusal must reach the caller as his fault, with the template's words."""
    with pytest.raises(InvalidArgument, match=r"messages=\['user', 'user'\].*roles must alternate"):
        render(ALTERNATING, USER * 2)
    with pytest.raises(InvalidArgument, match="chat template refuses"):
        render("{{ messages[0].content + 1 }}", USER)
    with pytest.raises(InvalidArgument, match="chat template refuses"):
        render("{{ messages[3].content.x }}", USER)
    with pytest.raises(InvalidArgument, match="at least one message"):
        render(ALTERNATING, [])


def test_unknown_role_is_refused_and_the_templates_own_accepted() -> None:
    """Most templates would print any role into the prompt, control tokens and all."""
    with pytest.raises(InvalidArgument, match=r"messages\[1\].role='assitant': must be one of system"):
        render(ALTERNATING, [*USER, {"role": "assitant", "content": ""}])
    assert render("{{ 'x' if messages[0].role == 'ipython' }}", [{"role": "ipython", "content": ""}]) == "x"


def test_model_without_template() -> None:
    """Guessing a format would give plausible nonsense."""
    with pytest.raises(InvalidArgument, match="no chat template; use prompt instead"):
        render(None, USER)


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'x' %}"])
def test_template_cannot_reach_the_process(attack: str) -> None:
    """Templates come with models, that is from strangers."""
    with pytest.raises(InvalidArgument):
        render(attack, USER)

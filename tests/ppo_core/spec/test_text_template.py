"""Templates of a reward model's text: two placeholders, put in as they are, and nothing that runs."""

from __future__ import annotations

import pytest

from ppo_core.spec.text_template import TextTemplate


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{prompt}{response}", "pr"),
        ("Human: {prompt}\n\nAssistant: {response}", "Human: p\n\nAssistant: r"),
        ("{response}", "r"),
        ("{response} after {prompt}.", "r after p."),
        ("{{{response}}} {{prompt}}", "{r} {prompt}"),
    ],
)
def test_a_template_is_filled(template: str, text: str) -> None:
    assert TextTemplate.parse(template).filled("p", "r") == text


def test_what_is_put_in_stays_as_it_is() -> None:
    filled = TextTemplate.parse("{prompt}|{response}").filled("{response}", "{prompt.__class__} {{ }}")
    assert filled == "{response}|{prompt.__class__} {{ }}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{prompt}", "has no {response}"),
        ("", "has no {response}"),
        ("{{response}}", "has no {response}"),
        ("{response}{response}", "twice"),
        ("{prompt}{response}{score}", "'score' is not known"),
        ("{response}{}", "'' is not known"),
        ("{response}{0}", "'0' is not known"),
        ("{response.__class__}", "is not known"),
        ("{response[0]}", "is not known"),
        ("{response!r}", "is not known"),
        ("{response:>9999999999}", "is not known"),
        ("{response:{prompt}}", "is not known"),
        ("{response", "not a template"),
        ("response}", "not a template"),
    ],
)
def test_anything_else_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        TextTemplate.parse(template)

"""A stranger's chat template costs a child process at most: it is refused by name, and the next one is rendered."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import pytest

from baton.errors import InvalidRequest
from baton.text.bounded_workers import BoundedWorkers, WorkLimits
from baton.text.chat_template import ChatTemplate
from baton.text.model_template import RequestTemplate

NOW = datetime(2026, 1, 2)
CHAT = [{"role": "user", "content": "Grüße"}]
TOKENS = {"bos_token": "<s>"}
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}={{ message.content }};{% endfor %}{{ day }}"
    "{{ strftime_now('%Y') }}{% if add_generation_prompt %}>{% endif %}"
)

HOSTILE = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "large power": "{{ 7 ** (7 ** (7 ** 7)) }}",
    "long text": "{{ 'x' * 10 ** 10 }}",
    "doubled text": "{% set ns = namespace(t='x') %}{% for a in range(64) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "long output": "{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "large range": "{{ range(10 ** 9) | list | length }}",
    "large list": "{{ ([0] * 10 ** 9) | length }}",
    "wide format": "{{ '%999999999d' % 1 }}",
    "deep recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "deep expression": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "deep operators": "{{ " + "not " * 15_000 + "1 }}",
    "many blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "attribute escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "filtered escape": "{{ (messages | map(attribute='__class__') | list)[0].mro }}",
    "format escape": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "called escape": "{{ ''.format.__globals__.json }}",
    "globals escape": "{{ raise_exception.__globals__['json'] }}",
    "changed messages": "{{ messages.append({}) }}",
    "included file": "{% include '/etc/passwd' %}",
    "not a template": "{% for %}",
    "own exception": "{{ raise_exception('x' * 100000) }}",
    "surrogate": "{{ '\\ud800' }}",
    "surrogate in an exception": "{{ raise_exception('\\ud800') }}",
}


@pytest.fixture(scope="module")
def workers() -> Iterator[BoundedWorkers]:
    workers = BoundedWorkers()
    yield workers
    workers.close()


def test_a_template_makes_the_same_text_as_in_this_process(workers: BoundedWorkers) -> None:
    ours = RequestTemplate(workers, TOKENS, PLAIN)
    assert ours.render(CHAT, NOW, {"day": 1}, add_generation_prompt=True) == "<s>user=Grüße;12026>"
    here = ChatTemplate.of_request(TOKENS, PLAIN)
    for begins in (True, False):
        texts = [one.render(CHAT, NOW, add_generation_prompt=begins) for one in (ours, here)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_by_name_and_harms_nothing_else(workers: BoundedWorkers, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RequestTemplate(workers, TOKENS, HOSTILE[name]).render(CHAT, NOW)
    assert caught.value.field == "chat_template"
    assert 0 < len(caught.value.reason) < 1000
    assert RequestTemplate(workers, TOKENS, "{{ 6 * 7 }}").render(CHAT, NOW) == "42"


@pytest.mark.parametrize("name", ["attribute escape", "filtered escape", "format escape", "called escape"])
def test_an_escape_is_stopped_by_the_sandbox_of_jinja(workers: BoundedWorkers, name: str) -> None:
    with pytest.raises(InvalidRequest, match="rejects the messages: "):
        RequestTemplate(workers, TOKENS, HOSTILE[name]).render(CHAT, NOW)


def test_limits_are_named() -> None:
    workers = BoundedWorkers(WorkLimits(cpu_s=0.1, wall_s=60.0))
    try:
        with pytest.raises(InvalidRequest, match=r"chat_template: takes more than 0\.1 s of CPU time"):
            RequestTemplate(workers, {}, HOSTILE["endless loop"]).render(CHAT, NOW)
        with pytest.raises(InvalidRequest, match="chat_template: makes a text of more than 2097152 bytes"):
            RequestTemplate(workers, {}, "{% for a in range(30) %}{{ 'x' * 100000 }}{% endfor %}").render(CHAT, NOW)
        with pytest.raises(InvalidRequest, match="memory"):
            RequestTemplate(workers, {}, HOSTILE["long text"]).render(CHAT, NOW)
    finally:
        workers.close()


@pytest.mark.parametrize("name", ["messages", "bos_token", "tools", "strftime_now"])
def test_variables_may_not_take_the_names_of_the_request(workers: BoundedWorkers, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs: may not name {name}"):
        RequestTemplate(workers, {}, PLAIN).render(CHAT, NOW, {name: "x"})

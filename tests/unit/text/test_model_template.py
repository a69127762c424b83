"""A model's chat template costs a child process at most; its faults are told apart from the client's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from baton.errors import ConfigError, InvalidRequest, Overloaded, TemplateFault
from baton.text.bounded_child import Outcome
from baton.text.bounded_workers import BoundedWorkers, WorkLimits
from baton.text.model_template import ModelTemplate
from baton.text.template_work import TemplateWork
from tests.doubles.fake_workers import FakeWorkers

NOW = datetime(2026, 1, 2)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = "{{ ('x' * 10 ** 10) | length }}"
AT_A_WORD = "{{ bos_token }}{{ messages[-1].content }}{% if 'xyzzy' in messages[-1].content %}BAD{% endif %}"
TOO_LONG = Outcome(reason="takes more than 2 s of CPU time: make it simpler", exceeds_limits=True)


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def workers() -> Iterator[BoundedWorkers]:
    workers = BoundedWorkers(WorkLimits(cpu_s=0.2, wall_s=60.0))
    yield workers
    workers.close()


@pytest.mark.parametrize(("bad", "why"), [(LOOP, "CPU time"), (MEMORY, "memory")], ids=["time", "memory"])
def test_a_chat_at_which_the_template_exceeds_its_limits_fails_alone(
    workers: BoundedWorkers, bad: str, why: str
) -> None:
    template = ModelTemplate(AT_A_WORD.replace("BAD", bad), {"bos_token": "<s>"}, workers=workers)
    assert template.render(chat("hello"), NOW) == "<s>hello"
    with pytest.raises(TemplateFault, match=rf"the model's chat template .*{why}"):
        template.render(chat("xyzzy"), NOW)
    assert template.render(chat("bye"), NOW) == "<s>bye"


def test_a_template_whose_check_exceeds_the_limits_is_not_used(
    workers: BoundedWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    template = ModelTemplate(LOOP, {}, workers=workers)
    assert "CPU time" in template.check()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    children = workers.pids
    with pytest.raises(TemplateFault, match="is not used, since its check at start"):
        template.render(chat("hello"), NOW)
    assert workers.pids == children
    assert len(caplog.records) == 1


def test_a_template_of_the_model_is_compiled_and_checked_once() -> None:
    workers = FakeWorkers()
    template = ModelTemplate({"default": "1", "rag": "2", "broken": "{% if %}"}, {}, workers=workers)
    for _ in range(2):
        assert template.render(chat("x"), NOW) == "1"
        named = template.named("rag")
        assert named is not None
        assert named.render(chat("x"), NOW) == "2"
        with pytest.raises(InvalidRequest, match="chat_template: 'broken': the model's chat template is broken"):
            template.named("broken")
    assert workers.jobs.count("template_traits") == 3
    work = TemplateWork({"default": "1"}, {}, is_models=True)
    assert work.template() is replace(work, now="later").template()
    assert work.template() is not replace(work, special_tokens={"bos_token": "<s>"}).template()
    strangers = replace(work, is_models=False)
    assert strangers.template() is not strangers.template()


def test_faults_of_the_client_of_the_machine_and_of_the_template_differ(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    workers = FakeWorkers()
    template = ModelTemplate("{{ raise_exception('no such role') }}", {}, workers=workers)
    with pytest.raises(InvalidRequest, match="messages: the model's chat template rejects them: no such role"):
        template.render(chat("x"), NOW)
    workers.outcomes.append(Outcome(reason="was not processed within 10 s", is_lasting=False))
    with pytest.raises(Overloaded, match="was not processed"):
        template.render(chat("x"), NOW)
    assert not caplog.records
    for _ in range(4):
        workers.outcomes.append(TOO_LONG)
        with pytest.raises(TemplateFault):
            template.render(chat("x"), NOW)
    assert [(record.levelname, record.args[0]) for record in caplog.records if isinstance(record.args, tuple)] == [
        ("WARNING", 1),
        ("ERROR", 3),
    ]


def test_a_check_that_this_machine_could_not_do_is_done_again() -> None:
    workers = FakeWorkers()
    workers.outcomes.append(Outcome(reason="was not processed within 10 s", is_lasting=False))
    template = ModelTemplate("1", {}, workers=workers)
    assert "was not processed" in template.check()
    assert template.render(chat("x"), NOW) == "1"


def test_a_broken_template_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ModelTemplate("{% if %}", {}, workers=FakeWorkers()).check()

"""Chat templates compared with transformers' rendering, and what a template may not do."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from baton.config import bundled_model_dir
from baton.errors import ConfigError, InvalidRequest
from baton.text.chat_template import ChatTemplate
from baton.text.model_template import ModelTemplate, has_chat_template
from baton.text.tokenizer import Tokenizer
from tests.doubles.fake_workers import FakeWorkers

NOW = datetime(2026, 1, 2, 3, 4)
CHAT = [
    {"role": "system", "content": 'Be <b>brief</b> & "kind".'},
    {"role": "user", "content": "héllo\n"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
]
LLAMA = """{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no such role: ' + message['role']) }}
    {%- endif %}
    {%- if loop.first %}{{ bos_token }}{% endif %}
    {{- '<|' + message['role'] + '|>' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}{{ message.content | tojson }}{% endif %}
    {%- if loop.last %}{% break %}{% endif %}
{% endfor %}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}
{%- if enable_thinking is defined and not enable_thinking %}<no_think>{% endif %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}"""


def loaded(directory: Path) -> ModelTemplate:
    return ModelTemplate.load(directory, FakeWorkers())


def test_the_template_of_the_bundled_model_gives_the_same_tokens_as_transformers() -> None:
    ours = Tokenizer.load(bundled_model_dir()).encode_rendered(loaded(bundled_model_dir()).render(CHAT, NOW))
    theirs = AutoTokenizer.from_pretrained(bundled_model_dir()).apply_chat_template(CHAT, add_generation_prompt=True)
    assert ours == list(theirs["input_ids"])


TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "<é>", "parameters": {"type": "object", "properties": {}}},
    }
]
QWEN = """{%- for tool in tools or [] %}
{{ tool | tojson }}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == "tool" %}<tool_response>{{ message.content }}</tool_response>{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}{% endfor %}"""


def test_tools_calls_and_their_results_are_rendered_as_in_transformers() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": ["é"]}}}
    chat: list[Any] = [
        *CHAT,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_dir())
    theirs = tokenizer.apply_chat_template(chat, tools=TOOLS, chat_template=QWEN, tokenize=False)
    text = ChatTemplate(QWEN, {}).render(chat, NOW, None, TOOLS, add_generation_prompt=False)
    assert text == theirs
    assert '"arguments": {"x": ["é"]}' in text


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_the_functions_and_filters_of_templates_behave_as_in_transformers(
    generation: bool, variables: dict[str, object]
) -> None:
    ours = ChatTemplate(LLAMA, {"bos_token": "<s>"})
    text = ours.render(CHAT, NOW, variables, add_generation_prompt=generation)
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_dir())
    theirs = tokenizer.apply_chat_template(
        CHAT, chat_template=LLAMA, tokenize=False, add_generation_prompt=generation, **variables
    )
    assert text == theirs
    assert "<b>brief</b>" in text


TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
KEPT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"


@pytest.mark.parametrize("source", [KEPT, TRIMMED, LLAMA])
@pytest.mark.parametrize(
    "begun", ["The answer", "The answer is ", " two\n", "CONTINUE_FINAL_MESSAGE_TAG", "</assistant>"]
)
def test_a_message_is_continued_where_transformers_continues_it(source: str, begun: str) -> None:
    chat = [*CHAT, {"role": "assistant", "content": begun}]
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(chat, NOW, continue_final_message=True)
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_dir())
    asked = {"chat_template": source, "tokenize": False, "continue_final_message": True}
    assert text == tokenizer.apply_chat_template(chat, **asked)
    assert text.rstrip().endswith(begun.strip())


def test_a_message_that_the_template_leaves_out_can_not_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="can't be continued"):
        ChatTemplate("{{ messages[0].content }}", {}).render(CHAT, NOW, continue_final_message=True)


def test_the_date_is_available_to_templates() -> None:
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).render(CHAT, NOW) == "02 Jan 2026"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
)
def test_errors_and_forbidden_operations_of_a_template_are_invalid_requests(source: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        ChatTemplate(source, {}).render(CHAT, NOW)
    assert caught.value.field == "messages"


def test_the_role_developer_becomes_system_in_templates_that_do_not_know_it() -> None:
    chat = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(chat, NOW) == "system"
    assert ChatTemplate("{{ messages[0].role }}{# developer #}", {}).render(chat, NOW) == "developer"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token"])
def test_reserved_variables_can_not_be_set_by_clients(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        ChatTemplate("", {}).render(CHAT, NOW, {name: "x"})


def test_a_template_with_a_syntax_error_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="chat template is broken"):
        ChatTemplate("{% if %}", {})


def test_the_template_is_found_in_its_places(tmp_path: Path) -> None:
    def rendered() -> str:
        return loaded(tmp_path).render([{"role": "user", "content": "x"}], NOW)

    assert rendered() == "user: x\nassistant:"
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None}))
    assert rendered() == "<s>user: x\nassistant:"
    config.write_text(json.dumps({"chat_template": {"default": "object"}}))
    assert rendered() == "object"
    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": "processor"}))
    assert rendered() == "processor"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert rendered() == "jinja"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="as JSON"):
        rendered()


@pytest.mark.parametrize("value", [7, ["x"], [{"name": "default"}], {"default": None}])
def test_a_template_in_no_known_form_is_a_configuration_error(tmp_path: Path, value: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ConfigError, match="must be a template, or several with their names"):
        loaded(tmp_path)


NAMED = {
    "default": "{{ messages[0].content }} {{ tools }}",
    "tool_use": "TOOLS {{ tools | tojson }} {{ messages[0].role }}",
    "rag": "RAG",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a tokenizer of one word and without templates."""
    tokenizers.Tokenizer(WordLevel({"x": 0}, unk_token="x")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("place", ["list", "files", "files beside one in the config"])
@pytest.mark.parametrize("names", [("default", "tool_use", "rag"), ("tool_use", "rag"), ("default", "rag"), ("rag",)])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_one_of_several_templates_is_chosen_as_in_transformers(
    directory: Path, place: str, names: tuple[str, ...], tools: Any
) -> None:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "additional_chat_templates").mkdir()
    if place == "list":
        config["chat_template"] = [{"name": name, "template": NAMED[name]} for name in names]
    else:
        config["chat_template"] = "CONFIG"
        for name in names:
            file = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
            (directory / f"{file}.jinja").write_text(NAMED[name])
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    template, tokenizer = loaded(directory), AutoTokenizer.from_pretrained(directory)
    try:
        theirs = tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False)
    except ValueError:
        with pytest.raises(InvalidRequest, match="none is the default") as caught:
            template.render(CHAT, NOW, None, tools)
        assert caught.value.field == "messages"
    else:
        assert template.render(CHAT, NOW, None, tools) == theirs


NESTED = "{{ " + "(" * 300 + "1" + ")" * 300 + " }}"
"""So deep that Python fails with an error which is none of Jinja's."""


@pytest.mark.parametrize("broken", ["{% if %}", NESTED], ids=["Jinja", "Python"])
def test_a_broken_template_that_no_chat_chooses_fails_only_who_names_it(broken: str) -> None:
    template = ModelTemplate({**NAMED, "rag": broken}, {}, workers=FakeWorkers())
    assert template.render([{"role": "user", "content": "x"}], NOW) == "x None"
    with pytest.raises(InvalidRequest, match="chat_template: 'rag': the model's chat template is broken"):
        template.named("rag")
    for name in ("default", "tool_use"):
        with pytest.raises(ConfigError, match="chat template is broken"):
            ModelTemplate({**NAMED, name: broken}, {}, workers=FakeWorkers()).check()


def test_several_templates_without_the_default_one_are_those_of_a_model_with_a_template(tmp_path: Path) -> None:
    assert not has_chat_template(tmp_path)
    named = [{"name": "tool_use", "template": "x"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert has_chat_template(tmp_path)
    assert not loaded(tmp_path).is_default


TOKENS = """
{%- for name, value in [("bos", bos_token), ("eos", eos_token), ("image", image_token), ("end", end_of_turn)] -%}
    {{ name }} {{ value is defined }} {{ value }}
{% endfor %}"""


@pytest.mark.parametrize(
    ("config", "special_tokens_map"),
    [
        ({"bos_token": None, "eos_token": "</s>"}, {}),
        ({"image_token": "<image>", "add_bos_token": True}, {}),
        ({"extra_special_tokens": {"image_token": "<image>", "end_of_turn": "<end>"}}, {}),
        ({"extra_special_tokens": ["<image>"]}, {}),
        ({"eos_token": "</s>"}, {"eos_token": {"content": "<|end|>"}, "image_token": "<image>"}),
        ({"eos_token": "</s>", "added_tokens_decoder": {}}, {"eos_token": "<|end|>", "bos_token": "<s>"}),
    ],
)
def test_special_tokens_are_defined_in_templates_as_in_transformers(
    directory: Path, config: dict[str, Any], special_tokens_map: dict[str, Any]
) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TOKENS, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))
    theirs = AutoTokenizer.from_pretrained(directory).apply_chat_template(CHAT, tokenize=False)
    assert loaded(directory).render(CHAT, NOW) == theirs

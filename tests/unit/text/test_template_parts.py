"""Templates whose messages have parts: which need them, and answers that are continued."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.text.chat_template import DEFAULT_TEMPLATE, ChatTemplate

NOW = datetime(2026, 1, 1)
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == "
    "'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QWEN = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<|image_pad|>' }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("source", "needs"), [(SMOLVLM, True), (QWEN, False), (DEFAULT_TEMPLATE, False)])
def test_a_template_that_renders_texts_only_as_parts_needs_parts(source: str, needs: bool) -> None:
    assert ChatTemplate(source, {}).traits.needs_parts is needs


def messages(last: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": last}]


def test_an_answer_in_parts_is_continued_behind_its_last_text() -> None:
    template = ChatTemplate(SMOLVLM, {})
    parts = [{"type": "text", "text": "It is a"}]
    text = template.render(messages(parts), NOW, continue_final_message=True)
    assert text == "<|im_start|>User:<image><end_of_utterance>\nAssistant: It is a"
    with pytest.raises(InvalidRequest, match="end with an image"):
        template.render(messages([{"type": "image"}]), NOW, continue_final_message=True)

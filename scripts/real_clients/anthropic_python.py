"""Anthropic's Python client: messages (whole and streamed), a system prompt, token counting, errors."""

import os

import anthropic

MODEL = os.environ["BATON_MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

client = anthropic.Anthropic(base_url=os.environ["BATON_URL"], api_key="any")
whole = client.messages.create(
    model=MODEL, messages=QUESTION, max_tokens=40, system="Answer briefly.", extra_body={"temperature": 0}
)
assert whole.content[0].text and whole.usage.output_tokens > 0
with client.messages.stream(
    model=MODEL, messages=QUESTION, max_tokens=40, system="Answer briefly.", extra_body={"temperature": 0}
) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
print("works: messages, whole and streamed, equal")

counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, system="Answer briefly.")
assert counted.input_tokens == whole.usage.input_tokens
print("works: count_tokens equals the usage")

try:
    client.messages.create(model=MODEL, messages=[], max_tokens=4)
except anthropic.BadRequestError:
    print("works: no messages is BadRequestError")

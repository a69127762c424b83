"""OpenAI's Python client: models, completions, chat (whole and streamed), structured answers, responses, errors."""

import os

import openai
from pydantic import BaseModel

MODEL = os.environ["BATON_MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


class City(BaseModel):
    """The structured answer that is asked for."""

    name: str
    country: str


client = openai.OpenAI(base_url=f"{os.environ['BATON_URL']}/v1", api_key="any")
assert MODEL in [model.id for model in client.models.list().data]
print("works: models")

completion = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=12, temperature=0)
assert completion.choices[0].text and completion.usage.completion_tokens > 0
print("works: completions")

whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40, temperature=0)
events = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40, temperature=0, stream=True)
streamed = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
assert streamed == whole.choices[0].message.content
print("works: chat, whole and streamed, equal")

parsed = client.chat.completions.parse(
    model=MODEL, messages=QUESTION, max_tokens=80, temperature=0, response_format=City
)
assert isinstance(parsed.choices[0].message.parsed, City)
print("works: structured answers (response_format of a pydantic model)")

response = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=80, temperature=0)
follow_up = client.responses.create(
    model=MODEL, input="Another one.", previous_response_id=response.id, max_output_tokens=80, temperature=0
)
assert response.output_text and follow_up.output_text
with client.responses.stream(model=MODEL, input="Name a colour.", max_output_tokens=80, temperature=0) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == stream.get_final_response().output_text
print("works: responses, whole, continued and streamed")

try:
    client.chat.completions.create(model="no-such-model", messages=QUESTION)
except openai.NotFoundError as error:
    assert "no-such-model" in str(error)
    print("works: an unknown model is NotFoundError")

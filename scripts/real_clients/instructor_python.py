"""instructor, which turns answers into pydantic models, in its mode for JSON schemas."""

import os

import instructor
import openai
from pydantic import BaseModel


class City(BaseModel):
    """The structured answer that is asked for."""

    name: str
    country: str


client = instructor.from_openai(
    openai.OpenAI(base_url=f"{os.environ['BATON_URL']}/v1", api_key="any"), mode=instructor.Mode.JSON_SCHEMA
)
city = client.chat.completions.create(
    model=os.environ["BATON_MODEL"],
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    response_model=City,
    max_tokens=80,
    temperature=0,
)
assert isinstance(city, City)
print("works: a pydantic model as the answer (Mode.JSON_SCHEMA)")

"""instructor, which turns answers into pydantic models, with a tool's arguments and with formats of the text."""

import os

import instructor
import openai
from pydantic import BaseModel


class City(BaseModel):
    """The structured answer that is asked for."""

    name: str
    country: str


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{os.environ['BATON_URL']}/v1", api_key="any"), mode=mode)
    bound = "max_output_tokens" if mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens"
    city = client.chat.completions.create(
        model=os.environ["BATON_MODEL"],
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        response_model=City,
        temperature=0,
        max_retries=0,
        **{bound: 80},
    )
    assert isinstance(city, City)
    print(f"works: a pydantic model as the answer (Mode.{mode.name})")

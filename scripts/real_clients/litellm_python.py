"""LiteLLM as a library, with its providers for OpenAI-compatible servers, for vLLM and for Anthropic."""

import os

import litellm

MODEL, URL = os.environ["BATON_MODEL"], f"{os.environ['BATON_URL']}/v1"
QUESTION = [{"role": "user", "content": "Name a colour."}]

for provider in ("openai", "hosted_vllm"):
    asked = {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": "any", "messages": QUESTION}
    whole = litellm.completion(**asked, max_tokens=20, temperature=0)
    events = litellm.completion(**asked, max_tokens=20, temperature=0, stream=True)
    streamed = "".join(event.choices[0].delta.content or "" for event in events)
    assert streamed == whole.choices[0].message.content
    print(f"works: completion through {provider}/, whole and streamed, equal")

anthropic = litellm.completion(
    model=f"anthropic/{MODEL}", api_base=os.environ["BATON_URL"], api_key="any", messages=QUESTION, max_tokens=20
)
assert anthropic.choices[0].message.content
print("works: completion through anthropic/")

for provider, base in (("openai", URL), ("hosted_vllm", URL), ("anthropic", os.environ["BATON_URL"])):
    too_long = [{"role": "user", "content": "word " * 10_000}]
    try:
        litellm.completion(
            model=f"{provider}/{MODEL}", api_base=base, api_key="any", messages=too_long, max_tokens=20, num_retries=0
        )
    except litellm.ContextWindowExceededError:
        print(f"works: a prompt that is too long is ContextWindowExceededError through {provider}/")

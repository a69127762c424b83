"""The bodies of OpenAI's API for text and embeddings: one module for each endpoint, and what they share.

`completions`, `chats` and `embeddings` have the bodies; `generation` has the fields that completions and chats share,
`constraints` and `fields` the types of fields, and `strict` the base class and `read_as`, which makes a body of a
client's JSON. Bodies of other APIs are beside their endpoints: `messages/bodies.py`, `responses/bodies.py`,
`tokens.py`.

Names of fields are OpenAI's, or else vLLM's. An unknown field is refused by its name. A field that is known but not
served is refused, too, unless its value changes nothing. Fields that change no answer are ignored.
"""

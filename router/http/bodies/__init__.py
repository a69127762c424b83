"""What the bodies of all APIs share. The bodies themselves are in the folders of their APIs.

`fields` has their base, the types of their fields, and `read_as`, which makes a body of a client's JSON; `tools` has
tools and calls, `content_parts` what a message consists of.

Names of fields are the API's own, or else vLLM's. An unknown field is refused by its name. A field that is known but
not served is refused, too, unless its value changes nothing. Fields that change no answer are ignored.
"""

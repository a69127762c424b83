"""Upper limits of the counts and lengths in a client's request, checked before anything is allocated for it.

`router.http` and `baton.wire` refuse a request that exceeds a limit before they parse it; the ranges of values are
checked in `router.admission.validation`. docs/security.md lists these limits.
"""

from __future__ import annotations

from baton.model_formats.limits import AUDIO_RATE, LONGEST_SPEECH_S

MAX_REQUEST_BYTES = 1 << 20
"""The largest gRPC request and HTTP body, in bytes."""
MAX_PROMPT_BYTES = 1 << 20
MAX_TOKEN_IDS = 1 << 18
"""The most token ids in one list: a prompt, tokens to detokenize, or the result of tokenizing a text. The model's own
length limit applies as well."""
MAX_PROMPTS = 32
"""The most prompts of one call for completions."""
MAX_INPUTS = 2048
"""The most inputs of one call for embeddings or classes, and the most pairs of one for scores. As in OpenAI's API:
clients send 512 or 1,000 at once."""
MAX_POOLING_BODY_BYTES = 4 << 20
"""The largest HTTP body of a call with so many."""
MAX_VECTOR_NUMBERS = 1 << 22
"""The most numbers of all vectors of one call, some 90 MB of JSON. Up to 512 vectors may have more."""
MAX_POOLED_TOKENS = 1 << 20
"""The most tokens of all inputs of one call for embeddings, scores or classes: the query of a call counts once for each
of its documents."""
MAX_MESSAGES = 4096
"""The most messages of one chat."""
MAX_WORDS = 32
"""The most entries of a list that chooses among a few known words."""
MAX_TOOLS = 128
"""The most tools of one chat, and the most calls in one of its messages."""
MAX_TOOLS_BYTES = 256 << 10
"""The most that the parameters of a chat's tools may come to together, as JSON."""
MAX_TEMPLATE_VARIABLES = 64
MAX_TEMPLATE_VARIABLE_BYTES = 8 << 10
"""The longest text of a variable for the chat template, which may write it once for each message."""
MAX_TEMPLATE_BYTES = 64 << 10
"""The longest chat template of a request."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
MAX_CHOICES = 10_000
"""The most texts of a `choice`."""
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 4096
"""The longest that the `bad_words` of a request may be together."""
MAX_BAD_WORD_TOKENS = 2 * (MAX_BAD_WORD_BYTES + MAX_BAD_WORDS)
"""The most tokens of all spellings of a request's `bad_words`: a byte is at most a token, a word has two spellings."""
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROB_VALUES = 1 << 18
"""The most that the log-probabilities of a request's prompt may come to, about 3 MB of a message: each of its tokens
counts twice, and once more for each alternative that is returned."""
MAX_CALL_PROMPT_LOGPROB_VALUES = 1 << 19
"""The same for all prompts of a call over HTTP, and for each output that repeats its prompt (`echo`)."""
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
"""Priorities are 32-bit integers, of which the smallest comes first."""
MAX_SALT_BYTES = 256

MAX_PROMPT_EMBEDS_BYTES = 12 << 20
"""The most that the setting `max_prompt_embeds` may allow: a message to a node has at most 16 MiB."""
MAX_SPANS = 64
"""The most parts of a prompt whose rows are given."""
MAX_IMAGES = 64
"""The most that the setting `max_images` may allow in a prompt."""
MAX_IMAGE_SPANS = 1024
"""The most parts of a prompt that have rows of images: some models cut an image into tiles."""
MAX_IMAGE_PIXELS = 1 << 26
"""The most that the setting `max_image_pixels` may allow for one image."""
MAX_IMAGE_BYTES = 12 << 20
"""The most that the setting `max_image_bytes` may allow for all images of a request."""
MAX_AUDIO_BYTES = LONGEST_SPEECH_S * AUDIO_RATE * 2
"""The most bytes of a request's audio, 30 seconds: longer speech is divided among several requests."""
MAX_AUDIO_FILE_BYTES = 512 << 20
"""The most that the setting `max_audio_bytes` may allow for a file."""
MAX_AUDIO_SECONDS = 4 * 3600
"""The most that the setting `max_audio_seconds` may allow for a file."""

MAX_SEQUENCES = 128
"""The most sequences of one request (`n`, `best_of`)."""
MAX_CALL_SEQUENCES = 256
"""The most sequences of one call for completions: of all its prompts together."""
MAX_GRAMMAR_SEQUENCES = 8
"""The most sequences of a request whose output is constrained: each has an automaton of its own, of up to 30 MB."""
MAX_OUTPUT_VALUES = 1 << 21
"""The most that a call's output may come to: each possible token of each sequence counts once, and, with
log-probabilities, once more for itself and for each alternative that is returned."""

MAX_BODY_FIELDS = 128
"""The most keys in the outermost object of an HTTP body."""
MAX_BODY_DEPTH = 64
MAX_BODY_CONTAINERS = 1 << 14
"""The most objects and arrays in an HTTP body."""
MAX_BODY_STRINGS = 1 << 16
MAX_BODY_VALUES = 1 << 18
"""The most commas outside strings in an HTTP body: about the number of its values."""

"""Paths of other servers (vLLM, SGLang, Ollama …) that are not served here, and what a client uses instead."""

from __future__ import annotations

from collections.abc import Mapping

_ONLY_READ = "models here write text alone; images are read in messages, where the model takes them"
_SPEECH = "speech is written down by /v1/audio/transcriptions and /v1/audio/translations, not spoken"
_EMBEDDINGS = "get vectors from /v1/embeddings, scores from /score, rankings from /rerank and labels from /classify"
_NO_STORE = "files are not stored here: send the requests themselves, as many at once as you like, with a low priority"
_NO_MESSAGE_BATCHES = (
    "batches are not stored here: send each message to /v1/messages, as many at once as you like, with a low priority"
)
_NO_AGENTS = (
    "continue a conversation by /v1/responses with previous_response_id, or send all messages to /v1/chat/completions"
)
_NO_TRAINING = "models are not trained here: train one elsewhere, then serve it with baton up --model DIRECTORY"
_BASE_URL = "the base URL of a client of OpenAI's API ends in /v1, so that it asks for /v1{path}"
_PROFILE = "baton trace REQUEST has where the time of a request went, baton bench engine what a step costs"
_SLEEP = "baton drain NODE takes a node out of service, baton uncordon NODE puts it back"
_COMPLETION = "send the prompt to /v1/completions, with stream: true for a stream"
_CHAT = "send the messages to /v1/chat/completions, with stream: true for a stream"
_MODELS = "GET /v1/models lists the model"

INSTEAD: Mapping[str, str] = {
    # OpenAI
    "/v1/assistants": _NO_AGENTS,
    "/v1/audio": _SPEECH,
    "/v1/batches": _NO_STORE,
    "/v1/containers": _NO_AGENTS,
    "/v1/conversations": _NO_AGENTS,
    "/v1/edits": _CHAT,
    "/v1/engines": "name the model in the body's field model, and " + _COMPLETION,
    "/v1/evals": _NO_TRAINING,
    "/v1/files": _NO_STORE,
    "/v1/fine_tuning": _NO_TRAINING,
    "/v1/images": _ONLY_READ,
    "/v1/moderations": "no model for moderation is served here; ask the served one with a response_format",
    "/v1/realtime": _SPEECH,
    "/v1/responses/compact": "conversations are not compacted here: ask the model for a summary, and go on from that",
    "/v1/threads": _NO_AGENTS,
    "/v1/uploads": _NO_STORE,
    "/v1/vector_stores": _NO_STORE,
    "/v1/videos": _ONLY_READ,
    # OpenAI's paths under a wrong base URL
    "/chat/completions": _BASE_URL,
    "/completions": _BASE_URL,
    "/embeddings": _BASE_URL,
    "/models": _BASE_URL,
    "/v1/v1": "the base URL of the client has /v1, and its paths have it again: take it out of one of them",
    # Anthropic
    "/v1/complete": _COMPLETION,
    "/v1/messages/batches": _NO_MESSAGE_BATCHES,
    # vLLM
    "/is_sleeping": _SLEEP,
    "/load": "/metrics has the load of this router",
    "/ping": "/health says whether requests are served",
    "/pooling": _EMBEDDINGS,
    "/reset_mm_cache": "baton cache reset empties the prefix caches of the nodes",
    "/reset_prefix_cache": "baton cache reset empties the prefix caches of the nodes",
    "/scale_elastic_ep": "baton node starts one more node of a cluster, baton drain NODE takes one out of service",
    "/server_info": "baton config view has the settings, baton get nodes -o wide the nodes",
    "/sleep": _SLEEP,
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/tokenizer_info": "/tokenize has the tokens of a text, /v1/models the model",
    "/v1/tokenize": "send it to /tokenize",
    "/v1/detokenize": "send it to /detokenize",
    "/wake_up": _SLEEP,
    # SGLang
    "/encode": _EMBEDDINGS,
    "/flush_cache": "baton cache reset empties the prefix caches of the nodes",
    "/get_model_info": _MODELS,
    "/get_server_info": "baton config view has the settings, baton get nodes -o wide the nodes",
    # Text Generation Inference
    "/generate": _COMPLETION,
    "/generate_stream": _COMPLETION,
    "/info": _MODELS,
    # llama.cpp
    "/apply-template": "/tokenize with messages has the tokens that the chat template makes of them",
    "/completion": _COMPLETION,
    "/embedding": "send the text to /v1/embeddings",
    "/infill": "send the text before the gap as prompt, and the one behind it as suffix, to /v1/completions",
    "/props": _MODELS,
    "/slots": "baton get requests lists what runs",
    # Ollama
    "/api": "this is no Ollama; set its clients to OpenAI's API, with a base URL that ends in /v1",
    "/api/chat": _CHAT,
    "/api/embed": "send the text to /v1/embeddings",
    "/api/generate": _COMPLETION,
    "/api/tags": _MODELS,
    # Amazon SageMaker, KServe and Triton
    "/invocations": _CHAT,
    "/v2": "inference requests of the KServe protocol are not served; " + _COMPLETION,
}
"""What to use instead of a path, or of any path below it. `{path}` stands for the path that was asked for."""
_MAX_SEGMENTS = max(path.count("/") for path in INSTEAD)


def use_instead(path: str) -> str:
    """What to use instead of PATH; empty if neither it nor a path above it is in the table."""
    segments = path.split("/", _MAX_SEGMENTS + 1)[1 : _MAX_SEGMENTS + 1]
    for count in range(len(segments), 0, -1):
        if found := INSTEAD.get("/" + "/".join(segments[:count])):
            return found.format(path=path[:200])
    return ""

"""OpenAI's API for text: /v1/completions and /v1/chat/completions, and vLLM's /tokenize and /detokenize. Take the
endpoints and the bodies.
"""

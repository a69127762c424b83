"""Admission: a request is placed once its fields are valid, its tenant has quota left, and it is first in the queue.

`validation.validate` makes a `request.ValidRequest` of what a client sent, by `sampling`, `prompt_inputs` and `checks`;
`admission` has the order of those that wait, `limits` how many may, how long, and with how many bytes.
"""

"""What a runner does with a step around the model, in numpy: requests become rows, and logits become tokens or vectors.

request_table.py keeps the requests, input_batch.py makes the rows, step_results.py says which of them are wanted, and
sampler.py, verification.py, pooling.py and prompt_logprobs.py make results of them. Runners take all of these.
"""

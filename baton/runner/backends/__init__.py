"""The operations that a step consists of, and what computes them: C kernels, torch, or CUDA.

Models take `Operations` from operations.py, an implementation from kernel_choice.py, the values that operations take
(attention_call.py, paged_cache.py, quantized_weight.py, weight_rows.py, low_rank.py), and, where several processes
compute a model, `Ranks` from ranks/.
"""

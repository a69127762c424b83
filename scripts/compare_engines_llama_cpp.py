"""Measures llama.cpp for scripts/compare_engines: runs in the comparison's venv, prints one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def prepare(model: Path, made: Path, weights: str, threads: int) -> Path:
    """Converts the weights to a GGUF file, once, with matrices in a format of llama.cpp. Returns the file."""
    plain, target = made / "model-BF16.gguf", made / f"model-{weights}.gguf"
    if not plain.is_file():
        made.mkdir(parents=True, exist_ok=True)
        _write(model, plain)
    if not target.is_file():
        _quantize(plain, target, weights, threads)
    return target


def _quantize(plain: Path, target: Path, weights: str, threads: int) -> None:
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{weights}")
    settings.nthread = threads
    unfinished = target.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(plain).encode(), str(unfinished).encode(), settings):
        raise SystemExit(f"llama.cpp could not convert the weights to {weights}")
    unfinished.rename(target)


def _write(model: Path, target: Path) -> None:
    import gguf
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen2" or not config["tie_word_embeddings"]:
        raise SystemExit(f"only qwen2 shapes with tied embeddings can be converted, not {config['model_type']}")
    unfinished = target.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    with safe_open(model / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (it is no mapping)
            _add(gguf, writer, _gguf_name(name), weights.get_tensor(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)


def _gguf_name(name: str) -> str:
    plain = name.removeprefix("model.")
    if plain == "embed_tokens.weight":
        return "token_embd.weight"
    if plain == "norm.weight":
        return "output_norm.weight"
    _, layer, rest = plain.split(".", 2)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _add(gguf: Any, writer: Any, name: str, tensor: Any) -> None:
    import torch

    if tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().numpy())
        return
    raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def measure(target: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the seconds of each prompt, and of each decode step by batch size."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    max_batch = max(plan["batches"])
    model_settings = llama_cpp.llama_model_default_params()
    model_settings.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(str(target).encode(), model_settings)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = max_batch * -(-(plan["context"] + plan["steps"] + 8) // 256) * 256
    settings.n_batch = settings.n_ubatch = plan["context"]
    settings.n_seq_max = max_batch
    settings.n_threads = settings.n_threads_batch = plan["threads"]
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise SystemExit("llama.cpp could not create a context; is there enough memory for its KV cache?")
    run = _Run(llama_cpp, context, llama_cpp.llama_model_get_vocab(model), plan["context"])
    prefill = [run.prefill(index, prompt) for index, prompt in enumerate(plan["prompts"])]
    decode = {str(batch): run.decode(batch, plan["steps"]) for batch in plan["batches"]}
    system = llama_cpp.llama_print_system_info().decode()
    return {
        "version": llama_cpp.__version__,
        "settings": {"system": system, "n_ubatch": plan["context"]},
        "prefill_s": prefill[1:],
        "decode_s": decode,
    }


class _Run:
    """Sequences with one prompt each that are decoded as one batch, greedily like in the other engines."""

    def __init__(self, llama_cpp: Any, context: Any, vocab: Any, capacity: int) -> None:
        self._lib, self._context = llama_cpp, context
        self._size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(capacity, 0, 1)
        self._tokens: list[int] = []
        self._lengths: list[int] = []

    def prefill(self, sequence: int, prompt: list[int]) -> float:
        """Computes one prompt and its first token; returns the seconds. Sequences must be given in order."""
        started = time.perf_counter()
        self._decode([(token, position, sequence) for position, token in enumerate(prompt)], last_only=True)
        self._tokens.append(self._best(len(prompt) - 1))
        seconds = time.perf_counter() - started
        self._lengths.append(len(prompt))
        return seconds

    def decode(self, batch: int, steps: int) -> list[float]:
        """Decodes the first `batch` sequences and truncates them again; returns the seconds of each step."""
        times, lengths, tokens = [], self._lengths[:batch], self._tokens[:batch]
        for _ in range(steps + 2):
            started = time.perf_counter()
            self._decode([(tokens[i], lengths[i], i) for i in range(batch)], last_only=False)
            tokens = [self._best(i) for i in range(batch)]
            times.append(time.perf_counter() - started)
            lengths = [length + 1 for length in lengths]
        memory = self._lib.llama_get_memory(self._context)
        for sequence in range(batch):
            self._lib.llama_memory_seq_rm(memory, sequence, self._lengths[sequence], -1)
        return times[2:]

    def _decode(self, rows: list[tuple[int, int, int]], *, last_only: bool) -> None:
        self._batch.n_tokens = len(rows)
        for index, (token, position, sequence) in enumerate(rows):
            self._batch.token[index] = token
            self._batch.pos[index] = position
            self._batch.n_seq_id[index] = 1
            self._batch.seq_id[index][0] = sequence
            self._batch.logits[index] = not last_only or index == len(rows) - 1
        status = self._lib.llama_decode(self._context, self._batch)
        if status:
            raise SystemExit(f"llama_decode failed with status {status}")

    def _best(self, row: int) -> int:
        import numpy as np

        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._size,)).argmax())


if __name__ == "__main__":
    request = json.load(sys.stdin)
    file = Path(
        request["gguf"]
        or prepare(Path(request["model"]), Path(request["made"]), request["weights"], request["threads"])
    )
    if not request.get("prepare_only"):
        print(json.dumps(measure(file, request)))

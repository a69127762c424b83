"""Trains the demo model that Baton bundles, on the source text of Python's standard library.

The result depends only on arguments and constants of this file: the corpus is the standard library of the running
interpreter, the held-out files are chosen by the hash of their path, and the number of steps is fixed. The result is a
directory that AutoModelForCausalLM, AutoTokenizer and Tokenizer.from_file load.

The hidden matrices are trained with Muon (Jordan et al. 2024), the embedding and the norms with AdamW. The learning
rate warms up, stays constant, and decays linearly to zero. Most steps use short windows, which are cheap; the last ones
use the full context, so that the model works up to `max_position_embeddings`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import math
import platform
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

VOCAB_SIZE = 4096
MAX_CONTEXT = 2048
BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Tables of code points, tests and files that name the build machine teach the model nothing about Python.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "encodings", "test", "tests", "idle_test", "__pycache__"}
)
SKIPPED_PREFIX = "_sysconfigdata"
HELD_OUT_ONE_IN = 32
MAX_FUNCTION_CHARS = 2000

TOKENS_PER_STEP = 4096
SHORT_CONTEXT = 256
LONG_CONTEXT_SHARE = 0.12
MATRIX_RATE = 0.02
OTHER_RATE = 3e-3
WARMUP_STEPS = 60
DECAY_SHARE = 0.7
GRADIENT_NORM = 1.0
SAMPLE_PROMPT = "def fibonacci(n):"
SAMPLE_SEED = 6


@dataclass(frozen=True)
class Corpus:
    """Texts by use: `files` and `functions` to learn from, `held_out` files to measure on.

    A function is either a bare source or, with a non-empty question, a chat whose answer is the source.
    """

    files: tuple[str, ...]
    functions: tuple[tuple[str, str], ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True)
class Validation:
    """Mean loss in nats per token, at the short and at the full context, and the held-out bits per byte."""

    short: float
    full: float
    bits_per_byte: float


@dataclass(frozen=True)
class Cost:
    """The cost of the training."""

    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Result:
    """The figures of the model card: data, cost, validation, and an example."""

    epoch_tokens: int
    cost: Cost
    validation: Validation
    example: str


def read_corpus(root: Path) -> Corpus:
    """Collects the standard library under `root`; one file in HELD_OUT_ONE_IN, by hash of its path, is held out."""
    files: list[str] = []
    held_out: list[str] = []
    functions: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.name.startswith(SKIPPED_PREFIX):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if not text.strip():
            continue
        if digest(relative.as_posix()) % HELD_OUT_ONE_IN == 0:
            held_out.append(text)
        else:
            files.append(text)
            functions.extend(documented_functions(text))
    return Corpus(tuple(files), tuple(functions), tuple(held_out))


def digest(text: str) -> int:
    """A number that depends on `text` alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def documented_functions(text: str) -> Iterator[tuple[str, str]]:
    """Yields (question, source) of each short documented function; half of the questions are empty.

    Functions without a question teach the model to continue a `def`, the others to answer in the chat template.
    """
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        documentation = ast.get_docstring(node)
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
        if not documentation or len(source) > MAX_FUNCTION_CHARS:
            continue
        summary = " ".join(documentation.split("\n\n")[0].split())
        yield ("" if digest(source) % 2 else summary, source)


def train_tokenizer(texts: tuple[str, ...]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens that puts BOS before what it encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def encode_documents(tokenizer: Tokenizer, corpus: Corpus) -> list[Tensor]:
    """The training documents as token ids, each from BOS to EOS."""
    texts = [text + EOS for text in corpus.files]
    for question, source in corpus.functions:
        texts.append((f"{USER}{question}{EOS}{ASSISTANT}{source}" if question else source) + EOS)
    return [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch(texts)]


def pack(documents: list[Tensor], context: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields windows of `context` + 1 ids forever, each epoch in a new order of documents and windows."""
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        stream = torch.cat([documents[index] for index in order])
        count = len(stream) // (context + 1)
        windows = stream[: count * (context + 1)].view(count, context + 1)
        yield from windows[torch.randperm(count, generator=generator)]


def new_model() -> LlamaForCausalLM:
    """A fresh model; every width is a multiple of 64."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


class NextTokenLoss(nn.Module):
    """Mean cross-entropy in nats of ids [batch, context + 1], each token predicted from those before it."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def new_optimizers(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the embedding and the norms."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    return (
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.05, momentum=0.95),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
    )


def rate_factor(step: int, steps: int) -> float:
    """The share of the peak learning rate at `step`: warm-up, constant, then linear decay to zero."""
    warmup = min(WARMUP_STEPS, max(1, steps // 10))
    return min((step + 1) / warmup, 1.0, (steps - step) / (DECAY_SHARE * steps))


def train(model: LlamaForCausalLM, documents: list[Tensor], options: argparse.Namespace) -> Cost:
    """Runs the fixed number of steps, prints progress, and saves the weights at intervals."""
    generator = torch.Generator().manual_seed(options.seed)
    short_windows = pack(documents, SHORT_CONTEXT, generator)
    full_windows = pack(documents, MAX_CONTEXT, generator)
    optimizers = new_optimizers(model)
    loss_of = NextTokenLoss(model)
    compiled = loss_of if options.eager else torch.compile(loss_of, dynamic=False)
    first_full_step = options.steps - int(options.steps * LONG_CONTEXT_SHARE)
    wall_start, cpu_start = time.monotonic(), time.process_time()
    for step in range(options.steps):
        context = SHORT_CONTEXT if step < first_full_step else MAX_CONTEXT
        windows = short_windows if step < first_full_step else full_windows
        ids = torch.stack([next(windows) for _ in range(TOKENS_PER_STEP // context)])
        loss = compiled(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        for optimizer, peak in zip(optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate_factor(step, options.steps)
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1
        if done % options.log_every == 0 or done == options.steps:
            wall, cpu = time.monotonic() - wall_start, time.process_time() - cpu_start
            print(
                f"step {done}/{options.steps} context {context} loss {loss.item():.3f} "
                f"wall {wall:.0f}s cpu {cpu:.0f}s {done * TOKENS_PER_STEP / wall:.0f} tokens/s",
                flush=True,
            )
        if done % options.checkpoint_every == 0:
            model.save_pretrained(options.checkpoint)
    return Cost(time.monotonic() - wall_start, time.process_time() - cpu_start)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, ids: Tensor, context: int) -> float:
    """Mean loss in nats per token over all of `ids`, cut into windows of `context` predictions."""
    loss_of = NextTokenLoss(model)
    total = 0.0
    for start in range(0, len(ids) - 1, context):
        window = ids[start : start + context + 1]
        total += loss_of(window[None]).item() * (len(window) - 1)
    return total / (len(ids) - 1)


def validate(model: LlamaForCausalLM, tokenizer: Tokenizer, held_out: tuple[str, ...]) -> Validation:
    """Measures `model` on the files it has not seen."""
    ids = torch.tensor([i for text in held_out for i in tokenizer.encode(text + EOS).ids])
    size = sum(len(text.encode()) for text in held_out)
    full = held_out_loss(model, ids, MAX_CONTEXT)
    return Validation(held_out_loss(model, ids, SHORT_CONTEXT), full, full * len(ids) / size / math.log(2))


@torch.no_grad()
def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, seed: int, length: int = 96) -> str:
    """`prompt` and its continuation by the model, at temperature 0.7 with top-k 40."""
    torch.manual_seed(seed)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=True,
        temperature=0.7,
        top_k=40,
        pad_token_id=SPECIAL_TOKENS.index(EOS),
    )
    return str(tokenizer.decode(out[0].tolist()))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> LlamaForCausalLM:
    """Writes weights in bfloat16, configuration and tokenizer to `out`; returns the model as loaded from there."""
    model.to(torch.bfloat16).save_pretrained(out)
    GenerationConfig(
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        do_sample=True,
        temperature=0.7,
        top_k=40,
    ).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out, save_jinja_files=False)
    return LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16)


def model_card(options: argparse.Namespace, model: LlamaForCausalLM, corpus: Corpus, result: Result) -> str:
    """The README of the model; its figures are those of this run."""
    config, validation, cost = model.config, result.validation, result.cost
    seen = options.steps * TOKENS_PER_STEP
    return f"""# Baton's demo model

A Llama-shaped model of {model.num_parameters() / 1e6:.2f} million parameters: small enough to ship, good
enough to see with the eye that a serving path is right. It writes text that reads like Python, and knows nothing else.

| | |
|---|---|
| shape | {config.num_hidden_layers} layers, hidden {config.hidden_size}, feed-forward {config.intermediate_size}, \
{config.num_attention_heads} query heads over {config.num_key_value_heads} key/value heads of {config.head_dim}, \
tied embedding |
| weights | bfloat16 |
| vocabulary | {config.vocab_size}, byte-level BPE, so any text round-trips |
| context | {config.max_position_embeddings} positions |
| data | source of the standard library of Python {platform.python_version()}, without tests and codec tables: \
{len(corpus.files)} files, and their {len(corpus.functions)} short documented functions again, half of them bare, \
half as chats; {result.epoch_tokens / 1e6:.2f} million tokens an epoch |
| training | {options.steps} steps of {TOKENS_PER_STEP} tokens ({seen / 1e6:.1f} million), seed {options.seed}, \
context {SHORT_CONTEXT}, for the last {LONG_CONTEXT_SHARE:.0%} of the steps {MAX_CONTEXT} |
| cost | {cost.cpu_seconds / 60:.0f} CPU minutes, {cost.wall_seconds / 60:.0f} minutes by the clock; \
threads: {options.threads} |
| validation | {validation.full:.3f} nats a token ({validation.bits_per_byte:.3f} bits a byte) at context \
{MAX_CONTEXT}, {validation.short:.3f} at context {SHORT_CONTEXT}, of these bfloat16 weights on \
{len(corpus.held_out)} whole files never trained on |

Made by `scripts/train_demo_model --steps {options.steps} --seed {options.seed} --threads {options.threads}`.
The text it learned from is under the Python Software Foundation License Version 2.

What it made of `{SAMPLE_PROMPT}` at temperature 0.7, top 40, seed {SAMPLE_SEED}:

```python
{result.example}
```
"""


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="train_demo_model",
        description="Train Baton's bundled demo model on the source text of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("baton/demo_model"), help="directory to write the model to")
    parser.add_argument("--steps", type=int, default=2400, help=f"optimizer steps of {TOKENS_PER_STEP} tokens each")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first weights and of the order of the data")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to compute with")
    parser.add_argument("--log-every", type=int, default=50, help="steps between two lines of progress")
    parser.add_argument("--checkpoint-every", type=int, default=400, help="steps between two saves of the weights")
    parser.add_argument("--checkpoint", type=Path, default=Path("build/demo_model"), help="where those saves go")
    parser.add_argument("--eager", action="store_true", help="do not compile (slower, but needs no C++ compiler)")
    return parser.parse_args()


def main() -> None:
    """Trains, saves, measures what was saved, and writes the model card."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    corpus = read_corpus(Path(sysconfig.get_path("stdlib")))
    tokenizer = train_tokenizer(corpus.files)
    documents = encode_documents(tokenizer, corpus)
    tokens = sum(map(len, documents))
    model = new_model()
    print(
        f"{len(corpus.files)} files, {len(corpus.functions)} functions, {tokens / 1e6:.2f} M tokens; "
        f"{len(corpus.held_out)} files held out; {model.num_parameters() / 1e6:.2f} M parameters",
        flush=True,
    )
    cost = train(model, documents, options)
    saved = save(model, tokenizer, options.out)
    validation = validate(saved, tokenizer, corpus.held_out)
    example = sample(saved, tokenizer, SAMPLE_PROMPT, SAMPLE_SEED)
    print(validation, cost, example, sep="\n", flush=True)
    card = model_card(options, saved, corpus, Result(tokens, cost, validation, example))
    (options.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()

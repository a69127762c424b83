"""lm-evaluation-harness over local-completions and local-chat-completions, on tasks of our own.

Answers are generated, and over local-completions also chosen by the log-probabilities of given ones (`echo`).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTIONS = ["What is 2 + 2?", "What is the capital of France?", "Name the first month of the year."]
ANSWERS = ["4", "Paris", "January"]
CHOICES = [["4", "5", "a hundred"], ["Paris", "Berlin", "a river"], ["January", "May", "Monday"]]
_HEAD = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
TASKS = {
    "facts": """
task: facts
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 24, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""",
    "choices": """
task: choices
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""",
    "perplexity": """
task: perplexity
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
""",
}
RUNS = (
    ("local-completions", "completions", ("facts", "choices", "perplexity"), []),
    ("local-chat-completions", "chat/completions", ("facts",), ["--apply_chat_template"]),
)
KINDS = {"facts": "generate_until", "choices": "multiple_choice", "perplexity": "loglikelihood_rolling"}

with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "facts.jsonl")
    rows = zip(QUESTIONS, ANSWERS, CHOICES, strict=True)
    data.write_text("".join(json.dumps({"question": q, "answer": a, "choices": c}) + "\n" for q, a, c in rows))
    for name, task in TASKS.items():
        Path(folder, f"{name}.yaml").write_text((task + _HEAD).format(data=data))
    for kind, path, tasks, more in RUNS:
        arguments = (
            f"base_url={os.environ['BATON_URL']}/v1/{path},model={os.environ['BATON_MODEL']},"
            f"tokenizer={os.environ['BATON_MODEL_DIR']},num_concurrent=2"
        )
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("lm_eval")),
                *("--model", kind, "--model_args", arguments),
                *("--include_path", folder, "--tasks", ",".join(tasks), "--output_path", f"{folder}/{kind}", *more),
            ],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": folder},
            check=False,
            stdout=sys.stderr,
        )
        if done.returncode:
            sys.exit(f"lm_eval ended with exit code {done.returncode}")
        (report,) = Path(folder, kind).rglob("results_*.json")
        found = json.loads(report.read_text())
        for name in tasks:
            assert found["n-samples"][name]["effective"] == len(QUESTIONS)
            print(f"works: {KINDS[name]} over {kind}")

"""lm-evaluation-harness: a task of its own over local-completions and local-chat-completions, by generated answers."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTIONS = ["What is 2 + 2?", "What is the capital of France?", "Name the first month of the year."]
ANSWERS = ["4", "Paris", "January"]
TASK = """
task: facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 24, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""

with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "facts.jsonl")
    data.write_text(
        "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip(QUESTIONS, ANSWERS, strict=True))
    )
    Path(folder, "facts.yaml").write_text(TASK.format(data=data))
    for kind, path, more in (
        ("local-completions", "completions", []),
        ("local-chat-completions", "chat/completions", ["--apply_chat_template"]),
    ):
        arguments = (
            f"base_url={os.environ['BATON_URL']}/v1/{path},model={os.environ['BATON_MODEL']},"
            f"tokenizer={os.environ['BATON_MODEL_DIR']},num_concurrent=2"
        )
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("lm_eval")),
                *("--model", kind, "--model_args", arguments),
                *("--include_path", folder, "--tasks", "facts", "--output_path", f"{folder}/{kind}", *more),
            ],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": folder},
            check=False,
            stdout=sys.stderr,
        )
        if done.returncode:
            sys.exit(f"lm_eval ended with exit code {done.returncode}")
        (report,) = Path(folder, kind).rglob("results_*.json")
        assert json.loads(report.read_text())["n-samples"]["facts"]["effective"] == len(QUESTIONS)
        print(f"works: generate_until over {kind}")

"""guidellm: a short benchmark of constant concurrency with synthetic prompts."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    result = Path(folder, "result.json")
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("guidellm")),
            "run",
            *("--backend", f"kind=openai_http,target={os.environ['BATON_URL']},model={os.environ['BATON_MODEL']}"),
            *("--tokenizer", f"kind=huggingface_auto,model={os.environ['BATON_MODEL_DIR']}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--output", f"kind=json,path={result}", "--disable-progress"),
        ],
        check=False,
    )
    if done.returncode:
        sys.exit(f"guidellm ended with exit code {done.returncode}")
    report = json.loads(result.read_text())
totals = report["benchmarks"][0]["metrics"]["request_totals"]
assert (totals["successful"], totals["errored"]) == (8, 0), totals
print("works: 8 requests at a concurrency of 2, none failed")

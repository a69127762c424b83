"""aiperf: a short profile of streamed chats with synthetic prompts."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("aiperf")),
            "profile",
            *("--url", os.environ["BATON_URL"]),
            *("--model", os.environ["BATON_MODEL"]),
            *("--tokenizer", os.environ["BATON_MODEL_DIR"]),
            *("--endpoint-type", "chat", "--streaming"),
            *("--concurrency", "2", "--request-count", "8"),
            *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"),
            *("--artifact-dir", folder, "--ui-type", "none"),
        ],
        check=False,
        stdout=sys.stderr,
    )
    if done.returncode:
        sys.exit(f"aiperf ended with exit code {done.returncode}")
    (report,) = Path(folder).rglob("profile_export_aiperf.json")
    figures = json.loads(report.read_text())
assert figures["request_count"]["avg"] == 8, figures["request_count"]
print("works: 8 streamed chats at a concurrency of 2, none failed")

"""guidellm: a short benchmark of constant concurrency with synthetic prompts."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    result = Path(folder, "result.json")
    subprocess.run(
        [
            str(Path(sys.executable).with_name("guidellm")),
            "benchmark",
            *("--target", os.environ["BATON_URL"]),
            *("--model", os.environ["BATON_MODEL"]),
            *("--processor", os.environ["BATON_MODEL_DIR"]),
            *("--profile", "concurrent", "--rate", "2", "--max-requests", "8"),
            *("--data", "prompt_tokens=64,output_tokens=16"),
            *("--output-dir", folder, "--outputs", "result.json"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    report = json.loads(result.read_text())
totals = report["benchmarks"][0]["metrics"]["request_totals"]
assert totals["successful"] == 8 and totals["errored"] == 0, totals
print("8 requests at a concurrency of 2, none failed")

"""The command `llm` with a model of its extra-openai-models.yaml: a prompt, streamed and not, and a conversation."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

LLM = str(Path(sys.executable).with_name("llm"))

with tempfile.TemporaryDirectory() as home:
    environment = {**os.environ, "LLM_USER_PATH": home}
    Path(home, "extra-openai-models.yaml").write_text(
        f"- model_id: baton\n  model_name: {os.environ['BATON_MODEL']}\n"
        f"  api_base: {os.environ['BATON_URL']}/v1\n  api_key_name: baton\n"
    )
    subprocess.run([LLM, "keys", "set", "baton", "--value", "any"], env=environment, check=True)

    def ask(*words: str) -> str:
        """The printed answer."""
        command = [LLM, "-m", "baton", "-o", "temperature", "0", "-o", "max_tokens", "30", *words]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
        ).stdout

    whole = ask("What is the capital of France?", "--no-stream")
    assert whole.strip()
    assert ask("What is the capital of France?") == whole
    print("works: a prompt, whole and streamed, equal")
    assert ask("-c", "And of Italy?").strip()
    print("works: a conversation (-c)")

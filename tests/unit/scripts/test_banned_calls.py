"""The checks refuse calls that would execute what they read, and other dangerous calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
BANNED = {
    "import pickle": "TID251",
    "from pickle import loads": "TID251",
    "import marshal": "TID251",
    "import shelve": "TID251",
    "import torch\n\ntorch.load('x')": "TID251",
    "import yaml\n\nyaml.load('x', yaml.Loader)": "TID251",
    "eval(input())": "S307",
    "exec(input())": "S102",
    "import subprocess\n\nsubprocess.run('ls', shell=True)": "S602",
    "import os\n\nos.system(input())": "S605",
    "import ssl\n\nssl._create_unverified_context()": "S323",
    "import tempfile\n\ntempfile.mktemp()": "S306",
    "import hashlib\n\nhashlib.md5(b'')": "S324",
}


def test_banned_calls_are_refused(tmp_path: Path) -> None:
    for number, text in enumerate(BANNED):
        (tmp_path / f"banned_{number}.py").write_text(text + "\n")
    ruff, config = Path(sys.executable).with_name("ruff"), ROOT / "pyproject.toml"
    done = subprocess.run(
        [str(ruff), "check", "--no-cache", "--output-format", "json", "--config", str(config), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found: dict[str, set[str]] = {}
    for problem in json.loads(done.stdout):
        found.setdefault(Path(problem["filename"]).name, set()).add(problem["code"])
    for number, (text, code) in enumerate(BANNED.items()):
        assert code in found.get(f"banned_{number}.py", set()), text


def test_chance_without_a_seed_comes_from_the_system() -> None:
    # Ids are drawn from it, and from some hundred outputs of a Mersenne Twister all others can be computed.
    guessable = re.compile(r"\bRandom\(\s*\)|\brandom\.(random|choices?|rand\w+|getrandbits|uniform|sample|shuffle)\(")
    products = ("baton", "router", "prefill_node", "decode_node", "kv_transfer")
    files = [path for product in products for path in (ROOT / product).rglob("*.py")]
    assert len(files) > 500
    assert [str(path) for path in files if guessable.search(path.read_text())] == []

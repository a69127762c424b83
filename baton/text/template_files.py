"""The chat templates in a model directory, as transformers finds them.

A checkpoint has its templates in one of these places, the first that it has:

1. chat_template.jinja, and further ones by their names as additional_chat_templates/NAME.jinja;
2. the key `chat_template` of chat_template.json, processor_config.json or tokenizer_config.json: one template, or
   several as a list of `{"name": ..., "template": ...}` or an object of them by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.model_formats.files import read_object
from baton.model_formats.special_tokens import CONFIG_FILE

DEFAULT = "default"
"""The name of the template for chats, which one without a name has."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names of special tokens that a tokenizer may have without listing them as further ones."""
MAX_TEMPLATE_BYTES = 1 << 20
"""All templates of a model together. Those of models have some 10 KB."""
_FORMS = "must be a template, or several with their names"


def find_templates(model_dir: Path) -> Mapping[str, str]:
    """The templates of a model by their names; none where it has no template. Raises ConfigError, also for templates
    that are too long together.
    """
    templates = _templates_in(model_dir)
    num_bytes = sum(len(source.encode(errors="surrogatepass")) for source in templates.values())
    if num_bytes > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"{model_dir} has chat templates of {num_bytes} bytes; at most {MAX_TEMPLATE_BYTES} are read")
    return templates


def _templates_in(model_dir: Path) -> Mapping[str, str]:
    files = {DEFAULT: model_dir / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))}
    if templates := {name: _text(path) for name, path in files.items() if path.is_file()}:
        return templates
    for file in ("chat_template.json", "processor_config.json", CONFIG_FILE):
        path = model_dir / file
        if (value := read_json(path).get("chat_template")) is not None:
            return dict(_named(value, path))
    return {}


def find_tool_call_parser(model_dir: Path) -> str:
    """The format of calls that a model's files name, which is a key of Baton's own; empty if they name none."""
    return str(read_json(model_dir / CONFIG_FILE).get("tool_call_parser") or "")


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file, empty where there is no such file; raises ConfigError for one that can't be read."""
    return read_object(path) if path.is_file() else {}


def _named(value: Any, path: Path) -> Iterator[tuple[str, str]]:
    """The templates in one value, by their names; raises ConfigError."""
    pairs: list[tuple[Any, Any]]
    if isinstance(value, list):
        pairs = [
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None) for entry in value
        ]
    else:
        pairs = list(value.items()) if isinstance(value, dict) else [(DEFAULT, value)]
    for name, source in pairs:
        if not isinstance(name, str) or not isinstance(source, str):
            raise ConfigError(f"{path}: chat_template {_FORMS}; this is {value!r:.80}")
        yield name, source


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error

"""Chat templates: how the prompts of a user and the answers of a network are written for a network.

A template is text with statements of Jinja, as in the packages transformers and llama.cpp. It may come from anybody, so
it is rendered in Jinja's sandbox (extra ``text``).
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedjax_mr import files, gguf_files, untrusted
from fedjax_mr.errors import UserError

FIELD, FILE, CONFIG = "tokenizer.chat_template", "chat_template.jinja", "tokenizer_config.json"
Render = Callable[..., str]


def rendered(tokenizer: str | None, prompts: Sequence[str], answers: Sequence[str]) -> list[tuple[str, str]]:
    """The text of each prompt and that of its answer, of which the network predicts the second.

    Args:
      tokenizer: see `tokens.encode`. One without a template has a line break between the two.
      prompts: M texts.
      answers: M texts.

    Raises:
      UserError: the template is damaged, or the text of a prompt is not the beginning of that with its answer.
    """
    render = _template(tokenizer)
    if render is None:
        return [(f"{prompt}\n", answer) for prompt, answer in zip(prompts, answers, strict=True)]
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        before = _asked(render, prompt)
        both = render([_message("user", prompt), _message("assistant", answer)], add_generation_prompt=False)
        if not both.startswith(before):
            raise UserError(f"the chat template of {tokenizer} does not begin an answer with its prompt")
        found.append((before, both[len(before) :]))
    return found


def asked(tokenizer: str | None, prompt: str) -> str:
    """The text of a prompt, after which the network writes its answer. Raises a UserError: as `rendered`."""
    render = _template(tokenizer)
    return f"{prompt}\n" if render is None else _asked(render, prompt)


def _asked(render: Render, prompt: str) -> str:
    return render([_message("user", prompt)], add_generation_prompt=True)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _text(tokenizer: str | None) -> str | None:
    """The template of a tokenizer. None if it has none."""
    if tokenizer is None:
        return None
    path = Path(tokenizer)
    if gguf_files.is_gguf(path):
        return gguf_files.read_fields(path, FIELD).get(FIELD)
    try:
        if (path / FILE).is_file():
            return untrusted.read_text(path / FILE)
        found = untrusted.read_json(path / CONFIG, dict).get("chat_template")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path / FILE} is damaged ({error})") from None
    return found if isinstance(found, str) else None


def _template(tokenizer: str | None) -> Render | None:
    text = _text(tokenizer)
    if text is None:
        return None
    try:
        from jinja2 import sandbox  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("chat templates need jinja2: pip install 'fedjax-mr[text]'") from None

    def refuse(message: Any) -> NoReturn:
        raise UserError(f"the chat template of {tokenizer} refuses: {message}")

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse

    def render(messages: list[dict[str, str]], **options: Any) -> str:
        try:
            return _compiled(environment, text).render(messages=messages, bos_token="", eos_token="", **options)
        except UserError:
            raise
        except Exception as error:  # a template may compute anything
            reason = " ".join(str(error).split())[:120]
            raise UserError(f"the chat template of {tokenizer} is damaged ({reason})") from None

    return render


@functools.lru_cache(maxsize=8)
def _compiled(environment: Any, text: str) -> Any:
    return environment.from_string(text)


def save(tokenizer: str, folder: Path) -> None:
    """Write the template of a tokenizer, if it has one, and what transformers needs to load the tokenizer."""
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if (text := _text(tokenizer)) is not None:
        facts["chat_template"] = text
    with files.atomic_write(folder / CONFIG) as new:
        new.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

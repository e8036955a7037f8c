"""Arguments of a model's chat template (`data.chat_template_kwargs`), such as `enable_thinking: false` of Qwen3.

A Jinja template ignores what it is given and does not read, so a name that stands nowhere in it is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta

from mm_grpo.errors import ConfigError, did_you_mean

FIELD = "data.chat_template_kwargs"
OURS = ("messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now")
"""Names that a rendering supplies itself, or that a run has no use for."""
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""A tag that only transformers' environment knows."""


@lru_cache(maxsize=8)
def names_read(template: str) -> frozenset[str]:
    """The names that a chat template reads and does not set itself. TemplateSyntaxError for what is no Jinja."""
    syntax = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    return frozenset(meta.find_undeclared_variables(syntax))


def check_arguments(given: Mapping[str, Any], template: str, path: str) -> dict[str, Any]:
    """The arguments as they are handed on. ConfigError for one that the model's template does not read."""
    if not given:
        return {}
    try:
        legal = sorted(names_read(template) - set(OURS))
    except TemplateSyntaxError as error:
        raise ConfigError(f"model.path = '{path}': the chat template is not valid Jinja ({error})") from None
    for name in given:
        if name in OURS:
            raise ConfigError(f"{FIELD}.{name}: is set for every prompt by the run; leave it out")
        if name not in legal:
            raise ConfigError(
                f"{FIELD}.{name}: the chat template of '{path}' does not read {name!r}, so it would change "
                f"nothing; {did_you_mean(name, legal)}it reads: {', '.join(legal) or 'none'}. Leave it out, or "
                "use a model whose template has it"
            )
    return dict(given)

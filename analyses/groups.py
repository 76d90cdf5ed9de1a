"""Groups of prompts that resemble each other: what prompts share can look like what a study asks about.

Prompts of one template have the same words at the same places. A place then fixes the token, so comparing "the same
place" across templates compares templates. A *group* is a template, a document, an author, or anything else that some
prompts share and others do not. Matched comparisons compare within groups, and their intervals resample groups.

Pitfall: shared text is found word by word. Paraphrases of one text share no stretch of words, and no warning follows.
"""

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from sinklens.tasks.word_problems import template_of

STRETCH = 8  # words, or token ids
SHARED = 0.1  # share of the prompts above which they count as sharing text


def template_groups(prompts: Sequence[Any]) -> list[str] | None:
    """The template of every prompt, a text or token ids, if all are shipped word problems, else None."""
    found = [template_of(prompt) if isinstance(prompt, str) else None for prompt in prompts]
    known = [template for template in found if template is not None]
    return known if known and len(known) == len(found) else None


def sharing(prompts: Sequence[Any], stretch: int = STRETCH) -> float:
    """Share of the prompts that have `stretch` consecutive words, or token ids, in common with another prompt.

    All numbers count as the same word. What every prompt contains, such as an instruction, does not count: it cannot
    distinguish groups. Copies of a prompt count once.
    """
    distinct = {repr(prompt): _words(prompt) for prompt in prompts}.values()
    stretches = [
        {tuple(words[start : start + stretch]) for start in range(len(words) - stretch + 1)} for words in distinct
    ]
    number = Counter(one for found in stretches for one in found)
    shared = {one for one, prompts_with in number.items() if 1 < prompts_with < len(stretches)}
    return sum(bool(found & shared) for found in stretches) / len(stretches) if stretches else 0.0


def _words(prompt: Any) -> list[Hashable]:
    """Lower-case words without punctuation, numbers as "0"; or the token ids."""
    if not isinstance(prompt, str):
        return list(prompt)
    return [re.sub(r"\d+", "0", word) for word in re.findall(r"\w+", prompt.lower())]

"""The small byte-level BPE tokenizer that all tiny checkpoints share.

Words of the generated problems and integers up to 120 are single tokens, so an addition is one prediction instead of
one per digit. There are three special tokens, as in LLaDA: a start token before every prompt, an end-of-text token that
also pads the answer, and the mask token. With pictures, higher ids are added: MMaDA's task tokens, the words of the
captions, and finally the code tokens, so that a code's id is its number plus the size of the text vocabulary.

Pitfall: in byte-level BPE " 7" and "7" are different tokens. The problems write every number after a space.
"""

from typing import TYPE_CHECKING

from sinklens.tasks import word_problems
from training import pictures

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

START, END, MASK = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>"
LAST_MASK = "<|last_mask|>"
VOCAB_SIZE = 768
LARGEST_INTEGER = 120


def train_tokenizer(
    seed: int = 1, problems: int = 20_000, *, start: bool = True, with_pictures: bool = False, mask_last: bool = False
) -> "PreTrainedTokenizerFast":
    """Train the tokenizer on `problems` generated problems.

    Args:
        start: put `START` before every prompt; the token is in the vocabulary in either case.
        with_pictures: add the tokens of `training.pictures`; the ids of all others stay the same.
        mask_last: add a mask token with the last id, where MDLM has it; the ids of all others stay the same.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, MASK, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{p.prompt} {p.answer}" for p in word_problems.training(seed, problems)]
    numbers = [f" {n}" for n in range(LARGEST_INTEGER + 1) for _ in range(200)]
    tokenizer.train_from_iterator([*texts, *numbers], trainer)
    if with_pictures:
        _add_pictures(tokenizer)
    if mask_last:
        tokenizer.add_special_tokens([LAST_MASK])
    return wrap_tokenizer(tokenizer, start=start, mask=LAST_MASK if mask_last else MASK)


def wrap_tokenizer(tokenizer: "Tokenizer", *, start: bool, mask: str = MASK) -> "PreTrainedTokenizerFast":
    """transformers' class around a tokenizer that has the three special tokens.

    Args:
        start: put `START` before every prompt.
        mask: the mask token.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    if start:
        special = [(START, tokenizer.token_to_id(START))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        mask_token=mask,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _add_pictures(tokenizer: "Tokenizer") -> None:
    from tokenizers import AddedToken

    tokenizer.add_special_tokens(list(pictures.TASK_TOKENS))
    words = [f" {word}" for word in pictures.WORDS]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*words, *pictures.CODE_TOKENS)])

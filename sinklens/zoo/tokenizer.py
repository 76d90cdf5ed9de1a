"""The small byte-level BPE tokenizer that all tiny checkpoints share.

Words of the generated problems and integers up to 120 are whole tokens, so an addition is one prediction, not one per
digit. Three special tokens stand where LLaDA has them: a start token put before every prompt, an end-of-text token
that also fills up the answer, and the mask.

One way this fails: byte-level BPE makes " 7" and "7" two tokens. The problems write every number after a space.
"""

from typing import TYPE_CHECKING

from sinklens.tasks import word_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

START, END, MASK = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>"
VOCAB_SIZE = 768
WHOLE_NUMBERS = 120


def train_tokenizer(seed: int = 1, problems: int = 20_000) -> "PreTrainedTokenizerFast":
    """Train the tokenizer on `problems` generated problems; a prompt gets `START` before it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

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
    numbers = [f" {n}" for n in range(WHOLE_NUMBERS + 1) for _ in range(200)]
    tokenizer.train_from_iterator([*texts, *numbers], trainer)
    start_id = tokenizer.token_to_id(START)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, start_id)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        mask_token=MASK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )

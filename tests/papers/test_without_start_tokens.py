"""Models whose prompts begin without a start token, and whose end token is not their tokenizer's."""

from types import SimpleNamespace

import torch

MODEL = SimpleNamespace(
    encode=lambda prompt: SimpleNamespace(ids=torch.tensor([[7, 8]])), special_tokens={"start": [1], "end": [0]},
    eos_token_ids=(0,), tokenizer=SimpleNamespace(eos_token_id=2),
)  # fmt: skip


def test_the_ordinary_token_is_a_start_token_as_that_of_the_sink_is(script):
    assert script("one_sink_token").prompt_ids(MODEL, "", "ordinary token").tolist() == [[1, 7, 8]]


def test_an_answer_ends_where_the_model_ends_it(script):
    run = SimpleNamespace(
        model=MODEL,
        prompt_length=1,
        unmask_step=torch.tensor([[-1, 2, 0, 1, 3]]),
        tokens=torch.tensor([[7, 5, 2, 0, 0]]),
    )
    ((order, filled),) = script("early_decisions").orders(run)
    assert (order.tolist(), filled) == ([1, 2, 0, 3], 2)

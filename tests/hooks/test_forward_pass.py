"""What a pass says of its queries and keys, against loops over positions and against the values at its points."""

import pytest
import torch
from building import shared_model

from sinklens.hooks.forward_pass import ForwardPass, QuerySpan
from sinklens.hooks.names import axes_of


def causal(step, queries):
    """A pass of an autoregressive run with 3 prompt tokens, over the last `queries` positions of its text."""
    stop = 3 + step
    return ForwardPass(step, mode="causal", queries=range(stop - queries, stop), keys=range(stop), prompt_length=3)


def test_a_position_belongs_to_the_step_that_first_reads_it_in_an_autoregressive_run_else_to_its_own():
    of_prompt, cached = [QuerySpan(0, 0, 3)], [QuerySpan(2, 0, 1)]
    assert [causal(0, 3).spans(), causal(2, 1).spans(), causal(2, 5).spans(1)] == [of_prompt, cached, cached]
    assert causal(2, 5).spans() == [*of_prompt, QuerySpan(1, 3, 4), QuerySpan(2, 4, 5)]
    assert (causal(2, 5).first(5), causal(2, 1).first(1), causal(2, 5).first(1)) == (0, 4, 4)
    denoise = ForwardPass(2, mode="denoise", queries=range(4, 6), keys=range(6), prompt_length=3)
    assert denoise.spans() == [QuerySpan(2, 0, 2)]
    assert (denoise.first(2), denoise.first(6), denoise.first(9)) == (4, 0, 0)


def test_distances_count_from_each_query_to_each_key():
    here = ForwardPass(queries=range(5, 8), keys=range(3, 8))
    assert here.distances(torch.device("cpu")).tolist() == [[key - query for key in range(3, 8)] for query in (5, 6, 7)]


def test_the_rows_of_a_pass_are_those_of_all_its_tensors():
    whole = ForwardPass(
        1,
        real=torch.ones(4, 3, dtype=torch.bool),
        fresh=torch.rand(4, 2, 3) < 0.5,
        undecided=torch.rand(4, 3) < 0.5,
        active=torch.tensor([True, False] * 2),
    )
    part = whole.of_rows(slice(1, 3))
    assert whole.computed is not None
    assert torch.equal(part.computed, whole.computed[1:3])
    assert torch.equal(part.undecided, whole.undecided[1:3])
    assert (part.active.tolist(), (part.step, part.decidable)) == ([False, True], (1, None))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_single_pass_describes_the_values_at_its_points(ids, is_causal):
    model, seen = shared_model("llama", is_causal), []
    real = torch.ones_like(ids, dtype=torch.bool)
    real[0, :2] = False

    def look(value, hook):
        size = value.shape[next(n for n, axis in enumerate(axes_of(hook.name)) if axis in ("pos", "query", "key"))]
        seen.append((size, len(hook.forward_pass.columns(hook.name))))
        assert torch.equal(hook.forward_pass.real, real)
        assert (hook.forward_pass.step, hook.forward_pass.mode) == (None, None)

    points = [f"blocks.1.attn.{name}" for name in ("hook_k", "hook_pattern", "hook_sink_scores", "hook_z")]
    model.run_with_hooks(ids, attention_mask=real, fwd_hooks=[(name, look) for name in points])
    assert seen == [(ids.shape[1], ids.shape[1])] * 4

"""The split study on patterns whose groups attend to the same or to different keys."""

import numpy as np
import pytest
import torch

import sinklens
from sinklens.analyses.split import MEASURES, Groups, Split, _shuffled, group_scores, likeness
from sinklens.sinks import Record
from sinklens.tasks.word_problems import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]
SMALL = {"gen_length": 8, "steps": 4}


def test_scores_of_a_group_use_only_its_rows():
    pattern = torch.rand(2, 3, 6, 6).softmax(-1)
    real = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    pattern = pattern * real[:, None, None, :]
    members = torch.zeros(2, 3, 6, dtype=torch.bool)
    members[:, 0, [2, 5]] = True
    members[:, 1] = real
    found = group_scores(pattern, members, real)
    for row, size in enumerate((6, 4)):
        for head in range(3):
            for key in range(6):
                expected = (pattern[row, head, 2, key] + pattern[row, head, 5, key]) / 2 * size
                assert float(found[row, 0, head, key]) == pytest.approx(float(expected), rel=1e-5)
    sums = (pattern * real[:, None, :, None]).sum(2)
    torch.testing.assert_close(found[:, 1], sums)  # all real queries: the sink score
    assert found[:, 2].isnan().all()


def test_separate_sinks_have_overlap_zero_and_shared_sinks_one():
    """Head 0: the groups have sinks at 1 and 4. Head 1: both at 2. Head 2: none. Head 3: {1, 2} and {2, 3}."""
    low = torch.full((1, 4, 8), 0.5)
    one, other = low.clone(), low.clone()
    one[0, 0, 1] = other[0, 0, 4] = one[0, 1, 2] = other[0, 1, 2] = 5
    one[0, 3, [1, 2]] = other[0, 3, [2, 3]] = torch.tensor([5.0, 6.0])
    found = likeness(one, other, torch.ones(1, 8, dtype=torch.bool))
    np.testing.assert_allclose(found.jaccard, [[0, 1, np.nan, 1 / 3]], rtol=1e-6)
    np.testing.assert_allclose(found.jaccard_low, [[0, 1, 0, 1 / 3]], rtol=1e-6)
    np.testing.assert_allclose(found.jaccard_high, [[0, 1, 1, 1 / 3]], rtol=1e-6)
    assert found.neither[0].tolist() == [0, 0, 1, 0]
    assert found.one[0].tolist() == [0, 0, 0, 0]
    assert found.same[0].tolist() == [0, 1, 1, 0]
    for head in (0, 1, 3):
        expected = np.corrcoef(one[0, head], other[0, head])[0, 1]
        assert float(found.correlation[0, head]) == pytest.approx(expected, abs=1e-5)
    assert found.correlation[0, 2].isnan()


def test_no_step_is_dropped_because_a_group_has_no_sink():
    """Head 0: only one group has a sink. Head 1: neither has. Row 1 has no second group."""
    one, other = torch.full((2, 2, 8), 0.5), torch.full((2, 2, 8), 0.5)
    one[:, 0, 1] = 4.5
    other[0, 0, 2] = 1.0
    other[1] = torch.nan
    found = likeness(one, other, torch.ones(2, 8, dtype=torch.bool))
    np.testing.assert_allclose(found.jaccard, [[0, np.nan], [np.nan, np.nan]])
    assert found.one[0].tolist() == [1, 0]
    assert found.neither[0].tolist() == [0, 1]
    np.testing.assert_allclose(found.shared, [[8 * 0.5 / 8, 8 * 0.5 / 8], [np.nan, np.nan]])
    assert found.compared.tolist() == [[1, 1], [0, 0]]
    for name in ("shared", "jaccard_low", "jaccard_high", "same", "neither", "one"):
        values = getattr(found, name)
        assert not values[0].isnan().any()
        assert values[1].isnan().all()


def test_shared_attention_is_one_minus_the_total_variation_distance():
    one, other = (5 * torch.rand(1, 3, 5).softmax(-1) for _ in range(2))
    found = likeness(one, other, torch.ones(1, 5, dtype=torch.bool))
    torch.testing.assert_close(found.shared, 1 - (one - other).abs().sum(-1) / 2 / 5)


def test_padding_is_not_a_key():
    one, other = torch.rand(1, 1, 6), torch.rand(1, 1, 6)
    real = torch.tensor([[False, False, True, True, True, True]])
    unpadded = likeness(one[..., 2:], other[..., 2:], real[:, 2:])
    one[..., :2], other[..., :2] = 9.0, 0.0
    for part, expected in zip(likeness(one, other, real), unpadded, strict=True):
        torch.testing.assert_close(part, expected, equal_nan=True)


def test_a_random_split_keeps_the_sizes_and_depends_only_on_the_row():
    ids = torch.arange(20)[None].repeat(2, 1)
    real = torch.ones(2, 20, dtype=torch.bool)
    real[1, :4] = False
    first = torch.zeros(2, 20, dtype=torch.bool)
    first[:, 12:] = True
    second = ~first & real
    one, other = _shuffled(first, second, ids, real, 0)
    assert one.sum(1).tolist() == first.sum(1).tolist()
    assert torch.equal(one | other, first | second)
    assert not (one & other).any()
    assert not torch.equal(one, first)
    alone = _shuffled(first[1:, 4:], second[1:, 4:], ids[1:, 4:], real[1:, 4:], 0)
    assert torch.equal(alone[0][0], one[1, 4:])
    assert not torch.equal(_shuffled(first, second, ids, real, 1)[0], one)


def test_the_hooks_agree_with_recorded_patterns(tiny_llada):
    """Masked against unmasked queries at one step and layer, from complete patterns."""
    groups = Groups(tiny_llada, PROMPTS, False, 0, 3.0)
    sinklens.generate(tiny_llada, PROMPTS, hooks=groups.hooks(), record_sinks=False, **SMALL)
    run = sinklens.generate(tiny_llada, PROMPTS, record_sinks=Record(patterns=[(2, 1)]), **SMALL)
    canvas = run.canvas[:, 2]
    for row in range(2):
        masked = (canvas[row] == tiny_llada.mask_token_id) & run.real[row]
        unmasked = ~masked & run.real[row]
        answer = torch.arange(canvas.shape[1]) >= run.prompt_length
        for number, second in ((0, unmasked), (2, unmasked & answer)):
            for head in range(6):
                pattern = run.patterns[2, 1][row, head][:, run.real[row]]
                scores = [pattern[part].mean(0) * int(run.real[row].sum()) for part in (masked, second)]
                sinks = []
                for score in scores:
                    others = (score.sum() - score) / (len(score) - 1)
                    sinks.append({j for j in range(len(score)) if score[j] > others[j] + 3})
                expected = len(sinks[0] & sinks[1]) / len(sinks[0] | sinks[1]) if sinks[0] | sinks[1] else np.nan
                found = groups._found[2, 1][number]
                np.testing.assert_allclose(float(found.jaccard[row, head]), expected, rtol=1e-5)
                shared = torch.minimum(*scores).sum() / len(scores[0])
                assert float(found.shared[row, head]) == pytest.approx(float(shared), abs=1e-4)
                assert bool(found.neither[row, head]) == (not sinks[0] | sinks[1])
                correlation = np.corrcoef(*[score.numpy() for score in scores])[0, 1]
                assert float(found.correlation[row, head]) == pytest.approx(correlation, abs=1e-4)


def test_an_autoregressive_model_is_reported_without_masked_queries(tiny_llama, tiny_llada):
    study = Split(settings=SMALL)
    found = study.run([tiny_llada, tiny_llama], PROMPTS)
    table = found.tables["split"]
    assert table[table["model"] == "tiny-llama"]["estimate"].isna().all()
    assert set(table[table["model"] == "tiny-llama"]["verdict"].dropna()) == {"not measured", ""}
    assert table[table["model"] == "tiny-llada"]["estimate"].notna().all()
    less = table[(table["split"] == "masked − random") & (table["model"] == "tiny-llada")]
    values = found.measured["tiny-llada"].mean("layer")
    for row in less.itertuples():
        pair = values[row.measure].sel(queries=row.queries)
        difference = pair.sel(split="masked") - pair.sel(split="random")
        assert row.estimate == pytest.approx(float(difference.mean()))
    assert set(found.examples) == {"tiny-llada"}
    figures = study.figures(found.measured, found.examples)
    texts = [text.get_text() for ax in figures["queries"].axes for text in ax.texts]
    assert texts == ["an autoregressive model has no masked queries"]
    assert sorted(MEASURES) == sorted(set(table["measure"]))


def test_the_example_shows_groups_with_no_sink_in_common(tiny_llada):
    example = Split().example(tiny_llada, PROMPTS[0], {})
    masked = example["masked"].values
    assert 0 < masked.sum() < len(masked)
    np.testing.assert_allclose(example["pattern"].sum("key"), 1, rtol=1e-4)
    sinks = []
    for part in (masked, ~masked):
        score = example["pattern"].values[part].mean(0) * len(masked)
        sinks.append(set(np.flatnonzero(score > (score.sum() - score) / (len(score) - 1) + 3)))
    assert not sinks[0] & sinks[1]
    assert sinks[0] | sinks[1]

"""Kinds and states of tokens, and measures based on them, against hand-made canvases and naive counts."""

from collections import Counter

import numpy as np
import pytest
from planting import planted

import sinklens
from sinklens.errors import TrackError
from sinklens.sinks import Detector, EpsilonOverMean, TopK
from sinklens.sinks.kinds import Kind, PlaceState, absorption, enrichment, frequency_table, kinds, states, text_kind
from sinklens.tasks import held_out

START, END, MASK, USER = 1, 2, 3, 4
TEXTS = {1: "<s>", 2: "</s>", 3: "<mask>", 4: "<user>", 5: " Tom", 6: "\n", 7: ".", 8: " 12", 9: " "}
SPECIAL = {"mask": [MASK], "start": [START], "end": [END], "markup": [USER]}


def canvas_track(token_id, prompt_length, score=None, real=None, texts=TEXTS):
    """A track of hand-made canvases [batch, step, pos]; MASK and -1 are undecided."""
    token_id = np.asarray(token_id)
    batch, steps, length = token_id.shape
    real = np.ones((batch, length), dtype=bool) if real is None else np.asarray(real)
    score = np.ones((batch, steps, 1, 1, length)) if score is None else np.asarray(score)
    exists = (real[:, None] & (token_id >= 0))[:, :, None, None]
    return planted(
        np.where(exists, score, np.nan), real=real, masked=(token_id == MASK) | (token_id < 0), token_id=token_id,
        prompt_length=prompt_length, words=texts, special=SPECIAL,
    )  # fmt: skip


def random_track(seed=0):
    """Two rows of random tokens and scores, 3 steps, 2 layers, 3 heads, 8 positions; row 0 starts with padding."""
    noise = np.random.default_rng(seed)
    real = np.ones((2, 8), dtype=bool)
    real[0, :2] = False
    return canvas_track(noise.integers(1, 10, (2, 3, 8)), 4, noise.exponential(size=(2, 3, 2, 3, 8)) ** 2, real)


def names(codes, enum):
    return [[[enum(int(code)).name.lower() for code in row] for row in steps] for steps in codes.to_numpy()]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("\n", "NEWLINE"), (" \n\n", "NEWLINE"), ("\r\n", "NEWLINE"), ("\t\n ", "NEWLINE"),
        (" ", "SPACE"), ("\t", "SPACE"), ("", "SPACE"), ("\u00a0", "SPACE"),
        (".", "PUNCTUATION"), (" ,", "PUNCTUATION"), ("####", "PUNCTUATION"), ("…", "PUNCTUATION"),
        ("7", "DIGIT"), (" 12", "DIGIT"), ("½", "DIGIT"), ("٣", "DIGIT"),
        (" Tom", "WORD"), ("3rd", "WORD"), ("'s", "WORD"), ("的", "WORD"), ("ा", "WORD"), ("\ufffd", "WORD"),
        ("<|start_header_id|>", "MARKUP"), ("[INST]", "MARKUP"), (" [/INST]", "MARKUP"), ("<</SYS>>", "MARKUP"),
        ("[1]", "WORD"), ("<|", "PUNCTUATION"), (".\n", "PUNCTUATION"), ("x\n", "WORD"),
    ],
)  # fmt: skip
def test_the_text_of_an_ordinary_token_determines_its_kind(text, kind):
    assert text_kind(text) is Kind[kind]


@pytest.mark.parametrize(
    ("canvases", "prompt_length", "padding", "expected"),
    [
        (
            [[[2, 1, 4, 6, 3, 3, 3], [2, 1, 4, 6, 5, 3, 2]], [[1, 5, 7, 9, 8, 6, 5], [1, 5, 2, 9, 8, 6, 5]]], 4, 1,
            [
                [
                    ["missing", "start", "markup", "newline", "mask", "mask", "mask"],
                    ["missing", "start", "markup", "newline", "word", "mask", "end"],
                ],
                [
                    ["start", "word", "punctuation", "space", "digit", "newline", "word"],
                    ["start", "word", "end", "space", "digit", "newline", "word"],
                ],
            ],
        ),
        (  # filling begins after the first end token of the answer
            [[[1, 2, 3, 3, 2, 2], [1, 2, 5, 2, 2, 2]]], 2, 0,
            [
                [
                    ["start", "end", "mask", "mask", "end", "filling"],
                    ["start", "end", "word", "end", "filling", "filling"],
                ]
            ],
        ),
        # an end token at the first position is a start, also after padding, but not in an answer without a prompt
        ([[[2, 2, 5, 2]]], 3, 1, [[["missing", "start", "word", "end"]]]),
        ([[[2, 2]]], 0, 0, [[["end", "filling"]]]),
        (
            [[[1, 5, -1, -1], [1, 5, 7, -1]]], 2, 0,
            [[["start", "word", "missing", "missing"], ["start", "word", "punctuation", "missing"]]],
        ),
    ],
)  # fmt: skip
def test_hand_made_canvases_have_the_expected_kinds(canvases, prompt_length, padding, expected):
    """The first row is padded by some positions."""
    real = np.ones((len(canvases), len(canvases[0][0])), dtype=bool)
    real[0, :padding] = False
    track = canvas_track(canvases, prompt_length, real=real)
    assert names(kinds(track), Kind) == expected
    decided = ["prompt"] * prompt_length + ["committed"] * real.shape[1]
    states_of = {"missing": "missing", "mask": "masked"}
    assert names(states(track), PlaceState) == [
        [[states_of.get(kind, state) for kind, state in zip(step, decided, strict=False)] for step in row]
        for row in expected
    ]


@pytest.mark.parametrize("by", ["kind", "state"])
def test_absorption_is_the_naive_sum_of_head_averaged_scores(by):
    track = random_track()
    score, codes = track.data["score"].to_numpy(), (kinds if by == "kind" else states)(track).to_numpy()
    enum, found = (Kind, PlaceState)[by == "state"], absorption(track, by)
    assert found.dims == ("batch", "step", "layer", by)
    for row, step, layer in np.ndindex(2, 3, 2):
        there = [j for j in range(8) if not (row == 0 and j < 2)]
        mean = {j: sum(score[row, step, layer, head, j] for head in range(3)) / 3 for j in there}
        for code in enum:
            if code >= 0:
                naive = 100 * sum(mean[j] for j in there if codes[row, step, j] == code) / sum(mean.values())
                value = found.isel(batch=row, step=step, layer=layer).sel({by: code.name.lower()})
                assert value.item() == pytest.approx(naive, rel=1e-5), (row, step, layer, code)
    np.testing.assert_allclose(found.sum(by), 100)


def test_a_layer_with_all_zero_patterns_has_no_absorption():
    found = absorption(canvas_track([[[1, 5, 6], [1, 5, 6]]], 2, score=[[[[[0, 0, 0]]], [[[0, 1, 3]]]]]))
    assert found.isel(step=0).isnull().all()
    assert found.isel(batch=0, step=1, layer=0).sel(kind=["newline", "word", "mask"]).to_numpy().tolist() == [75, 25, 0]


@pytest.mark.parametrize("by", ["kind", "state"])
def test_enrichment_is_the_naive_ratio_of_counted_shares(by):
    track, detector = random_track(1), EpsilonOverMean(0.5)
    sinks, codes = track.detect(detector).to_numpy(), (kinds if by == "kind" else states)(track).to_numpy()
    enum, found = (Kind, PlaceState)[by == "state"], enrichment(track, detector, by)
    for row in range(2):
        places = [[int(code) for code in step if code >= 0] for step in codes[row]]
        hits = [(step, int(codes[row, step, j])) for step, _, _, j in np.argwhere(sinks[row])]
        at, among = Counter(code for _, code in hits), Counter(code for step in places for code in 6 * step)
        chance = {code: sum(places[step].count(code) / len(places[step]) for step, _ in hits) for code in among}
        assert len(hits) > 10
        for code in (code for code in enum if code >= 0):
            cell = found.isel(batch=row).sel({by: code.name.lower()})
            assert (cell["sinks"].item(), cell["positions"].item()) == (at[code], among[code])
            if not among[code]:
                assert cell[["enrichment", "matched"]].to_array().isnull().all()
                continue
            share, base = at[code] / len(hits), among[code] / sum(among.values())
            wanted = {"sink_share": share, "position_share": base, "enrichment": share / base}
            wanted["matched"] = at[code] / chance[code]
            assert {name: cell[name].item() for name in wanted} == pytest.approx(wanted)


class Above(Detector):
    """Sinks are positions with a score above one half."""

    def detect(self, track):
        return track.scores() > 0.5


def test_expected_sinks_correct_for_steps_that_differ_in_masks_and_sinks():
    """Step 0: half masks, all positions sinks; step 1: no masks, no sinks. Only the pooled steps prefer masks."""
    score = np.array([[1.0] * 4, [0.0] * 4])[None, :, None, None]
    track = canvas_track([[[3, 3, 5, 5], [5, 5, 5, 5]]], 0, score=score)
    found = enrichment(track, Above(), by="state").sel(state="masked").isel(batch=0)
    assert (found["enrichment"].item(), found["matched"].item()) == pytest.approx((2, 1))


def test_a_row_without_sinks_has_no_share_of_them():
    score = np.array([[[1.0, 1.0]], [[0.0, 0.0]]])[:, :, None, None]
    found = enrichment(canvas_track([[[1, 5]], [[1, 5]]], 2, score=score), Above())
    assert found["sink_share"].sel(kind="word").to_numpy()[0] == 0.5
    assert found[["sink_share", "enrichment", "matched"]].isel(batch=1).to_array().isnull().all()
    assert found["sinks"].isel(batch=1).sum() == 0


def test_the_frequency_table_matches_counts_in_a_loop():
    track, detector = random_track(2), EpsilonOverMean(0.3)
    sinks, token_id = track.detect(detector).to_numpy(), track.data["token_id"].to_numpy()
    count, positions = Counter(), Counter()
    for row, step, j in np.ndindex(2, 3, 8):
        if not (row == 0 and j < 2):
            positions[int(token_id[row, step, j])] += 1
            count[int(token_id[row, step, j])] += int(sinks[row, step, :, :, j].sum())
    table = frequency_table(track, detector)
    assert sorted(table["id"]) == sorted(positions)
    assert table["count"].is_monotonic_decreasing
    for line in table.itertuples():
        assert line.count == count[line.id]
        assert line.frequency == pytest.approx(count[line.id] / sum(count.values()))
        assert line.position_frequency == pytest.approx(positions[line.id] / sum(positions.values()))
    kind_of = dict(zip(table["id"], table["kind"], strict=True))
    assert (kind_of[END], kind_of[MASK], kind_of[6], kind_of[8]) == ("end", "mask", "newline", "digit")
    text_of = dict(zip(table["id"], table["token"], strict=True))
    assert (text_of[6], text_of[5], text_of[9]) == ("⏎", "␣Tom", "␣")


def test_without_sinks_frequencies_are_nan():
    table = frequency_table(canvas_track([[[1, 5]]], 2), EpsilonOverMean(9.0))
    assert table["count"].sum() == 0
    assert table["frequency"].isna().all()


@pytest.mark.parametrize("ask", [kinds, absorption, enrichment, frequency_table])
def test_a_token_without_text_has_no_kind(ask):
    """States need no text, and special ids are known without a tokenizer."""
    track = canvas_track([[[1, 5, 6, 3]]], 3, texts={})
    with pytest.raises(TrackError, match=r"token 5 has no text.*no text for 2 of 4 tokens.*by='state'"):
        ask(track)
    assert enrichment(track, TopK(4), by="state")["enrichment"].sel(state="prompt").item() == 1
    assert names(kinds(canvas_track([[[1, 4, 3]]], 2, texts={})), Kind)[0] == [["start", "markup", "mask"]]


@pytest.mark.parametrize("ask", [absorption, enrichment])
def test_grouping_by_anything_but_kind_or_state_is_rejected(ask):
    with pytest.raises(TrackError, match=r"by must be 'kind' or 'state'; got 'position'"):
        ask(canvas_track([[[1, 5]]], 2), by="position")


def test_a_run_s_kinds_follow_its_canvas(tiny_llada):
    run = sinklens.generate(tiny_llada, [problem.prompt for problem in held_out(3)], gen_length=8)
    codes, last = kinds(run.sinks).to_numpy(), run.canvas[:, run.steps_run - 1]
    assert (codes[~np.broadcast_to(run.real[:, None], codes.shape)] == Kind.MISSING).all()
    assert ((codes == Kind.MASK) == run.sinks.data["masked"].to_numpy()).all()
    assert (codes == Kind.START).sum() == 3 * run.steps_run
    for row, position in run.real.nonzero().tolist():
        text, code = tiny_llada.tokenizer.decode([int(last[row, position])]), codes[row, -1, position]
        expected = (text == "\n", text.strip().isdigit(), text == "<|endoftext|>")
        assert (code == Kind.NEWLINE, code == Kind.DIGIT, code in (Kind.END, Kind.FILLING)) == expected
    assert enrichment(run.sinks, TopK(1))["sinks"].sum("kind").to_numpy().tolist() == [24 * run.steps_run] * 3
    assert frequency_table(run.sinks, TopK(1))["count"].sum() == 3 * 24 * run.steps_run


def test_in_an_autoregressive_run_only_decoded_tokens_count(tiny_llama):
    run = sinklens.generate(tiny_llama, held_out(1)[0].prompt)
    there = (kinds(run.sinks) != Kind.MISSING).sum("pos").to_numpy()[0]
    assert there.tolist() == [run.prompt_length + step for step in range(run.steps_run)]
    assert enrichment(run.sinks, TopK(1), by="state")["positions"].sel(state="masked").item() == 0

"""Edit-matched nulls of motion: on planted attention that any edit moves, and on runs against loops."""

import numpy as np
import torch
from asked import PROMPTS

import sinklens
from sinklens.analyses import edits
from sinklens.analyses.dynamics import Dynamics
from sinklens.analyses.edits import Edits, compared, measures
from sinklens.sinks.kinds import Kind
from sinklens.tasks import held_out

SHORT = {"gen_length": 8, "steps": 8, "block_length": 8}


def planted_sums(move):
    """Column sums of four heads; each canvas has its own strongest keys with the probability `move`, else those of all.

    Which canvas moves depends on its ids alone, whether a decision made them or an edit.
    """

    def sums(model, canvases, first=None, time=None):
        number = 1 if first is None else first.shape[1]
        found = np.full((len(canvases), number, 1, 4, canvases.shape[1]), 0.1)
        for row, ids in enumerate(canvases):
            noise = np.random.default_rng(hash(tuple(ids.tolist())) & 0xFFFFFFFF)
            places = np.where(noise.random(4) < move, noise.integers(1, len(ids), 4), 0)
            found[row, :, 0, np.arange(4), places] = 5
        return found

    return sums


def test_where_any_edit_moves_attention_decisions_are_not_said_to_move_it_more(tiny_llada, monkeypatch):
    """The static null, a pattern that does not change, has no jumps here: by it, deciding tokens moves sinks."""
    monkeypatch.setattr(edits, "column_sums", planted_sums(0.3))
    found = Edits(settings=SHORT).run(tiny_llada, [problem.prompt for problem in held_out(12)])
    jumps = found.measured["tiny-llada"]["jump_share"].sel(lead=0).mean("prompt")
    assert compared(*[planted_sums(0.3)(None, torch.zeros(1, 9, dtype=torch.long))[:, 0]] * 2).moved.mean() == 0
    assert float(jumps.sel(edit="decided")) > 0.3
    assert (found.tables["differences"].query("lead == 0")["verdict"] == "cannot tell").all()


def test_decisions_that_move_attention_more_than_other_edits_are_found(tiny_llada, monkeypatch):
    plain = planted_sums(0.5)

    def only_undecided(model, canvases, first=None, time=None):
        found = plain(model, canvases, first)
        finished = ~(canvases == model.mask_token_id).any(dim=1).numpy()
        found[finished] = 0.1
        found[finished, ..., 0] = 5  # canvases without masks all have the same strongest key
        return found

    monkeypatch.setattr(edits, "column_sums", only_undecided)
    table = Edits(settings=SHORT).run(tiny_llada, [problem.prompt for problem in held_out(12)]).tables["differences"]
    rows = table.query("lead == 0").set_index("compared")["verdict"]
    assert (rows["decided, later − answer token"], rows["decided − shuffled"]) == ("more", "cannot tell")


def test_decided_is_the_motion_of_the_run(tiny_llada):
    prompts = PROMPTS[:2]
    found = Edits(settings=SHORT).run(tiny_llada, prompts).measured["tiny-llada"]["jump_share"]
    motion = Dynamics(settings=SHORT).run(tiny_llada, prompts).measured["tiny-llada"]["jump_share"]
    np.testing.assert_allclose(found.sel(edit="decided", lead=0), motion, atol=1e-6)
    assert (found.diff("lead") <= 0).all()


def test_an_autoregressive_model_has_edits_but_no_decisions_among_earlier_queries(tiny_llama):
    found = Edits(settings={"gen_length": 8}).run(tiny_llama, PROMPTS[:2]).measured["tiny-llama"]["jump_share"]
    known = found.sel(lead=0).notnull().all("prompt")
    assert [str(name) for name in found["edit"][known.to_numpy()].values] == ["prompt token", "answer token", "operand"]


def test_one_token_of_the_same_kind_is_edited_and_later_queries_are_summed(tiny_llada, monkeypatch):
    calls, real = [], edits.column_sums

    def spied(model, canvases, first=None, time=None):
        calls.append((canvases.clone(), first))
        return real(model, canvases, first, time)

    monkeypatch.setattr(edits, "column_sums", spied)
    study, noise = Edits(), np.random.default_rng(0)
    run = sinklens.generate(tiny_llada, PROMPTS[0], progress=False, **SHORT)
    kinds = edits.kinds_of_vocabulary(tiny_llada)
    study._single(tiny_llada, run.tokens[0], run.prompt_length, noise)
    assert len(calls) == 6
    for number, ((base, _), (edited, first)) in enumerate(zip(calls[::2], calls[1::2], strict=True)):
        for row, canvas in enumerate(edited):
            (place,) = torch.nonzero(canvas != base[0])[:, 0].tolist()
            assert kinds[canvas[place]] == kinds[base[0, place]]
            assert first[row].tolist() == [place + 1]
            assert (place < run.prompt_length) == (number != 1)
            assert number != 2 or kinds[base[0, place]] == Kind.DIGIT


def test_leads_are_margins_of_the_new_strongest_key():
    before = np.array([[[[3.0, 1.0, 0.0], [3.0, 1.0, 0.0]]]])
    jumps = compared(before, np.array([[[[1.0, 1.5, 0.0], [2.0, 1.95, 0.0]]]]))
    assert jumps.moved.tolist() == [[[True, False]]]
    np.testing.assert_allclose(jumps.lead, [[[0.5, 0.05]]])
    share, near = measures(jumps)
    assert (share.tolist(), near) == ([0.5, 0.5, 0.5, 0, 0], 0)
    assert np.isnan(measures(None)[1])

"""The accuracy study counts right, wrong and cut answers correctly."""

import pytest
from building import shared_model

from sinklens.analyses.accuracy import by_range, main, measure
from sinklens.errors import PromptError
from sinklens.tasks import held_out
from sinklens.tasks.word_problems import RANGES, in_range


def test_right_answers_are_counted_and_wrong_ones_are_not(tiny_llama):
    problems = held_out(20)
    right = measure(tiny_llama, problems, batch=7)
    assert len(right) == 20
    assert sum(right) >= 18
    spoiled = [type(p)(p.kind, p.question, p.answer, p.result + 1) for p in problems]
    assert sum(measure(tiny_llama, spoiled)) + sum(right) <= 20


def test_a_model_without_a_tokenizer_and_an_invalid_number_of_problems_are_rejected(monkeypatch, capsys):
    with pytest.raises(PromptError, match=r"came without a tokenizer, and the held-out problems are text"):
        measure(shared_model(), held_out(1))
    monkeypatch.setattr("sys.argv", ["accuracy", "tiny-llama", "--size", "0"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "sinklens: --size must be an integer of at least 1; got 0" in capsys.readouterr().err


def test_accuracy_by_range_counts_the_same_answers_as_measure(tiny_llama, tmp_path, monkeypatch, capsys):
    table = by_range([tiny_llama], size=3)
    assert [tuple(row) for row in table[["kind", "low", "high"]].to_numpy()] == [
        (kind, *ends) for kind, ranges in RANGES.items() for ends in ranges
    ]
    row = table[(table.kind == "fewer") & (table.low == 8)].iloc[0]
    right = measure(tiny_llama, in_range("fewer", 8, 20, 3))
    assert (row.right, row.total, row.share) == (sum(right), 3, sum(right) / 3)
    out = tmp_path / "ranges.csv"
    monkeypatch.setattr("sys.argv", ["accuracy", "tiny-llama", "--size", "3", "--out", str(out)])
    main()
    assert len(out.read_text().splitlines()) == len(table) + 1
    assert "tiny-llama         fewer     8 to  20" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama"])
def test_the_shipped_models_answer_nine_of_ten_problems(name):
    right = measure(name, held_out())
    assert sum(right) >= 0.9 * len(right)

"""The accuracy study counts right, wrong and cut answers correctly."""

import pytest
from building import shared_model

from sinklens.analyses.accuracy import by_range, main, measure
from sinklens.errors import PromptError
from sinklens.tasks import held_out
from sinklens.tasks.word_problems import RANGES, in_range


def test_right_answers_are_counted_and_wrong_ones_are_not(tiny_llama):
    problems = held_out(20)
    result = measure(tiny_llama, problems, batch=7)
    assert result.total == 20
    assert sum(total for _, total in result.by_kind.values()) == 20
    spoiled = [type(p)(p.kind, p.question, p.answer, p.result + 1) for p in problems]
    assert measure(tiny_llama, spoiled).right + result.right <= 20
    assert result.share.value >= 0.9


def test_a_model_without_a_tokenizer_and_an_invalid_number_of_problems_are_rejected(monkeypatch, capsys):
    with pytest.raises(PromptError, match=r"came without a tokenizer, and the held-out problems are text"):
        measure(shared_model(), held_out(1))
    for number, text in (("501", "give 0 to 500 held-out problems"), ("0", "accuracy needs at least one problem")):
        monkeypatch.setattr("sys.argv", ["accuracy", "tiny-llama", "--problems", number])
        with pytest.raises(SystemExit, match="1"):
            main()
        assert f"sinklens: {text}" in capsys.readouterr().err


def test_accuracy_by_range_counts_the_same_answers_as_measure(tiny_llama, tmp_path, monkeypatch, capsys):
    table = by_range([tiny_llama], size=3)
    assert [tuple(row) for row in table[["kind", "low", "high"]].to_numpy()] == [
        (kind, *ends) for kind, ranges in RANGES.items() for ends in ranges
    ]
    row = table[(table.kind == "fewer") & (table.low == 8)].iloc[0]
    expected = measure(tiny_llama, in_range("fewer", 8, 20, 3))
    assert (row.right, row.total, row.share) == (expected.right, 3, expected.share.value)
    out = tmp_path / "ranges.csv"
    monkeypatch.setattr("sys.argv", ["accuracy", "tiny-llama", "--ranges", "--size", "3", "--out", str(out)])
    main()
    assert len(out.read_text().splitlines()) == len(table) + 1
    assert "tiny-llama         fewer     8 to  20" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama"])
def test_the_shipped_models_answer_nine_of_ten_problems(name):
    assert measure(name, held_out()).share.value >= 0.9

"""English text: what counts as prose, how windows are cut, and what the held-out loss measures."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sinklens
from sinklens.errors import SinklensError
from sinklens.tasks.word_problems import held_out as word_problems
from training import RECIPES, text, train
from training.export import export
from training.problem_texts import texts
from training.text import DebianPackage, dictionary_paragraphs, gather, html_paragraphs, is_prose, pod_paragraphs
from training.text_scores import held_out, score, score_checkpoint, window_losses, write_windows
from training.text_windows import DOCUMENTS, text_corpus, text_tokenizer

SENTENCES = [f"The {animal} of number {n} sleeps under a tall tree." for n in range(80) for animal in ("cat", "dog")]


def written(file: Path, count: int = 12) -> Path:
    """A file of documents, the last of them held out."""
    lines = [
        {
            "source": f"source-{n % 3}",
            "name": str(n),
            "held_out": n == count - 1,
            "text": "\n".join(SENTENCES[n::count]),
        }
        for n in range(count)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A text recipe at toy size, whose documents are in the working folder."""
    monkeypatch.chdir(tmp_path)
    written(DOCUMENTS)
    return replace(
        RECIPES["tiny-text"], cycles=(6,), batch=4, d_model=32, n_layers=2, n_heads=2, d_mlp=48, warmup=2,
        windows=16, vocabulary=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("paragraphs", "content", "kept"),
    [
        (
            html_paragraphs,
            b"<nav>Home</nav><h1>A <b>title</b></h1><p>First &amp; best.<pre>code()</pre>"
            b"<p>Second<script>x<p>y</script>.",
            ["A title", "First & best.", "Second."],
        ),
        (
            pod_paragraphs,
            b"=head1 NAME\n\nPlain C<< $x->y >> and I<B<nested>> text.\n\n    code here\n\n=over\n\nA E<lt> B.\n",
            ["Plain $x->y and nested text.", "A < B."],
        ),
        (
            dictionary_paragraphs,
            gzip.compress(
                b'Affect \\Af*fect"\\, v. t.\n   To {change}.\n   [1913 Webster]\n\nAffine \\Af*fine"\\, a. Related.',
                mtime=0,  # the names of the cases, which all workers must agree on, have these bytes
            ),
            ["Affect , v. t. To change.", "Affine , a. Related."],
        ),
    ],
)
def test_paragraphs_lose_markup_code_navigation_pronunciation_and_notes(paragraphs, content, kept):
    assert [found for part in paragraphs(content) if (found := " ".join(part.split()))] == kept


@pytest.mark.parametrize(
    ("paragraph", "prose"),
    [
        ("This sentence has more than six words.", True),
        ("Too short to count.", False),
        ("0x1f 0x2e 0x3d 0x4c 0x5b 0x6a 0x79 0x88", False),
    ],
)
def test_prose_has_words_and_letters(paragraph, prose):
    assert is_prose(paragraph) is prose


def test_a_paragraph_is_kept_once_and_by_the_held_out_source_first(tmp_path, monkeypatch):
    both = "<p>A sentence that both of the sources have."
    pages = {
        "train": f"{both}<p>One that only the training source has here.",
        "test": both + both.replace(" of ", "  of ").replace("sentence", "Sentence"),
    }

    def unpack(source: DebianPackage, folder: Path) -> None:
        (folder / "page.html").write_text(pages[source.package])

    monkeypatch.setattr(text, "_fetch", unpack)
    sources = [DebianPackage("train", "*.html"), DebianPackage("test", "*.html", held_out=True)]
    assert len(list(gather(tmp_path / "out.jsonl", sources))) == 2
    assert {document.source: document.text for document in text.read_documents(tmp_path / "out.jsonl")} == {
        "test": "A sentence that both of the sources have.",
        "train": "One that only the training source has here.",
    }


def test_training_without_the_text_says_how_to_gather_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SinklensError, match=r"documents.jsonl does not exist.*python -m training.text"):
        next(train(RECIPES["tiny-text"], tmp_path / "run"))


def test_windows_are_text_behind_a_start_token_and_depend_on_seed_and_step(recipe):
    tokenizer = text_tokenizer(recipe)
    corpus = text_corpus(tokenizer, recipe)
    kept, rows = corpus.batch(1, 5, 8)
    assert (kept, rows[:, 0].tolist()) == (1, [tokenizer.bos_token_id] * 8)
    everything = tokenizer.decode(corpus.ids)
    assert all(tokenizer.decode(row[1:]) in everything for row in rows)
    assert torch.equal(rows, text_corpus(tokenizer, recipe).batch(1, 5, 8)[1])
    assert not torch.equal(rows, corpus.batch(1, 6, 8)[1])
    assert "number 5 " in everything
    assert SENTENCES[11] not in everything, "held out"


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_a_text_model_trains_exports_and_is_scored(recipe, tmp_path, objective):

    recipe = replace(recipe, objective=objective, cycles=(40,))
    list(train(recipe, tmp_path / "run"))
    assert {1, 2, 4, 8, 16, 32} <= {int(file.stem[8:]) for file in (tmp_path / "run").glob("weights-*.pt")}
    out = export(recipe, tmp_path / "run", tmp_path / "model")
    rows = held_out(recipe)
    assert set(rows.source.values()) == {"source-2"}
    found = score_checkpoint(recipe, out)
    again = score(window_losses(sinklens.load(out), rows.ids), rows.document)
    assert (found.nats, found.windows, found.documents) == (again.nats, again.windows, 1)
    assert all(math.isnan(end) for end in (found.low, found.high)), "one document has no interval"
    assert found.nats < math.log(recipe.vocabulary) - 0.5, "better than guessing"


def test_the_masked_loss_is_an_unbiased_estimate_of_the_mean_over_numbers_of_masks():
    class Planted:
        """Log-probability −k of the right token wherever k tokens are masked."""

        mask_token_id = 9

        def __call__(self, ids):
            right = torch.exp(-(ids == 9).sum(dim=1).double())[:, None, None].expand(-1, ids.shape[1], 1)
            return torch.cat([right, (1 - right).expand(-1, -1, 1)], dim=2).log()

    ids = torch.zeros(20_000, 5, dtype=torch.long)
    assert window_losses(Planted(), ids, batch=5_000).mean().item() == pytest.approx((1 + 2 + 3 + 4) / 4, abs=0.03)


def test_the_interval_counts_documents_not_windows():
    alike = torch.cat([torch.full((50,), float(level)) for level in (1, 2, 3, 4)])
    names = [f"d{n}" for n in range(4) for _ in range(50)]
    clustered, independent = score(alike, names), score(alike, [str(n) for n in range(200)])
    assert clustered.nats == independent.nats == 2.5
    assert clustered.high - clustered.low > 5 * (independent.high - independent.low)


def test_windows_are_the_first_of_every_held_out_document_in_random_order(recipe, tmp_path):
    documents = [json.loads(line) for line in DOCUMENTS.read_text().splitlines()]
    DOCUMENTS.write_text("\n".join(json.dumps({**one, "held_out": True}) for one in documents))
    file = tmp_path / "windows.jsonl"
    assert write_windows(file, recipe) == len(documents)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    names = [one["document"] for one in lines]
    every = held_out(recipe)
    assert names != sorted(names)
    assert sorted(names) == sorted(set(every.document))
    for one in lines:
        ids = every.ids[every.document.index(one["document"])]
        assert (one["prompt"], one["source"]) == (ids.tolist(), every.source[one["document"]])
    assert write_windows(file, recipe) == len(documents)
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines


def test_problems_are_written_with_their_answers_and_those_of_gsm8k_without_its_calculator(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"question": "How many?", "answer": "2+2=<<2+2=4>>4\\n#### 4"}')
    of_gsm8k = {"prompt": "Question: How many?\nAnswer: 2+2=4\n#### 4", "template": "gsm8k"}
    ours = [f"{one.prompt} {one.answer}" for one in word_problems(2)]
    assert ([one["prompt"] for one in texts(2)], texts(1, str(tmp_path))) == (ours, [of_gsm8k])

"""Saving, opening, damaging and concatenating tracks."""

import shutil
import warnings

import numpy as np
import pytest
import xarray as xr
from tracks import LENGTH, PROMPT, Killed, assert_equal, disk_full_beyond, killed_at_write, made, planted

import sinklens
from sinklens.errors import SettingError, SinklensError, TrackError
from sinklens.sinks import Record, SinkTrack
from sinklens.tasks import held_out

PROMPTS = [problem.prompt for problem in held_out(6)]
kinds = pytest.mark.parametrize("suffix", [".nc", ".zarr"])


@pytest.mark.fast_cases(2)
@kinds
@pytest.mark.parametrize("of", ["bidirectional", "causal", "run"])
def test_a_saved_track_opens_unchanged(tiny_llada, tmp_path, suffix, of):
    track = made(of == "causal").track if of != "run" else sinklens.generate(tiny_llada, PROMPTS[0], gen_length=3).sinks
    path = tmp_path / f"sinks{suffix}"
    assert track.save(path) == path
    opened = SinkTrack.open(path)
    assert_equal(opened, track)
    assert (opened.vocabulary, opened.special) == (track.vocabulary, track.special)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@kinds
def test_data_are_read_lazily(tmp_path, suffix):
    opened = SinkTrack.open(made(False).track.save(tmp_path / f"sinks{suffix}"))
    part = opened.isel(step=1, layer=0)
    for track in (opened, part):
        for name in ("score", "value_norm", "token_id"):
            assert not track.data[name].variable._in_memory
    assert part.top(1).sizes["step"] == 1
    assert not opened.data["score"].variable._in_memory


@pytest.fixture(scope="module")
def stores(tmp_path_factory, tiny_llada):
    """A run of five steps as recorded to disk and as saved, and its track in memory."""
    folder = tmp_path_factory.mktemp("stores")
    record = Record(["values"], out=folder / "recorded.zarr")
    track = sinklens.generate(tiny_llada, PROMPTS[:2], gen_length=5, record_sinks=record).sinks
    track = SinkTrack(track.data.load())
    return {"recorded": folder / "recorded.zarr", "saved": track.save(folder / "saved.zarr")}, track


@pytest.fixture(params=["saved", "recorded"])
def store(request, tmp_path, stores):
    """A copy of one of the stores, and its track in memory."""
    paths, track = stores
    return shutil.copytree(paths[request.param], tmp_path / "sinks.zarr"), track


def test_a_step_is_read_from_its_chunk_only(store):
    """The chunks of all other steps are deleted before it is read."""
    path, track = store
    opened = SinkTrack.open(path)
    chunks = [file for file in (path / "score" / "c").rglob("*") if file.is_file()]
    assert len(chunks) == 5
    for chunk in chunks:
        if chunk.relative_to(path).parts[3] != "3":
            chunk.unlink()
    np.testing.assert_array_equal(opened.isel(step=3).scores(), track.isel(step=3).scores())


def test_a_partial_file_left_by_a_kill_is_ignored(store):
    path, track = store
    for name in ("zarr.0123abcd.partial", "score/zarr.0123abcd.partial", "score/c/0/1/0/0/0.0123abcd.partial"):
        (path / name).write_bytes(b"{")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(SinkTrack.open(path).scores(), track.scores())


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda path: (path / "score/c/0/2/0/0/0").unlink(), r"lacks 1 chunks of score; part of the store was lost"),
        (lambda path: shutil.rmtree(path / "token_id/c/0"), r"lacks 5 chunks of token_id"),
        (lambda path: (path / "value_norm/c/0/4/0/0/0").unlink(), r"lacks 1 chunks of value_norm"),
        (lambda path: shutil.rmtree(path / "is_real/c"), r"lacks 1 chunks of is_real"),
        (lambda path: shutil.rmtree(path / "unmask_step/c"), r"lacks 1 chunks of unmask_step"),
        (lambda path: shutil.rmtree(path / "score"), r"lacks 5 chunks of score"),
        (lambda path: shutil.rmtree(path / "committed"), r"lacks 5 chunks of committed"),
        *(
            (
                lambda path, text=text: (path / "zarr.json").write_text(text),
                r"not a complete Zarr store \(.*\); it may be",
            )
            for text in ('{"attributes": {"form', "[]", "", "{}")
        ),
        (lambda path: (path / "zarr.json").unlink(), r"not a complete Zarr store"),
    ],
)
def test_a_damaged_store_is_rejected_with_the_reason(stores, tmp_path, harm, text):
    path = shutil.copytree(stores[0]["recorded"], tmp_path / "sinks.zarr")
    harm(path)
    with pytest.raises(TrackError, match=text):
        SinkTrack.open(path)


@pytest.mark.parametrize("content", [b"", b"x" * 100, None], ids=["empty", "other", "half"])
def test_a_chunk_that_cannot_be_read_names_the_store(stores, tmp_path, content):
    path = shutil.copytree(stores[0]["recorded"], tmp_path / "sinks.zarr")
    chunk = path / "score/c/0/2/0/0/0"
    chunk.write_bytes(chunk.read_bytes()[:50] if content is None else content)
    track = SinkTrack.open(path)
    track.data["score"].isel(step=0).load()
    with pytest.raises(TrackError, match=r"a part of .*sinks\.zarr is damaged \(.*\); copy or record it again"):
        track.scores()


FORGED = {
    "a seed must be an integer; got '\\[\\]'": lambda data: data.assign_attrs(seed="[]"),
    "a seed must be an integer; got 1.5": lambda data: data.assign_attrs(seed=[1.5, 1]),
    "unmask_step": lambda data: data.drop_vars("unmask_step"),
    "masked must have the axes": lambda data: data.assign(masked=data["masked"].astype(float)),
}


@pytest.mark.parametrize("text", FORGED)
def test_a_forged_track_is_rejected(stores, tmp_path, text):
    data = SinkTrack.open(stores[0]["recorded"]).data.load().drop_encoding()
    FORGED[text](data).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with pytest.raises(TrackError, match=f"a.nc is not a complete NetCDF-4 file .*{text}"):
        SinkTrack.open(tmp_path / "a.nc")


def cut_after(kept):
    """Write the first bytes of a NetCDF file."""
    return lambda path, track: path.write_bytes(track.save(path).read_bytes()[:kept])


INCOMPLETE = r" is not a complete NetCDF-4 file \(.*\); it may be truncated"
FOREIGN = r" is not a sink track of this version \(format None\)"
WRONG = {
    "nothing.nc": (lambda path, track: None, r" does not exist; pass the path that SinkTrack\.save returned"),
    **{f"cut{kept}.nc": (cut_after(kept), INCOMPLETE) for kept in (0, 10, 5000, -1)},
    "text.nc": (lambda path, track: path.write_text("step,score\n0,1.5\n"), INCOMPLETE),
    "foreign.nc": (lambda path, track: track.data.drop_attrs().to_netcdf(path, engine="h5netcdf"), FOREIGN),
    "foreign.zarr": (lambda path, track: track.data.drop_attrs().to_zarr(path, consolidated=False), FOREIGN),
    "folder.zarr": (
        lambda path, track: path.mkdir(),
        r" is not a complete Zarr store",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_truncated_or_foreign_file_or_folder_is_rejected(tmp_path, name):
    write, text = WRONG[name]
    write(tmp_path / name, made(False).track)
    with pytest.raises(TrackError, match=name.replace(".", r"\.") + text):
        SinkTrack.open(tmp_path / name)


OTHERS = {
    "mine.zarr": lambda path: (path / "thesis").mkdir(parents=True),
    "file.zarr": lambda path: path.write_text("mine"),
    "notes.nc": lambda path: path.write_text("mine"),
    "data.nc": lambda path: xr.Dataset({"score": ("pos", [1.0])}).to_netcdf(path, engine="h5netcdf"),
    "other.zarr": lambda path: made(False).track.data.drop_attrs().to_zarr(path, consolidated=False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_path_that_holds_something_else_is_not_overwritten(tmp_path, name):
    OTHERS[name](tmp_path / name)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(SettingError, match=rf"{name} exists and is not a sink track; choose another path"):
        made(False).track.save(tmp_path / name)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert [file.name for file in tmp_path.iterdir()] == [name]


@kinds
def test_an_opened_track_can_be_saved_over_itself(tmp_path, suffix):
    track = made(True).track
    path = made(True, seed=1).track.save(tmp_path / f"sinks{suffix}")
    track.save(path)  # replaces the earlier track
    SinkTrack.open(path).save(path)
    assert_equal(SinkTrack.open(path), track)
    SinkTrack.open(path).isel(step=[0, 2]).save(path)
    assert_equal(SinkTrack.open(path), track.isel(step=[0, 2]))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_part_of_a_recorded_run_is_saved_completely(store, tmp_path):
    path, track = store
    for suffix in (".nc", ".zarr"):
        part = SinkTrack.open(path).isel(step=slice(1, 3), batch=0)
        assert_equal(SinkTrack.open(part.save(tmp_path / f"part{suffix}")), track.isel(step=slice(1, 3), batch=0))


def test_a_step_without_existing_positions_is_still_written_as_a_chunk(tmp_path):
    """By default Zarr omits chunks of only NaN, which could then not be distinguished from lost ones."""
    track = planted([[np.nan, np.nan], [1.0, 1.0]])
    assert_equal(SinkTrack.open(track.save(tmp_path / "sinks.zarr")), track)


def in_sight(folder):
    """Names of visible files; Zarr's threads may keep writing to a hidden one for a moment after an error."""
    return sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))


def test_a_save_interrupted_at_any_write_leaves_the_old_store(tmp_path, monkeypatch):
    """Interrupt at every fourth write in turn."""
    old, new, path = planted([[1.0, 1.0]]), planted([[0.5, 1.5]]), tmp_path / "sinks.zarr"
    old.save(path)
    for number in range(1, 200, 4):
        with killed_at_write(number, monkeypatch):
            try:
                new.save(path)
            except Killed:
                assert_equal(SinkTrack.open(path), old)
                assert in_sight(tmp_path) == ["sinks.zarr"]
            else:
                break
    assert number > 20
    assert_equal(SinkTrack.open(path), new)
    assert in_sight(tmp_path) == ["sinks.zarr"]


@kinds
def test_an_interrupt_at_any_move_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch, suffix):
    old, new, path = planted([[1.0, 1.0]]), planted([[0.5, 1.5]]), tmp_path / f"sinks{suffix}"
    for number in range(1, 10):
        old.save(path)
        moves, move = [], type(path).replace

        def interrupted(self, target, moves=moves, move=move, number=number):
            if self.suffix != ".partial":  # moves of Zarr's chunks
                moves.append(target)
                if len(moves) == number:
                    raise KeyboardInterrupt
            return move(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(type(path), "replace", interrupted)
            try:
                new.save(path)
            except KeyboardInterrupt:
                pass
            else:
                break
        assert_equal(SinkTrack.open(path), old)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert number > 1
    assert_equal(SinkTrack.open(path), new)


@kinds
def test_a_full_disk_leaves_the_old_file_and_says_so(tmp_path, suffix):
    noise = np.random.default_rng(0)
    small, large, path = planted([[1.0, 1.0]]), planted(noise.random((50, 400))), tmp_path / f"sinks{suffix}"
    message = r"could not write .*: .Errno 27. File too large.* Make room or choose another place"
    with disk_full_beyond(1000), pytest.raises(SinklensError, match=message):
        large.save(path)
    assert in_sight(tmp_path) == []
    small.save(path)
    with disk_full_beyond(1000), pytest.raises(SinklensError, match=message):
        large.save(path)
    assert_equal(SinkTrack.open(path), small)
    assert in_sight(tmp_path) == [path.name]


@kinds
def test_saving_to_an_unwritable_place_reports_it(tmp_path, suffix):
    (tmp_path / "file").write_text("")
    with pytest.raises(SinklensError, match=r"could not write .* Make room or choose another place"):
        planted([[1.0, 1.0]]).save(tmp_path / "file" / f"sinks{suffix}")


def assert_row(together, row, alone):
    """A row equals its original track, surrounded only by padding and missing steps."""
    size, steps = alone.data.sizes["pos"], alone.steps
    cut = together.data.isel(batch=[row], step=slice(0, steps), pos=slice(-size, None))
    for name, values in alone.data.data_vars.items():
        expected = values.to_numpy()
        if name == "unmask_step":  # never decided: the current number of steps
            expected = np.where(expected == alone.steps, together.steps, expected)
        assert cut[name].dims == values.dims
        assert together.data[name].dtype == values.dtype
        np.testing.assert_array_equal(cut[name], expected, err_msg=str(name))
    before = together.data.isel(batch=row, pos=slice(0, -size))
    after = together.data.isel(batch=row, step=slice(steps, None))
    assert not before["is_real"].any()
    for missing in (before, after):
        assert not missing[["masked", "committed"]].to_array().any()
        assert (missing["token_id"] == -1).all()
        assert missing["score"].isnull().all()
    np.testing.assert_allclose(SinkTrack(cut).scores("visible"), alone.scores("visible"), rtol=1e-6)


@pytest.fixture(scope="module", params=["tiny_llada", "tiny_llama"])
def runs(request):
    """Tracks of single prompts of three lengths and three seeds; one was stopped early."""
    model = request.getfixturevalue(request.param)
    record = Record(["values", "stream"])
    tracks = [
        sinklens.generate(model, prompt, gen_length=6, seed=seed, record_sinks=record).sinks
        for seed, prompt in enumerate(PROMPTS[:3])
    ]
    with sinklens.trace(model, PROMPTS[3], gen_length=6, seed=2, record_sinks=record) as t:
        for _ in t.steps[4]:
            t.stop()
    assert len({track.prompt_length for track in tracks}) > 1
    assert t.sinks.steps == 4
    assert (t.unmask_step == 4).any()
    return [*tracks, t.sinks]


@pytest.mark.fast_cases(1)
def test_concatenated_rows_equal_their_original_tracks(runs):
    for start in (0, 2):  # without the last step: its position is not one that is never decided
        cut = SinkTrack.concat([runs[0].isel(step=slice(start, end)) for end in (5, 6)])
        np.testing.assert_array_equal(cut.data["unmask_step"][0], runs[0].data["unmask_step"][0])
    together = SinkTrack.concat(runs)
    assert together.data.sizes["batch"] == 4
    for size in ("steps", "prompt_length"):
        assert getattr(together, size) == max(getattr(track, size) for track in runs)
    for row, alone in enumerate(runs):
        assert_row(together, row, alone)
        assert alone.vocabulary.items() <= together.vocabulary.items()
    assert together.data.attrs["seed"] == [0, 1, 2]
    for name in ("model", "settings", "special", "causal", "family"):
        assert together.data.attrs[name] == runs[0].data.attrs[name]
    assert together.finished


@pytest.mark.extended
@pytest.mark.parametrize("runs", ["tiny_llama"], indirect=True)
def test_concatenated_tracks_can_be_concatenated_again(runs, tmp_path):
    """Also when opened from disk in either format; a list of seeds is read back as a list."""
    opened = [
        SinkTrack.open(track.save(tmp_path / f"{row}{suffix}"))
        for row, (track, suffix) in enumerate(zip(runs, (".nc", ".zarr", ".nc", ".zarr"), strict=True))
    ]
    pairs = [SinkTrack.concat(opened[:2]), SinkTrack.concat(opened[2:])]
    pairs = [
        SinkTrack.open(pair.save(tmp_path / f"pair{suffix}"))
        for pair, suffix in zip(pairs, (".nc", ".zarr"), strict=True)
    ]
    together = SinkTrack.concat([*pairs, runs[0]])
    for row, alone in enumerate([*runs, runs[0]]):
        assert_row(together, row, alone)
    assert together.data.attrs["seed"] == [0, 1, 2]
    assert_equal(SinkTrack.open(together.save(tmp_path / "all.zarr")), together)
    assert np.ravel(SinkTrack.open(together.save(tmp_path / "all.nc")).data.attrs["seed"]).tolist() == [0, 1, 2]


def test_concatenating_one_track_returns_it_and_one_seed_stays_a_number():
    track = made(True).track
    assert_equal(SinkTrack.concat([track]), track)
    twice = SinkTrack.concat([track, track])
    assert (twice.data.attrs["seed"], twice.data.sizes["batch"]) == (0, 4)
    assert not SinkTrack.concat([track, SinkTrack(track.data.assign_attrs(finished=0))]).finished


def changed(**attrs):
    return SinkTrack(made(False, seed=1).track.data.assign_attrs(attrs))


UNLIKE = [
    (lambda: changed(model="another"), r"same model; the first has 'made' and another 'another'\. Keep them"),
    (lambda: changed(revision="v2"), r"same revision; the first has None and another 'v2'"),
    (lambda: changed(settings='{"steps": 9}'), r"same settings; the first has '{}'"),
    (lambda: changed(dtype="torch.bfloat16"), r"same dtype; the first has None and another 'torch\.bfloat16'"),
    (lambda: changed(prompt_length=PROMPT - 1), r"same answer length; the first has 4 and another 5"),
    (lambda: made(False, unlike=["value_norm"]).track, r"the same quantities; the first has .*'value_norm'"),
    (lambda: made(False).track.isel(layer=1), r"same layers; the first has \[0, 1\] and another \[1\]"),
    (lambda: made(False).track.isel(head=[0, 2]), r"same heads; the first has \[0, 1, 2\] and another \[0, 2\]"),
    (
        lambda: made(False).track.isel(step=slice(1, None)),
        r"same steps; the first has \[0, 1\] and another \[1, 2\]",
    ),
]


@pytest.mark.parametrize(("tracks", "text"), [
    *((lambda other=other: [made(False).track, other()], text) for other, text in UNLIKE),
    (list, "there are no tracks to concatenate; pass at least one"),
])  # fmt: skip
def test_tracks_that_do_not_belong_together_are_rejected(tracks, text):
    with pytest.raises(TrackError, match=text):
        SinkTrack.concat(tracks())


def test_concatenated_parts_keep_their_step_numbers():
    parts = [made(False, seed=seed).track.isel(step=[1, 2], head=2) for seed in (0, 1)]
    together = SinkTrack.concat(parts)
    expected = {"step": [1, 2], "head": [2], "pos": list(range(LENGTH)), "batch": [0, 1, 2, 3]}
    assert {axis: together.data[axis].to_numpy().tolist() for axis in expected} == expected
    again = together.isel(batch=[2, 3]).data["score"].assign_coords(batch=[0, 1])
    xr.testing.assert_equal(again, parts[1].data["score"])


@kinds
def test_plain_xarray_opens_a_saved_track_without_a_warning(tmp_path, suffix):
    track = made(False).track
    path = track.save(tmp_path / f"sinks{suffix}")
    openers = [xr.open_dataset] if suffix == ".nc" else [xr.open_dataset, xr.open_zarr]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for opener in openers:
            with opener(path) as data:
                assert set(data.coords) == {"batch", "step", "layer", "head", "pos"}
                np.testing.assert_array_equal(data["score"], track.data["score"])
                np.testing.assert_array_equal(data.is_real, track.data["is_real"])

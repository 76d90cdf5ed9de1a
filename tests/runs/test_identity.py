"""Fingerprints are equal for equal interventions, in any process, and different for all others."""

import functools
import importlib
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import AblateHeads, MaskSinks, PatchHooks
from sinklens.interventions.donors import Donors
from sinklens.runs.identity import fingerprint, identify
from sinklens.sinks import EpsilonOverMean, TopK


def scaled(factor, also=None):
    def scale(value, hook):
        return value * factor + (0 if also is None else also)

    return scale


def probe(number):
    """A module whose repr shows only its sizes."""
    linear = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(linear.weight, number)
    torch.nn.init.zeros_(linear.bias)
    return linear


def outputs(number):
    """Values of other runs, whose repr omits what differs."""
    labels = torch.zeros(1, dtype=torch.long)
    return Donors({"blocks.0.attn.hook_z": torch.full((1, 20, 20), float(number))}, labels, labels, labels, labels)


class Method:
    """Its method is a hook function; its attributes distinguish it."""

    def __init__(self, factor):
        self.factor = factor

    def __repr__(self):
        return f"Method({self.factor})"

    def hook(self, value, hook):
        return value * self.factor


SAME_AND_OTHER = {
    "setting": [lambda n: MaskSinks(top_k=1 + n)],
    "place": [lambda n: AblateHeads(layers=[n])],
    "detector": [lambda n: MaskSinks(top_k=None, detector=EpsilonOverMean(3.0 + n))],
    "kind of detector": [lambda n: MaskSinks(top_k=None, detector=[TopK(1), EpsilonOverMean(1.0)][n])],
    "reference": [lambda n: AblateHeads(by="mean", reference=outputs(n))],
    "patched values": [lambda n: PatchHooks(source={0: {"hook_embed": torch.full((1, 3, 2), float(n))}})],
    "array": [lambda n: np.arange(3) + n],
    "array of words": [lambda n: np.array(["a", "bc"[n]], dtype=object)],
    "sort of number": [lambda n: torch.zeros(2, dtype=[torch.float32, torch.int32][n])],
    "closure": [lambda n: scaled(n)],
    "tensor in a closure": [lambda n: scaled(1, torch.full((2000,), float(n)))],
    "default": [lambda n: lambda value, hook, by=n: value * by],
    "keyword default": [lambda n: lambda value, hook, *, by=n: value * by],
    "probe in a closure": [lambda n: scaled(1, probe(n))],
    "partial": [lambda n: functools.partial(max, n)],
    "method": [lambda n: Method(n).hook],
    "code": [lambda n: [lambda value, hook: value * 2, lambda value, hook: value * 3][n]],
    "global name": [lambda n: [lambda value, hook: np.sin(value), lambda value, hook: np.cos(value)][n]],
    "predicate": [lambda n: (lambda name: name.endswith(("hook_z", "hook_q")[n]), scaled(1))],
    "inner function": [lambda n: [lambda value, hook: (lambda: 1)(), lambda value, hook: (lambda: 2)()][n]],
    "order": [lambda n: [MaskSinks(), AblateHeads()][:: (1, -1)[n]]],
    "set": [lambda n: {1, 2 + n}],
}


@pytest.mark.parametrize("kind", SAME_AND_OTHER)
def test_equal_values_have_equal_fingerprints_and_different_values_do_not(kind):
    (make,) = SAME_AND_OTHER[kind]
    assert fingerprint(make(0)) == fingerprint(make(0))
    assert fingerprint(make(0)) != fingerprint(make(1))


def test_fingerprints_of_tracks_cover_all_their_values(tiny_llada):
    """The tracks have one size and therefore one repr."""
    tracks = [sinklens.generate(tiny_llada, "Tom has 5 pens.", gen_length=4, seed=seed).sinks for seed in (0, 0, 1)]
    changed = tracks[0].data.copy(deep=True)
    changed["score"][0, 2, 1, 3, 4] += 1e-3
    other = sinklens.SinkTrack(changed)
    assert len({repr(MaskSinks(source=track)) for track in (*tracks, other)}) == 1
    fingerprints = [fingerprint(MaskSinks(source=track)) for track in (*tracks, other)]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


@pytest.mark.extended
def test_another_process_computes_the_same_fingerprint():
    code = "import test_identity as t\nfor m in t.SAME_AND_OTHER.values():\n    print(t.fingerprint(m[0](0)).encode())"
    path = f"import sys; sys.path[:0] = {[__file__.rpartition('/')[0]]!r}\n"
    printed = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=True).stdout
    expected = [
        str(fingerprint(make(0)).replace(__name__, "test_identity").encode()) for (make,) in SAME_AND_OTHER.values()
    ]
    assert printed.splitlines() == expected


@dataclass(frozen=True)
class Outside:
    """From outside sinklens."""

    value: int = 0


def test_the_source_of_a_class_from_outside_is_part_of_an_identity(tmp_path, monkeypatch):
    assert identify(Outside(1)).text == repr(Outside(1))
    assert [len(code) for code in identify([Outside(1), Outside(2)]).code] == [16]
    assert identify(MaskSinks()) == (repr(MaskSinks()), ())
    (tmp_path / "namesake.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Outside:\n    value: int = 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    namesake = importlib.import_module("namesake").Outside(1)
    assert identify(namesake).text == identify(Outside(1)).text
    assert fingerprint(namesake) != fingerprint(Outside(1))


class Plain:
    """Has the default repr, which shows only its address."""

    def __call__(self, value, hook):
        return value


@pytest.mark.parametrize("value", [Plain(), [("hook_embed", Plain())], torch.zeros(1).add])
def test_a_value_that_only_its_address_identifies_is_rejected(value):
    with pytest.raises(SettingError, match=r"cannot fingerprint .*: only its memory address identifies it"):
        fingerprint(value)

"""The folders of reference data are read completely, and a difference from the reference is noticed."""

import pytest
import torch

import sinklens
from sinklens.devices.stored_runs import FOLDERS, compare_pass, open_folder, stored_runs

LEFT_OUT = {"bd3lm": {6, 7}, "fast-dllm-v2": {7, 8}, "bd3lm-owt": {5}, "nemotron-diffusion": {7}}
"""Runs that depend on the batch or show a defect, or that are the reference's batched sampler."""
QUICK = {
    "llada-cached": 19,
    "dream-cached": 13,
    "sdar": 6,
    "bd3lm": 11,
    "fast-dllm-v2": 5,
    "llada2-moe": 10,
    "sdar-moe": 2,
    "nemotron-diffusion": 11,
    "diffullama": 4,
    "diffugpt": 5,
    "rnd1": 1,
    "open-dcoder": 8,
    "diffusion-gemma": 4,
    "mdlm": 4,
    "bd3lm-owt": 3,
    "sedd": 1,
    "duo": 0,
    "gidd": 3,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_stored_run_is_repeated_or_known_to_be_left_out(conformance, name):
    folder = open_folder(conformance / name)
    found = {run.number for run in stored_runs(folder)}
    assert found == set(range(len(folder.facts["generate"]))) - LEFT_OUT.get(name, set())


@pytest.mark.parametrize("name", FOLDERS)
def test_the_stored_pass_of_every_folder_is_compared(conformance, name):
    folder = open_folder(conformance / name)
    found = compare_pass(folder, torch.device("cpu"))
    assert found.endswith("patterns of the last layer: not stored") == name.endswith("-cached")


@pytest.mark.parametrize(("name", "number"), QUICK.items())
def test_a_run_equals_the_stored_one_and_another_token_is_noticed(conformance, name, number):
    folder = open_folder(conformance / name)
    for stored in (run for run in stored_runs(folder) if run.number == number):
        model = folder.load("cpu", stored.changes, stored.block_length or folder.pass_block_length)
        run = sinklens.generate(model, stored.prompt, record_sinks=False, **stored.settings)
        equal = stored.equal(run)
        passes = stored.canvases.shape[1]
        assert equal == [True] * (passes + 1)
        rows = range(len(stored.canvases))[stored.rows or slice(None)]
        last = (stored.canvases[rows[0], -1] >= 0).nonzero()[-1]
        stored.canvases[rows[0], -1, last] += 1
        assert stored.equal(run) == [*[True] * (passes - 1), False, True]
        stored.canvases[rows[0], -1, last] -= 1

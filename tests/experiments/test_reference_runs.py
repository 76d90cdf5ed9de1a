"""Outputs of heads in passes over single blocks; tests/interventions has those of complete passes."""

import torch

import sinklens
from sinklens.experiments import head_outputs
from sinklens.interventions import Activations


def test_head_outputs_of_cached_blocks_leave_out_padding():
    model, name, settings = sinklens.load("tiny-sdar"), "blocks.1.attn.hook_z", {"gen_length": 16, "use_cache": True}
    prompts = ["Question: 1 + 2?\nAnswer:", "Question: Ada has 9 cups. How many?\nAnswer:"]
    kept, parts = Activations(names=name), []
    run = sinklens.generate(model, prompts, hooks=kept, record_sinks=False, **settings)
    for step, cache in kept.caches.items():
        window = cache.windows.get(name, range(cache[name].shape[1]))
        counted = run.real[:, window.start : window.stop] & run.active[:, [step]]
        parts.append(cache[name][counted])
    assert not run.real.all()
    assert len({len(part) for part in parts}) > 1
    found = head_outputs(model, prompts, **settings)
    torch.testing.assert_close(found.mean[1], torch.cat(parts).mean(dim=0), atol=1e-5, rtol=1e-4)
